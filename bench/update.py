"""One optimizer update on one ragged batch of rollouts: packed (this trainer) or in padded micro-batches.

    python bench/update.py                      writes bench/results/update.md and .json, update-gpu.* on CUDA
    python bench/update.py --micro_batch 4 8 --trl --rounds 2
    python bench/update.py --compile --micro_batch --model models/tiny --vocab 256 --out update_compile

The model is a small Qwen2 with the real vocabulary on a CPU, the exact shape of Qwen2.5-1.5B in bf16 on CUDA.

packed   nano_rlvr.py with its default flags: pack, collate, TokenLogps, policy_loss, backward, step
compiled the same with --compile on; it compiles in the warm-up
padded   micro-batches of --micro_batch rows (nano-aha-moment: 4) in the order of sampling, each padded to its
         longest; the logits of all completion positions at once, log_softmax and gather in fp32, no entropy:
         the textbook loop, and that of nano-aha-moment
trl      TRL 1.16.0 with its defaults: 8 rows, padded to the longest of the whole batch; log-probs and entropy
         from its fused LM head, which never holds all logits (on a CPU it also computes the positions of
         prompt and padding, which it skips on CUDA)

All run through the same nano_rlvr.update and DeepSpeed engine, with the same loss, AdamW, dtype and
activation checkpointing. Only the module that computes log-probs differs; attention is always PyTorch's own.
On a CPU, nano_rlvr.py asks PyTorch for memory in pages of 2 MB; the others run without, as they do by
default, and the padded loop also with them. Each measurement is a separate process (for its peak memory), in
the order A B A B, and runs the same update once before as a warm-up. Loss, mean log-prob mismatch and
gradient norm must agree.
"""
import argparse
import itertools
import json
import statistics
import sys
import tempfile

import torch

import common  # puts the repository on sys.path
import nano_rlvr as nr
from bench import random_model
from runtime import dist

COLUMNS = ("", "seconds (min to max)", "tokens/s", "peak memory above idle", "idle", "padding",
           "forward passes")


class Padded(torch.nn.Module):
    """TokenLogps' interface for a padded batch (B, P + C): prompts end, and completions start, at column
    P."""
    minimum_size = 0, 0  # of P and C

    def __init__(self, model, temperature=1.0, **flags):
        super().__init__()
        model.set_attn_implementation("sdpa")
        self.model, self.temperature = model, temperature

    def forward(self, batch):
        lengths, completion_lengths = batch.cu_seqlens_k.diff().tolist(), batch.lengths.tolist()
        P = max(self.minimum_size[0], *(n - c for n, c in zip(lengths, completion_lengths)))
        C = max(self.minimum_size[1], *completion_lengths)
        ids, mask = batch.input_ids.new_zeros(2, len(lengths), P + C)  # (B, P + C) each
        sequences = batch.input_ids[0][batch.kv_index].split(lengths)
        for i, (sequence, n, c) in enumerate(zip(sequences, lengths, completion_lengths)):
            ids[i, P + c - n:P + c] = sequence
            mask[i, P + c - n:P + c] = 1
        logp = self.logps(ids, mask, C)[mask[:, P:].bool()]  # (R,)
        return logp, torch.zeros_like(logp)

    def logps(self, ids, mask, C):
        out = self.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=C + 1)
        logits = out.logits[:, :-1].float() / self.temperature  # (B, C, V)
        return logits.log_softmax(-1).gather(-1, ids[:, -C:, None])[..., 0]  # (B, C)


class Trl(Padded):
    """As _get_per_token_logps_and_entropies of TRL 1.16.0's GRPOTrainer."""

    def __init__(self, model, temperature=1.0, **flags):
        super().__init__(model)
        from trl.trainer.utils import add_fused_lm_head
        add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))

    def logps(self, ids, mask, C):
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-C] = -100
        out = self.model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return out.log_probs[:, -C:]  # (B, C)


MODULES = {"packed": nr.TokenLogps, "compiled": nr.TokenLogps, "padded": Padded, "trl": Trl}


def one(args):
    """Measures one side in this process and prints the result as JSON."""
    dist.init_process_group()
    nr.TokenLogps = MODULES[args.side]  # the module that make_policy wraps
    cfg = common.make_config(args.model, pack_tokens=args.pack_tokens,
                             compile="on" if args.side == "compiled" else "off")
    engine = nr.make_policy(cfg)
    rollouts = common.make_rollouts(args.sequences, args.max_tokens, args.vocab)
    rows = {"trl": 8, "padded": args.micro_batch[0] if args.micro_batch else 0}.get(args.side)

    def split(rollouts):
        if rows is None:
            return nr.pack(rollouts, cfg.pack_tokens)
        return [rollouts[i:i + rows] for i in range(0, len(rollouts), rows)]

    def longest(members):  # (prompt, completion)
        return max(len(r.prompt) for r in members), max(len(r.completion) for r in members)

    if args.side == "trl":
        Padded.minimum_size = longest(rollouts)
    first, result = (common.measure(engine, split, rollouts, cfg) for _ in range(2))  # the first: warm-up

    def padded_tokens(members):
        return len(members) * sum(map(max, Padded.minimum_size, longest(members)))

    batches = split(rollouts)
    tokens = result["tokens"] if rows is None else sum(map(padded_tokens, batches))
    print(json.dumps(result | {"first": first["seconds"], "padding": 1 - result["tokens"] / tokens,
                               "batches": len(batches),
                               "gradients": 4 * sum(p.numel() for p in engine.module.parameters())}))


