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
STEPS = (4, 8, 12, 16)
SEEDS = (3, 4, 5)


def terms(group, tokenizer):
    """The number of terms of the sum that a group was asked."""
    question = tokenizer.decode(group[0].prompt)
    return question.count("+") + question.count("-")


def kind_of(group, own, tokenizer):
    if group is own:
        return "own group"
    if terms(group, tokenizer) == terms(own, tokenizer):
        return "neighbours"
    return "others"


def greedy(run, prompt, example):
    """The scored greedy completion of a prompt."""
    [r] = run.rollout(run.llm, [prompt], 1, 0.0, run.cfg.max_tokens, examples=[example])
    blame.nr.score([r], [example], run.verifier)
    return r


def questions_of(run, snapshots):
    """Rows (step, number of the group, example, right greedy answer after the last step)."""
    cfg = run.cfg
    questions = []
    for step in STEPS:
        examples = blame.nr.data.batch_at(run.train_set, step, cfg.prompts, cfg.seed)
        groups = snapshots[step].groups
        number = 0  # of the first group with unequal rewards
        while stats.has_zero_std(groups[number]):
            number += 1
        answer = greedy(run, groups[number][0].prompt, examples[number])
        if stats.is_right(answer):
            questions.append((step, number, examples[number], answer))
    return questions


def keys_of(step, number, samples):
    """The keys of the rollouts of a group in blame's scores."""
    first = number * samples
    return [(step, i) for i in range(first, first + samples)]


def sums_of(run, snapshots, scores, column, own):
    """{kind: a sum of scores per group}"""
    tokenizer = run.llm.get_tokenizer()
    sums = {kind: [] for kind in KINDS}
    *steps, _ = snapshots.items()  # the last one is the state at the end
    for step, snapshot in steps:
        for number, group in enumerate(snapshot.groups):
            keys = keys_of(step, number, run.cfg.samples)
            total = sum(scores[key][column] for key in keys if key in scores)
            sums[kind_of(group, own, tokenizer)].append(total)
    return sums


def first_of_each_kind(groups, own, tokenizer):
    """{kind: number of its first group with unequal rewards}"""
    first = {}
    for number, group in enumerate(groups):
        if not stats.has_zero_std(group):
            first.setdefault(kind_of(group, own, tokenizer), number)
    return first


def credit(run, args):
    """A train function: appends a row per question to args.rows."""
    snapshots = blame.record(run, args.last + 1)
    print(replay.proof(args.run, run.log.folder, args.start))
    questions = questions_of(run, snapshots)
    names = ["end", "path"]
    wanted = []  # of all questions "end", then of all "path"
    for name in names:
        for *_, answer in questions:
            wanted.append(blame.vectors(run, snapshots, answer, names)[name])
    scores = blame.scores(run, snapshots, wanted)  # {key of a rollout: a score for each of wanted}
    run.eval_set = run.eval_set[:1]  # evaluations change no weight
    for i, (step, number, example, answer) in enumerate(questions):
        groups = snapshots[step].groups
        own = groups[number]
        sums = sums_of(run, snapshots, scores, len(questions) + i, own)
        replay.put(run, snapshots[args.last + 1])
        [after] = blame.logprobs(run, [answer])
        exact = {}
        first_of = first_of_each_kind(groups, own, run.llm.get_tokenizer())
        for kind, first in first_of.items():
            blame.without(run, snapshots, keys_of(step, first, run.cfg.samples))
            [without] = blame.logprobs(run, [answer])
            exact[kind] = after - without
        largest = max(scores, key=lambda key: abs(scores[key][i]))
        blame.without(run, snapshots, [largest])
        [without] = blame.logprobs(run, [answer])
        is_right = stats.is_right(greedy(run, answer.prompt, example))
        args.rows.append({
            "sums": sums,
            "exact": exact,
            "largest": [scores[largest][i], after - without, is_right],
        })


def one(seed):
    """The rows of a run, which is made if it is not there."""
    folder = common.ROOT / f"runs/lab/credit-{seed}"
    if not (folder / "final").exists():
        command = [*common.SCRIPT, *FLAGS, "--seed", str(seed), "--name", folder.name, "--resume"]
        subprocess.run([*command, "--out", str(folder.parent)], check=True)
    args = Namespace(run=folder, first=0, last=None, rows=[])
    blame.start(args, credit)
    return args.rows


def means_of(rows, kind):
    """Of the groups of a kind, means over the questions: (first order, exact, share of all credit)
    """
    per_group = []
    exact = []
    shares = []
    for row in rows:
        sums = row["sums"]
        total = sum(map(sum, sums.values()))
        per_group.append(fmean(sums[kind]))
        exact.append(row["exact"].get(kind, 0.0))
        shares.append(sum(sums[kind]) / total)
    return fmean(per_group), fmean(exact), fmean(shares)


def report(runs):
    """Writes the page. runs: {seed: rows}."""
    lines = []
    per_group = {}
    for kind in KINDS:
        of_runs = [means_of(rows, kind) for rows in runs.values()]
        columns = list(zip(*of_runs))
        per_group[kind] = columns[0]
        lines.append([kind, *map(cell, columns)])
    head = ["groups", "nats per group, first order", "nats of one group of the step, exact",
            "share of all credit"]
    text = ["# credit", __doc__.partition("\n\n")[0], common.table(head, lines)]
    for one, other in itertools.pairwise(KINDS):
        gaps = [x - y for x, y in zip(per_group[one], per_group[other])]
        text.append(f"- {one} − {other}, nats per group: {cell(gaps)}")
    largest = []
    for rows in runs.values():
        largest += [row["largest"] for row in rows]
    wrong = sum(not right for *_, right in largest)
    moved = max(abs(exact) for _, exact, _ in largest)
    low, high = stats.wilson_interval(wrong, len(largest))
    text.append(f"- without the rollout with the largest score {wrong} of {len(largest)} answers "
                f"are wrong (95 % interval {low:.0%} to {high:.0%}); the log-prob moved by at most "
                f"{moved:.4f} nats")
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
        rows = one(int(sys.argv[1]))
        Path(f"runs/lab/credit-{sys.argv[1]}.json").write_text(json.dumps(rows))
    else:
        main()
