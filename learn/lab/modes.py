"""Thinking modes: one model for /think and /no_think, beside a model for each."""
import json
import sys

from learn.lab import lab  # isort: skip
import data
from models.tiny.make_tiny import worked

TASK = "learn/lab/think.py"
OUT = lab.RUNS / "modes"
MIXTURES = {"fused": 60, "think": 30, "no_think": 30}  # -> steps of SFT, 30 of each mode
DEMOS = 512  # of each mixture
SETS = ",".join(f"{TASK}:{name}" for name in ("think", "no_think", "cut_8", "cut_16"))


def completion(row):
    """A demonstration: the sum worked out, or a right answer at once."""
    steps, total = worked(row["question"].split()[0])
    thinking = "\n".join(steps) if row["mode"] == "think" else ""
    return f"<think>{thinking}</think><answer>{total}</answer>"


def make_models():
    """SFT of the bundled model on demonstrations of each mixture."""
    OUT.mkdir(parents=True, exist_ok=True)
    for name, steps in MIXTURES.items():
        demos = OUT / f"{name}.jsonl"
        rows = data.load(f"{TASK}:{name}", "train", DEMOS, 100)
        lines = [json.dumps(row | {"completion": completion(row)}) for row in rows]
        demos.write_text("\n".join(lines))
        flags = (f"--demos {demos} --data {TASK}:{name} --eval_data {SETS} --eval_size 128 "
                 f"--rewards {TASK}:obeyed_and_right --rollout {TASK}:with_budget --kl_coef 0 "
                 f"--steps {steps} --eval_every 100 --prompts 64 --lr 5e-4 --save_every 0")
        command = [sys.executable, "-m", "examples.sft", *flags.split()]
        lab.seeds.run_all({name: command}, [100], OUT)


def accuracy(name, step=-1):
    """Of the greedy answers to a set, those that obey the mode and are right."""
    return lab.at(f"eval/think.py-{name}/accuracy", step), lab.share


def arm(mixture):
    return f"nano_rlvr.py --model {OUT}/{mixture}-100/final --data {TASK}:{mixture}"


REWARDS = f"{TASK}:obeyed_and_right,{TASK}:obeyed:0"

FINDING = lab.Finding(
    claim="One model that thinks after /think and answers at once after /no_think is about as good "
          "in each mode as a model for this mode alone, obeys the switch, and, trained in both, "
          "answers from thinking that was cut off although it never saw that (section 4.3 and "
          "figure 2 of the source, without numbers for models of one mode).",
    source="2505.09388",
    checks=[lab.gap("fused", "think only", "think", low=-0.05, named=0.05, sd=0.01),
            lab.gap("fused", "no-think only", "no think", low=-0.05, named=0.05, sd=0.015),
            lab.Check("samples of fused that obey", [("fused", "obeyed", 1)], low=0.95,
                      named=0.04, sd=0.01),
            lab.gain("fused", "think", low=0, named=0.05, sd=0.01),
            lab.gap("fused", "think only", "cut at 16", low=0, named=0.1, sd=0.03)],
    arms={"think only": arm("think"), "no-think only": arm("no_think"), "fused": arm("fused")},
    measures={
        "think": accuracy("think"), "think before": accuracy("think", 0),
        "no think": accuracy("no_think"), "no think before": accuracy("no_think", 0),
        "obeyed": (lab.late("reward/obeyed", 5), lab.share),
        "cut at 8": accuracy("cut_8"), "cut at 16": accuracy("cut_16"),
        "tokens, think": (lab.at("eval/think.py-think/length"), lab.number),
        "tokens, no think": (lab.at("eval/think.py-no_think/length"), lab.number)},
    panels=lab.SAMPLES | {"samples that obey": "reward/obeyed"},
    flags=f"--eval_data {SETS} --eval_size 128 --eval_n 0 --rewards {REWARDS} --template chat "
          f"--max_prompt 64 --max_tokens 96 --lr 1e-4 --rollout {TASK}:with_budget",
    seeds=(3, 4, 5, 6, 7),
    prepare=make_models)

if __name__ == "__main__":
    lab.main(FINDING)
