"""Seconds per step, by stage: nano_rlvr and TRL's GRPOTrainer on the same machine, model, prompts and sizes.

    python bench/vs_trl.py                    models/tiny; writes bench/results/vs_trl.md and .json
    python bench/vs_trl.py --model Qwen2.5-Math-1.5B --data gsm8k.jsonl --max_tokens 1024      on a GPU
    python bench/vs_trl.py --random_model small 64 --prompts 16 --samples 8 --max_tokens 512 --micro 8 \\
        --out vs_trl_small
                                              random weights; 64 tokens per completion on average, up to 512

Flags that are not listed below are nano_rlvr's and are passed to all contenders, as are its defaults for the
model. Each contender runs in its own process:

    ours         nano_rlvr.py's main()
    trl          TRL as shipped, generating with transformers (on CUDA only on request, with --contenders);
                 its option use_transformers_continuous_batching took 11 GiB and 4 times the processor time
                 on a CPU
    trl+vllm     TRL with vLLM in the same process ("colocate"); on CUDA as shipped, with sleep mode like ours

Without CUDA, TRL's vLLM mode does not run as shipped. Its first weight sync fails ('Parameter' object has no
attribute 'weight_loader'): vLLM repacks weights for the CPU when it loads them, and TRL passes new ones to
model.load_weights. patch_for_cpu() gives TRL nano_rlvr's weight sync and changes nothing else. This favours
TRL: users have no such patch.

The same for all: initial weights, prompts and their order (token ids are compared), group size, lengths,
temperature, reward function (rewards.gsm8k_reward), fp32 on a CPU, bf16 with fp32 weights on CUDA, AdamW, KL
to a reference, importance correction between vLLM and the trainer (TRL's needs one more forward pass; trl has
none), one optimizer step on all completions of a step, KV cache size, threads' waiting policy; no
checkpoints, evaluation or reports. Only nano_rlvr uses pages of 2 MB: with them TRL is slower (9.3 s per
step, 7.7 without). The learning rate is 1e-6, so that lengths stay equal. TRL runs with the fastest of the
--micro batches: each is tried with trl+vllm (with trl if that does not run). Runs of ours and of TRL
alternate.

A step lasts from the end of the previous one to its own end. rollout: prompts to decoded completions. reward:
the reward functions (ours runs them in worker processes, TRL in its own). sync: weights into vLLM. update:
the rest of the step: advantages, log-probs of reference and policy, loss, backward, AdamW, logging. Figures
are medians over all steps but the first of each run. On a busy machine the processor time is the more stable
figure; it does not include ours' reward workers. Memory is the peak of the process: resident on a CPU
(without ours' reward workers); on CUDA all that is in use on the device, read 50 times per second.
"""
import time

START = time.perf_counter()

import argparse  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
from collections import Counter  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import fmean, median  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; these three are nano_rlvr's, for everyone
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

from bench import random_model  # noqa: E402

CUDA = torch.cuda.is_available()
COLUMNS = ("seconds per step", "rollout", "reward", "update", "sync", "**total**", "times ours",
           "processor time", "tokens per second", "mean length", "steps", "peak memory", "start-up")
STAGES = ("rollout", "reward", "update", "sync", "total")  # the last one is the sum of the others


def now():
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class Marks(list):
    """Where a run's steps begin and end: (wall clock, processor time of this process)."""

    def set(self):
        self.append((now(), time.process_time()))

    def last(self):
        (wall, cpu), (wall_end, cpu_end) = self[-2:]
        return {"total": wall_end - wall, "cpu": cpu_end - cpu}

    def start(self):
        return self[0][0] - START


# --------------------------------------------------------------------------------------------- the contenders


def ours(argv, micro, folder):
    """Runs nano_rlvr: (seconds of start-up, one row per step)."""
    import nano_rlvr as nr
    from runtime.log import Log
    marks, rows, train, write = Marks(), [], nr.train, Log.write

    def timed_train(*args, **kwargs):
        marks.set()
        train(*args, **kwargs)

    def timed_write(self, step, metrics, *args, **kwargs):
        write(self, step, metrics, *args, **kwargs)
        marks.set()
        if "lr" in metrics:  # the last line has only an evaluation
            seconds = {stage: metrics[f"seconds/{stage}"] for stage in ("rollout", "reward", "sync")}
            rows.append(seconds | marks.last() | {
                "length": metrics["completion/length"], "mismatch": metrics["mismatch/mean_abs"]})

    nr.train, Log.write = timed_train, timed_write
    nr.main([*argv, "--out", folder, "--name", "run", "--eval_every", "1000000000", "--eval_size", "1",
             "--save_every", "0"])
    return marks.start(), rows


