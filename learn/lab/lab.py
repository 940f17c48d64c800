"""The lab: published findings, repeated in small with seeds and judged by a rule fixed before.

    python -m learn.lab.staleness      its runs, table, picture and verdict: results/staleness.*
    python -m learn.lab.staleness --dry      its rule, seeds and commands, without a run
    python -m learn.lab.lab 2          (make lab) the findings of chapter 2 whose rule or commands
                                       have changed since their results, then all pages and tables
    python -m learn.lab.lab 3          (make lab-real) the same with a real language model
    python -m learn.lab.lab --fix      rules.json: a digest of each rule, to commit before the runs

README.md here says what a check is, and how verdict and number of seeds come from the checks. An
arm is a command, without --seed; "{seed}" in it becomes the seed. All arms get the flags of their
chapter and those of the finding. An interrupted command continues.
"""
import dataclasses
import hashlib
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Callable

import numpy as np
from scipy import integrate, optimize, stats
from statsmodels.stats.weightstats import DescrStatsW

from bench import common, seeds, stale
from bench.seeds import at, cell, late, number, share

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
RULES = "learn/lab/rules.json"
RUNS = Path("runs/lab")
BASE = {  # chapter -> flags of all its arms
    2: "--steps 30 --prompts 16 --samples 8 --kl_coef 0 --eval_every 30 --eval_size 256 --eval_n 4 "
       "--save_every 0",
    3: "--model models/smollm2 --steps 8 --eval_every 8 --eval_size 64 --eval_n 4"}
LEAST, MOST = {2: 5, 3: 3}, 10  # chapter -> the least number of seeds; the largest number
BY_HAND = "<!-- by hand -->"  # of a page: reading and exercises
EARLIER = ("The figures below are those of earlier runs, made before this rule. The standard "
           "deviations for the number of seeds are theirs.")


# what several findings measure and draw: see Finding.measures and panels
MEAN = {"mean@4": (at("eval/mean@4"), share)}
BEFORE = {"mean@4 before": (at("eval/mean@4", 0), share)}
GREEDY = {"greedy": (at("eval/accuracy"), share)}
FLAT = {"groups without a gradient": (late("group/zero_std"), share)}
TOKENS = {"tokens": (at("eval/length"), number)}
SAMPLES = {"reward of the samples": "reward/mean", "tokens of a sample": "completion/length"}


@dataclasses.dataclass
class Check:
    text: str  # the difference, in words
    weights: list  # (arm, title, weight): the difference of a seed is the sum of weight * value
    low: float = -math.inf  # the claim: the mean difference is above low and below high
    high: float = math.inf
    named: float = 0.1  # how far from low or high the claim says that it is
    sd: float = 0.03  # standard deviation over the seeds of earlier runs

    def region(self):
        ends = [f"above {self.low:.3g}"] * (self.low > -math.inf)
        return " and ".join(ends + [f"below {self.high:.3g}"] * (self.high < math.inf))


def gap(arm, other, title="mean@4", **more):
    """The check of arm - other."""
    return Check(f"{title}, {arm} − {other}", [(arm, title, 1), (other, title, -1)], **more)


def gain(arm, title="mean@4", **more):
    """The check of a title after the run minus before it: "x" and "x before"."""
    return Check(f"{title} of {arm}, after − before",
                 [(arm, title, 1), (arm, f"{title} before", -1)], **more)


@dataclasses.dataclass
class Finding:
    claim: str  # what the source says, with its own numbers
    source: str  # arXiv id, or an address
    checks: list[Check]  # the rule
    arms: dict[str, str]  # label -> command: a file and its flags, seen from the repository
    measures: dict[str, tuple[Callable, Callable]]  # title -> (value of a run's rows, format)
    panels: dict[str, str]  # title of a panel of the picture -> metric
    flags: str = ""  # of all arms, after BASE
    chapter: int = 2
    equal: bool = True  # whether all arms take the same number of samples
    seeds: tuple = ()  # (): as many as the power needs, from 3 on
    prepare: Callable = None  # makes what the arms need, before the runs

    def __post_init__(self):
        needed = [seeds_needed(check, self.alpha()) for check in self.checks]
        self.seeds = self.seeds or tuple(range(3, 3 + max(LEAST[self.chapter], *needed)))

    def alpha(self):
        """The error rate of each check."""
        return 0.05 / len(self.checks)


