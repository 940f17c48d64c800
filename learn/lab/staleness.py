"""Staleness: what rollouts from older weights cost, with and without an importance weight."""
from learn.lab import lab

ASYNC = "examples/async_rl.py --lag"
FINDING = lab.Finding(
    claim="With decoupled importance weights, old rollouts cost no accuracy (the source: up to 4 "
          "updates; here only lag 2 is tested for it, since lag 4, with an sd of 0.11, would need "
          "57 seeds); without weights, accuracy falls as the lag grows.",
    source="2505.24298",
    checks=[lab.gap("lag 2", "lag 0", low=-0.05, named=0.05, sd=0.012),
            lab.gap("lag 4", "lag 4, no weight", low=0, named=0.2, sd=0.077),
            lab.gap("lag 4, no weight", "lag 2, no weight", high=0, sd=0.038)],
    arms={
        "lag 0": f"{ASYNC} 0",
        "lag 2": f"{ASYNC} 2",
        "lag 4": f"{ASYNC} 4",
        "lag 2, no weight": f"{ASYNC} 2 --correction none",
        "lag 4, no weight": f"{ASYNC} 4 --correction none",
    },
    measures=lab.MEAN | lab.GREEDY | {
        "reward of the last 10 steps": (lab.late("reward/mean", 10), "{:.3f}".format),
        "mismatch": (lab.late("mismatch/mean_abs", 10), "{:.3f}".format)},
    panels={"mean@4": "eval/mean@4", "reward": "reward/mean", "mismatch": "mismatch/mean_abs"})

if __name__ == "__main__":
    lab.main(FINDING)
