"""A reward model that is over-optimised: its score rises while the truth turns, RLVR beside it."""
from statistics import fmean

from learn.lab import lab

MODEL, FEW = "reward model", "reward model, few pairs"
NEAR = 5  # steps over which the accuracy of the samples is averaged


def fall(rows):
    """The highest accuracy of NEAR steps in a row, minus that of the last ones."""
    values = list(lab.seeds.series(rows, "reward/gsm8k").values())
    starts = range(len(values) - NEAR + 1)
    means = [fmean(values[start:start + NEAR]) for start in starts]
    return max(means) - means[-1]


FINDING = lab.Finding(
    claim="RL against a reward model raises its score all the time, but what it stands for rises "
          "and then falls, the sooner the fewer comparisons the model was trained on; an exact "
          "reward has no such turn.",
    source="2210.10760",
    checks=[lab.gain(MODEL, "score", low=0, named=0.5, sd=0.2),
            lab.gap(MODEL, "GRPO", "fall from the peak", low=0, sd=0.04),
            lab.gap(FEW, MODEL, "fall from the peak", low=0, sd=0.04),
            lab.gap(MODEL, "GRPO", high=0, sd=0.04)],
    arms={"GRPO": "nano_rlvr.py",
          MODEL: "examples/reward_model.py",
          FEW: "examples/reward_model.py --questions 32"},
    measures=lab.MEAN | lab.BEFORE | lab.TOKENS | {
        "score": (lab.late("reward/mean", NEAR), "{:.2f}".format),
        "score before": (lab.at("reward/mean", 0), "{:.2f}".format),
        "fall from the peak": (fall, "{:.3f}".format)},
    panels={
        "score or reward": "reward/mean",
        "true accuracy": "reward/gsm8k",
        "tokens of a sample": "completion/length",
    },
    seeds=(3, 4, 5, 6, 7))

if __name__ == "__main__":
    lab.main(FINDING)
