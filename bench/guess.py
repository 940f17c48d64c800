"""Binary search by several seeds: how many guesses does a small model need, before and after RL?

    python -m examples.guess_model --out runs/guess
    python -m bench.guess --seeds 5          some minutes a seed on one core

All seeds begin with the same model. Writes bench/results/guess.md, .json and .png. Repeat the
command after an interruption: finished runs are kept. The second table in guess.md and the picture
have what the model guesses: first, second, and where between the numbers that are still possible.
"""
import functools
import sys
from statistics import fmean

from bench import common, seeds
from bench.seeds import at, late, share
from examples.guess import guesses
from examples.guess_model import MOST
from runtime.report.curve import figure

STEPS = 70
FLAGS = (f"--model runs/guess --steps {STEPS} --prompts 32 --samples 8 --lr 1e-3 --lr_end 0.1 "
         "--warmup 4 --scale none --aggregate token --eval_every 10 --eval_size 0 "
         "--keep_rollouts 256 --save_every 0")
SIZES = ((64, 64), (32, 63), (16, 31), (8, 15), (4, 7))  # of possible numbers
ENDS = 4  # steps at the end of a run whose mean is in the table
GUESSES = "reward/guesses"
PANELS = {"guesses per game": GUESSES}


def first(key):
    """A metric of the first step, whose games the model plays before any update."""
    return lambda rows: rows[0][key]


def greedy(step):
    """Guesses per greedy game, one of each number, at a step (-1: the last one). A turn is two
    tokens, the number and the end of the turn."""
    return lambda rows: at("eval/length", step)(rows) / 2


number = "{:.2f}".format
COLUMNS = {
    "guesses, before": (first(GUESSES), number),
    "guesses, after": (late(GUESSES, ENDS), number),
    "greedy guesses, before": (greedy(0), number),
    "greedy guesses, after": (greedy(-1), number),
}


@functools.cache
def cost(size, halves):
    """Guesses per game with so many possible numbers: of binary search, or of a coin, who takes
    any of them."""
    if size == 0:
        return 0.0
    middle = (size + 1) // 2
    places = [middle] if halves else range(1, size + 1)
    means = []
    for place in places:
        below = (place - 1) * cost(place - 1, halves)
        above = (size - place) * cost(size - place, halves)
        means.append(1 + (below + above) / size)
    return fmean(means)


def turns_of(folders, steps):
    """[(number of the turn, guess, first and last possible number)] of the games of some steps."""
    found = []
    for folder in folders:
        for row in common.read(folder, "rollouts.jsonl"):
            if row["step"] not in steps:
                continue
            for turn, (guess, low, high) in enumerate(guesses(row["completion"])):
                value = int(guess) if guess.isdecimal() else 0
                found.append((turn, value, low, high))
    return found


def in_the_middle(turns):
    """A cell per range of sizes: the share of guesses that lie in the middle half of the possible
    numbers, and of those that are possible at all."""
    cells = []
    for least, most in SIZES:
        n = 0
        possible = 0
        middle = 0
        for _, guess, low, high in turns:
            size = high - low + 1
            if not least <= size <= most:
                continue
            n += 1
            possible += low <= guess <= high
            quarter = (size - 1) / 4
            middle += low + quarter <= guess <= high - quarter
        in_middle = share(middle / n)
        in_range = share(possible / n)
        cells.append(f"{in_middle} of {in_range}")
    return cells


def draw(folders, before, after, path):
    """Guesses per game by step, then what is guessed, before and after."""
    fig = figure(figsize=(13, 6.4))
    curve, first_guess, second_guess, place = fig.subplots(2, 2).flat
    runs = list(map(common.read, folders))
    seeds.draw_panel(curve, {f"{len(runs)} seeds": runs}, GUESSES)
    curve.axhline(cost(MOST, False), color="C7", ls="--", label="any possible number")
    curve.axhline(cost(MOST, True), color="C2", ls="--", label="binary search")
    curve.set(xlabel="step", title="guesses per game", ylim=(4.5, None))
    for label, turns in ("before", before), ("after", after):
        for wanted, axis in enumerate((first_guess, second_guess)):
            values = [guess for turn, guess, *_ in turns if turn == wanted]
            axis.hist(values, range(MOST + 2), alpha=0.5, density=True, label=label)
        places = []
        for _, guess, low, high in turns:
            width = high - low
            if width > 6:
                places.append((guess - low) / width)
        place.hist(places, 40, range=(-0.2, 1.2), alpha=0.5, density=True, label=label)
    first_guess.set(title="first guess of a game")
    second_guess.set(title="second guess")
    place.set(title="where a guess lies: 0 is the first possible number, 1 the last")
    for axis in fig.axes:
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    fig.savefig(path, dpi=120)


def main(argv):
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args(argv)
    command = [sys.executable, "-m", "examples.guess", *FLAGS.split()]
    out = common.ROOT / "runs/guess-seeds"
    folders = seeds.run_all({"guess": command}, range(args.seeds), out)
    seeds.report(folders, common.RESULTS / "guess", COLUMNS, PANELS)
    before = turns_of(folders["guess"], [0])
    after = turns_of(folders["guess"], range(STEPS - ENDS, STEPS))
    draw(folders["guess"], before, after, common.RESULTS / "guess.png")
    head = ["possible numbers"]
    for least, most in SIZES:
        head.append(f"{least} to {most}" if least < most else str(most))
    lines = []
    for when, turns in ("before", before), ("after", after):
        lines.append([when, *in_the_middle(turns)])
    with open(common.RESULTS / "guess.md", "a") as file:
        file.write(f"\n{common.table(head, lines)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
