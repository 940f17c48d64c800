"""One optimizer update on one ragged batch of rollouts: packed (this trainer) beside padded micro-batches.

    python bench/update.py                      CPU: a small Qwen2 with the real vocabulary; CUDA: the exact shape of Qwen2.5-1.5B in bf16
    python bench/update.py --micro_batch 4 8 --trl --rounds 2

packed   nano_rlvr.py as it is: pack, collate, TokenLogps, policy_loss, backward, step, with its default flags
padded   micro-batches of --micro_batch rows (nano-aha-moment: 4) in the order of sampling, each padded to its longest; the logits of all
         its completion positions at once, log_softmax and gather in fp32, no entropy: the textbook's loop, and nano-aha-moment's
trl      TRL 1.16.0 with its defaults: 8 rows, padded to the longest of the whole batch; log-probs and entropy from its own fused LM head,
         which never holds all logits (on a CPU it also computes the positions of prompt and padding, which it skips on CUDA)

All run through the same nano_rlvr.update and DeepSpeed engine - same loss, AdamW, dtype, activation checkpointing - and only the
module that gives log-probs is exchanged, attention being PyTorch's own each time. On a CPU nano_rlvr.py asks PyTorch for memory in pages of
2 MB; the others run as they are, without, and the padded loop once more with them. Each measurement is a process of its own (peak memory) in
turns A B A B; the same update has run once before, as a warm-up. That all take the same step is checked: loss, mean log-prob gap and
gradient norm agree.
Writes bench/results/update.md and update.json (update-gpu.* on CUDA).
"""
import argparse
import json
import statistics
import sys
import tempfile

import common  # first: it finds nano_rlvr
import torch

import nano_rlvr as nr


class Padded(torch.nn.Module):
    """The interface of nano_rlvr.TokenLogps over a (B, P + C) batch: prompts end and completions begin at column P."""
    widest = 0, 0  # least P and C

    def __init__(self, model, temperature=1.0, chunk=None):
        super().__init__()
        model.set_attn_implementation("sdpa")
        self.model, self.temperature = model, temperature

    def forward(self, batch):
        lengths, sizes = batch.ends.diff().tolist(), batch.sizes.tolist()
        P = max(self.widest[0], *(n - size for n, size in zip(lengths, sizes)))
        C = max(self.widest[1], *sizes)
        ids, mask = batch.ids.new_zeros(2, len(sizes), P + C)  # (B, P + C) each
        for i, (row, size) in enumerate(zip(batch.ids[0][batch.whole].split(lengths), sizes)):
            ids[i, P + size - len(row):P + size] = row
            mask[i, P + size - len(row):P + size] = 1
        logp = self.logps(ids, mask, C)[mask[:, P:].bool()]  # (R,)
        return logp, torch.zeros_like(logp)

    def logps(self, ids, mask, C):
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=C + 1).logits[:, :-1]  # (B, C, V)
        return (logits.float() / self.temperature).log_softmax(-1).gather(-1, ids[:, -C:, None])[..., 0]  # (B, C)


class Trl(Padded):
    """As _get_per_token_logps_and_entropies of TRL 1.16.0's GRPOTrainer."""

    def __init__(self, model, temperature=1.0, chunk=None):
        super().__init__(model)
        from trl.trainer.utils import add_fused_lm_head
        add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))

    def logps(self, ids, mask, C):
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-C] = -100
        return self.model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -C:]


MODULES = {"packed": nr.TokenLogps, "padded": Padded, "trl": Trl}


def one(args):
    """A measurement, in this process."""
    nr.launch()
    nr.TokenLogps = MODULES[args.side]  # the module that make_policy wraps
    cfg = common.make_config(args.model, pack_tokens=args.pack_tokens)
    engine = nr.make_policy(cfg)
    rollouts = common.make_rollouts(args.sequences, args.max_tokens, args.vocab)
    rows = {"packed": None, "trl": 8}.get(args.side, args.micro_batch[0])

    def split(rollouts):
        return nr.pack(rollouts, cfg.pack_tokens) if rows is None else [rollouts[i:i + rows] for i in range(0, len(rollouts), rows)]

    if args.side == "trl":
        Padded.widest = max(len(r.prompt) for r in rollouts), max(len(r.completion) for r in rollouts)
    for _ in range(2):  # the second one counts
        result = common.measure(engine, split, rollouts, cfg)

    def cells(members):  # tokens of a batch with its padding
        prompt, completion = (max(widest, *map(len, parts)) for widest, parts in zip(
            Padded.widest, ([r.prompt for r in members], [r.completion for r in members])))
        return len(members) * (prompt + completion)

    grid = result["tokens"] if rows is None else sum(map(cells, split(rollouts)))
    print(json.dumps(result | {"padding": 1 - result["tokens"] / grid, "batches": len(split(rollouts)),
                               "gradients": 4 * sum(p.numel() for p in engine.module.parameters())}))


