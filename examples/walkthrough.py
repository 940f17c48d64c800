"""The walkthrough of a text on RLVR as one file: GSM8K, a format with tags, LoRA.

    python -m examples.walkthrough --model Qwen2.5-Coder-0.5B-Instruct --steps 25

Any flag of nano_rlvr.py may follow. GSM8K=folder in the environment names a folder with GSM8K's
train.jsonl and test.jsonl; without it they come from the hub. The parts of the text, in its order:

    1. prompt     a system message that asks for <reasoning> and <answer>, then the question
    2. rewards    +1 if the text in <answer> is the gold answer, else -1; 0.5 to every completion
                  "for the format"
    3. LoRA       rank 8, alpha 16, dropout 0.05
    4. training   GRPO at learning rate 3e-4

Two things that the text does not say. GRPO subtracts the group's mean, so the constant 0.5 changes
no advantage; `formatted`, here with weight 0, pays only for the format. And +1/-1 gives the same
advantages as 1/0, up to eps, because GRPO divides by the group's standard deviation.

nano_rlvr.py's adapters have alpha = 2 * rank, here 16, and no dropout. `train` adds the dropout to
the trainer's model. The log-probs of a model with dropout are random, and vLLM samples without it:
the metric mismatch and the correction then measure that noise, too. --dropout 0 leaves it out.
"""
import argparse
import functools
import os
import re

import data
from rewards import each

FILE = "examples/walkthrough.py"
SYSTEM = ("Answer in this form: <reasoning>the steps</reasoning><answer>the number</answer>. "
          "Write nothing else.")
FORMAT = re.compile(r"\s*<reasoning>.+</reasoning>\s*<answer>.+</answer>\s*", re.S)
FLAGS = f"""--data {FILE}:make --eval_data {FILE}:make --template chat
    --rewards {FILE}:correctness,{FILE}:constant,{FILE}:formatted:0
    --lora_rank 8 --lr 3e-4 --prompts 16 --samples 8 --max_tokens 256 --mismatch_bound 1"""


# ---- 1. rows

def make(split, size, seed):
    """Yields GSM8K's rows with the system message. A solution of GSM8K ends with `#### 72`."""
    folder = os.environ.get("GSM8K")
    source = f"{folder}/{split}.jsonl" if folder else "gsm8k"
    for example in data.load(source, split, size):
        chat = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": example["question"]},
        ]
        yield {"prompt": chat, "answer": example["answer"].rpartition("####")[2].strip()}


# ---- 2. rewards

def extract_answer(text):
    """What the first <answer> holds; "" without one."""
    return text.partition("<answer>")[2].partition("</answer>")[0].strip()


@each
def correctness(text, answer):
    """1.0 if the answer is, letter by letter, the gold one, else -1.0."""
    return 1.0 if extract_answer(text) == answer else -1.0


@each
def constant(text):
    """0.5, whatever the text is, as in the walkthrough."""
    return 0.5


@each
def formatted(text):
    """0.5 if the text has the form that the system message asks for, else 0.0."""
    return 0.5 if FORMAT.fullmatch(text) else 0.0


# ---- 3. and 4. LoRA and training

def train(run, dropout):
    """nano_rlvr's loop, with dropout before each adapter of the trainer's model."""
    import torch

    import nano_rlvr as nr
    for module in run.policy.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(dropout)
    nr.train(run)


def main():
    import nano_rlvr as nr  # not at the top: the rewards do not need it
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dropout", type=float, default=0.05)
    args, flags = parser.parse_known_args()
    nr.main([*FLAGS.split(), *flags], train=functools.partial(train, dropout=args.dropout))


if __name__ == "__main__":
    main()
