"""Where two runs part: the first step, stage and value that differ, and what that usually means.

    python -m bench.diff runs/a runs/b       ends with status 1 if they differ

Runs with the same settings are equal bit for bit (docs/reliability.md says when), so the first
difference is close to its cause. What the two folders hold is compared in the order in which the
loop makes it.
"""
import math
import sys
from collections import Counter, namedtuple
from pathlib import Path
from textwrap import shorten

from bench import common
from runtime.checkpoint import on_disk
from runtime.flags import FREE
from runtime.messages import first_line, plain

TIMED = ("seconds/", "memory/", "tokens_per_second", "mfu")  # metrics that depend on time
STAGES = {  # in the order of a step; stage -> how the names of its values begin
    "inputs": ("inputs",),
    "weights": ("weights",),
    "evaluation": ("eval",),
    "data": ("prompt",),
    "tokens": ("text", "completion", "tokens", "finish", "draws"),
    "rewards": ("reward", "parts", "steps", "group/zero_std"),
    "advantages": ("advantage",),
    "trainer's log-probs": ("entropy",),
    # stored only as their gap to the trainer's: looked at where the trainer's are equal
    "vLLM's log-probs": ("mismatch/",),
    "loss": ("ratio", "clip_ratio", "correction/", "kl", "loss"),
    "learning rate": ("lr",),
    "gradients": ("grad_norm", "skipped"),
    "other values": ("",),
}
ORDER = []  # (stage, how a name begins)
for stage, starts in STAGES.items():
    ORDER += [(stage, start) for start in starts]
LABELS = {"eval": "eval/{} of answer {}", "rollouts": "{} of rollout {}",
          "metrics": "{} of line {}"}  # the number is left out in the first line of a step
# step: inf at the end of the run. size: relative to the larger value, or to 1 if both are
# smaller; inf for what is no number
Difference = namedtuple("Difference", "step stage name text size")


def place(name):
    """The number of the first entry of ORDER that a name begins with."""
    return next(i for i, (_, start) in enumerate(ORDER) if name.startswith(start))


def differences(a, b):
    """Yields each Difference between the results of two runs, in the order in which they were made.

    What only one of the runs has comes last.
    """
    a, b = Path(a), Path(b)
    if (a / "inputs.sha256").read_text() != (b / "inputs.sha256").read_text():
        yield Difference(0, "inputs", "inputs.sha256", "two checksums", math.inf)
    values_a = values(a)
    values_b = values(b)
    saved_a = checkpoints(a)
    saved_b = checkpoints(b)
    steps = values_a.keys() & values_b.keys() | saved_a.keys() & saved_b.keys()
    for step in sorted(steps):
        if step in saved_a and step in saved_b:
            changed = weights(saved_a[step], saved_b[step])
            if changed:
                yield Difference(step, "weights", saved_a[step].name, *changed)
        of_a = values_a.get(step, {})
        of_b = values_b.get(step, {})
        in_both = [name for name in of_a if name in of_b]
        for name in sorted(in_both, key=place):
            if repr(of_a[name]) != repr(of_b[name]):
                stage, _ = ORDER[place(name)]
                yield Difference(step, stage, name, *gap(name, of_a[name], of_b[name]))
    for step in sorted(values_a.keys() | values_b.keys()):
        in_one = values_a.get(step, {}).keys() ^ values_b.get(step, {}).keys()
        for name in sorted(in_one):
            yield Difference(step, "other values", name, "only one run has it", math.inf)
    if math.inf in saved_a.keys() ^ saved_b.keys():
        yield Difference(math.inf, "other values", "final", "only one run has it", math.inf)


def checkpoints(folder):
    """{step: folder} of the checkpoints of a run; that of final/ is inf."""
    finals = {math.inf: path for path in [folder / "final"] if path.exists()}
    return on_disk(folder) | finals


def values(folder):
    """{step: {name: value}} of the logs of a run, without what depends on time.

    The numbers per token in rollouts.jsonl have two digits only: they are left out, too.
    """
    values_of = {}
    for file in LABELS:
        seen = Counter()  # how many rows of a step came before
        for row in common.read(folder, f"{file}.jsonl"):
            step = row["step"]
            number = seen[step]
            seen[step] += 1
            if "per_token" in row:
                row["text"] = row.pop("per_token")["text"]
            for name, value in row.items():
                if name.startswith(TIMED):
                    continue
                label = LABELS[file].format(name, number)
                if (file, number) == ("metrics", 0):
                    label = name
                values_of.setdefault(step, {})[label] = value
    return values_of


def gap(name, x, y):
    """(text, size) of how two values of the logs differ."""
    where = ""
    if isinstance(x, list) and isinstance(y, list):  # the first place that differs
        shared = min(len(x), len(y))
        i = 0
        while i < shared and x[i] == y[i]:
            i += 1
        x = x[i:i + 1]
        y = y[i:i + 1]
        where = f", at {i}"
    size = math.inf
    are_numbers = all(isinstance(value, (int, float)) for value in (x, y))
    if are_numbers and name != "lr":
        size = abs(x - y) / max(abs(x), abs(y), 1)
    return f"{shorten(repr(x), 70)} | {shorten(repr(y), 70)}{where}", size


def weights(a, b):
    """(text, size) of how the tensors of two folders differ, None if their bits are equal.

    size: distance of the two vectors of all weights, divided by the norm of the first.
    """
    import torch
    from safetensors.torch import load_file
    changed = []
    distance = 0.0
    norm = 0.0
    paths = set()
    for folder in (a, b):
        paths |= {path.relative_to(folder) for path in folder.rglob("*.safetensors")}
    for path in sorted(paths):
        x, y = (load_file(f / path) if (f / path).exists() else {} for f in (a, b))
        shapes_x = {key: tensor.shape for key, tensor in x.items()}
        shapes_y = {key: tensor.shape for key, tensor in y.items()}
        if shapes_x != shapes_y:
            return f"{path} has other tensors in one of them, or is missing", math.inf
        for key in x:
            p = x[key].flatten()  # (P,)
            q = y[key].flatten()  # (P,)
            apart = p.double() - q.double()  # (P,)
            if not torch.equal(p.view(torch.uint8), q.view(torch.uint8)):
                changed.append(f"{path} {key}, {(p != q).sum()} of {len(p)} values, "
                               f"by {apart.abs().max():.1e} at most")
            if not key.startswith("exp_avg"):  # AdamW's moments
                distance += apart.square().sum().item()
                norm += p.double().square().sum().item()
    if not changed:
        return None
    text = f"{len(changed)} tensors differ, the first: {changed[0]}"
    return text, math.sqrt(distance / norm) or math.inf


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
    flags_a = a["config"]
    flags_b = b["config"]
    pairs = []
    for name in flags_a | flags_b:
        if name not in FREE:
            pairs.append((f"--{name}", flags_a.get(name), flags_b.get(name)))
    for name in ("commit", "device", "versions", "world"):
        pairs.append((name, a.get(name), b.get(name)))
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
        lines = list(answer(*argv))
    except Exception as e:  # a damaged file can raise anything
        sys.exit(plain(
            f"diff: {' '.join(argv)}: damaged, or not the folder of a run ({first_line(e)})"))
    print(plain("\n".join(lines)))
    sys.exit(any(line.startswith("first difference") for line in lines))


if __name__ == "__main__":
    main(sys.argv[1:])
