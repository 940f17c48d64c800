"""A search that cannot fool itself: settings are tried one after the other, and noise is not kept.

    OMP_NUM_THREADS=1 python -m learn.lab.honest_search runs    the runs, in one process; minutes
    python -m learn.lab.honest_search                           page and picture of these runs

`keep if higher` keeps a setting if its result is above the best so far. Among settings that differ
in nothing but the seed it finds "better" ones nevertheless: the k-th result is the highest of all
with a probability of 1 / k, so 40 of them bring 3.3 (the sum of 1/2 to 1/41), however many runs a
result is the mean of.

`search` keeps a setting only if the interval of its difference to the best so far is above 0. The
interval knows how often the search will ask: 0.05 is spent on all tries and LOOKS together, in
equal parts (Bonferroni, as in lab.py; to plan looks is Lan and DeMets, doi 10.1093/biomet/70.3.659;
to spend alpha over tries is Foster and Stine, doi 10.1111/j.1467-9868.2007.00643.x). A setting that
is not above the best so far at a look is dropped: that saves runs and can only lower the error.
"""
import dataclasses
import json
import os
import random
import sys
from statistics import fmean, stdev

from statsmodels.stats.weightstats import CompareMeans

import nano_rlvr as nr
from bench import common, replay
from learn.lab import lab
from runtime.log import provenance
from runtime.report.curve import figure

LOOKS = (5, 10)  # runs of a setting after which it is judged; the first is the lab's least number
LEVEL = 0.05  # the chance that a whole search of null edits keeps one
TRIES = 40
FIRST = ("null", 0)  # the setting that a search of the study begins with
EQUAL = 8  # runs of an edit with which `keep if higher` needs about as many as the lab's rule
SEARCHES = 400  # of the study
FLAGS = ("--steps 8 --prompts 8 --samples 8 --kl_coef 0 --eval_size 128 --eval_n 4 --save_every -1 "
         "--lr_end 1 --eval_every 8")
# name -> learning rate, number of runs
POOLS = {"null": (1e-4, 40), "rate 2e-4": (2e-4, 10), "rate 3e-4": (3e-4, 10)}
OUT = common.ROOT / "runs/lab/honest_search"
RESULTS = common.ROOT / "learn/lab/results/honest_search"


# ---- the two rules

def interval(tried, best, tries, looks=LOOKS):
    """(low, high) of the mean of `tried` minus that of `best`: Welch's t interval."""
    level = LEVEL / (tries * len(looks))
    comparison = CompareMeans.from_data(tried, best)
    low, high = comparison.tconfint_diff(level, usevar="unequal")
    return float(low), float(high)


def search(first, edits, measure, looks=LOOKS):
    """Tries the edits in order. measure(setting, n) makes n new runs of a setting -> their results.
    Returns a dict per edit: edit, runs, low, high, kept."""
    best = measure(first, looks[-1])
    found = []
    for edit in edits:
        tried = []
        for look in looks:
            tried += measure(edit, look - len(tried))
            low, high = interval(tried, best, len(edits), looks)
            if low > 0 or fmean(tried) <= fmean(best):
                break
        found.append({"edit": edit, "runs": len(tried), "low": low, "high": high, "kept": low > 0})
        if low > 0:
            best = tried + measure(edit, looks[-1] - len(tried))
    return found


def keep_if_higher(first, edits, measure, runs=1):
    """The rule that fools itself. A setting's result is the mean of so many runs."""
    best = fmean(measure(first, runs))
    found = []
    for edit in edits:
        result = fmean(measure(edit, runs))
        found.append({"edit": edit, "runs": runs, "gain": result - best, "kept": result > best})
        best = max(best, result)
    return found


# ---- the runs

class Rows:
    """Stands in for the log of a run: keeps the metrics of its evaluations, writes nothing."""

    def __init__(self, folder):
        self.folder = folder
        self.rows = []

    def write(self, step, metrics, groups=(), answers=()):
        self.rows.append({"step": step, **metrics})

    def token_changes(self, *_):
        pass

    say = close = token_changes


def train(run, path, pools):
    """All runs that the file does not have yet, one after the other; adds a line per run."""
    start = replay.take(run)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(row["pool"], row["seed"]) for row in done}
    first = run.cfg
    commit = provenance()["commit"]  # of the code that this process has read
    for pool, (lr, runs) in pools.items():
        for seed in range(runs):
            if (pool, seed) in known:
                continue
            cfg = dataclasses.replace(first, lr=lr, seed=seed)
            replay.put(run, start)
            run.cfg = cfg
            run.log = Rows(run.log.folder)
            run.train_set, _ = nr.data.load_splits(cfg, run.llm.get_tokenizer(), notify=str)
            nr.train(run)
            last = run.log.rows[-1]
            row = {"pool": pool, "seed": seed, "mean@4": last["eval/mean@4"], "commit": commit}
            with path.open("a") as file:
                print(json.dumps(row), file=file)


