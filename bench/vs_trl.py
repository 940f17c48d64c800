"""Seconds a step, by stage: nano_rlvr beside TRL's GRPOTrainer on the same machine, model, prompts and sizes.

    python bench/vs_trl.py                                        models/tiny; writes bench/results/vs_trl.md and .json
    python bench/vs_trl.py --model Qwen2.5-Math-1.5B --data gsm8k.jsonl --max_tokens 1024      the same on a GPU
    python bench/vs_trl.py --random_model small 64 --prompts 16 --samples 8 --max_tokens 512 --micro 8 --out vs_trl_small
                                                  random weights; completions of 64 tokens on average, up to 512: a long tail, as real ones have

Flags that are not below are nano_rlvr's and reach all contenders, as do its defaults for the model. Each runs in its own process:

    ours         nano_rlvr.py's main()
    trl          TRL as it is, generating with transformers (on CUDA only when asked for: --contenders ours trl+vllm trl);
                 its option use_transformers_continuous_batching was tried on a CPU: four times the processor time, 11 GiB
    trl+vllm     TRL with vLLM in its own process ("colocate"); on CUDA as it is, with sleep mode like ours

Without CUDA, TRL's vLLM mode does not run as shipped: its first weight sync stops ('Parameter' object has no attribute
'weight_loader'), since vLLM repacks weights for the CPU when it loads them and TRL hands new ones to model.load_weights.
patch_for_cpu() gives TRL nano_rlvr's way of doing it and leaves the rest alone. That is in TRL's favour: a CPU user has no such TRL.

Alike for all: weights at the start, prompts and their order (token ids are compared), group size, lengths, temperature, reward
function (rewards.gsm8k_reward), fp32 on a CPU, on CUDA bf16 over fp32 weights, AdamW, KL to a reference, importance correction
between vLLM and trainer (TRL's needs a forward pass more; trl has none), one optimizer step on all completions of a step, KV cache
size, threads' waiting policy; no checkpoints, no evaluation, no report. The pages of 2 MB that nano_rlvr asks for are its own: with
them TRL is slower (9.3 s a step, 7.7 without). The learning rate is 1e-6, so that lengths stay alike. TRL's
micro-batch is the fastest of --micro: each is tried in trl+vllm (in trl without it). Runs of ours and of TRL take turns.

A step lasts from the end of the last one to its own end. rollout: prompts to decoded completions. reward: the reward functions (ours
runs them in processes that can be killed, TRL in its own). sync: weights into vLLM. update: all the rest of the step - advantages,
log-probs of reference and policy, loss, backward, AdamW, logging. Medians over all steps but the first of each run.
On a machine that is not quiet the processor time of the process is the steadier figure (without ours' reward processes). Memory is the peak
of the process: resident on a CPU (without ours' reward processes), allocated through PyTorch on CUDA.
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
STAGES = ("rollout", "reward", "update", "sync", "total")  # of which the last is their sum


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


# --------------------------------------------------------------------------------------------------- the contenders


def ours(argv, micro, folder):
    """-> (seconds of start-up, a row for each step)."""
    import nano_rlvr as nr
    marks, rows, train, write = Marks(), [], nr.train, nr.Log.write

    def timed_train(*args):
        marks.set()
        train(*args)

    def timed_write(log, step, metrics, *rollouts):
        write(log, step, metrics, *rollouts)
        marks.set()
        if "lr" in metrics:  # the last line has an evaluation only
            seconds = {stage: metrics[f"seconds/{stage}"] for stage in ("rollout", "reward", "sync")}
            rows.append(seconds | marks.last() | {"length": metrics["completion/length"], "mismatch": metrics["mismatch/mean_abs"]})

    nr.train, nr.Log.write = timed_train, timed_write
    nr.main([*argv, "--out", folder, "--name", "run", "--eval_every", "1000000000", "--eval_size", "1"])
    return marks.start(), rows


def patch_for_cpu(cfg):
    """All that is changed in TRL: two arguments of vLLM's LLM (it would take bf16 from a fp32 model, and compile for a minute to be no
    faster), and the hand-over of weights."""
    from trl.generation import vllm_generation

    def sync_weights(self):
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(self.model.state_dict().items())})
        self.llm.reset_prefix_cache()

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=cfg.dtype, enforce_eager=True)
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def trl(argv, micro, folder, vllm=False):
    """-> (seconds of start-up, a row for each step)."""
    import nano_rlvr as nr  # for its reading of flags and its prompts
    from rewards import gsm8k_reward
    cfg = nr.parse_config([*argv, "--out", folder])
    tokenizer, train_set, _ = nr.prepare(cfg)
    cfg = nr.plan(cfg)

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    examples = [e for step in range(cfg.steps) for e in nr.data.batch_at(train_set, step, cfg.prompts, cfg.seed)]
    prompts = [tokenizer.decode(e["prompt_ids"]) for e in examples]
    assert tokenizer(text=prompts)["input_ids"] == [e["prompt_ids"] for e in examples], "TRL would read other prompt tokens than ours"
    options = dict(
        max_steps=cfg.steps, learning_rate=cfg.lr, lr_scheduler_type="constant", adam_beta2=cfg.beta2, weight_decay=cfg.weight_decay,
        max_grad_norm=cfg.max_grad_norm, per_device_train_batch_size=micro, gradient_accumulation_steps=cfg.prompts * cfg.samples // micro,
        num_generations=cfg.samples, max_completion_length=cfg.max_tokens, temperature=cfg.temperature, num_iterations=1,
        loss_type="grpo", scale_rewards="group", beta=cfg.kl_coef, use_bias_correction_kl=False, epsilon=cfg.clip_low,
        epsilon_high=cfg.clip_high, gradient_checkpointing=cfg.checkpointing == "on", bf16=cfg.dtype == "bfloat16", use_cpu=not CUDA,
        model_init_kwargs={"dtype": "float32"}, shuffle_dataset=False, seed=cfg.seed, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True)
    if vllm:
        options |= dict(
            use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=CUDA, vllm_gpu_memory_utilization=cfg.vllm_memory or 0.5,
            vllm_max_model_length=cfg.max_prompt + cfg.max_tokens, vllm_importance_sampling_correction=cfg.correction != "none",
            vllm_importance_sampling_mode=cfg.correction, vllm_importance_sampling_clip_max=cfg.correction_cap)
        if not CUDA:
            patch_for_cpu(cfg)

    marks, rows, seconds, lengths = Marks(), [], Counter(), []

    class Steps(TrainerCallback):
        def on_train_begin(self, *_, **__):
            marks.set()

        def on_step_end(self, *_, **__):
            marks.set()
            gaps = trainer._metrics["train"]["sampling/sampling_logp_difference/mean"] or [None]
            rows.append(marks.last() | {"rollout": seconds["rollout"] - seconds["sync"], "reward": seconds["reward"], "sync": seconds["sync"],
                                        "length": lengths[-1], "mismatch": gaps[-1]})
            seconds.clear()

    trainer = GRPOTrainer(
        model=cfg.model, reward_funcs=gsm8k_reward, args=GRPOConfig(folder, **options), processing_class=tokenizer, callbacks=[Steps()],
        train_dataset=Dataset.from_list([{"prompt": p, "answer": e["answer"]} for p, e in zip(prompts, examples)]))

    if not vllm:  # the model's own list of tokens that end a completion, as vLLM has it; TRL's default is the tokenizer's one
        trainer.generation_config.eos_token_id = trainer.accelerator.unwrap_model(trainer.model).generation_config.eos_token_id

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

    clock(trainer, "_generate", "rollout")  # contains the sync
    clock(trainer, "_calculate_rewards", "reward")
    if vllm:
        clock(trainer.vllm_generation, "sync_weights", "sync")
    trainer.train()
    bound = cfg.mismatch_bound
    assert CUDA or all((r["mismatch"] or 0) <= bound for r in rows), f"TRL's vLLM and trainer disagree: {[r['mismatch'] for r in rows]}"
    return marks.start(), rows


CONTENDERS = {"ours": ours, "trl": trl, "trl+vllm": functools.partial(trl, vllm=True)}


def child(a, argv):
    with tempfile.TemporaryDirectory() as folder:
        start, rows = CONTENDERS[a.contender]([*argv, "--steps", str(a.steps)], a.micro[0], folder)
    for r in rows:
        r["update"] = r["total"] - r["rollout"] - r["reward"] - r["sync"]
    peak = torch.cuda.max_memory_allocated() if CUDA else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(a.result).write_text(json.dumps({"contender": a.contender, "micro": a.micro[0], "start": start, "peak": peak, "steps": rows}))


# -------------------------------------------------------------------------------------------------------- the bench


def summarise(runs, warmup):
    """Runs of one contender -> medians over their steps, without the first ones of each run."""
    rows = [row for run in runs for row in run["steps"][warmup:]]
    return {stage: median(r[stage] for r in rows) for stage in (*STAGES, "cpu")} | {
        "length": fmean(r["length"] for r in rows), "mismatch": max((r["mismatch"] or 0.0 for r in rows)), "n": len(rows),
        "slowest": max(r["total"] for r in rows), "fastest": min(r["total"] for r in rows),
        "start": median(run["start"] for run in runs), "peak": max(run["peak"] for run in runs)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["ours", "trl+vllm"] + ["trl"] * (not CUDA))
    parser.add_argument("--steps", type=int, default=5, help="steps a run")
    parser.add_argument("--slow_steps", type=int, default=3, help="steps a run of trl on a CPU")
    parser.add_argument("--warmup", type=int, default=1, help="first steps of a run that do not count")
    parser.add_argument("--micro", type=int, nargs="+", default=[64, 32, 16, 8], help="TRL's per_device_train_batch_size: the fastest counts")
    parser.add_argument("--random_model", nargs=2, metavar=("SHAPE", "MEAN"), help="of bench/random_model.py, with completions of this mean length")
    parser.add_argument("--out", default="vs_trl", help="name of the two files in bench/results")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)  # these two make it one run, in this process
    parser.add_argument("--result", help=argparse.SUPPRESS)
    a, argv = parser.parse_known_args()
    if a.contender:
        return child(a, argv)

    import nano_rlvr as nr
    from bench import common
    from tools.preflight import find_model
    from tools.runlog import provenance
    began, load, work = time.time(), os.getloadavg(), tempfile.TemporaryDirectory()
    if a.random_model:
        shape, mean = a.random_model
        random_model.make(work.name, shape, int(mean))
        argv = ["--model", work.name, "--data", work.name + "/questions.jsonl", "--task", "gsm8k", "--template", "none"] + argv
    argv = ["--lr", "1e-6", "--lr_end", "1", *argv]
    cfg = nr.parse_config(argv)
    micros = [m for m in a.micro if cfg.prompts * cfg.samples % m == 0] or [cfg.samples]
    runs, failed = [], []

    def run(contender, micro, steps=a.steps):
        result = Path(work.name) / "result.json"
        print(f"--- {contender}" + (f", micro-batches of {micro}" if contender != "ours" else ""), flush=True)
        done = subprocess.run([sys.executable, __file__, "--contender", contender, "--micro", str(micro), "--steps", str(steps),
                               "--result", result, *argv], env=os.environ | {"THP_MEM_ALLOC_ENABLE": "1" if contender == "ours" else "0"})
        if done.returncode:  # a micro-batch too large for the memory, say: the others count
            failed.append(f"{contender} {micro}")
        else:
            runs.append(json.loads(result.read_text()))
            print(json.dumps(summarise(runs[-1:], a.warmup)), flush=True)

    def of(contender, micro=None):
        return [r for r in runs if r["contender"] == contender and micro in (None, r["micro"])]

    def fastest(contender):
        return min((r["micro"] for r in of(contender)), key=lambda m: summarise(of(contender, m), a.warmup)["total"])

    for contender in [c for c in ("trl+vllm", "trl") if c in a.contenders] or [None]:
        tried = [fastest("trl+vllm")] if contender == "trl" and of("trl+vllm") else micros
        for micro in tried:
            if "ours" in a.contenders:
                run("ours", 0)
            if contender:
                run(contender, micro, a.slow_steps if contender == "trl" and not CUDA else a.steps)

    table = {c: summarise(of(c) if c == "ours" else of(c, fastest(c)), a.warmup)
             for c in ("ours", "trl+vllm", "trl") if of(c)}
    base = next(iter(table.values()))["total"]
    names = {"trl+vllm": "TRL, vLLM colocate" + (" (patched for the CPU)" if not CUDA else ""), "trl": "TRL, transformers generation",
             "ours": "nano_rlvr"}
    lines = ["| seconds a step | rollout | reward | update | sync | **total** | times ours | processor time | tokens a second | mean length | steps | peak memory | start-up |",
             "|---|" + "---|" * 12]
    for c, s in table.items():
        lines.append(f"| {names[c]} | " + " | ".join(f"{s[k]:.2f}" for k in STAGES[:-1]) + f" | **{s['total']:.2f}** | {s['total'] / base:.1f} | {s['cpu']:.2f} "
                     f"| {cfg.prompts * cfg.samples * s['length'] / s['total']:.0f} | {s['length']:.1f} | {s['n']} | {s['peak'] / 2**30:.2f} GiB "
                     f"| {s['start']:.0f} s |")
    tried = [f"{c} {r['micro']}: {summarise([r], a.warmup)['total']:.2f} s" for c in ("trl+vllm", "trl") for r in of(c)]
    tried += [f"{name}: failed" for name in failed]
    about = provenance("trl", "accelerate")
    conditions = (
        f"{find_model(cfg.model) if not a.random_model else 'random weights, %s, ending after %s tokens on average' % tuple(a.random_model)}, {cfg.task}, {cfg.prompts} prompts x "
        f"{cfg.samples} samples of at most {cfg.max_tokens} tokens, {cfg.dtype}, lr {cfg.lr:g}, kl_coef {cfg.kl_coef:g}; median over the steps "
        f"after the first of each run; TRL's micro-batches: {', '.join(tried) or '-'}; "
        f"mean |log-prob difference| of vLLM and trainer at most {max(s['mismatch'] for s in table.values()):.1e}; commit {about['commit']}, {about['device']}, "
        f"load average {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after, "
        + ", ".join(f"{name} {v}" for name, v in about["versions"].items()) + f"; `python {' '.join(['bench/vs_trl.py', *sys.argv[1:]])}`, "
        f"{time.strftime('%Y-%m-%d')}, {(time.time() - began) / 60:.1f} minutes in all").replace(str(ROOT) + "/", "")
    common.write(a.out, "\n".join(lines) + f"\n\n{conditions}.", {"conditions": conditions, "summary": table, "runs": runs})


if __name__ == "__main__":
    main()
