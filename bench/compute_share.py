"""The share of RL in the compute of a pipeline, and what further steps of each stage bring.

    python nano_rlvr.py --steps 30 --eval_every 10 --name rl
    python -m bench.compute_share runs/rl              the bundled model: its cold start, then RL

Any number of runs of this script and of examples/sft.py may follow one another. The cold start of
the bundled model (make_tiny.py) stands for pretraining. With W weights, a token costs 2 W FLOPs in
a forward pass and 4 W in a backward pass: 2 W to sample it, 6 W to learn it, 2 W more for the
log-probs of the reference or of the old policy. Not counted: attention between tokens, prompts,
which the samples of a group share, and evaluations.

DeepSeek-V3 (arXiv:2412.19437, table 1) spent 5 of 2,788 thousand GPU hours on post-training: 0.2 %.

The second table asks "let it cook longer?": a row per evaluation of a run, with the accuracy that
the steps since the last one brought and their share of the pipeline's compute.
"""
import random
import sys
from statistics import fmean

import data
from bench import common
from models.tiny import make_tiny
from nano_rlvr import Config
from runtime.memory import ModelShape
from runtime.stats import passes

STEPS, BATCH = 2000, 128  # of make_tiny's cold start
METRICS = ("eval/mean@4", "eval/accuracy")  # the first that a run has


def weights_of(model):
    return ModelShape.of(model).parameters


def cold_start_flops():
    """FLOPs of the bundled model's cold start: the mean length of a thousand examples."""
    tokenizer = make_tiny.make_tokenizer()
    rng = random.Random(0)
    lengths = []
    for _ in range(1000):
        example = make_tiny.training_example(data.arithmetic, rng)
        text = make_tiny.demonstration(example, rng)
        prompt = data.encode(example, tokenizer, "chat")
        completion = tokenizer(text, add_special_tokens=False)["input_ids"]
        lengths.append(len(prompt) + len(completion))
    return 6 * weights_of(common.TINY) * STEPS * BATCH * fmean(lengths)


def step_flops(row, config):
    """(FLOPs of sampling, of the update) of a step. SFT has no rollouts: it samples nothing."""
    forward = 2 * weights_of(config.model) * row["tokens"]
    sampled = forward if "seconds/rollout" in row else 0
    return sampled, forward * row["trained"] * passes(config)


def read_run(folder):
    """(Config, rows of metrics) of a run. Raises ValueError for a folder without metrics."""
    rows = common.read(folder)
    if not rows:
        raise ValueError(f"{folder}: no metrics.jsonl with a step")
    return Config(**common.read_config(folder)["config"]), rows


def further_steps(name, config, rows, total):
    """Lines of the second table: between two evaluations, steps, gain and share of the compute."""
    metric = next((name for name in METRICS if name in rows[0]), METRICS[-1])
    lines = []
    spent = 0
    before = None  # (step, accuracy) of the last evaluation
    for row in rows:
        if metric in row:
            now = (row["step"], row[metric])
            if before:
                gain = 100 * (now[1] - before[1])
                lines.append([name, f"{before[0]} to {now[0]}", f"{gain:+.1f}",
                              f"{spent / total:.2%}"])
            before = now
            spent = 0
        if "tokens" in row:
            spent += sum(step_flops(row, config))
    return lines


def main(argv):
    """Prints both tables. Raises ValueError with one line."""
    parser = common.parser(__doc__)
    parser.add_argument("runs", nargs="+", help="folders of runs, in the order of the pipeline")
    args = parser.parse_args(argv)
    runs = {folder: read_run(folder) for folder in args.runs}
    spent = {"cold start": (0, cold_start_flops())}  # stage -> FLOPs of sampling, of updates
    for folder, (config, rows) in runs.items():
        steps = [step_flops(row, config) for row in rows if "tokens" in row]
        spent[folder] = tuple(map(sum, zip(*steps)))
    total = sum(map(sum, spent.values()))
    lines = []
    for stage, parts in spent.items():
        share = sum(parts) / total
        lines.append([stage, *[f"{part:.2e}" for part in parts], f"{share:.2%}"])
    print(common.table(["stage", "FLOPs of sampling", "of updates", "share"], lines))
    lines = []
    for folder, (config, rows) in runs.items():
        lines += further_steps(folder, config, rows, total)
    print("\n" + common.table(["run", "steps", "points", "share"], lines))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        sys.exit(f"compute_share: {e}")
