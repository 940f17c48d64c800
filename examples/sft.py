"""Supervised fine-tuning: the model imitates the completions of a file.

    python -m examples.sft --demos demos.jsonl --steps 20       flags of nano_rlvr.py work

A line of the file is a JSON object with `question` and `completion`. The eval.jsonl of a run
(`--steps 0 --model teacher --eval_data questions.jsonl`) is such a file: then only the completions
that are right count (rejection sampling, arXiv:2308.01825). A step takes the next `--prompts`
lines; each completion counts the same, or each token with `--aggregate token`.
"""
import argparse
import dataclasses
import json
from pathlib import Path

import nano_rlvr as nr
from runtime import dist


def as_rollout(example, text, tokenizer, template):
    """A text, and then its end, as a Rollout with reward 1. No engine gave it log-probs."""
    prompt = nr.data.encode(example, tokenizer, template)
    completion = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
    return nr.Rollout(prompt, completion, text, False, [0.0] * len(completion), reward=1.0,
                      parts={"sft": 1.0})


def read_demos(path, tokenizer, template):
    """The lines of a file -> Rollouts with reward 1. Wrong and truncated completions are left out.

    Raises OSError, or RunError with one line if a line is not as described above.
    """
    demos = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            demo = as_rollout(row, row["completion"], tokenizer, template)
        except (ValueError, KeyError, TypeError) as e:
            raise dist.RunError(f"{path}:{number}: no question and completion ({e!r})") from e
        if row.get("right", True) and row.get("finish") != "length":
            demos.append(demo)
    if not demos:
        raise dist.RunError(f"{path}: no completion to imitate")
    return demos


def train(run, path):
    """nano_rlvr's loop without sampling: the advantage of each demonstration is its reward, 1."""
    demos = read_demos(path, run.llm.get_tokenizer(), run.cfg.template)

    def collect_rollouts(run, step):
        cfg = run.cfg
        batch = nr.data.batch_at(
            demos, step, cfg.prompts, cfg.seed, dist.rank(), dist.world_size())
        groups = [[dataclasses.replace(r)] for r in batch]
        return [groups[i::cfg.minibatches] for i in range(cfg.minibatches)], groups

    nr.train(run, collect_rollouts=collect_rollouts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--demos", required=True)
    own, argv = parser.parse_known_args()
    fixed = "--algo rft --samples 1 --correction none --mismatch_bound 1e9".split()
    nr.main([*fixed, *argv], lambda run: train(run, own.demos))
