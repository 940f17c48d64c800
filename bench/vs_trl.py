"""Seconds per step, by stage: nano_rlvr and TRL's GRPOTrainer on the same machine and prompts.

    python -m bench.vs_trl --micro 64         models/tiny; writes bench/results/vs_trl.md and .json
    python -m bench.vs_trl --model models/smollm2 --steps 6 --micro 16 --out vs_trl_smollm2
    python -m bench.vs_trl --random_model small 64 --prompts 8 --samples 8 --max_tokens 512 \\
        --micro 8 --steps 3 --out vs_trl_long
                                              random weights; 64 tokens per completion on average

Flags that are not listed below are nano_rlvr's; all contenders get them. Each has its own process:

    ours         nano_rlvr.py's main()
    trl+vllm     TRL with vLLM in the same process ("colocate"); on CUDA as shipped, with sleep mode
    trl          TRL as shipped, generating with transformers; not on CUDA

Without CUDA, TRL's first weight sync into vLLM fails, because vLLM repacks weights for the CPU.
patch_for_cpu() gives TRL nano_rlvr's weight sync. This favours TRL: users have no such patch.

The same for all: weights, prompts (token ids are compared), group size, lengths, temperature,
the task's first reward, fp32 on a CPU, bf16 with fp32 weights on CUDA, AdamW, KL to a reference,
importance correction between vLLM and the trainer (not in trl), one optimizer step per step, KV
cache size; no checkpoints, evaluation or reports. Only nano_rlvr uses pages of 2 MB: with them TRL
is slower. The learning rate is 1e-6, so that lengths stay equal.

rollout: prompts to decoded completions. reward: ours runs it in worker processes, TRL in its own.
sync: weights into vLLM. update: the rest of the step, also logging. Figures are medians over all
steps but the first.
"""
import functools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from statistics import fmean, median

from bench import common

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; these three are nano_rlvr's, for all
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from bench import random_model

CUDA = torch.cuda.is_available()
STAGES = ("rollout", "reward", "update", "sync", "total")  # the last one is the sum of the others


def now():
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class Steps(list):
    """A row per step of a run. The seconds of the first one include the start, and do not count."""
    end = 0.0  # of the last step

    def add(self, seconds, length, mismatch):
        start, self.end = self.end, now()
        row = {stage: seconds[stage] for stage in ("rollout", "reward", "sync")}
        row["total"] = self.end - start
        row["update"] = row["total"] - row["rollout"] - row["reward"] - row["sync"]
        self.append(row | {"length": length, "mismatch": mismatch})


def ours(argv, micro, folder):
    import nano_rlvr as nr
    from runtime.log import Log
    steps = Steps()
    write = Log.write

    def timed_write(self, step, metrics, *args, **kwargs):
        write(self, step, metrics, *args, **kwargs)
        if "lr" in metrics:  # the last line has only an evaluation
            seconds = {stage: metrics[f"seconds/{stage}"] for stage in STAGES[:-1]}
            steps.add(seconds, metrics["completion/length"], metrics["mismatch/mean_abs"])

    Log.write = timed_write
    nr.main([*argv, "--out", folder, "--name", "run", "--eval_every", "1000000000",
             "--eval_size", "1", "--save_every", "0"])
    return steps


