"""Makes a small model that can call Python but mostly guesses, and its task: products of numbers.

    python -m examples.tool_model --out runs/tool          90 seconds on one core; seeded (--seed)

Writes the model, train.jsonl and test.jsonl. The supervised examples are products such as 347*86,
of numbers with up to three digits, each answered in one of two ways:

    guess: off by up to 10 %, nearly always wrong
    <answer>28913</answer>
    call: always right
    <python>print(347*86)</python><output>29842</output><answer>29842</answer>

The output is not learned: it comes from the program. The share of calls is HABIT, the same for all
questions, so that the greedy answer is a guess. With examples/python_tool.py RL finds out that
calling pays.
"""
import argparse
import json
from pathlib import Path

import data
import nano_rlvr
from data import generate
from models.tiny.make_tiny import cold_start, make_tokenizer, new_model, training_example

ROOT = Path(__file__).resolve().parents[1]
HABIT = 0.3  # share of the examples that call Python
TAGS = ["<python>", "</python>", "<output>", "</output>"]  # one token each


def product(rng):
    """A product of two numbers with 1 to 3 digits each."""
    digits = rng.randint(1, 3), rng.randint(1, 3)
    a, b = [rng.randrange(10 ** (n - 1), 10**n) for n in digits]
    return {"question": f"{a}*{b}", "answer": str(a * b)}


def demonstration(example, rng):
    """A completion in parts [(text, whether it is to be learned), ...]."""
    question, answer = example["question"], int(example["answer"])
    if rng.random() < HABIT:
        return [(f"<python>print({question})</python>", True),
                (f"<output>{answer}</output>", False),
                (f"<answer>{answer}</answer><|endoftext|>", True)]
    guess = round(answer * rng.uniform(0.9, 1.1))
    return [(f"<answer>{guess}</answer><|endoftext|>", True)]


def main():
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", default="runs/tool")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(TAGS)

    def sample(rng):
        example = training_example(product, rng)
        completion = []
        loss_mask = []
        for text, is_learned in demonstration(example, rng):
            ids = tokenizer(text)["input_ids"]
            completion += ids
            loss_mask += [is_learned] * len(ids)
        prompt = data.encode(example, tokenizer, "chat")
        return nano_rlvr.Rollout(
            prompt, completion, "", False, [0.0] * len(completion), loss_mask)

    model = new_model(tokenizer, args.seed, args.layers)
    cold_start(model, sample, args.steps, args.batch, args.lr, args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for split, size in (("train", 8192), ("test", 512)):
        rows = generate(product, split, size, args.seed)
        lines = [json.dumps(row) + "\n" for row in rows]
        (Path(args.out) / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