def patch_for_cpu(cfg):
    """All changes to TRL: the weight sync, and two arguments of vLLM's LLM (it would choose bf16 for a fp32
    model, and compile for a minute without being faster)."""
    from trl.generation import vllm_generation

    def sync_weights(self):
        weights = iter(self.model.state_dict().items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=cfg.dtype, enforce_eager=True)
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def trl(argv, micro, folder, vllm=False):
    """Runs TRL: (seconds of start-up, one row per step)."""
    import data
    import nano_rlvr as nr  # for its flags
    from rewards import gsm8k_reward
    from runtime import memory, preflight
    cfg = nr.parse_config([*argv, "--out", folder])
    tokenizer = preflight.load_tokenizer(cfg)
    train_set, _ = data.load_splits(cfg, tokenizer)
    cfg = memory.plan(cfg)

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    examples = [e for step in range(cfg.steps) for e in data.batch_at(train_set, step, cfg.prompts, cfg.seed)]
    prompts = [tokenizer.decode(e["prompt_ids"]) for e in examples]
    same = tokenizer(text=prompts)["input_ids"] == [e["prompt_ids"] for e in examples]
    assert same, "TRL would tokenize the prompts differently"
    options = dict(
        max_steps=cfg.steps, learning_rate=cfg.lr, lr_scheduler_type="constant", adam_beta2=cfg.beta2,
        weight_decay=cfg.weight_decay, max_grad_norm=cfg.max_grad_norm, per_device_train_batch_size=micro,
        gradient_accumulation_steps=cfg.prompts * cfg.samples // micro, num_generations=cfg.samples,
        max_completion_length=cfg.max_tokens, temperature=cfg.temperature, num_iterations=1, loss_type="grpo",
        scale_rewards="group", beta=cfg.kl_coef, use_bias_correction_kl=False, epsilon=cfg.clip_low,
        epsilon_high=cfg.clip_high, gradient_checkpointing=cfg.checkpointing == "on",
        bf16=cfg.dtype == "bfloat16", use_cpu=not CUDA, model_init_kwargs={"dtype": "float32"},
        shuffle_dataset=False, seed=cfg.seed, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True)
    if vllm:
        options |= dict(
            use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=CUDA,
            vllm_gpu_memory_utilization=cfg.vllm_memory or 0.5,
            vllm_max_model_length=cfg.max_prompt + cfg.max_tokens,
            vllm_importance_sampling_correction=cfg.correction != "none",
            vllm_importance_sampling_mode=cfg.correction,
            vllm_importance_sampling_clip_max=cfg.correction_cap)
        if not CUDA:
            patch_for_cpu(cfg)

    marks, rows, seconds, lengths = Marks(), [], Counter(), []

    class Steps(TrainerCallback):
        def on_train_begin(self, *_, **__):
            marks.set()

        def on_step_end(self, *_, **__):
            marks.set()
            mismatches = trainer._metrics["train"]["sampling/sampling_logp_difference/mean"] or [None]
            rows.append(marks.last() | {
                "rollout": seconds["rollout"] - seconds["sync"], "reward": seconds["reward"],
                "sync": seconds["sync"], "length": lengths[-1], "mismatch": mismatches[-1]})
            seconds.clear()

    dataset = Dataset.from_list([{"prompt": p, "answer": e["answer"]} for p, e in zip(prompts, examples)])
    trainer = GRPOTrainer(
        model=cfg.model, reward_funcs=gsm8k_reward, args=GRPOConfig(folder, **options),
        processing_class=tokenizer, callbacks=[Steps()], train_dataset=dataset)

    if not vllm:  # the model's stop tokens, as in vLLM; TRL's default is the tokenizer's single one
        model = trainer.accelerator.unwrap_model(trainer.model)
        trainer.generation_config.eos_token_id = model.generation_config.eos_token_id

    def clock(owner, name, stage):
        method = getattr(owner, name)

        def clocked(*args, **kwargs):
            start = now()
            result = method(*args, **kwargs)
            seconds[stage] += now() - start
            if stage == "rollout":
                lengths.append(fmean(map(len, result[1])))
            return result
        setattr(owner, name, clocked)

    clock(trainer, "_generate", "rollout")  # includes the sync
    clock(trainer, "_calculate_rewards", "reward")
    if vllm:
        clock(trainer.vllm_generation, "sync_weights", "sync")
    trainer.train()
    mismatches = [row["mismatch"] for row in rows]
    agree = all((mismatch or 0) <= cfg.mismatch_bound for mismatch in mismatches)
    assert CUDA or agree, f"TRL's vLLM and trainer disagree: {mismatches}"
    return marks.start(), rows


