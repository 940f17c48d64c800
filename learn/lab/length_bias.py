"""Length bias: does the mean over a completion's own tokens make wrong answers grow?"""
from learn.lab import doubting, lab

WRONG, RIGHT = "tokens of a wrong sample", "tokens of a right sample"
OWN, CONSTANT = "doubts, 1/|o|", "doubts, constant"
FREE = "doubts, without the length"

FINDING = lab.Finding(
    claim="The mean over a completion's own tokens (1/|o|) punishes a long wrong answer less per "
          "token, so wrong answers grow; with a constant divisor they do not, and accuracy is the "
          "same. A course text: advantages without their projection on the length give shorter "
          "answers at the same accuracy.",
    source="2503.20783",
    checks=[lab.gap(OWN, CONSTANT, WRONG, low=0, named=3, sd=1),
            lab.gap(OWN, CONSTANT, low=-0.05, high=0.05, named=0.05, sd=0.015),
            lab.gap(FREE, OWN, "tokens", high=0, named=2, sd=0.7),
            lab.gap(FREE, OWN, low=-0.05, named=0.05, sd=0.015)],
    arms={OWN: "nano_rlvr.py",
          CONSTANT: "nano_rlvr.py --aggregate constant",
          "doubts, Dr. GRPO": "nano_rlvr.py --algo dr_grpo",
          FREE: "examples/length_free.py"},
    measures=lab.MEAN | lab.BEFORE | lab.TOKENS | {
        WRONG: (lab.late("reward/tokens_if_wrong", 10), lab.number),
        RIGHT: (lab.late("reward/tokens_if_right", 10), lab.number)},
    panels={WRONG: "reward/tokens_if_wrong", RIGHT: "reward/tokens_if_right",
            "reward of the samples": "reward/gsm8k"},
    flags=f"{doubting.flags('doubter')} --rewards {doubting.counted('gsm8k')}",
    seeds=(3, 4, 5, 6, 7),
    prepare=lambda: doubting.make_base("doubter"))

if __name__ == "__main__":
    lab.main(FINDING)
