"""R1's four stages, each with room: few demonstrations, two languages, eight samples, a judge."""
import json
import math
from statistics import fmean

from learn.lab import lab  # isort: skip
import data
from learn.lab import two_languages
from learn.lab.pipeline import after
from models.tiny.make_tiny import worked

TASK = "learn/lab/two_languages.py"
DEMOS = lab.RUNS / "cold.jsonl"
BASE = "--model runs/lab/bilingual"
REWARDS = f"{TASK}:right:1,format:0.2"
ONE_LANGUAGE = f"{REWARDS},{TASK}:consistent:0.2"
SEEN = f"{REWARDS},{TASK}:consistent:0"  # not rewarded, but in the metrics
OPEN = f"{ONE_LANGUAGE},{TASK}:preferred:1,{TASK}:valid:0"


def prepare():
    """The base, and 64 demonstrations of 3 and 4 terms in symbols: short sums only."""
    two_languages.make_base()
    lines = []
    for row in data.load("arithmetic", "train", 400, 100):
        steps, total = worked(row["question"])
        if row["terms"] <= 4 and len(lines) < 64:
            thinking = "\n".join(steps)
            text = f"<think>{thinking}</think><answer>{total}</answer>"
            lines.append(json.dumps(row | {"completion": text}))
    DEMOS.write_text("\n".join(lines))


SFT = "examples/sft.py --prompts 64 --samples 1 --lr 5e-4"


def language(rows):
    """The share of lines in symbols in the last 5 steps; NaN for stages that do not measure it."""
    values = list(lab.seeds.series(rows, "reward/consistent").values())[-5:]
    return fmean(values) if values else math.nan


FINDING = lab.Finding(
    claim="R1's stages are each worth something: RL after a cold start adds to it, a reward for "
          "one language ends the mixture at a small cost, and the last stage serves an open task "
          "without harm to the sums.",
    source="2501.12948",
    checks=[lab.gap("R1 stage 2", "R1 stage 1", low=0, named=0.1, sd=0.04),
            lab.gap("R1 stage 2", "R1 stage 2, mixed", "one language", low=0, named=0.1, sd=0.04),
            lab.gap("R1 stage 2", "R1 stage 2, mixed", low=-0.05, named=0.05, sd=0.02),
            lab.gap("R1 stage 4", "R1 stage 2", low=-0.05, named=0.05, sd=0.02)],
    arms={"R1 Zero": f"nano_rlvr.py {BASE} --rewards {SEEN}",
          "R1 stage 1": f"{SFT} --demos {DEMOS} {BASE} --steps 4",
          "R1 stage 2": after("R1 stage 1", f"nano_rlvr.py --rewards {ONE_LANGUAGE}"),
          "R1 stage 2, mixed": after("R1 stage 1", f"nano_rlvr.py --rewards {SEEN}"),
          "R1 samples": after("R1 stage 2", f"learn/lab/rejection.py --steps 0 --rewards "
                                            f"{ONE_LANGUAGE}"),
          "R1 stage 3": f"{SFT} --demos runs/lab/R1-samples-{{seed}}/demos.jsonl {BASE}",
          "R1 stage 4": after("R1 stage 3", f"nano_rlvr.py --data {TASK}:mix --eval_data "
                                            f"arithmetic --rewards {OPEN}")},
    measures=lab.MEAN | lab.BEFORE | lab.TOKENS | {"one language": (language, lab.share)},
    panels={"mean@4": "eval/mean@4"},
    flags="--task arithmetic --template chat --max_prompt 64 --max_tokens 128 --lr 1e-4",
    equal=False,
    seeds=(3, 4, 5, 6, 7),
    prepare=prepare)

if __name__ == "__main__":
    lab.main(FINDING)
