"""One optimizer update on one ragged batch of rollouts: packed (this trainer) or padded.

    python -m bench.update                      writes bench/results/update.md and .json
    python -m bench.update --side packed        measures one side in this process, prints JSON

The model is a small Qwen2 with the real vocabulary on a CPU, Qwen2.5-1.5B's shape in bf16 on CUDA.

packed   nano_rlvr.py with its default flags: pack, collate, TokenLogps, policy_loss, backward, step
padded   micro-batches of --micro_batch rows (nano-aha-moment: 4) in the order of sampling, each
         padded to its longest; the logits of all completion positions at once, log_softmax and
         gather in fp32, no entropy: the textbook loop

Both run through the same nano_rlvr.update and DeepSpeed engine, with memory in pages of 2 MB on a
CPU; only the module that computes log-probs differs. Each measurement is a separate process (for
its peak memory), in turns, and runs the same update once before as a warm-up. Loss, mean log-prob
mismatch and gradient norm must agree.
"""
import ctypes
import dataclasses
import gc
import itertools
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import nano_rlvr as nr
from bench import common, random_model
from runtime import flags, ranks
from runtime.batch import fill_packs

CUDA = torch.cuda.is_available()
COLUMNS = ("", "seconds (min to max)", "times packed", "peak memory above idle", "times packed",
           "padding")


def make_config(model, **changes):
    """The defaults of nano_rlvr.py without the KL term: an update needs no reference model then."""
    changes = dict(model=str(model), kl_coef=0.0, gradient_checkpointing="on") | changes
    cfg = flags.check(dataclasses.replace(nr.Config(), **changes))
    return dataclasses.replace(cfg, mismatch_bound=math.inf)  # the rollouts are not vLLM's


def make_rollouts(n, max_tokens, vocab, seed=0):
    """n rollouts of random tokens, 8 per prompt.

    At max_tokens 3000: prompts of 60 to 120 tokens; lengths of completions are lognormal with
    median 200 (GSM8K's) and 99th percentile 3000, where they end; all are scaled by max_tokens.
    """
    lengths = random.Random(seed)
    tokens = random.Random(seed)  # another one, because lengths must not depend on vocab
    sigma = math.log(15) / 2.326  # the 99th percentile is 2.326 sigma above the median
    rollouts = []
    for i in range(n):
        if i % 8 == 0:
            prompt_length = lengths.randint(1 + max_tokens // 50, 1 + max_tokens // 25)
            prompt = [tokens.randrange(vocab) for _ in range(prompt_length)]
        length = round(max_tokens / 15 * math.exp(sigma * lengths.gauss(0, 1)))
        length = min(max_tokens, max(1, length))
        completion = [tokens.randrange(vocab) for _ in range(length)]
        vllm_logps = [-math.log(vocab)] * length  # nearly those of a random model
        rollouts.append(nr.Rollout(prompt, completion, "", length == max_tokens, vllm_logps,
                                   reward=0.0, advantages=[lengths.gauss(0, 1)] * length))
    return rollouts


def memory(peak=False):
    """Bytes that PyTorch holds on the GPU, or without one the resident size of this process: now,
    or the most since measure() reset it."""
    if CUDA:
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    name = "VmHWM:" if peak else "VmRSS:"  # ru_maxrss starts at the parent's value, for ever
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            kib = int(line.split()[1])
            return kib * 1024


def measure(engine, parts, cfg):
    """Runs nano_rlvr.collate and update on parts, a list of lists of rollouts. Returns its metrics
    with its seconds and the bytes in memory before it ("idle") and at its peak."""
    gc.collect()
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    idle = memory()
    start = time.perf_counter()
    cpu_start = time.process_time()
    packs = [nr.collate(part, ranks.device()) for part in parts]
    metrics = nr.update(engine, packs, cfg)
    if CUDA:
        torch.cuda.synchronize()
    metrics["seconds"] = time.perf_counter() - start
    metrics["cpu_seconds"] = time.process_time() - cpu_start
    metrics["idle"] = idle
    metrics["peak"] = memory(peak=True)
    return metrics


class Padded(torch.nn.Module):
    """TokenLogps' interface for a padded batch (B, P + C): prompts end at column P."""

    def __init__(self, model, temperature):
        super().__init__()
        model.set_attn_implementation("sdpa")
        self.model = model
        self.temperature = temperature

    def forward(self, pack):
        lengths = pack.cu_seqlens_k.diff().tolist()
        completion_lengths = pack.lengths.tolist()
        P = max(n - c for n, c in zip(lengths, completion_lengths))
        C = max(completion_lengths)
        ids, mask = pack.input_ids.new_zeros(2, len(lengths), P + C)  # (B, P + C) each
        sequences = pack.input_ids[0][pack.kv_index].split(lengths)
        for i, (sequence, n, c) in enumerate(zip(sequences, lengths, completion_lengths)):
            ids[i, P + c - n:P + c] = sequence
            mask[i, P + c - n:P + c] = 1
        out = self.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=C + 1)
        logits = out.logits[:, :-1].float() / self.temperature  # (B, C, V)
        logps = logits.log_softmax(-1).gather(-1, ids[:, -C:, None])[..., 0]  # (B, C)
        is_token = mask[:, P:].bool()  # (B, C)
        logps = logps[is_token]  # (R,)
        return logps, torch.zeros_like(logps)