def make_runs():
    OUT.mkdir(parents=True, exist_ok=True)
    argv = [*FLAGS.split(), "--out", str(OUT), "--name", f"process-{os.getpid()}"]
    nr.main(argv, lambda run: train(run, OUT / "runs.jsonl", POOLS))


# ---- the study

def drawn(pools, rng):
    """measure(setting, n) for a search: n results of the setting's pool, none of them twice.

    A setting is (pool, number). The first one is FIRST; no edit gets one of its runs.
    """
    null = rng.sample(pools["null"], len(pools["null"]))
    left = pools | {"null": null[LOOKS[-1]:]}
    waiting = {FIRST: null[:LOOKS[-1]]}

    def measure(setting, n):
        if setting not in waiting:
            values = left[setting[0]]
            waiting[setting] = rng.sample(values, len(values))
        return [waiting[setting].pop() for _ in range(n)]

    return measure


def study(pools, edits, rng):
    """{rule: [(edits kept, runs, whether the last edit was kept) of each search]}."""
    rules = {
        "keep if higher, 1 run": keep_if_higher,
        f"keep if higher, mean of {EQUAL} runs":
            lambda *words: keep_if_higher(*words, runs=EQUAL),
        "the lab's rule": search}
    results = {rule: [] for rule in rules}
    for _ in range(SEARCHES):
        for rule, find in rules.items():
            found = find(FIRST, edits, drawn(pools, rng))
            kept = [row["kept"] for row in found]
            results[rule].append((sum(kept), sum(row["runs"] for row in found), kept[-1]))
    return results


def picture(counts, path):
    """A line per rule: in which share of the searches at least so many null edits were kept."""
    fig = figure(figsize=(6, 3.4))
    axis = fig.subplots()
    most = range(1, 11)
    for rule, values in counts.items():
        shares = []
        for k in most:
            shares.append(fmean(value >= k for value in values))
        axis.plot(most, shares, "o-", ms=4, lw=1.2, label=rule)
    axis.set(xlabel=f"null edits kept of {TRIES}, at least", ylabel="share of the searches",
             ylim=(-0.02, 1.02))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    fig.savefig(path, dpi=144)


def page(rows, path=RESULTS):
    """Writes the page, the numbers and the picture of the study."""
    pools = {}
    for row in rows:
        pools.setdefault(row["pool"], []).append(row["mean@4"])
    rng = random.Random(0)
    nothing = [("null", i) for i in range(1, TRIES + 1)]
    null = study(pools, nothing, rng)
    others = [pool for pool in pools if pool != "null"]
    powers = [study(pools, [*nothing[1:], (pool, 1)], rng) for pool in others]
    lines = []
    counts = {}
    for rule, found in null.items():
        kept, runs, _ = zip(*found)
        counts[rule] = kept
        line = [rule, f"{fmean(runs):.0f}", f"{fmean(kept):.2f}", f"{fmean(map(bool, kept)):.1%}"]
        for power in powers:
            was_kept = fmean(last for *_, last in power[rule])
            line.append(f"{was_kept:.1%}")
        lines.append(line)
    head = ["rule", "runs of the edits", f"null edits kept of {TRIES}", "searches that keep one"]
    head += [f"{pool} kept, as the last edit" for pool in others]
    of_pools = [f"{name}: {len(x)} runs, {fmean(x):.1%} ± {100 * stdev(x):.1f}"
                for name, x in pools.items()]
    commits = ", ".join(lab.commits_of(rows))
    text = (f"{common.table(head, lines)}\n\n![shares](honest_search.png)\n\n"
            f"mean@4 on 128 questions after the run, mean ± standard deviation over the seeds: "
            f"{'; '.join(of_pools)}. {SEARCHES} searches per cell, each drawn from these runs.\n\n"
            f"{common.describe([rows[0] | provenance() | {'commit': commits}])}")
    picture(counts, f"{path}.png")
    old = path.with_suffix(".md")
    by_hand = old.read_text().partition(lab.BY_HAND)[2] if old.exists() else ""
    text = f"# honest_search\n\n{text}\n\n{lab.BY_HAND}{by_hand.rstrip()}"
    common.write(path, text, {"runs": rows, "kept": counts})


if __name__ == "__main__":
    if sys.argv[1:] == ["runs"]:
        make_runs()
    else:
        page([json.loads(line) for line in (OUT / "runs.jsonl").read_text().splitlines()])
