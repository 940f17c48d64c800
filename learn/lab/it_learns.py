"""A reward curve that rises does not show that a trainer is right: faults that still learn."""
from learn.lab import lab

FAULTS = {  # label -> its description in tests/faults.txt
    "maximum for minimum": "clip: maximum instead of minimum",
    "KL reversed": "kl: reversed",
    "end not trained": "collate: end-of-sequence token not trained",
    "not clipped": "steps: gradient not clipped",
    "wrong sign": "loss: wrong sign",
}
CONTROL = "wrong sign"  # a fault that any curve shows

FINDING = lab.Finding(
    claim="A fault in the loss, the packs or the update need not show in what a run gains: with "
          "each of four it ends within 5 points of the run without a fault; with a wrong sign it "
          "does not. (The claim is ours. The source found that details of the implementation, not "
          "the algorithm, decide much of what PPO gains.)",
    source="2005.12729",
    checks=[lab.gap(label, "no fault", low=-0.05, high=0.05, named=0.05, sd=0.01)
            for label in FAULTS if label != CONTROL]
    + [lab.gap(CONTROL, "no fault", high=-0.05, sd=0.032)],
    arms={"no fault": "nano_rlvr.py"} | {
        label: f"learn/lab/with_fault.py --fault '{fault}'" for label, fault in FAULTS.items()},
    flags="--minibatches 2 --kl_coef 0.05",
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS | {
        "k3 to the start": (lab.late("kl", 10), "{:.3f}".format)},
    panels=lab.SAMPLES | {"k3 to the start": "kl"})

if __name__ == "__main__":
    lab.main(FINDING)
