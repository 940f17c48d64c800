"""Supervised fine-tuning: the model imitates the completions of a file.

    python -m examples.sft --demos demos.jsonl --steps 20       flags of nano_rlvr.py work

A row of the file (any that --data reads) has `question` and `completion`. The eval.jsonl of a run
(`--steps 0 --model teacher --eval_data questions.jsonl`) is such a file: then only the completions
that are right count (rejection sampling, arXiv:2308.01825). Held-out questions and what is longer
than --max_prompt and --max_tokens are left out, and their numbers printed. A step takes the next
`--prompts` rows; each completion counts the same, or each token with `--aggregate token`.
"""
import argparse
import dataclasses
from pathlib import Path

import nano_rlvr as nr
from runtime import ranks
from runtime.messages import RunError


def as_rollout(example, text, tokenizer, template):
    """A text, and then its end, as a Rollout with reward 1. No engine gave it log-probs."""
    prompt = nr.data.encode(example, tokenizer, template)
    written = text.removeprefix(nr.data.opened_thinking(prompt, tokenizer))
    completion = tokenizer.encode(written, add_special_tokens=False) + [tokenizer.eos_token_id]
    logps = [0.0] * len(completion)
    parts = {"sft": 1.0}
    return nr.Rollout(prompt, completion, text, False, logps, reward=1.0, parts=parts)


def read_demos(path, tokenizer, cfg, held_out=(), notify=ranks.print_once):
    """The rows of a file -> Rollouts with reward 1. Wrong and truncated completions are left out.
    held_out: questions that are left out, too. notify(text) is called with the numbers of those
    that are left out. Raises RunError with one line for another file."""
    rows = []
    location = path
    try:
        if not Path(path).is_file():
            raise ValueError("no such file")
        for location, row in nr.data.read_rows(Path(path)):
            for name in ("question", "completion"):
                text = row.get(name) if isinstance(row, dict) else None
                if not isinstance(text, str):
                    raise ValueError(f"it needs a text as '{name}'")
                text.encode()  # a ValueError for half of a surrogate pair
            is_right = row.get("right", True)
            if is_right and row.get("finish") != "length":
                rows.append(row)
        location = path
        new = [row for row in rows if row["question"] not in held_out]
        demos = [as_rollout(row, row["completion"], tokenizer, cfg.template) for row in new]
    except (ValueError, OSError) as e:
        raise RunError(f"--demos {location}: {e}") from e
    fit = [r for r in demos if fits(r, cfg)]
    reasons = {
        "their questions are held out": len(rows) - len(new),
        "longer than --max_prompt or --max_tokens": len(new) - len(fit),
    }
    for why, count in reasons.items():
        if count:
            notify(f"{count} of {len(rows)} demonstrations left out: {why}")
    if not fit:
        raise RunError(f"--demos {path}: no completion is left to imitate")
    return fit


def fits(r, cfg):
    return len(r.prompt) <= cfg.max_prompt and len(r.completion) <= cfg.max_tokens


def checked_sampler(cfg, path):
    """A Sampler, if the file can be read: before the engines load."""
    read_demos(path, nr.load_tokenizer(cfg), cfg, notify=lambda text: None)
    return nr.Sampler(cfg)


def train(run, path):
    """nano_rlvr's loop without sampling: the advantage of each demonstration is its reward, 1."""
    held_out = {example["question"] for example in run.eval_set}
    demos = read_demos(path, run.llm.get_tokenizer(), run.cfg, held_out)

    def collect_rollouts(run, step):
        cfg = run.cfg
        batch = nr.data.batch_at(
            demos, step, cfg.prompts, cfg.seed, ranks.rank(), ranks.world_size())
        groups = [[dataclasses.replace(r)] for r in batch]
        minibatches = [groups[i::cfg.minibatches] for i in range(cfg.minibatches)]
        return minibatches, groups

    nr.train(run, collect_rollouts=collect_rollouts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--demos", required=True)
    own, argv = parser.parse_known_args()
    fixed = "--algo rft --samples 1 --correction none --mismatch_bound 1e9".split()
    nr.main(
        [*fixed, *argv],
        lambda run: train(run, own.demos),
        lambda cfg: checked_sampler(cfg, own.demos))
