"""Rows against packs: padding, seconds and the gradient of one update, for three kinds of lengths.

    OMP_NUM_THREADS=1 python -m bench.layouts          the bundled model; some minutes on one core
    python -m bench.layouts --model models/smollm2 --prompts 2 --passes 1 --out layouts_smollm2

The completions are random tokens, 8 of each of 8 prompts (--prompts) of 60 tokens. Writes
bench/results/layouts.md and .json (--out). Seconds are the least of three passes (--passes),
forward and backward. The gradient is compared in float32, by its largest difference over its
largest number.
"""
import random
import sys
import time

import torch

import nano_rlvr as nr
from bench import common
from runtime import flags, ranks
from runtime.model import load_model

SAMPLES, PROMPT_TOKENS = 8, 60
BUDGET = 4096
LENGTHS = {  # a draw from a random generator
    "equal: 150": lambda rng: 150,
    "ragged: lognormal, median 90": lambda rng: min(600, 1 + int(rng.lognormvariate(4.5, 0.8))),
    "two kinds: 20 or 400": lambda rng: rng.choice([20, 400]) + rng.randint(0, 15),
}


def rollouts_of(draw, prompts):
    """Completions of random tokens with random advantages, each weighted like a token of GRPO."""
    rng = random.Random(0)
    rollouts = []
    for _ in range(prompts):
        prompt = rng.choices(range(256), k=PROMPT_TOKENS)
        for _ in range(SAMPLES):
            n = draw(rng)
            ids = rng.choices(range(256), k=n)
            advantages = [rng.gauss(0, 1)] * n
            weight = 1 / (prompts * SAMPLES * n)
            r = nr.Rollout(prompt, ids, "", False, [0.0] * n, advantages=advantages, weight=weight)
            rollouts.append(r)
    return rollouts


def measure(policy, rollouts, layout, passes):
    """(tokens that are computed, seconds, the gradient) of one update without AdamW."""
    policy.model.set_attn_implementation("packed" if layout == "packed" else "sdpa")
    lists = nr.pack_evenly(rollouts, BUDGET, layout)
    packs = [nr.collate(members, layout=layout) for members in lists]
    tokens = sum(pack.input_ids.numel() for pack in packs)
    seconds = []
    for _ in range(passes):
        policy.zero_grad()
        start = time.perf_counter()
        for pack in packs:
            logp, _ = policy(pack)  # (R,)
            loss = -(logp * pack.advantage * pack.weight).sum()
            loss.backward()
        seconds.append(time.perf_counter() - start)
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
    return tokens, min(seconds), gradient


def main(argv):
    parser = common.parser(__doc__)
    parser.add_argument("--model", default=common.TINY)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--out", default="layouts")
    args = parser.parse_args(argv)
    conditions = common.conditions()
    ranks.init_process_group()
    settings = {
        "model": args.model,
        "dtype": "float32",
        "max_prompt": 64,
        "max_tokens": 600,
    }
    cfg = flags.check(nr.Config(**settings))
    policy = nr.TokenLogps(load_model(cfg))
    head = ["lengths", "tokens", "in packs", "in rows", "padding", "packs, s", "rows, s"]
    head += ["difference of the gradient"]
    rows = []
    numbers = []
    for kind, draw in LENGTHS.items():
        rollouts = rollouts_of(draw, args.prompts)
        total = sum(map(len, rollouts))
        packed, packed_s, gradient = measure(policy, rollouts, "packed", args.passes)
        padded, padded_s, other = measure(policy, rollouts, "rows", args.passes)
        difference = ((gradient - other).abs().max() / gradient.abs().max()).item()
        padding = padded / total - 1
        rows.append([kind, f"{total:,}", f"{packed:,}", f"{padded:,}", f"{padding:.1%}",
                     f"{packed_s:.2f}", f"{padded_s:.2f}", f"{difference:.0e}"])
        numbers.append({"lengths": kind, "tokens": total, "packed": packed, "rows": padded,
                        "packed_s": packed_s, "rows_s": padded_s, "difference": difference})
    common.write(args.out, f"{common.table(head, rows)}\n\n{conditions}", numbers)


if __name__ == "__main__":
    main(sys.argv[1:])
