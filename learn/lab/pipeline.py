"""Stages in a row: SFT, DPO and RLVR; RLVR again from its own checkpoint; DPO after RLVR."""
import json
import re

from learn.lab import lab  # isort: skip
import data
from models.tiny.make_tiny import worked

DEMOS = lab.RUNS / "worked.jsonl"
DIRECT, TUNED = "SFT, RLVR", "SFT, DPO, RLVR"
AGAIN, ONCE = "RLVR, then RLVR again", "GRPO"


def write_demos():
    """128 worked sums: few, so that the later stages have room."""
    DEMOS.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for row in data.load("arithmetic", "train", 128, 100):
        steps, total = worked(row["question"])
        thinking = "\n".join(steps)
        text = f"<think>{thinking}</think><answer>{total}</answer>"
        lines.append(json.dumps(row | {"completion": text}))
    DEMOS.write_text("\n".join(lines))


def after(label, command):
    """A command that begins with the weights of another arm of the same seed."""
    folder = re.sub(r"\W+", "-", label)
    return f"{command} --lr 1e-4 --model runs/lab/{folder}-{{seed}}/final"


FINDING = lab.Finding(
    claim="SFT, DPO and RLVR in a row (Tulu 3) end above SFT and RLVR without DPO; RLVR that "
          "begins again, with a new optimizer, from its own checkpoint ends where one run of the "
          "same length ends. A course text adds that RLVR varies more over the seeds than SFT.",
    source="2411.15124",
    checks=[lab.gap(TUNED, DIRECT, low=0, named=0.05, sd=0.02),
            lab.gap(AGAIN, ONCE, low=-0.05, high=0.05, named=0.05, sd=0.015)],
    arms={"SFT": f"examples/sft.py --demos {DEMOS} --steps 5 --prompts 64 --lr 2e-4",
          DIRECT: after("SFT", "nano_rlvr.py"),
          "SFT, DPO": after("SFT", "examples/dpo.py --steps 15"),
          TUNED: after("SFT, DPO", "nano_rlvr.py --steps 15"),
          ONCE: "nano_rlvr.py",
          "RLVR, first half": "nano_rlvr.py --steps 15",
          AGAIN: after("RLVR, first half", "nano_rlvr.py --steps 15"),
          "RLVR, then DPO": after("RLVR, first half", "examples/dpo.py --steps 15")},
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"},
    equal=False,
    seeds=(3, 4, 5, 6, 7),
    prepare=write_demos)

if __name__ == "__main__":
    lab.main(FINDING)
