"""Entropy collapses in RL; four ways that shall hold it up."""
from learn.lab import lab

CURES = ("clip-higher", "bonus", "Clip-Cov", "GMPO")


def judge(values):
    falls = all(after < 0.5 * before for before, after in zip(
        values["GRPO"]["entropy at step 0"], values["GRPO"]["entropy"]))
    return falls and any(lab.above(values, cure, "GRPO", "entropy") for cure in CURES)


FINDING = lab.Finding(
    claim="Without a counter-measure, the entropy of the policy falls to nearly 0 early in "
          "training. Covariance clipping holds it up (and gains 2.0 points at 7B, 6.4 at 32B).",
    source="2505.22617",
    rule="GRPO's entropy falls to less than half in each run, and at least one of the cures ends "
         "with a higher entropy than GRPO.",
    arms={"GRPO": "nano_rlvr.py", "clip-higher": "nano_rlvr.py --clip_high 0.28",
          "bonus": "examples/entropy.py --bonus 0.01",
          "Clip-Cov": "examples/entropy.py --clip_cov 0.01", "GMPO": "examples/entropy.py --gmpo"},
    flags="--minibatches 4 --eval_n 8",
    measures={"entropy": (lab.late("entropy", 10), "{:.4f}".format),
              "entropy at step 0": (lab.at("entropy", 0), "{:.4f}".format),
              "mean@8": (lab.at("eval/mean@8"), lab.share),
              "pass@8": (lab.at("eval/pass@8"), lab.share)},
    judge=judge,
    panels={"entropy": "entropy", "mean@8": "eval/mean@8", "pass@8": "eval/pass@8"},
    reading=(
        "The entropy of GRPO falls to a twentieth in 30 steps of 4 updates. Of the four cures, "
        "only Clip-Cov ends above it, by a third, and clearly so only because the seeds move "
        "together. The accuracy gains nothing from it: the task is nearly solved, and what "
        "Clip-Cov spends on exploration is missing in mean@8. The others do little at the "
        "strengths of their papers."),
    exercises=(
        "Add an arm `--bonus 0.1`. Predict entropy and mean@8.",
        "Draw mean@8 against entropy for all runs. Does R = -a exp(H) + b of the paper fit, "
        "and with which ceiling b?"))

if __name__ == "__main__":
    lab.main(FINDING)
