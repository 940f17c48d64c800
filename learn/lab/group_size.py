"""Groups of 2 with an eighth of the samples of groups of 16."""
from learn.lab import lab

EIGHTH = "n = 2, an eighth of the samples"

FINDING = lab.Finding(
    claim="Groups of 2 keep 97.6 % of the accuracy of groups of 16, with 12.5 % of the samples.",
    source="2510.00977",
    # The claim is 2.4 % (2 points here) below n = 16. The rule takes it as met down to 5 points,
    # and the seeds must find a difference 3 points above that end.
    checks=[lab.gap(EIGHTH, "n = 16", low=-0.05, named=0.03, sd=0.03)],
    arms={"n = 16": "nano_rlvr.py --prompts 8 --samples 16",
          EIGHTH: "nano_rlvr.py --prompts 8 --samples 2",
          "n = 2, equal samples": "nano_rlvr.py --prompts 64 --samples 2"},
    measures=lab.MEAN | lab.GREEDY | lab.TOKENS | lab.FLAT,
    panels={"reward of the samples": "reward/mean", "zero-std groups": "group/zero_std",
            "mean@4": "eval/mean@4"},
    equal=False)

if __name__ == "__main__":
    lab.main(FINDING)
