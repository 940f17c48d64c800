"""Does RLVR vary more over the seeds than SFT and DPO? From the lab's stored results, no runs.

    python -m learn.lab.variance      writes results/variance.md

The claim of a course text: RLVR depends more on the seed than SFT and DPO. In each pair both arms
are of one finding: same base, same questions, same seeds. Brown-Forsythe's test of equal variances
(Levene's with medians) looks at one pair; with 5 seeds it finds only large ratios.

The same text: what RLVR gains cannot be predicted, sometimes much, sometimes next to nothing. The
second table has the gain of single seeds: the least, the mean and the most.
"""
import json
from statistics import fmean, stdev

from scipy.stats import levene

from bench import common
from bench.seeds import share

RESULTS = common.ROOT / "learn/lab/results"
PAIRS = [  # (finding, arm of RLVR, the arm beside it)
    ("dpo_pairs", "GRPO", "DPO online"),
    ("dpo_pairs", "GRPO", "DPO offline"),
    ("distillation", "RL", "SFT on the teacher's right answers"),
    ("distillation", "RL", "on-policy distillation")]
GAINS = [  # (finding, arm of RLVR): easy to learn, hard to learn, a real model, a reward for form
    ("label_noise", "GRPO"),
    ("methods_rare", "six terms, outcome"),
    ("real_controls", "right answers"),
    ("real_controls", "form")]


def values_of(finding):
    """{arm: {title: its value for each seed}} of a finding."""
    return json.loads((RESULTS / f"{finding}.json").read_text())["values"]


def gain_row(finding, arm):
    """A line of the second table, in points of mean@4."""
    values = values_of(finding)[arm]
    gains = [100 * (after - before)
             for after, before in zip(values["mean@4"], values["mean@4 before"])]
    cells = [f"{gain:+.1f}" for gain in (min(gains), fmean(gains), max(gains))]
    return [finding, arm, len(gains), *cells]


def row(finding, arm, other):
    """A line of the table: means, standard deviations over the seeds, their ratio and p."""
    values = values_of(finding)
    ours = values[arm]["mean@4"]
    theirs = values[other]["mean@4"]
    ratio = stdev(ours) / stdev(theirs)
    p = levene(ours, theirs).pvalue
    cells = [f"{share(fmean(x))} ± {100 * stdev(x):.1f}" for x in (ours, theirs)]
    return [finding, len(ours), arm, cells[0], other, cells[1], f"{ratio:.2f}", f"{p:.2f}"]


def main():
    head = ["finding", "seeds", "RLVR", "mean@4 ± sd", "beside it", "mean@4 ± sd", "ratio of sd",
            "p (equal)"]
    text = common.table(head, [row(*pair) for pair in PAIRS])
    head = ["finding", "arm", "seeds", "least gain", "mean", "most"]
    text += "\n\n" + common.table(head, [gain_row(*arm) for arm in GAINS])
    (RESULTS / "variance.md").write_text(f"# variance\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