CONTENDERS = {"ours": ours, "trl": trl, "trl+vllm": functools.partial(trl, vllm=True)}


class DevicePeak(threading.Thread):
    """The most bytes in use on the GPU, by whatever allocator, read from the driver 50 times per second.

    torch.cuda.max_memory_allocated() counts the pool of a sleeping vLLM as allocated (vLLM issue 17117).
    """

    def __init__(self):
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self):
        while True:
            free, total = torch.cuda.mem_get_info()
            self.bytes = max(self.bytes, total - free)
            time.sleep(0.02)


def child(a, argv):
    """Runs one contender in this process and writes its result to a file."""
    device_peak = DevicePeak()
    if CUDA:
        device_peak.start()
    with tempfile.TemporaryDirectory() as folder:
        start, rows = CONTENDERS[a.contender]([*argv, "--steps", str(a.steps)], a.micro[0], folder)
    for row in rows:
        row["update"] = row["total"] - row["rollout"] - row["reward"] - row["sync"]
    peak = device_peak.bytes if CUDA else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"contender": a.contender, "micro": a.micro[0], "start": start, "peak": peak, "steps": rows}
    Path(a.result).write_text(json.dumps(result))


# -------------------------------------------------------------------------------------------------- the bench


def summarise(runs, warmup):
    """Medians over the steps of one contender's runs, without the first `warmup` steps of each run."""
    rows = [row for run in runs for row in run["steps"][warmup:]]
    return {stage: median(r[stage] for r in rows) for stage in (*STAGES, "cpu")} | {
        "length": fmean(r["length"] for r in rows),
        "mismatch": max(r["mismatch"] or 0.0 for r in rows), "n": len(rows),
        "slowest": max(r["total"] for r in rows), "fastest": min(r["total"] for r in rows),
        "start": median(run["start"] for run in runs), "peak": max(run["peak"] for run in runs)}


