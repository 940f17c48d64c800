"""Does RLVR vary more over the seeds than SFT and DPO? From the lab's stored results, no runs.

    python -m learn.lab.variance      writes results/variance.md

The claim of a course text: RLVR depends more on the seed than SFT and DPO. In each pair both arms
are of one finding: same base, same questions, same seeds. Brown-Forsythe's test of equal variances
(Levene's with medians) looks at one pair; with 5 seeds it finds only large ratios.
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


def row(finding, arm, other):
    """A line of the table: means, standard deviations over the seeds, their ratio and p."""
    values = json.loads((RESULTS / f"{finding}.json").read_text())["values"]
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
    (RESULTS / "variance.md").write_text(f"# variance\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
