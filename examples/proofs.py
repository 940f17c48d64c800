"""Small formal proofs as a task: a program checks whether each line follows from earlier ones.

    F=examples/proofs.py
    python nano_rlvr.py --model Qwen2.5-0.5B-Instruct --template chat --data $F:make \\
        --eval_data $F:make --rewards $F:proof --max_tokens 256
    python -m examples.process_rewards --step_rewards $F:steps --data $F:make --eval_data $F:make \\
        --rewards $F:proof --template chat

The proof goes on with the numbers of the premises; a third rule takes a part of x&y:

    1. a     2. b     3. a&b->c          the premises; to be proven: c
    4. a&b from 1 2                      both of them
    5. c from 4 3                        modus ponens: x and x->y give y

The first command rewards a whole proof with 1.0; in the second one each line is a step.
"""
import random
import re
from itertools import pairwise

from data import generate
from rewards import after_thinking, each

NUMBER = re.compile(r"^\s*\d+\.")  # before a line; the place of the line counts
LETTERS = "abcdefghijklmnop"
ASK = """Premises:
{premises}
Prove {goal}. Write one line per step and nothing else: its number, a formula, and the numbers of \
the lines from which it follows, as in "9. x&y from 2 7" or "10. z from 9 5"."""


# ---- the task

def draw(rng):
    """Two facts, and 2 to 4 rules: each gives a new letter from one or two known ones."""
    letters = rng.sample(LETTERS, 8)
    known = letters[:2]
    premises = known.copy()
    for new in letters[2:rng.randint(4, 6)]:
        condition = rng.sample(known, rng.randint(1, 2))
        premises.append("&".join(condition) + f"->{new}")
        known.append(new)
    premises.append(f"{letters[7]}->{letters[6]}")  # it leads nowhere
    rng.shuffle(premises)
    listed = [f"{number}. {premise}" for number, premise in enumerate(premises, 1)]
    question = ASK.format(premises="\n".join(listed), goal=known[-1])
    return {"question": question, "answer": known[-1], "premises": premises}


def make(split, size, seed):
    return generate(draw, split, size, seed)


# ---- the checker

def follows(formula, used):
    """Whether a formula follows from one or two others by one rule. No "->" is ever derived."""
    if "->" in formula:
        return False
    if len(used) == 1:
        parts = used[0].split("&")
        return "->" not in used[0] and formula in parts
    for first, second in pairwise([*used, used[0]]):  # in both orders
        if second == f"{first}->{formula}":
            return True
        if "->" not in first + second and formula == f"{first}&{second}":
            return True
    return False


def checked(text, premises):
    """[(end of a line in the text, its formula, whether it follows)] of the lines of a proof."""
    proof = after_thinking(text)
    end = len(text) - len(proof)
    known = premises.copy()
    found = []
    for line in proof.splitlines(keepends=True):
        end += len(line)
        if not line.strip():
            continue
        said, _, places = line.partition(" from ")
        formula = NUMBER.sub("", said).replace(" ", "")
        numbers = [int(number) for number in re.findall(r"\d{1,4}", places)]
        used = [known[number - 1] for number in numbers if 0 < number <= len(known)]
        is_complete = len(used) == len(numbers) and len(used) in (1, 2)
        is_new = formula not in known  # or repeating a line would pay
        is_right = is_new and is_complete and follows(formula, used)
        known.append(formula if is_right else "?")  # nothing follows from a wrong line
        found.append((end, formula, is_right))
    return found


@each
def proof(text, answer, premises):
    """1.0 if every line follows and the last one is what had to be proven, else 0.0."""
    lines = checked(text, premises)
    is_whole = bool(lines) and all(is_right for _, _, is_right in lines)
    return float(is_whole and lines[-1][1] == answer)


@each
def steps(text, answer, premises):
    """For examples/process_rewards.py: 1.0 or 0.0 per line, and for the whole proof at its end."""
    lines = checked(text, premises)
    if not lines:
        return 0.0
    *earlier, last = lines
    values = [(end, float(is_right)) for end, _, is_right in earlier]
    whole = proof([text], [answer], [premises])
    return [*values, (last[0], whole[0])]


if __name__ == "__main__":
    print(draw(random.Random(0))["question"])