def main():
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=CONTENDERS, default=["ours", "trl+vllm"] + ["trl"] * (not CUDA))
    add("--steps", type=int, default=5, help="steps per run")
    add("--slow_steps", type=int, default=3, help="steps per run of trl on a CPU")
    add("--warmup", type=int, default=1, help="first steps of a run that do not count")
    add("--micro", type=int, nargs="+", default=[64, 32, 16, 8],
        help="per_device_train_batch_size values to try for TRL: the fastest counts")
    add("--random_model", nargs=2, metavar=("SHAPE", "MEAN"),
        help="a shape of bench/random_model.py, with completions of this mean length")
    add("--out", default="vs_trl", help="name of the two files in bench/results")
    add("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)  # with --result: one run, in this process
    add("--result", help=argparse.SUPPRESS)
    a, argv = parser.parse_known_args()
    if a.contender:
        return child(a, argv)

    import nano_rlvr as nr
    from bench import common
    from runtime.log import provenance
    from runtime.preflight import find_model
    began, load, work = time.time(), os.getloadavg(), tempfile.TemporaryDirectory()
    if a.random_model:
        shape, mean = a.random_model
        random_model.make(work.name, shape, int(mean))
        questions = work.name + "/questions.jsonl"
        argv = ["--model", work.name, "--data", questions, "--task", "gsm8k", "--template", "none", *argv]
    argv = ["--lr", "1e-6", "--lr_end", "1", *argv]
    cfg = nr.parse_config(argv)
    micros = [m for m in a.micro if cfg.prompts * cfg.samples % m == 0] or [cfg.samples]
    runs, failed = [], []

    def run(contender, micro, steps=a.steps):
        result = Path(work.name) / "result.json"
        print(f"--- {contender}" + (f", micro-batches of {micro}" if contender != "ours" else ""), flush=True)
        command = [sys.executable, __file__, "--contender", contender, "--micro", str(micro),
                   "--steps", str(steps), "--result", result, *argv]
        large_pages = {"THP_MEM_ALLOC_ENABLE": "1" if contender == "ours" else "0"}
        done = subprocess.run(command, env=os.environ | large_pages)
        if done.returncode:  # for example a micro-batch too large for the memory: the others count
            failed.append(f"{contender} {micro}")
        else:
            runs.append(json.loads(result.read_text()))
            print(json.dumps(summarise(runs[-1:], a.warmup)), flush=True)

    def of(contender, micro=None):
        return [r for r in runs if r["contender"] == contender and micro in (None, r["micro"])]

    def fastest(contender):
        def seconds(micro):
            return summarise(of(contender, micro), a.warmup)["total"]
        return min((r["micro"] for r in of(contender)), key=seconds)

    for contender in [c for c in ("trl+vllm", "trl") if c in a.contenders] or [None]:
        tried = [fastest("trl+vllm")] if contender == "trl" and of("trl+vllm") else micros
        for micro in tried:
            if "ours" in a.contenders:
                run("ours", 0)
            if contender:
                run(contender, micro, a.slow_steps if contender == "trl" and not CUDA else a.steps)

    table = {c: summarise(of(c, fastest(c)), a.warmup) for c in ("ours", "trl+vllm", "trl") if of(c)}
    base = next(iter(table.values()))["total"]
    names = {"trl+vllm": "TRL, vLLM colocate" + (" (patched for the CPU)" if not CUDA else ""),
             "trl": "TRL, transformers generation", "ours": "nano_rlvr"}
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for c, s in table.items():
        tokens_per_second = cfg.prompts * cfg.samples * s["length"] / s["total"]
        cells = [names[c], *(f"{s[stage]:.2f}" for stage in STAGES[:-1]), f"**{s['total']:.2f}**",
                 f"{s['total'] / base:.1f}", f"{s['cpu']:.2f}", f"{tokens_per_second:.0f}",
                 f"{s['length']:.1f}", str(s["n"]), f"{s['peak'] / 2**30:.2f} GiB", f"{s['start']:.0f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    tried = [f"{c} {r['micro']}: {summarise([r], a.warmup)['total']:.2f} s"
             for c in ("trl+vllm", "trl") for r in of(c)]
    tried += [f"{name}: failed" for name in failed]
    about = provenance("trl", "accelerate")
    if a.random_model:
        model = f"random weights, {shape}, ending after {mean} tokens on average"
    else:
        model = find_model(cfg.model)
    conditions = "; ".join([
        f"{model}, {cfg.task}, {cfg.prompts} prompts x {cfg.samples} samples "
        f"of at most {cfg.max_tokens} tokens, {cfg.dtype}, lr {cfg.lr:g}, kl_coef {cfg.kl_coef:g}",
        "median over the steps after the first of each run",
        f"TRL's micro-batches: {', '.join(tried) or '-'}",
        "mean |log-prob difference| of vLLM and trainer at most "
        f"{max(s['mismatch'] for s in table.values()):.1e}",
        f"commit {about['commit']}, {about['device']}, "
        f"load average {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after, "
        + ", ".join(f"{name} {v}" for name, v in about["versions"].items()),
        f"`python {' '.join(['bench/vs_trl.py', *sys.argv[1:]])}`, {time.strftime('%Y-%m-%d')}, "
        f"{(time.time() - began) / 60:.1f} minutes in all"]).replace(f"{ROOT}/", "")
    numbers = {"conditions": conditions, "summary": table, "runs": runs}
    common.write(a.out, "\n".join(lines) + f"\n\n{conditions}.", numbers)


if __name__ == "__main__":
    main()
