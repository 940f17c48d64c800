"""Is a right answer learned from its own question's group, from its neighbours, or from any group?

    OMP_NUM_THREADS=1 python -m learn.lab.credit      three runs; writes results/credit.md

Each run (seeds 3 to 5) has 20 steps of 16 x 8 samples. In each of the steps 4, 8, 12 and 16 the
first group with unequal rewards gives a question. If its greedy answer after the last step is
right, examples/blame.py scores all rollouts of the run for the log-prob of this answer: "path",
whose sum is the change of the log-prob. A neighbour is a group, of any step, whose sum has as many
terms. Beside the scores: the same step without the group itself, without its first neighbour and
without its first other group, and without the rollout with the largest score "end", each replayed
to the end of the run.

The rule, fixed before the runs; intervals are 95 % t intervals over the three runs, each the mean
over its questions:
- own group: it counts more if (own - neighbours), nats per group, lies above 0;
- neighbours: they count more if (neighbours - others), nats per group, lies above 0;
- any group: it is learned from all if the own group has less than a tenth of all credit;
- one rollout is decisive if without it one of the answers is wrong.
"""
import itertools
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from statistics import fmean

from bench import common, replay
from bench.seeds import mean_interval
from examples import blame
from runtime import stats

RESULTS = common.ROOT / "learn/lab/results"
FLAGS = "--steps 20 --prompts 16 --samples 8 --eval_size 128 --save_every 10 --keep 10".split()
KINDS = ("own group", "neighbours", "others")
STEPS, SEEDS = (4, 8, 12, 16), (3, 4, 5)


def terms(group, tokenizer):
    """The number of terms of the sum that a group was asked."""
    question = tokenizer.decode(group[0].prompt)
    return question.count("+") + question.count("-")


def kind_of(group, own, tokenizer):
    if group is own:
        return "own group"
    is_neighbour = terms(group, tokenizer) == terms(own, tokenizer)
    return "neighbours" if is_neighbour else "others"


def greedy(run, prompt, example):
    """The scored greedy completion of a prompt."""
    [r] = run.sample(run.llm, [prompt], 1, 0.0, run.cfg.max_tokens, examples=[example])
    blame.nr.score([r], [example], run.verifier)
    return r


def credit(run, args):
    """A train function: appends a row per question to args.found."""
    tokenizer, cfg = run.llm.get_tokenizer(), run.cfg
    snapshots = blame.record(run, args.last + 1)
    print(replay.proof(args.run, run.log.folder, args.start))
    asked = []
    for step in STEPS:
        examples = blame.nr.data.batch_at(run.train_set, step, cfg.prompts, cfg.seed)
        groups = snapshots[step].groups
        i = next(i for i, group in enumerate(groups) if not stats.has_zero_std(group))
        answer = greedy(run, groups[i][0].prompt, examples[i])
        if stats.is_right(answer):
            asked.append((step, i, examples[i], answer))
    names = ["end", "path"]
    wanted = [blame.vectors(run, snapshots, answer, names)[name]
              for name in names for *_, answer in asked]
    found = blame.scores(run, snapshots, wanted)  # of each rollout: all "end", then all "path"
    run.eval_set = run.eval_set[:1]  # evaluations change no weight
    for number, (step, i, example, answer) in enumerate(asked):
        own = snapshots[step].groups[i]
        sums = {kind: [] for kind in KINDS}  # a number per group
        first = {"own group": i}  # of each kind in the same step
        for now, snapshot in list(snapshots.items())[:-1]:
            for g, group in enumerate(snapshot.groups):
                kind = kind_of(group, own, tokenizer)
                keys = [(now, g * cfg.samples + j) for j in range(cfg.samples)]
                column = len(asked) + number
                sums[kind].append(sum(found[key][column] for key in keys if key in found))
                if now == step and not stats.has_zero_std(group):
                    first.setdefault(kind, g)
        row = {"sums": sums, "exact": {}}
        blame.put(run, snapshots[args.last + 1])
        [after] = blame.logprobs(run, [answer])
        for kind, g in first.items():
            chosen = [(step, g * cfg.samples + j) for j in range(cfg.samples)]
            blame.without(run, snapshots, chosen)
            row["exact"][kind] = after - blame.logprobs(run, [answer])[0]
        largest = max(found, key=lambda key: abs(found[key][number]))
        blame.without(run, snapshots, [largest])
        row["largest"] = [found[largest][number], after - blame.logprobs(run, [answer])[0],
                          stats.is_right(greedy(run, answer.prompt, example))]
        args.found.append(row)


def one(seed):
    """The rows of a run, which is made if it is not there."""
    folder = common.ROOT / f"runs/lab/credit-{seed}"
    if not (folder / "final").exists():
        command = [*common.SCRIPT, *FLAGS, "--seed", str(seed), "--name", folder.name, "--resume"]
        subprocess.run([*command, "--out", str(folder.parent)], check=True)
    args = Namespace(run=folder, first=0, last=None, found=[])
    blame.start(args, credit)
    return args.found


def report(runs):
    """Writes the page. runs: {seed: rows}."""
    rows = []
    per_group = {}
    for kind in KINDS:
        per_group[kind] = [fmean(fmean(q["sums"][kind]) for q in of) for of in runs.values()]
        exact = [fmean(q["exact"].get(kind, 0.0) for q in of) for of in runs.values()]
        shares = []
        for of in runs.values():
            shares.append(fmean(sum(q["sums"][kind]) / sum(sum(q["sums"].values(), []))
                                for q in of))
        rows.append([kind, cell(per_group[kind]), cell(exact), cell(shares)])
    text = ["# credit", __doc__.partition("\n\n")[0],
            common.table(["groups", "nats per group, first order",
                          "nats of one group of the step, exact", "share of all credit"], rows)]
    for one, other in itertools.pairwise(KINDS):
        gaps = [x - y for x, y in zip(per_group[one], per_group[other])]
        text.append(f"- {one} − {other}, nats per group: {cell(gaps)}")
    largest = [q["largest"] for of in runs.values() for q in of]
    wrong = sum(not right for *_, right in largest)
    low, high = stats.wilson_interval(wrong, len(largest))
    text.append(f"- without the rollout with the largest score {wrong} of {len(largest)} answers "
                f"are wrong (95 % interval {low:.0%} to {high:.0%}); the log-prob moved by at most "
                f"{max(abs(exact) for _, exact, _ in largest):.4f} nats")
    about = common.read_config(common.ROOT / f"runs/lab/credit-{SEEDS[0]}")
    text.append(f"In brackets: 95 % t interval over {len(runs)} runs. {common.describe([about])}.")
    (RESULTS / "credit.md").write_text("\n\n".join(text) + "\n")
    (RESULTS / "credit.json").write_text(json.dumps(runs))
    print(*text, sep="\n\n")


def cell(values):
    mean, low, high = mean_interval(values)
    return f"{mean:+.5f} ({low:+.5f} to {high:+.5f})"


def main():
    """A process per run: vLLM starts once in a process."""
    runs = {}
    for seed in SEEDS:
        path = Path(f"runs/lab/credit-{seed}.json")
        if not path.exists():
            command = [sys.executable, "-m", "learn.lab.credit", str(seed)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        runs[seed] = json.loads(path.read_text())
    report(runs)


if __name__ == "__main__":
    os.chdir(common.ROOT)
    if sys.argv[1:]:
        found = one(int(sys.argv[1]))
        Path(f"runs/lab/credit-{sys.argv[1]}.json").write_text(json.dumps(found))
    else:
        main()
