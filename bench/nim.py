"""Nim by several seeds: what does a small model learn by playing against itself?

    python -m examples.nim_model --out runs/nim
    python -m bench.nim --seeds 5          five minutes a seed on one core

All seeds begin with the same model. Writes bench/results/nim.md, .json and .png. Repeat the command
after an interruption: finished runs are kept. The second table in nim.md has the share of best
moves for each heap from which a player can win.
"""
import re
import sys
from collections import Counter

from bench import common, seeds
from bench.seeds import at, late, share
from examples.nim import moves

STEPS = 60
FLAGS = (f"--model runs/nim --steps {STEPS} --prompts 32 --samples 8 --lr 4e-4 --kl_coef 0.05 "
         "--scale none --aggregate token --eval_every 20 --eval_size 64 --keep_rollouts 256 "
         "--save_every 0")
ENDS = 4  # steps at each end of a run whose mean is in the table
RANDOM = "eval/nim_model.py-against_random/accuracy"
OPTIMAL = "eval/nim_model.py-against_optimal/accuracy"
PANELS = {
    "best moves in self-play": "reward/optimal",
    "won against a random player": RANDOM,
    "won against an optimal player": OPTIMAL,
}


def first(key):
    """The mean of a metric over the first steps of the rows of a run."""
    return lambda rows: late(key)(rows[:ENDS])


COLUMNS = {
    "best moves, before": (first("reward/optimal"), share),
    "best moves, after": (late("reward/optimal", ENDS), share),
    "first player wins, after": (late("reward/outcome", ENDS), share),
    "beats random, before": (at(RANDOM, 0), share),
    "beats random, after": (at(RANDOM), share),
    "beats optimal, before": (at(OPTIMAL, 0), share),
    "beats optimal, after": (at(OPTIMAL), share),
}


def best_by_heap(folders, steps):
    """{heap: share of best moves} of the games of some steps, for heaps that can be won."""
    best = Counter()
    total = Counter()
    for folder in folders:
        for row in common.read(folder, "rollouts.jsonl"):
            if row["step"] not in steps:
                continue
            start = re.search(r"\d+", row["prompt"])[0]
            for heap, move in moves(row["completion"], start):
                total[heap] += 1
                best[heap] += move == str(heap % 4)
    return {heap: best[heap] / total[heap] for heap in sorted(total) if heap % 4}


def main(argv):
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args(argv)
    command = [sys.executable, "-m", "examples.nim", *FLAGS.split()]
    folders = seeds.run_all({"nim": command}, range(args.seeds), common.ROOT / "runs/nim-seeds")
    seeds.report(folders, common.RESULTS / "nim", COLUMNS, PANELS)
    before = best_by_heap(folders["nim"], range(ENDS))
    after = best_by_heap(folders["nim"], range(STEPS - ENDS, STEPS))
    lines = []
    for when, shares in ("before", before), ("after", after):
        lines.append([when, *map(share, shares.values())])
    table = common.table(["heap", *before], lines)
    with open(common.RESULTS / "nim.md", "a") as file:
        file.write(f"\n{table}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