def power(check):
    """80 % for the whole check. A region with two ends needs 90 % for each."""
    return 0.9 if max(-check.low, check.high) < math.inf else 0.8


def t_power(effect, n, alpha):
    """The power of a two-sided t test of n differences whose mean is `effect` deviations from 0.

    It is integrated over the deviation of the sample, because scipy's noncentral t, which
    statsmodels uses, is NaN for large effects.
    """
    degrees = n - 1
    critical = stats.t.ppf(1 - alpha / 2, degrees)
    shift = effect * math.sqrt(n)

    s = np.linspace(0, 10, 8001)  # deviation of the sample / true deviation
    density = 2 * degrees * s * stats.chi2.pdf(degrees * s * s, degrees)
    upper = stats.norm.sf(critical * s - shift)  # the chance to find it, for each s
    lower = stats.norm.cdf(-critical * s - shift)
    return integrate.simpson(density * (upper + lower), x=s)


def seeds_needed(check, alpha):
    """The least number of seeds with that power, MOST at most."""
    for n in range(3, MOST):
        if t_power(check.named / check.sd, n, alpha) >= power(check):
            return n
    return MOST


def found_from(check, sd, n, alpha):
    """The least distance from the ends of the region that n seeds find with that power."""
    return sd * optimize.brentq(lambda effect: t_power(effect, n, alpha) - power(check), 0, 1000)


def judge(check, values, alpha):
    """(verdict, mean, low, high, what was found with 80 %) of {arm: {title: [of each seed]}}."""
    columns = []
    for arm, title, weight in check.weights:
        columns.append([weight * x for x in values[arm][title]])
    of_seeds = zip(*columns, strict=True)
    differences = DescrStatsW(list(map(sum, of_seeds)))
    low, high = differences.tconfint_mean(alpha)
    verdict = "cannot tell"
    if check.low < low and high < check.high:
        verdict = "agrees"
    elif high < check.low or check.high < low:
        verdict = "contradicts"
    deviation = differences.var_ddof(1) ** 0.5
    found = found_from(check, deviation, int(differences.nobs), alpha)
    return verdict, differences.mean, low, high, found


def words(finding):
    """{label: a file and its flags, as a list} of the arms."""
    found = {}
    for label, command in finding.arms.items():
        file, *own = shlex.split(command)
        found[label] = [file, *BASE[finding.chapter].split(), *finding.flags.split(), *own]
    return found


def commands(finding):
    """{label: command as a list} of the arms."""
    return {label: [sys.executable, "-m", common.module(file), *flags]
            for label, (file, *flags) in words(finding).items()}