def main():
    cuda, raw = common.CUDA, argparse.RawDescriptionHelpFormatter  # raw keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--hidden", type=int, default=1536 if cuda else 128)
    add("--layers", type=int, default=28 if cuda else 2)
    add("--vocab", type=int, default=151936)
    add("--model", help="folder of a model, instead of these sizes; --vocab bounds the tokens")
    add("--sequences", type=int, default=256 if cuda else 64, help="rollouts in the batch, 8 per prompt")
    add("--max_tokens", type=int, default=3000 if cuda else 750,
        help="99th percentile of the completion lengths, 15 times their median")
    add("--pack_tokens", type=int, default=16384 if cuda else 4096, help="tokens per pack")
    add("--micro_batch", type=int, nargs="*", default=[4, 8] if cuda else [4], help="rows per padded batch")
    add("--compile", action="store_true", help="also measure --compile on")
    add("--trl", action="store_true", help="also measure TRL's way (TRL must be installed)")
    add("--rounds", type=int, default=3)
    add("--out", default="update-gpu" if cuda else "update", help="name of the two files in bench/results")
    add("--side", help=argparse.SUPPRESS)  # measure this side in this process
    args = parser.parse_args()
    if args.side:
        return one(args)

    pages = {"": "0"} if cuda else {"": "0", ", pages of 2 MB": "1"}
    sides = {"packed": (["packed"], "1")}  # name -> flags, THP_MEM_ALLOC_ENABLE
    if args.compile:
        sides["compiled"] = ["compiled"], "1"
    if args.trl:
        sides["trl"] = ["trl"], "0"
    for n in args.micro_batch:
        for name, large_pages in pages.items():
            sides[f"padded, {n} rows{name}"] = ["padded", "--micro_batch", n], large_pages
    conditions, results = common.conditions(), {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        args.model or random_model.make(folder, random_model.sizes(args.hidden, args.layers, args.vocab))
        for _ in range(args.rounds):
            for side, (flags, large_pages) in sides.items():
                arguments = [*sys.argv[1:], "--model", args.model or folder, "--side", *flags]
                result = common.run_apart(__file__, *arguments, THP_MEM_ALLOC_ENABLE=large_pages)
                results[side].append(result)
                shown = ("first", "seconds", "cpu_seconds", "idle", "peak", "loss", "grad_norm")
                print(side, {name: round(result[name], 6) for name in shown}, file=sys.stderr)

    first, tolerance = results["packed"][0], 2e-2 if cuda else 1e-4  # bf16, fp32
    for run in itertools.chain(*results.values()):  # all must have computed the same step
        for name in ("loss", "mismatch/mean_abs", "grad_norm"):
            difference = abs(run[name] - first[name])
            assert difference <= tolerance * abs(first[name]), f"{name}: {run[name]} is not {first[name]}"

    def median(side, value):
        return statistics.median(map(value, results[side]))

    def seconds(run):
        return run["seconds"]

    def memory(run):
        return run["peak"] - run["idle"]

    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for side, runs in results.items():
        fastest, slowest = min(map(seconds, runs)), max(map(seconds, runs))
        cells = [side, f"{median(side, seconds):.1f} ({fastest:.1f} to {slowest:.1f})",
                 f"{median(side, lambda run: run['tokens'] / run['seconds']):,.0f}",
                 f"{median(side, memory) / 2**30:.2f} GiB",
                 f"{median(side, lambda run: run['idle']) / 2**30:.2f} GiB",
                 f"{runs[0]['padding']:.0%}", str(runs[0]["batches"])]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    ratios = {}
    for side in list(sides)[1:]:
        time, space = (median(side, value) / median("packed", value) for value in (seconds, memory))
        ratios[side] = {"time": time, "memory": space}
        lines.append(f"**{side}: {time:.2f} times the time and {space:.2f} times the memory of packed.**")
    model = args.model or (f"Qwen2 with random weights, hidden {args.hidden}, {args.layers} layers, "
                           f"vocabulary {args.vocab:,}")
    notes = (f"{model}, {'bf16' if cuda else 'fp32'}; "
             f"{args.sequences} rollouts, {first['tokens']:,} tokens, "
             f"completions of median {args.max_tokens // 15} and at most {args.max_tokens}; "
             f"--pack_tokens {args.pack_tokens}; median of {args.rounds} rounds. "
             f"Each peak includes the fp32 gradients: {first['gradients'] / 2**30:.2f} GiB.")
    command = " ".join(["python bench/update.py", *sys.argv[1:]])
    lines += ["", notes, "", f"{conditions}; `{command}`"]
    common.write(args.out, "\n".join(lines),
                 {"conditions": conditions, "arguments": vars(args), "ratios": ratios, "runs": results})


if __name__ == "__main__":
    main()
