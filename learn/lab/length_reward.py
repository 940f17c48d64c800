"""Kimi k1.5 in small: a length reward, questions by difficulty, and its loss with four updates."""
from bench import common
from learn.lab import lab, r1

BASE = common.ROOT / "runs/r1/base"
PLAIN, SHORT = "fillers, GRPO", "fillers, length reward"
FOUR, KIMI = "fillers, GRPO, 4 updates", "fillers, Kimi, 4 updates"
EDGE = "fillers, by difficulty"


def make_base():
    """The base of r1.py: half of its answers are guesses, and its steps have fillers."""
    if not (BASE / "tokenizer.json").exists():
        r1.make_base(BASE, (0, 1, 2, 3))


FINDING = lab.Finding(
    claim="A reward for short right answers makes answers shorter without a loss (the source: it "
          "slows learning at first), questions chosen by difficulty teach more, and the squared "
          "penalty of the loss learns as well as the clip.",
    source="2501.12599",
    checks=[lab.gap(SHORT, PLAIN, "tokens", high=0, named=3, sd=1),
            lab.gap(SHORT, PLAIN, low=-0.05, named=0.05, sd=0.015),
            lab.gap(EDGE, PLAIN, low=0, named=0.05, sd=0.02),
            lab.gap(KIMI, FOUR, low=-0.05, named=0.05, sd=0.02)],
    arms={PLAIN: "nano_rlvr.py",
          SHORT: "nano_rlvr.py --rewards gsm8k:1,examples/shaping_rewards.py:length_kimi:0.5",
          EDGE: "examples/curriculum.py --band 0.2 0.8 --pool 512",
          FOUR: "nano_rlvr.py --minibatches 4",
          KIMI: "nano_rlvr.py --algo kimi --minibatches 4"},
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS | {
        "tokens before": (lab.at("eval/length", 0), lab.number),
        "clipped": (lab.late("clip_ratio"), "{:.2%}".format)} | lab.FLAT,
    panels=lab.SAMPLES | {"zero-std groups": "group/zero_std"},
    flags="--model runs/r1/base --task arithmetic --template chat --max_tokens 96 --lr 1e-4",
    seeds=(3, 4, 5, 6, 7),
    prepare=make_base)

if __name__ == "__main__":
    lab.main(FINDING)