def digest(finding):
    """Changes with the claim, its rule, what is run and what is measured."""
    checks = [list(dataclasses.astuple(check)) for check in finding.checks]
    what = [finding.claim, checks, words(finding), list(finding.measures), list(finding.seeds)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def fixed(name, result):
    """Whether rules.json had the digest of the rule at each commit of the runs."""
    return all(json.loads(stale.show(commit, RULES) or "{}").get(name) == result["digest"]
               for commit in result["commits"])


def commits_of(abouts):
    """The commits of runs. "-dirty" goes if now only pages and results differ from the commit: the
    findings that the same command ran before have written them. A copy of the repository, with a
    fault in it, has no commit of its own."""
    def named(commit):
        base = commit.removesuffix("-dirty")
        changed = subprocess.run(["git", "diff", "--quiet", base, "--", ".", ":!*.md",
                                  ":!learn/lab/results"], cwd=ROOT, capture_output=True).returncode
        return commit if changed else base

    return sorted(map(named, {about["commit"] for about in abouts} - {""}))  # git once per commit


def minutes(folder):
    """How long a run took after its start, which takes about half a minute more."""
    return ((folder / "metrics.jsonl").stat().st_mtime
            - (folder / "config.json").stat().st_mtime) / 60


def run(finding, name, out=RUNS, results=RESULTS):
    """Makes the runs of a finding and writes its results: numbers, picture and page. The bundled
    model runs on one core at a time, a real one on all; its weights, 2.9 GB a run, are deleted."""
    os.chdir(ROOT)  # the commands have paths and modules from there
    if finding.prepare:
        finding.prepare()
    tiny = finding.chapter == 2
    # an arm that begins with the weights of another one waits for it
    is_chain = any("{seed}" in command for command in finding.arms.values())
    jobs = 2 if tiny and not is_chain else 1
    folders = seeds.run_all(commands(finding), finding.seeds, out, jobs=jobs, keep_weights=tiny)
    rows = {label: list(map(common.read, of)) for label, of in folders.items()}
    values = {}
    for label, of in rows.items():
        measured = {title: list(map(value, of)) for title, (value, _) in finding.measures.items()}
        values[label] = measured
    everyone = sum(folders.values(), [])
    spent, abouts = sum(map(minutes, everyone)), [common.read_config(f) for f in everyone]
    commits = commits_of(abouts)
    about = common.describe([abouts[0] | {"commit": commit} for commit in commits])
    conditions = (f"{len(finding.seeds)} seeds per row, in brackets the 95 % t interval over them; "
                  f"{len(everyone)} runs of {spent / len(everyone):.1f} minutes"
                  f"{' on one core' if jobs > 1 else ''}; {about}")
    result = {"digest": digest(finding), "commits": commits, "values": values,
              "conditions": conditions}
    result["fixed"] = fixed(name, result)
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(result, indent=1))
    seeds.draw(rows, finding.panels, results / f"{name}.png")
    write_page(finding, name, results)


def stored(name, results=RESULTS):
    """The results of a finding, or None."""
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def current(finding, result):
    """Whether the results are those of this rule and these commands."""
    return bool(result) and result["digest"] == digest(finding)


def verdict(finding, result):
    if not result:
        return "not run"
    if not current(finding, result):
        return "not run since the rule changed"
    found = set()
    for check in finding.checks:
        found.add(judge(check, result["values"], finding.alpha())[0])
    word = "cannot tell"
    if "contradicts" in found:
        word = "contradicts"
    elif found == {"agrees"}:
        word = "agrees"
    return word + ("" if result["fixed"] else " (the rule was not fixed before the runs)")


def check_rows(finding, result):
    """A row per check: what the claim says, difference, distance found with 80 %, verdict."""
    rows = []
    for check in finding.checks:
        row = ["", found_from(check, check.sd, len(finding.seeds), finding.alpha()), "planned"]
        if current(finding, result):
            word, mean, low, high, found = judge(check, result["values"], finding.alpha())
            row = [f"{mean:+.3f} ({low:+.3f} to {high:+.3f})", found, word]
        rows.append([f"{check.text}: {check.region()}", row[0],
                     f"{row[1]:.3f} ({check.named:.3g})", row[2]])
    return rows


