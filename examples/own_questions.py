"""Instruction data that a model makes itself: questions, then answers to them, for examples.sft.

    python -m examples.own_questions --model SmolLM2-360M-Instruct --task gsm8k --template chat \\
        --max_tokens 512 --steps 0 --name own
    python -m examples.sft --demos runs/own/demos.jsonl --model SmolLM2-135M --template chat \\
        --task gsm8k --steps 20

A chat model that is given the beginning of a user's turn and nothing else goes on with a question
(Magpie, arXiv:2406.08464); a base model needs examples of questions (Self-Instruct, 2212.10560).
Of --questions samples those are kept that ended, are not short, and share less than SIMILAR of
their words, in the same order, with each one that was kept before. Then the model answers. Only
completions that ended are written. No verifier looks at them: for that, see
learn/lab/rejection.py. --template: chat or a file. --steps 0 makes the data and evaluates.
"""
import argparse
import difflib
import json

import nano_rlvr as nr
from data import encode, request_seed

MARK = "QUESTION"  # stands for the question in a prompt
SIMILAR = 0.7
LEAST = 3  # words of a question


def opening(tokenizer, template):
    """The token ids of a prompt up to where the question begins."""
    prompt = encode({"question": MARK}, tokenizer, template)
    before, _, _ = tokenizer.decode(prompt).partition(MARK)
    return tokenizer(before, add_special_tokens=False)["input_ids"]


def overlap(words, others):
    """The share of the words of two questions that they have in common, in the same order."""
    return difflib.SequenceMatcher(None, words, others, autojunk=False).ratio()


def choose(texts):
    """The texts that are long enough and unlike all that were kept before."""
    kept = []
    for text in texts:
        words = text.lower().split()
        is_new = all(overlap(words, other.lower().split()) < SIMILAR for other in kept)
        if len(words) >= LEAST and is_new:
            kept.append(text.strip())
    return kept


def make(run, count):
    """[{"question", "completion"}, ...] by the starting model."""
    cfg = run.cfg
    llm = run.llm
    tokenizer = llm.get_tokenizer()
    prompts = [opening(tokenizer, cfg.template)] * count
    seeds = [request_seed(cfg.seed, "questions", number) for number in range(count)]
    asked = nr.rollout(llm, prompts, 1, 1.0, cfg.max_prompt // 2, seeds)
    questions = choose(r.text for r in asked if not r.truncated)
    prompts = [encode({"question": question}, tokenizer, cfg.template) for question in questions]
    answers = nr.rollout(llm, prompts, 1, 0.0, cfg.max_tokens) if prompts else []
    rows = []
    for question, r in zip(questions, answers):
        if not r.truncated:
            rows.append({"question": question, "completion": r.text})
    return rows


def train(run, count):
    """Writes the file into the folder of the run, then trains or evaluates as the script does."""
    nr.sync_weights(run.policy, run.llm)  # wakes vLLM
    rows = make(run, count)
    run.llm.sleep()
    path = run.log.folder / "demos.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.log.say(f"{len(rows)} questions with answers of {count} samples are in {path}")
    nr.train(run)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--questions", type=int, default=256)
    own, argv = parser.parse_known_args()
    nr.main(argv, lambda run: train(run, own.questions))
