"""Staleness: what rollouts from older weights cost, with and without an importance weight."""
from learn.lab import lab

LAGS = (1, 2, 4)

FINDING = lab.Finding(
    claim="With decoupled importance weights, rollouts that are up to 4 updates old cost no "
          "accuracy; without them, accuracy falls as the lag grows.",
    source="2505.24298",
    # at lag 4, "no cost" would need some 40 seeds (sd 0.11): here only that the weight helps
    checks=[lab.gap("lag 1", "lag 0", low=-0.05, named=0.05, sd=0.01),
            lab.gap("lag 2", "lag 0", low=-0.05, named=0.05, sd=0.012),
            lab.gap("lag 4", "lag 4, no weight", low=0, named=0.2, sd=0.077),
            lab.gap("lag 4, no weight", "lag 2, no weight", high=0, sd=0.038)],
    arms={"lag 0": "examples/async_rl.py --lag 0"}
    | {f"lag {k}": f"examples/async_rl.py --lag {k}" for k in LAGS}
    | {f"lag {k}, no weight": f"examples/async_rl.py --lag {k} --correction none"
       for k in LAGS[1:]},
    measures=lab.MEAN | lab.GREEDY | {
        "reward of the last 10 steps": (lab.late("reward/mean", 10), "{:.3f}".format),
        "mismatch": (lab.late("mismatch/mean_abs", 10), "{:.3f}".format)},
    panels={"mean@4": "eval/mean@4", "reward": "reward/mean", "mismatch": "mismatch/mean_abs"})

if __name__ == "__main__":
    lab.main(FINDING)
