"""The lab: published findings, repeated in small with seeds and judged by a rule written before.

    python -m learn.lab.staleness      its runs, table, picture and verdict: results/staleness.*
    python -m learn.lab.lab            (make lab) the findings whose commands have changed since
                                       their results were made, then all pages and tables

A finding is a file with FINDING. An arm is a command, without --seed; all arms get the flags BASE
and those of the finding. The arms are compared seed by seed. The intervals are about the seeds: all
runs answer the same held-out questions. An interrupted command continues. One run per core goes on
at a time.
"""
import dataclasses
import hashlib
import importlib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Callable

from measure import common, seeds
from measure.seeds import at, cell, late, number, share

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
RUNS = Path("runs/lab")
BASE = ("--steps 30 --prompts 16 --samples 8 --kl_coef 0 --eval_every 30 --eval_size 256 "
        "--eval_n 4 --save_every 0")


# what several findings measure and draw: see Finding.measures and panels
MEAN = {"mean@4": (at("eval/mean@4"), share)}
BEFORE = {"mean@4 before": (at("eval/mean@4", 0), share)}
GREEDY = {"greedy": (at("eval/accuracy"), share)}
TOKENS = {"tokens": (at("eval/length"), number)}
FLAT = {"groups without a gradient": (late("group/zero_std"), share)}
SAMPLES = {"reward of the samples": "reward/mean", "tokens of a sample": "completion/length"}


@dataclasses.dataclass
class Finding:
    claim: str  # what the source says, with its own numbers
    source: str  # arXiv id
    rule: str  # when our runs agree with the claim, in words; judge is the same in code
    arms: dict[str, str]  # label -> command: a file and its flags, seen from the repository
    measures: dict[str, tuple[Callable, Callable]]  # title -> (value of a run's rows, format)
    judge: Callable  # {arm: {title: [value of each seed]}} -> whether the rule holds
    panels: dict[str, str]  # title of a panel of the picture -> metric
    flags: str = ""  # of all arms, after BASE
    seeds: tuple = (0, 1, 2)
    prepare: Callable = None  # makes what the arms need, before the runs
    reading: str = ""  # what the figures mean here, written after the runs
    exercises: tuple = ()


def gap(values, arm, other, title):
    """(mean, low, high): the 95 % t interval of arm - other, from the differences of each seed."""
    pairs = zip(values[arm][title], values[other][title], strict=True)
    return seeds.mean_interval([a - b for a, b in pairs])


def gain(values, arm, title):
    """The same of a title after the run minus before it: "x" and "x before"."""
    of = values[arm]
    return seeds.mean_interval(
        [a - b for a, b in zip(of[title], of[f"{title} before"], strict=True)])


def above(values, arm, other, title):
    """Whether arm is above other: the whole interval of their difference is above 0."""
    return gap(values, arm, other, title)[1] > 0


def near(values, arm, other, title, margin):
    """Whether the whole interval of the difference lies within +-margin."""
    _, low, high = gap(values, arm, other, title)
    return -margin < low and high < margin


def words(finding):
    """{label: a file and its flags, as a list} of the arms."""
    found = {}
    for label, command in finding.arms.items():
        file, *own = shlex.split(command)
        found[label] = [file, *BASE.split(), *finding.flags.split(), *own]
    return found


def commands(finding):
    """{label: command as a list} of the arms."""
    return {label: [sys.executable, "-m", common.module(file), *flags]
            for label, (file, *flags) in words(finding).items()}


def digest(finding):
    """Changes with what is run and with what is measured."""
    what = list(words(finding).values())
    what += [list(finding.arms), list(finding.measures), list(finding.seeds)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def minutes(folder):
    """How long a run took after its start, which takes about half a minute more."""
    return ((folder / "metrics.jsonl").stat().st_mtime
            - (folder / "config.json").stat().st_mtime) / 60


def run(finding, name, out=None, results=RESULTS):
    """Makes the runs of a finding and writes its results: numbers, picture and page."""
    os.chdir(ROOT)  # the commands have paths and modules from there
    if finding.prepare:
        finding.prepare()
    folders = seeds.run_all(commands(finding), finding.seeds, out or RUNS / name, jobs=2)
    rows = {label: [common.read(folder) for folder in of] for label, of in folders.items()}
    values = {label: {title: list(map(value, of))
                      for title, (value, _) in finding.measures.items()}
              for label, of in rows.items()}
    everyone = sum(folders.values(), [])
    spent = sum(map(minutes, everyone))
    conditions = (f"{len(finding.seeds)} seeds per row, in brackets the 95 % t interval over them; "
                  f"{len(everyone)} runs of {spent / len(everyone):.1f} minutes on one core; "
                  f"{common.describe([common.read_config(f) for f in everyone])}")
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(
        {"digest": digest(finding), "agrees": bool(finding.judge(values)), "minutes": spent,
         "values": values, "conditions": conditions}, indent=1))
    seeds.draw(rows, finding.panels, results / f"{name}.png")
    write_page(finding, name, results)


