"""DeepSeek-R1 in miniature (arXiv:2501.12948): its stages, R1-Zero, and two distillations.

    python -m learn.lab.r1 --seeds 0 1 2 3 4     50 runs, one by one; a second call continues

Two base models are made first: `base`, and `student` with two of its four layers. They have read
sums and strings to reverse, mostly without tags, half of the sums guessed, with fillers ("hm").

    Zero         R1-Zero: RL on the base; rewards: right answer, format
    cold         R1, stage 1: SFT of the base on 256 worked examples without fillers
    RL           R1, stage 2: RL as for Zero
    SFT          R1, stage 3: SFT of the base on right answers of stage 2, sums and strings
    R1           R1, stage 4: RL on sums and strings
    off-policy   the student imitates right answers of R1
    on-policy    the student samples, and R1 grades each token
    small-RL     the student learns by RL, with as many samples

Writes <out>/r1.md and .png: accuracy and format on held-out sums, completions with fillers, tokens,
the strings (what is forgotten?), and the completions and seconds of training.
"""
import json
import random
import shlex
import sys
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nano_rlvr as nr
from bench import common
from bench import seeds as over_seeds
from data import arithmetic, generate
from examples import sft
from models.tiny.make_tiny import cold_start, training_example, worked
from rewards import format_reward
from runtime.report.curve import figure

ROOT = common.ROOT
TINY = ROOT / "models/tiny"
FILLERS = (" hm", " ok", " so")
SFT = "--lr 5e-4 --prompts 64 --steps"
RL = "--lr 1e-4 --prompts 16 --samples 8 --steps 30"
READ = "nano_rlvr.py --steps 0 --eval_size 3840 --eval_data"  # one answer to each question
# arm -> (the model it starts from, its command); {x} is the folder of arm x, same seed, or a file
ARMS = {
    "Zero": ("{base}", f"nano_rlvr.py {RL}"),
    "cold": ("{base}", f"examples/sft.py --demos {{demos}} {SFT} 20"),
    "RL": ("{cold}/final", f"nano_rlvr.py {RL}"),
    "RL-reads": ("{RL}/final", f"{READ} {{mix}}"),
    "SFT": ("{base}", f"examples/sft.py --demos {{RL-reads}}/eval.jsonl {SFT} 30"),
    "R1": ("{SFT}/final", f"nano_rlvr.py {RL} --data {{mix}}"),
    "R1-reads": ("{R1}/final", f"{READ} {{sums}}"),
    "off-policy": ("{student}", f"examples/sft.py --demos {{R1-reads}}/eval.jsonl {SFT} 60"),
    "on-policy": ("{student}", f"examples/distill.py --teacher {{R1}}/final {RL}"),
    "small-RL": ("{student}", f"nano_rlvr.py {RL}"),
}
SHOWN = ("Zero", "cold", "RL", "SFT", "R1", "off-policy", "on-policy", "small-RL")
SAME = ("--task arithmetic --template chat --max_prompt 64 --max_tokens 96 --kl_coef 0 --rewards "
        "gsm8k:1,format:0.2 --eval_every 1000 --save_every 0")
SHARES = ("sums", "format", "with fillers", "strings")
TEST = "--eval_data arithmetic,{strings} --eval_size 200"


def reverse(rng):
    """The other task: a string of four digits, to be reversed."""
    text = "".join(rng.choices("123456789", k=4))
    return {"question": f"reverse {text}", "answer": text[::-1]}


def pretraining_text(example, rng):
    """What the base models have read as the answer to an example."""
    tagged = rng.random() < 0.25
    if example["question"].startswith("reverse"):
        answer = example["answer"]
        return f"<think></think><answer>{answer}</answer>" if tagged else answer
    steps, total = worked(example["question"])
    if rng.random() < 0.5:  # a guess
        steps = []
        total += rng.randint(-5, 5)
    lines = []
    for step in steps:
        filler = rng.choice(FILLERS)
        is_filled = rng.random() < 0.5
        lines.append(step + filler * is_filled)
    text = "\n".join(lines)
    return f"<think>{text}</think><answer>{total}</answer>" if tagged else f"{text}\n{total}"