def write_page(finding, name, results=RESULTS):
    """The page of a finding, from its stored numbers. What stands below BY_HAND is kept."""
    path, result = results / f"{name}.md", stored(name, results)
    old = path.read_text() if path.exists() else f"{BY_HAND}\n"
    head = ["the claim says", f"difference ({1 - finding.alpha():.1%} interval)",
            "found with 80 % (asked)", "verdict"]
    arms = [f"- {label}: `{command}`" for label, command in finding.arms.items()]
    if flags := finding.flags.strip():
        arms.append(f"- all arms, after the flags of chapter {finding.chapter}: `{flags}`")
    page = [f"# {name}", f"Claim: {finding.claim} ({link(finding)})",
            common.table(head, check_rows(finding, result)),
            f"Verdict: **{verdict(finding, result)}**. {len(finding.seeds)} seeds.",
            "\n".join(arms)]
    if result:
        known = next(iter(result["values"].values()))
        titles = [title for title in finding.measures if title in known]
        rows = []
        for label, of in result["values"].items():
            cells = [cell(of[title], finding.measures[title][1], " to ") for title in titles]
            rows.append([label, *cells])
        conditions = common.without_versions(result["conditions"].partition("; ")[2])
        page += ["" if current(finding, result) else EARLIER,
                 common.table(["arm", *titles], rows),
                 f"![curves]({name}.png)",
                 f"In brackets: 95 % t intervals; {conditions}."]
    text = "\n\n".join(filter(None, page))
    path.write_text(f"{text}\n\n{BY_HAND}{old.partition(BY_HAND)[2]}")
    print(text)


def main(finding):
    """Of a finding's file: `if __name__ == "__main__": lab.main(FINDING)`."""
    if sys.argv[1:] == ["--dry"]:
        print(plan(finding))
    else:
        run(finding, Path(sys.argv[0]).stem)


def plan(finding):
    """The rule, the seeds and the commands of a finding, without a run."""
    lines = [f"{check.text}: {check.region()}" for check in finding.checks]
    lines.append(f"seeds {', '.join(map(str, finding.seeds))}")
    lines += [shlex.join(command) for command in commands(finding).values()]
    return "\n".join(lines)


def findings():
    """{name: Finding} of the files beside this one, in the order of chapters and names."""
    names = sorted(path.stem for path in HERE.glob("*.py"))
    modules = {name: importlib.import_module(f"learn.lab.{name}") for name in names}
    found = {name: m.FINDING for name, m in modules.items() if hasattr(m, "FINDING")}
    return dict(sorted(found.items(), key=lambda item: item[1].chapter))


def link(finding):
    address = finding.source
    return f"[{address}]({'' if '/' in address else 'https://arxiv.org/abs/'}{address})"


def in_short(claim):
    """The first sentence of a claim, without brackets. The page of the finding has all of it."""
    sentence = re.sub(r" \([^)]*\)", "", claim).split(". ")[0]
    return sentence.removesuffix(".")


def lab_table(chapter):
    """A row per finding. Its claim and its checks are on its page, which exists after its runs."""
    rows = []
    for name, finding in findings().items():
        if finding.chapter != chapter:
            continue
        result = stored(name)
        shown = verdict(finding, result)
        if result:
            page = (RESULTS / f"{name}.md").read_text()
            old = " (stale)" if stale.changed(page) else ""
            shown = f"[{shown}](results/{name}.md){old}"
        verdicts = Counter(row[-1] for row in check_rows(finding, result))
        counts = ", ".join(f"{count} {word}" for word, count in verdicts.items())
        rows.append([
            f"[{name}]({name}.py)",
            f"{in_short(finding.claim)} ({link(finding)})",
            counts,
            shown,
            f"{len(finding.seeds)} × {len(finding.arms)}",
        ])
    table = common.table(["finding", "claim", "checks", "verdict", "seeds × arms"], rows)
    return f"Flags of all arms: `{BASE[chapter]}`\n\n{table}"


def write_tables():
    path = HERE / "README.md"
    text = path.read_text()
    for chapter in BASE:
        mark = f"<!-- chapter {chapter} -->"
        before, _, after = text.split(mark)
        text = f"{before}{mark}\n{lab_table(chapter)}\n{mark}{after}"
    path.write_text(text)
    stale.main([])


if __name__ == "__main__":
    if sys.argv[1:] == ["--fix"]:
        rules = {name: digest(finding) for name, finding in findings().items()}
        (ROOT / RULES).write_text(json.dumps(rules, indent=1) + "\n")
    for name, finding in findings().items():
        if str(finding.chapter) in sys.argv[1:] and not current(finding, stored(name)):
            run(finding, name)
        elif stored(name):
            write_page(finding, name)
    write_tables()