def main():
    cuda = common.CUDA
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536 if cuda else 128)
    parser.add_argument("--layers", type=int, default=28 if cuda else 2)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--sequences", type=int, default=256 if cuda else 64, help="rollouts in the batch, 8 a prompt")
    parser.add_argument("--max_tokens", type=int, default=3000 if cuda else 750, help="99th percentile of the completions, 15 times their median")
    parser.add_argument("--pack_tokens", type=int, default=16384 if cuda else 4096, help="to --max_tokens as 16384 to 3000, the defaults of nano_rlvr.py")
    parser.add_argument("--micro_batch", type=int, nargs="+", default=[4, 8] if cuda else [4], help="rows of a padded micro-batch")
    parser.add_argument("--trl", action="store_true", help="TRL's way, too (it must be installed)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return one(args)

    pages = {"": "0"} if cuda else {"": "0", ", pages of 2 MB": "1"}
    sides = {"packed": (["packed"], "1")} | ({"trl": (["trl"], "0")} if args.trl else {}) | {
        f"padded, {n} rows{name}": (["padded", "--micro_batch", n], large) for n in args.micro_batch for name, large in pages.items()}
    conditions, results = common.conditions(), {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        common.make_model(folder, args.hidden, args.layers, args.vocab)
        for _ in range(args.rounds):
            for side, (flags, large) in sides.items():
                results[side].append(common.in_a_process(__file__, *sys.argv[1:], "--model", folder, "--side", *flags, THP_MEM_ALLOC_ENABLE=large))
                print(side, {k: round(results[side][-1][k], 6) for k in ("seconds", "cpu_seconds", "idle", "peak", "loss", "grad_norm")}, file=sys.stderr)

    first, tolerance = results["packed"][0], 2e-2 if cuda else 1e-4  # bf16, fp32
    for runs in results.values():  # two different computations would not be worth comparing
        for run in runs:
            for name in ("loss", "mismatch/mean_abs", "grad_norm"):
                assert abs(run[name] - first[name]) <= tolerance * abs(first[name]), f"{name}: {run[name]} is not {first[name]}"

    def median(side, value):
        return statistics.median(map(value, results[side]))

    lines = ["| | seconds (min to max) | tokens/s | peak memory above idle | idle | padding | forward passes |", "|---|---|---|---|---|---|---|"]
    for side, runs in results.items():
        seconds = [r["seconds"] for r in runs]
        lines.append(f"| {side} | {statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) "
                     f"| {median(side, lambda r: r['tokens'] / r['seconds']):,.0f} | {median(side, lambda r: r['peak'] - r['idle']) / 2**30:.2f} GiB "
                     f"| {median(side, lambda r: r['idle']) / 2**30:.2f} GiB | {runs[0]['padding']:.0%} | {runs[0]['batches']} |")
    ratios = {other: {"time": median(other, lambda r: r["seconds"]) / median("packed", lambda r: r["seconds"]),
                      "memory": median(other, lambda r: r["peak"] - r["idle"]) / median("packed", lambda r: r["peak"] - r["idle"])}
              for other in sides if other != "packed"}
    lines += [""] + [f"**{other}: {r['time']:.2f} times the time and {r['memory']:.2f} times the memory of packed.**" for other, r in ratios.items()]
    lines += ["", f"Qwen2 with random weights, hidden {args.hidden}, {args.layers} layers, vocabulary {args.vocab:,}, {'bf16' if cuda else 'fp32'}; "
              f"{args.sequences} rollouts, {first['tokens']:,} tokens, completions of median {args.max_tokens // 15} and at most {args.max_tokens}; "
              f"--pack_tokens {args.pack_tokens}; median of {args.rounds} rounds. "
              f"Each peak holds the fp32 gradients: {first['gradients'] / 2**30:.2f} GiB.",
              "", f"{conditions}; `{' '.join(['python bench/update.py', *sys.argv[1:]])}`"]
    common.write("update-gpu" if cuda else "update", "\n".join(lines),
                 {"conditions": conditions, "arguments": vars(args), "ratios": ratios, "runs": results})


if __name__ == "__main__":
    main()
