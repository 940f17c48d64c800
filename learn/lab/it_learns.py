"""A reward curve that rises does not show that a trainer is right: faults that still learn."""
from learn.lab import lab

FAULTS = {  # label -> its description in tests/faults.txt
    "maximum for minimum": "clip: maximum instead of minimum",
    "mean per pack": "loss: mean over the pack instead of the batch",
    "KL reversed": "kl: reversed",
    "KL rewarded": "kl: distance from the reference is rewarded",
    "end not trained": "collate: end-of-sequence token not trained",
    "weight inverted": "correction: inverted",
    "whole batch each time": "steps: every minibatch is the complete batch",
    "not clipped": "steps: gradient not clipped",
    "wrong sign": "loss: wrong sign",
}
CONTROL = "wrong sign"  # a fault that any curve shows


def judge(values):
    subtle = [label for label in FAULTS if label != CONTROL]
    learn = [label for label in subtle if lab.gain(values, label, "mean@4")[1] > 0]
    return len(learn) >= 6 and lab.gain(values, CONTROL, "mean@4")[1] <= 0


FINDING = lab.Finding(
    claim="What an RL algorithm gains depends on details of its implementation that its reward "
          "curve alone does not show; a run that learns is no proof that the code is the formula.",
    source="2005.12729",
    rule="Of eight faults in the loss, the packs and the update, at least six still raise mean@4. "
         "The control, a loss with the wrong sign, does not.",
    arms={"no fault": "nano_rlvr.py"} | {
        label: f"learn/lab/with_fault.py --fault '{fault}'" for label, fault in FAULTS.items()},
    flags="--minibatches 2 --kl_coef 0.05",
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS | {
        "k3 to the start": (lab.late("kl", 10), "{:.3f}".format)},
    judge=judge,
    panels=lab.SAMPLES | {"k3 to the start": "kl"},
    reading="No curve of the eight tells its fault from the program without one (the widest "
            "difference is that of the rewarded KL, -1.2 points, -7.7 to +5.3); the wrong sign "
            "does. Two of the eight change nothing here, but would elsewhere. All completions of "
            "an optimizer step fit into one pack, so the mean per pack is the mean. In fp32 the "
            "importance weight is 1, inverted or not. One fault even ends higher: with the whole "
            "batch in each minibatch, a step learns from twice the samples. The reversed KL is "
            "seen in its own metric, which reaches hundreds. Tests against the formulas notice all "
            "of them: see [docs/tests.md](../../../docs/tests.md).",
    exercises=(
        "Take another fault of tests/faults.txt. Predict whether its curve shows it, and which "
        "metric of docs/metrics.md would.",
        "Run one of these faults with 5 learning rates. Can a learning rate hide it?"))

if __name__ == "__main__":
    lab.main(FINDING)
