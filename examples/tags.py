"""GSM8K with a strict format: the answer counts only in its tags. So RL has a format and arithmetic
to teach, and a second reward with weight 0 tells them apart.

    python nano_rlvr.py --model Qwen2.5-Coder-0.5B-Instruct --template examples/tags.txt \\
        --rewards examples/tags.py:strict,examples/tags.py:loose:0 --max_tokens 128

The template shows one solved question. Without it, this model writes long answers without a tag.
"""
import re

from rewards import each

NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def same(found, answer):
    gold = answer.rpartition("####")[2]  # GSM8K's solutions end with #### 72
    return bool(found) and float(found[-1].replace(",", "")) == float(gold.replace(",", ""))


@each
def strict(text, answer):
    """1 if the text ends with <answer>number</answer> and the number is the answer."""
    return float(same(re.findall(rf"<answer>\s*\$?({NUMBER})\s*</answer>\s*$", text), answer))


@each
def loose(text, answer):
    """1 if the last number of the text is the answer."""
    return float(same(re.findall(NUMBER, text), answer))