def padded_size(rows):
    """Tokens of a padded batch with its padding."""
    prompt = max(len(r.prompt) for r in rows)
    completion = max(len(r.completion) for r in rows)
    return len(rows) * (prompt + completion)


def one(args, model):
    """Measures args.side in this process, and prints the result as JSON."""
    ranks.init_process_group()
    if args.side == "padded":
        nr.TokenLogps = Padded  # the module that make_policy wraps
    cfg = make_config(model, pack_tokens=args.pack_tokens)
    engine = nr.make_policy(cfg)
    rollouts = make_rollouts(args.sequences, args.max_tokens, args.vocab)
    rollouts = nr.assign_token_weights(rollouts, cfg)
    tokens = padded = sum(map(len, rollouts))
    if args.side == "padded":
        starts = range(0, len(rollouts), args.micro_batch)
        parts = [rollouts[start:start + args.micro_batch] for start in starts]
        padded = sum(map(padded_size, parts))
    else:
        parts = fill_packs(rollouts, cfg.pack_tokens)
    measure(engine, parts, cfg)  # the warm-up
    result = measure(engine, parts, cfg)
    print(json.dumps(result | {"tokens": tokens, "padding": 1 - tokens / padded}))


def compare(args, argv, model):
    """Measures the sides in turns and writes the table."""
    conditions = common.conditions()
    results = {"packed": [], "padded": []}
    for _ in range(args.rounds):
        for side in results:
            words = [*argv, "--model", model, "--side", side]
            run = common.run_apart("update", *words, THP_MEM_ALLOC_ENABLE="1")
            results[side].append(run)
            print(f"{side}: {run['seconds']:.1f} s, processor {run['cpu_seconds']:.1f} s")

    first = results["packed"][0]
    tolerance = 0.02 if CUDA else 1e-4  # bf16, fp32
    packed_time, packed_space = median_costs(results["packed"])
    rows = []
    for side, runs in results.items():
        times = [run["seconds"] for run in runs]
        time, space = median_costs(runs)
        rows.append([
            side,
            f"{time:.1f} ({min(times):.1f} to {max(times):.1f})",
            f"{time / packed_time:.2f}",
            f"{space / 2**30:.2f} GiB",
            f"{space / packed_space:.2f}",
            f"{runs[0]['padding']:.0%}",
        ])
        for run, name in itertools.product(runs, ("loss", "mismatch/mean_abs", "grad_norm")):
            assert math.isclose(run[name], first[name], rel_tol=tolerance), (side, name, run[name])
    text = (f"{common.table(COLUMNS, rows)}\n\n{args.model or 'random weights'}, vocabulary "
            f"{args.vocab:,}, {'bf16' if CUDA else 'fp32'}; {args.sequences} rollouts, "
            f"{first['tokens']:,} tokens, completions of median {args.max_tokens // 15} and at "
            f"most {args.max_tokens}; --pack_tokens {args.pack_tokens}; median of {args.rounds} "
            f"rounds. Each peak includes the fp32 gradients.\n\n{conditions}")
    common.write(args.out, text, {"conditions": conditions, "runs": results})


def median_costs(runs):
    """(seconds, bytes above idle) of the runs of one side."""
    seconds = median(run["seconds"] for run in runs)
    space = median(run["peak"] - run["idle"] for run in runs)
    return seconds, space


def main(argv):
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--model", help="folder of a model; --vocab bounds the tokens")
    add("--vocab", type=int, default=151936)
    add("--sequences", type=int, default=256 if CUDA else 64, help="rollouts, 8 per prompt")
    add("--max_tokens", type=int, default=3000 if CUDA else 750,
        help="99th percentile of the completion lengths, 15 times their median")
    add("--pack_tokens", type=int, default=16384 if CUDA else 4096, help="tokens per pack")
    add("--micro_batch", type=int, default=4, help="rows per padded batch")
    add("--rounds", type=int, default=3)
    add("--out", default="update-gpu" if CUDA else "update", help="name of the results")
    add("--side", choices=("packed", "padded"))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            hidden, layers = (1536, 28) if CUDA else (128, 2)
            random_model.make(folder, random_model.sizes(hidden, layers, args.vocab))
        model = args.model or folder
        if args.side:
            one(args, model)
        else:
            compare(args, argv, model)


if __name__ == "__main__":
    main(sys.argv[1:])
