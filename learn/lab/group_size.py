"""The size of a group against the number of prompts, at equal samples."""
from learn.lab import lab

SIZES = (2, 4, 16, 64)


def judge(values):
    return lab.near(values, "n = 2", "n = 16", "mean@4", 0.05)


FINDING = lab.Finding(
    claim="Groups of 2 are nearly as good as groups of 16 (97.6 % of the accuracy, with 12.5 % of "
          "the samples).",
    source="2510.00977",
    rule="At equal samples, mean@4 with n = 2 is within 5 points of n = 16 (whole interval).",
    arms={f"n = {n}": f"nano_rlvr.py --samples {n} --prompts {128 // n}" for n in SIZES},
    measures=lab.MEAN | lab.GREEDY | lab.FLAT | {
        "gradient norm": (lab.late("grad_norm"), "{:.2f}".format)},
    judge=judge,
    panels={"reward of the samples": "reward/mean", "zero-std groups": "group/zero_std",
            "mean@4": "eval/mean@4"},
    reading="At equal samples, many small groups teach at least as much as few large ones: in each "
            "seed n = 2 ends 2 to 3 points above n = 16, although two thirds of its groups have no "
            "gradient. With n = 64 a batch has two questions; each seed ends 5 to 8 points below "
            "n = 16. The source gave groups of 2 an eighth of the samples; here all arms get 128 "
            "samples per step, so this is half of its claim.",
    exercises=(
        "With pass rate p, a group of n has no gradient with probability p^n + (1 - p)^n. "
        "Compare with the column of the table.",
        "Take `--prompts 1 --samples 128`. Predict the spread over the seeds."))

if __name__ == "__main__":
    lab.main(FINDING)
