"""Rejection sampling: several answers per question, of which the good ones go into a file.

    python -m learn.lab.rejection --steps 0 --model runs/lab/RL-3/final

Samples --samples answers to each of --questions questions and keeps those for which every reward
function of --rewards gave 1 or nothing: right, in the format, in one language. <run>/demos.jsonl is
then for examples.sft --demos. This is how R1's third stage makes its data (arXiv:2501.12948).
"""
import argparse
import json

import nano_rlvr as nr
from data import request_seed


def is_good(r):
    return not r.truncated and set(r.parts.values()) <= {1.0, None}


def train(run, questions):
    """Writes the file, then evaluates as the script does."""
    cfg = run.cfg
    examples = run.train_set[:questions]
    prompts = [example["prompt_ids"] for example in examples]
    seeds = [request_seed(cfg.seed, "rejection", number) for number in range(questions)]
    nr.sync_weights(run.policy, run.llm)  # wakes vLLM
    rollouts = run.rollout(
        run.llm, prompts, cfg.samples, cfg.temperature, cfg.max_tokens, seeds,
        examples=examples)
    run.llm.sleep()
    nr.score(rollouts, examples, run.verifier)
    lines = []
    groups = nr.in_groups(rollouts, cfg.samples)
    for example, group in zip(examples, groups):
        texts = {r.text for r in group if is_good(r)}
        for text in sorted(texts):
            row = {"question": example["question"], "completion": text}
            lines.append(json.dumps(row) + "\n")
    path = run.log.folder / "demos.jsonl"
    path.write_text("".join(lines))
    run.log.say(f"{len(lines)} of {len(rollouts)} answers are kept")
    nr.train(run)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--questions", type=int, default=256)
    args, argv = parser.parse_known_args()
    nr.main(argv, lambda run: train(run, args.questions))
