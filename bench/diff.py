"""Where two runs part: the first step, stage and value that differ, and what that usually means.

    python -m bench.diff runs/a runs/b

Runs with the same settings are equal bit for bit (docs/reliability.md says when), so the first
difference is close to its cause. What the two folders hold is compared in the order in which the
loop makes it: see bench/compare.py.
"""
import math
import sys

from bench.compare import differences
from measure import common
from runtime.folder import FREE
from runtime.shape import first_line

# a difference by rounding, relative to the larger value or to 1: 64 roundings, in bf16 two
ROUNDED = {"float64": 2**-46, "float32": 2**-17, "bfloat16": 2**-6}
ROUNDING = ("The difference has the size of rounding: the same numbers were added in another "
            "order, as with another number of threads or ranks, pack size, machine or version.")
MEANINGS = {  # stage -> what it means if this is where two runs part, and not by rounding
    "inputs": "The data, the tokenizer or the starting weights are not the same.",
    "weights": "The update before was the same up to its gradient: the optimizer, the clipping or "
               "the checkpoint has changed.",
    "evaluation": "The weights are the same: the held-out questions, the reward function or vLLM "
                  "has changed.",
    "data": "The runs have other prompts, or the same in another order.",
    "tokens": "vLLM got the same prompts and sampled other tokens: its seeds, its settings or its "
              "weights have changed, or rounding decided a draw.",
    "rewards": "The texts are the same: the reward function has changed, is random or ran out of "
               "time.",
    "advantages": "The rewards are the same: assign_advantages has changed, or which groups are "
                  "trained.",
    "trainer's log-probs": "The tokens are the same: the trainer's forward pass has changed.",
    "vLLM's log-probs": "The trainer's log-probs are the same: vLLM computes with other weights, "
                        "settings or kernels.",
    "loss": "Log-probs and advantages are the same: policy_loss, the reference or the weights of "
            "the tokens have changed.",
    "learning rate": "The learning rate follows from the flags and the number of the step.",
    "gradients": "The loss is the same: its gradient or the backward pass has changed.",
    "other values": "The script does not write this value, or only one of the runs has it.",
}


def settings(a, b):
    """Texts "name value | value" of what config.json of two runs says differently about results."""
    a, b = map(common.read_config, (a, b))
    pairs = [(f"--{name}", a["config"].get(name), b["config"].get(name))
             for name in a["config"] | b["config"] if name not in FREE]
    pairs += [(name, a.get(name), b.get(name))
              for name in ("commit", "device", "versions", "world")]
    return [f"{name} {x} | {y}" for name, x, y in pairs if x != y]


def answer(a, b):
    """Yields the lines that say where two runs part, and what it means."""
    other = settings(a, b)
    yield f"settings and versions that differ: {'; '.join(other) or 'none'}"
    found = differences(a, b)
    first = next(found, None)
    if not first:
        yield "no difference: all results are equal bit for bit"
        return
    bound = ROUNDED[common.read_config(a)["config"]["dtype"]]
    yield f"first difference: {where(first)}"
    yield f"    {ROUNDING if first.size <= bound else MEANINGS[first.stage]}"
    if flags := [text.split()[0] for text in other if text.startswith("--")]:
        yield f"    The likely cause: the settings differ in {', '.join(flags)}."
    if first.size <= bound:
        later = next((d for d in found if d.size > bound), None)
        yield f"first difference beyond rounding: {where(later) if later else 'none'}"
    elif first.stage == "inputs":  # only a checksum: where does it show?
        later = next(found, None)
        yield f"where it shows first: {where(later) if later else 'nowhere'}"


def where(d):
    """A Difference as text."""
    step = "at the end" if d.step == math.inf else f"step {d.step}"
    size = "" if d.size == math.inf else f" (relative difference {d.size:.1e})"
    return f"{step}, {d.stage}: {d.name}: {d.text}{size}"


def main(argv):
    if len(argv) != 2:
        sys.exit(__doc__)
    try:
        print(*answer(*argv), sep="\n")
    except Exception as e:  # a damaged file can raise anything
        sys.exit(f"diff: {' '.join(argv)}: damaged, or not the folder of a run ({first_line(e)})")


if __name__ == "__main__":
    main(sys.argv[1:])
