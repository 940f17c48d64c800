"""Aha moment or artefact of the length: does "wait" rise, and is it worth something?"""
from learn.lab import doubting, lab

OWN, CONSTANT = "doubts, 1/|o|", "doubts, constant"

FINDING = lab.Finding(
    claim="In RL on a base model, self-correction (\"wait\") becomes more frequent, and it pays: "
          "an aha moment. If it rises with a constant divisor of the loss as well, it is no effect "
          "of 1/|o| on the length (the doubt of arXiv:2503.20783).",
    source="2501.12948",
    checks=[lab.gain(CONSTANT, "waits", low=0, named=0.1, sd=0.03),
            lab.Check("P(right | wait) − P(right | none), constant",
                      [(CONSTANT, "right if wait", 1), (CONSTANT, "right if none", -1)],
                      low=0, named=0.1, sd=0.05),
            lab.gap(OWN, CONSTANT, "waits", low=-0.05, high=0.05, named=0.05, sd=0.02)],
    arms={OWN: "nano_rlvr.py",
          CONSTANT: "nano_rlvr.py --aggregate constant",
          "doubts, without the length": "examples/length_free.py",
          "doubts, coin": f"nano_rlvr.py --rewards {doubting.counted('gsm8k:0', 'random')}"},
    measures=lab.MEAN | lab.BEFORE | lab.TOKENS | {
        "waits": (lab.late("reward/waits", 5), lab.share),
        "waits before": (lab.at("reward/waits", 0), lab.share),
        "right if wait": (lab.late("reward/right_if_wait"), lab.share),
        "right if none": (lab.late("reward/right_if_none"), lab.share)},
    panels={"samples with wait": "reward/waits", "right if wait": "reward/right_if_wait",
            "right if none": "reward/right_if_none"},
    flags=f"{doubting.flags('doubter')} --rewards {doubting.counted('gsm8k')}",
    seeds=(3, 4, 5, 6, 7),
    prepare=lambda: doubting.make_base("doubter"))

if __name__ == "__main__":
    lab.main(FINDING)
