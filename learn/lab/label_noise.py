"""Label noise: how many wrong verdicts RL tolerates."""
from learn.lab import lab

NOISY = "nano_rlvr.py --rewards gsm8k:0,learn/lab/faulty_rewards.py:noisy"

FINDING = lab.Finding(
    claim="Noise in the verdicts changes the rate of learning, not its fate, as long as the "
          "verifier is better than chance: where its hit rate minus its false-alarm rate J is "
          "positive the model learns, at J = 0 it drifts, below it unlearns.",
    source="2601.04411",
    checks=[  # 20, 40, 50, 60 % of flips: J = 0.6, 0.2, 0, -0.2
        lab.gain("20 %", low=0, sd=0.026),
        lab.gain("40 %", low=0, sd=0.009),
        lab.gap("40 %", "GRPO", high=0, sd=0.035),
        lab.gain("50 %", low=-0.1, high=0.1, sd=0.007),
        lab.gain("60 %", high=0, sd=0.017),
    ],
    arms={
        "GRPO": "nano_rlvr.py",
        "20 %": f"{NOISY}_20:1",
        "40 %": f"{NOISY}_40:1",
        "50 %": f"{NOISY}_50:1",
        "60 %": f"{NOISY}_60:1",
    },
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"})

if __name__ == "__main__":
    lab.main(FINDING)
