"""With a critic and without: PPO, GRPO, RLOO, and REINFORCE++ in two readings."""
from learn.lab import lab

MOVING, BATCH = "REINFORCE++, moving average", "REINFORCE++, mean of the batch"
REINFORCE = "nano_rlvr.py --algo reinforce++ --prompts 16 --samples 8 --kl_coef 0"

FINDING = lab.Finding(
    claim="No critic is needed. The source: REINFORCE++, whose baseline is the mean of the batch, "
          "is comparable to PPO. arXiv:2402.14740: RLOO is better than PPO. A course text: GRPO "
          "is as good as PPO; REINFORCE++, for which it has a moving average, is a little worse. "
          "Here: GRPO within 5 points of PPO, RLOO and REINFORCE++ not 5 points below it.",
    source="2501.03262",
    checks=[lab.gap("GRPO", "PPO", low=-0.05, high=0.05, named=0.05, sd=0.015),
            lab.gap("RLOO", "PPO", low=-0.05, named=0.05, sd=0.015),
            lab.gap(BATCH, "PPO", low=-0.05, named=0.05, sd=0.015),
            lab.gap(MOVING, "GRPO", high=0, named=0.05, sd=0.015)],
    arms={"PPO": "examples/ppo.py",
          "GRPO": "nano_rlvr.py",
          "RLOO": "nano_rlvr.py --algo rloo",
          BATCH: REINFORCE,
          MOVING: f"{REINFORCE} --baseline running"},
    measures=lab.MEAN | lab.GREEDY | lab.TOKENS,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"},
    seeds=(3, 4, 5, 6, 7))

if __name__ == "__main__":
    lab.main(FINDING)