def make_base(folder, layers):
    """Trains these layers of the bundled model on pretraining_text, without held-out questions."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY)
    kept = [model.model.layers[i] for i in layers]
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(layers)
    model.config.layer_types = model.config.layer_types[:len(layers)]

    def draw(rng):
        return rng.choice([arithmetic, reverse])(rng)

    def sample(rng):
        example = training_example(draw, rng)
        return sft.as_rollout(example, pretraining_text(example, rng), tokenizer, "chat")

    cold_start(model, sample, steps=500, batch=64, lr=1e-3, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_data(out):
    """The files of the stages -> {name: path}. No held-out question is in a file to train on."""
    rng = random.Random(0)
    sums = nr.data.load("arithmetic", "train", 3840, 0)
    strings = list(generate(reverse, "train", 1000, 0))
    demos = []
    for example in sums[:256]:
        steps, _ = worked(example["question"])
        thinking = "\n".join(steps)
        completion = f"<think>{thinking}</think><answer>{example['answer']}</answer>"
        demos.append(example | {"completion": completion})
    mix = sums[:1000] + strings
    rng.shuffle(mix)
    files = {
        "demos": demos,
        "mix": mix,
        "sums": sums,
        "strings": list(generate(reverse, "test", 200, 0)),
    }
    paths = {}
    for name, rows in files.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        paths[name] = out / f"{name}.jsonl"
        paths[name].write_text("".join(lines))
    return paths


def has_filler(text):
    return any(filler in text for filler in FILLERS)


def training_seconds(rows):
    """Of all stages of these rows of metrics but the evaluations."""
    total = 0.0
    for row in rows:
        for key, value in row.items():
            if key.startswith("seconds/") and key != "seconds/evaluate":
                total += value
    return total


def measure(folder, before=False):
    """{title: value} of a finished run, or before its first step. Sums, strings: greedy answers."""
    config = common.read_config(folder)["config"]
    rows = common.read(folder)
    steps = 0 if before else config["steps"]
    row = rows[0] if before else rows[-1]
    texts = []
    for answer in common.read(folder, "eval.jsonl"):
        if answer["step"] == steps and answer["set"] == "arithmetic":
            texts.append(answer["completion"])
    return {
        "sums": row["eval/arithmetic/accuracy"],
        "format": fmean(format_reward(texts)),
        "with fillers": fmean(map(has_filler, texts)),
        "strings": row["eval/strings/accuracy"],
        "tokens": row["eval/arithmetic/length"],
        "samples": steps * config["prompts"] * config["samples"],
        "seconds": training_seconds(rows[:steps])}


def report(folders, path):
    """Writes the table (.md) and the picture (.png). folders: {arm: [folder of each seed]}."""
    measured = {  # {arm: [{title: value} of each seed]}
        "base": [measure(folder, before=True) for folder in folders["Zero"]],
        "student": [measure(folder, before=True) for folder in folders["small-RL"]],
    }
    for arm in SHOWN:
        measured[arm] = [measure(folder) for folder in folders[arm]]
    titles = list(measured["base"][0])
    lines = []
    for arm, runs in measured.items():
        line = [arm]
        for title in titles:
            values = [run[title] for run in runs]
            form = over_seeds.share if title in SHARES else "{:,.0f}".format
            line.append(over_seeds.cell(values, form, " to "))
        lines.append(line)
    draw(measured, f"{path}.png")
    everyone = [common.read_config(folder) for folder in sum(folders.values(), [])]
    table = common.table(["arm", *titles], lines)
    common.write(path, f"{table}\n\n{common.describe(everyone)}", measured)


def draw(measured, path):
    """A panel for each of SHARES, with a bar and its interval for each arm."""
    fig = figure(figsize=(11, 3.4))
    panels = fig.subplots(1, 4, sharey=True)
    for axis, title in zip(panels, SHARES):
        axis.set(title=title, xlim=(0, 1), yticks=range(len(measured)), yticklabels=measured)
        for row, runs in enumerate(measured.values()):
            values = [run[title] for run in runs]
            mean, low, high = over_seeds.mean_interval(values)
            axis.barh(row, mean, color="C0", xerr=[[mean - low], [high - mean]])
    panels[0].invert_yaxis()
    fig.savefig(path, dpi=144)


def commands(seed, out, files):
    """{arm: its command as a list} for a seed."""
    places = files | {"base": out / "base", "student": out / "student"}
    for arm in ARMS:
        places[arm] = out / f"{arm}-{seed}"
    quoted = {name: shlex.quote(str(path)) for name, path in places.items()}  # may have blanks
    command_of = {}
    for arm, (start, command) in ARMS.items():
        words = f"{command} {SAME} --model {start}"
        if arm in SHOWN:
            words += f" {TEST}"
        script, *flags = shlex.split(words.format(**quoted))
        command_of[arm] = [sys.executable, "-m", common.module(script), *flags]
    return command_of


def main(argv):
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/r1")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    if "," in str(out) or not str(out).isprintable():
        parser.error(f"--out {str(out)!r}: choose a path without commas and line breaks: a comma "
                     "separates the sets of --eval_data")
    if min(args.seeds) < 0 or len({*args.seeds}) < len(args.seeds):
        parser.error(f"--seeds {args.seeds}: must be different numbers from 0")
    for name, layers in (("base", (0, 1, 2, 3)), ("student", (0, 3))):
        if not (out / name / "tokenizer.json").exists():
            make_base(out / name, layers)
    files = write_data(out)
    folders = {}  # {arm: [folder of each seed]}
    for seed in args.seeds:
        of_seed = over_seeds.run_all(commands(seed, out, files), [seed], out)
        for arm, paths in of_seed.items():
            folders.setdefault(arm, []).extend(paths)
    if len(args.seeds) > 1:  # an interval needs two
        report(folders, out / "r1")


if __name__ == "__main__":
    main(sys.argv[1:])