def write_page(finding, name, results=RESULTS):
    """The page of a finding, from its stored numbers."""
    result = stored(name, results)
    rows = []
    for label, of in result["values"].items():
        cells = [cell(of[title], form, " to ") for title, (_, form) in finding.measures.items()]
        rows.append([label, *cells])
    page = [f"# {name}", f"Claim: {finding.claim} ({link(finding)})",
            f"Rule: {finding.rule}",
            common.table(["arm", *finding.measures], rows), f"Verdict: **{verdict(result)}**.",
            finding.reading, f"![curves]({name}.png)",
            f"All arms: `{BASE} {finding.flags}`. {result['conditions']}."]
    if finding.exercises:
        page += ["## Exercises", *(f"{i}. {text}" for i, text in enumerate(finding.exercises, 1))]
    text = "\n\n".join(filter(None, page)) + "\n"
    (results / f"{name}.md").write_text(text)
    print(text)


def main(finding):
    """Of a finding's file: `if __name__ == "__main__": lab.main(FINDING)`."""
    run(finding, Path(sys.argv[0]).stem)


# ----------------------------------------------------------------------------------- the two tables


def findings():
    """{name: Finding} of the files beside this one, in the order of their names."""
    names = sorted(path.stem for path in HERE.glob("*.py"))
    modules = {name: importlib.import_module(f"learn.lab.{name}") for name in names}
    return {name: m.FINDING for name, m in modules.items() if hasattr(m, "FINDING")}


def stored(name, results=RESULTS):
    """The results of a finding, or None."""
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def verdict(result):
    return "agrees" if result["agrees"] else "not shown"


def link(finding):
    return f"[{finding.source}](https://arxiv.org/abs/{finding.source})"


def figures(finding, result):
    """The first measure of each arm, in one line."""
    title, (_, form) = next(iter(finding.measures.items()))
    means = ", ".join(f"{arm} {form(seeds.mean_interval(of[title])[0])}"
                      for arm, of in result["values"].items())
    return f"{title}: {means}"


def lab_table():
    rows = []
    for name, finding in findings().items():
        if result := stored(name):
            rows.append([f"[{name}]({name}.py)", finding.claim, link(finding), finding.rule,
                         figures(finding, result), f"[{verdict(result)}](results/{name}.md)",
                         f"{result['minutes']:.0f}"])
    head = ["finding", "claim", "source", "rule", "our figures", "verdict", "minutes of a core"]
    return common.table(head, rows)


def examples_table(text):
    """examples/README.md with the number of lines of each file, and the figures of each finding
    that a row links to."""
    lines, known = text.splitlines(keepends=True), findings()
    for i, line in enumerate(lines):
        cells = line.split("|")
        if file := re.match(r"\| \[`(\w+\.py)`\]", line):
            cells[4] = f" {len((ROOT / 'examples' / file[1]).read_text().splitlines())} "
        if finding := re.search(r"\[([^]]*)\]\(\.\./learn/lab/results/(\w+)\.md\)", line):
            if result := stored(finding[2]):
                shown = f"[{figures(known[finding[2]], result)}]"
                cells = [cell.replace(f"[{finding[1]}]", shown) for cell in cells]
        lines[i] = "|".join(cells)
    return "".join(lines)


def write_tables():
    path, mark = HERE / "README.md", "<!-- table -->"
    before, _, after = path.read_text().split(mark)
    path.write_text(f"{before}{mark}\n{lab_table()}\n{mark}{after}")
    path = ROOT / "examples/README.md"
    path.write_text(examples_table(path.read_text()))


if __name__ == "__main__":
    for name, finding in findings().items():
        result = stored(name)
        if not result or result["digest"] != digest(finding):
            run(finding, name)
        else:
            write_page(finding, name)
    write_tables()
