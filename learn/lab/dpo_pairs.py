"""DPO on verified pairs against GRPO, at equal samples."""
from learn.lab import lab

FINDING = lab.Finding(
    claim="On tasks with a checkable result, RL is better than DPO, and DPO on fresh samples of "
          "the policy is better than DPO on a fixed set (code contests: PPO 22.4 %, DPO 0 %).",
    source="2404.10719",
    checks=[lab.gap("GRPO", "DPO offline", low=0, named=0.224, sd=0.076),
            lab.gap("DPO online", "DPO offline", low=0, named=0.2, sd=0.072),
            lab.gap("GRPO", "DPO online", low=0, named=0.05, sd=0.019)],
    arms={
        "GRPO": "nano_rlvr.py",
        "DPO online": "examples/dpo.py",
        "DPO offline": "examples/dpo.py --offline",
    },
    measures=lab.MEAN | lab.GREEDY | lab.TOKENS,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"})

if __name__ == "__main__":
    lab.main(FINDING)