def patch_for_cpu(cfg):
    """All changes to TRL: the weight sync, and two arguments of vLLM's LLM (it would choose bf16
    for an fp32 model, and compile for a minute without being faster)."""
    from trl.generation import vllm_generation

    def sync_weights(self):
        weights = iter(self.model.state_dict().items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()

    LLM = functools.partial(vllm_generation.LLM, dtype=cfg.dtype, enforce_eager=True)
    vllm_generation.LLM = LLM
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def grpo_options(cfg, micro, vllm):
    """The arguments of TRL's GRPOConfig that are nano_rlvr's cfg."""
    options = dict(
        max_steps=cfg.steps, learning_rate=cfg.lr, lr_scheduler_type="constant",
        adam_beta2=cfg.beta2, weight_decay=cfg.weight_decay, max_grad_norm=cfg.max_grad_norm,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=cfg.prompts * cfg.samples // micro,
        num_generations=cfg.samples, max_completion_length=cfg.max_tokens,
        temperature=cfg.temperature, num_iterations=1, loss_type="grpo", scale_rewards="group",
        beta=cfg.kl_coef, use_bias_correction_kl=False, epsilon=cfg.clip_low,
        epsilon_high=cfg.clip_high,
        gradient_checkpointing=CUDA or cfg.gradient_checkpointing == "on",  # TRL's default is True
        bf16=cfg.dtype == "bfloat16", use_cpu=not CUDA, model_init_kwargs={"dtype": "float32"},
        shuffle_dataset=False, seed=cfg.seed, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True)
    if vllm:
        options |= dict(
            use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=CUDA,
            vllm_gpu_memory_utilization=cfg.gpu_memory_utilization or 0.5,
            vllm_max_model_length=cfg.max_prompt + cfg.max_tokens,
            vllm_importance_sampling_correction=cfg.correction != "none",
            vllm_importance_sampling_mode=cfg.correction,
            vllm_importance_sampling_clip_max=cfg.correction_cap)
    return options


def trl(argv, micro, folder, vllm=False):
    import data
    import nano_rlvr as nr  # for its flags
    import rewards
    from runtime import memory
    from runtime.model import load_tokenizer
    from runtime.verify import user_code
    cfg = nr.parse_config([*argv, "--out", folder])
    tokenizer = load_tokenizer(cfg)
    train_set, _ = data.load_splits(cfg, tokenizer)
    cfg, _ = memory.plan(cfg)

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    examples = []
    for step in range(cfg.steps):
        examples += data.batch_at(train_set, step, cfg.prompts, cfg.seed)
    prompt_ids = [example["prompt_ids"] for example in examples]
    prompts = [tokenizer.decode(ids) for ids in prompt_ids]
    same = tokenizer(text=prompts)["input_ids"] == prompt_ids
    assert same, "TRL would tokenize the prompts differently"
    if vllm and not CUDA:
        patch_for_cpu(cfg)
    steps = Steps()
    seconds = Counter()
    lengths = []

    class Callback(TrainerCallback):
        def on_step_end(self, *_, **__):
            metrics = trainer._metrics["train"]["sampling/sampling_logp_difference/mean"]
            seconds["rollout"] -= seconds["sync"]  # _generate includes the sync
            steps.add(seconds, lengths[-1], metrics[-1] if metrics else 0.0)
            seconds.clear()

    rows = [{"prompt": p, "answer": e["answer"]} for p, e in zip(prompts, examples)]
    _, _, where = rewards.parse_spec(cfg.rewards)[0]
    trainer = GRPOTrainer(
        model=cfg.model, reward_funcs=user_code.load(where),
        processing_class=tokenizer,
        args=GRPOConfig(folder, **grpo_options(cfg, micro, vllm)), callbacks=[Callback()],
        train_dataset=Dataset.from_list(rows))
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

    clock(trainer, "_generate", "rollout")
    clock(trainer, "_calculate_rewards", "reward")
    if vllm:
        clock(trainer.vllm_generation, "sync_weights", "sync")
    trainer.train()
    assert CUDA or max(row["mismatch"] for row in steps) <= cfg.mismatch_bound
    return steps


CONTENDERS = {"ours": ours, "trl+vllm": functools.partial(trl, vllm=True), "trl": trl}


def main(argv):
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=5, help="per run; the first one does not count")
    add("--micro", type=int, default=64, help="TRL's per_device_train_batch_size")
    add("--random_model", nargs=2, metavar=("SHAPE", "MEAN"), help="see bench/random_model.py")
    add("--out", default="vs_trl", help="of the results, or an absolute path")
    add("--contender", choices=CONTENDERS, help="runs one in this process, and prints JSON")
    a, flags = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if a.contender:
            flags += ["--steps", str(a.steps)]
            return print("\n" + json.dumps(CONTENDERS[a.contender](flags, a.micro, folder)))
        if a.random_model:
            shape, mean = a.random_model
            flags = [*random_model.make(folder, shape, int(mean)), *flags]
        compare(a, ["--lr", "1e-6", "--lr_end", "1", *flags])


def median_seconds(rows):
    """{stage: median over the steps}"""
    seconds = {}
    for stage in STAGES:
        seconds[stage] = median(row[stage] for row in rows)
    return seconds


def compare(a, flags):
    """Runs the contenders one after the other, and writes the table."""
    import nano_rlvr as nr
    cfg = nr.parse_config(flags)
    conditions = common.conditions("trl", "accelerate")
    runs = {}
    table = []
    for name in ("ours", "trl+vllm", *["trl"] * (not CUDA)):
        pages = "1" if name == "ours" else "0"
        own = ["--contender", name, "--micro", a.micro, "--steps", a.steps]
        rows = common.run_apart("vs_trl", *own, *flags, THP_MEM_ALLOC_ENABLE=pages)[1:]
        runs[name] = rows
        seconds = median_seconds(rows)
        base = median_seconds(runs["ours"])["total"]
        length = fmean(row["length"] for row in rows)
        tokens_per_second = cfg.prompts * cfg.samples * length / seconds["total"]
        table.append([name, *(f"{x:.2f}" for x in seconds.values()),
                      f"{seconds['total'] / base:.1f}", f"{tokens_per_second:.0f}", f"{length:.1f}",
                      f"{max(row['mismatch'] for row in rows):.1e}"])
        print(*table[-1], flush=True)
    columns = ["seconds per step", *STAGES, "times ours", "tokens per second", "mean length",
               "largest mismatch"]
    model = f"random weights {' '.join(a.random_model)}" if a.random_model else cfg.model
    text = (f"{common.table(columns, table)}\n\n{model}, {cfg.task}, {cfg.prompts} prompts x "
            f"{cfg.samples} samples of at most {cfg.max_tokens} tokens, {cfg.dtype}, lr "
            f"{cfg.lr:g}, kl_coef {cfg.kl_coef:g}; TRL's micro-batches: {a.micro}; {conditions}.")
    common.write(a.out, text, {"conditions": conditions, "runs": runs})


if __name__ == "__main__":
    main(sys.argv[1:])
