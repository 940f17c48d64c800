"""Four methods that learn from right answers: RFT, online RFT, GRPO with outcomes, with steps."""
import itertools
from statistics import fmean

from learn.lab import lab

LATE = 15  # steps at the end of a run, over which the jumps of the reward are measured


def jump(rows):
    """The mean distance between the rewards of two steps that follow each other."""
    rewards = list(lab.seeds.series(rows, "reward/mean").values())[-LATE:]
    jumps = [abs(after - before) for before, after in itertools.pairwise(rewards)]
    return fmean(jumps)


FINDING = lab.Finding(
    claim="GRPO is better than online RFT, online RFT is better than RFT, and process supervision "
          "is better than outcome supervision (figure 5 of the source: on GSM8K and MATH, by a few "
          "points each). A course text adds that the curves of GRPO are smoother.",
    source="2402.03300",
    checks=[lab.gap("GRPO", "online RFT", low=0, sd=0.03),
            lab.gap("online RFT", "RFT", low=0, sd=0.03),
            lab.gap("GRPO+PS", "GRPO", low=0, named=0.05, sd=0.015),
            lab.gap("GRPO", "online RFT", "jump of the reward", high=0, named=0.02, sd=0.008)],
    arms={
        "RFT": "learn/lab/offline.py --algo rft",
        "online RFT": "nano_rlvr.py --algo rft",
        "GRPO": "nano_rlvr.py",
        "GRPO+PS": "examples/process_rewards.py",
    },
    measures=lab.MEAN | lab.GREEDY | lab.TOKENS | {"jump of the reward": (jump, "{:.3f}".format)},
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"},
    seeds=(3, 4, 5, 6, 7))

if __name__ == "__main__":
    lab.main(FINDING)
