"""Programs as a task: small Python functions of 15 kinds. Three kinds are held out.

    F=examples/programs.py
    python nano_rlvr.py --model Qwen2.5-Coder-0.5B-Instruct --template chat --lora_rank 32 \\
        --data $F:make --eval_data $F:make,$F:new_kinds --answer_key none \\
        --rewards examples/code_reward.py:code --max_prompt 256 --max_tokens 256

A question describes a function and gives one example. The tests are three other calls, which run
in the jail (examples/jail.py). `make` has new questions of the trained kinds for evaluation,
`new_kinds` those of the held-out kinds.
"""
from data import generate

KINDS = {  # name: (argument, what the function returns, the expression that computes it)
    "count_above": (
        "numbers", "how many of the numbers are greater than {k}",
        "sum(x > {k} for x in numbers)"),
    "scaled": (
        "numbers", "a list of the numbers, each multiplied by {k}",
        "[{k} * x for x in numbers]"),
    "multiples": (
        "numbers", "a list of those numbers that are divisible by {k}",
        "[x for x in numbers if x % {k} == 0]"),
    "clipped": (
        "numbers", "a list of the numbers, with {k} in place of each number above {k}",
        "[min(x, {k}) for x in numbers]"),
    "largest": (
        "numbers", "a list of the {k} largest numbers, the largest one first",
        "sorted(numbers, reverse=True)[:{k}]"),
    "gaps": (
        "numbers", "a list with each number minus the number {k} places before it, if there is one",
        "[b - a for a, b in zip(numbers, numbers[{k}:])]"),
    "rotated": (
        "numbers", "the list with its first {k} numbers moved to the end",
        "numbers[{k}:] + numbers[:{k}]"),
    "repeated": (
        "word", "the word {k} times, with a dash between two words",
        "'-'.join([word] * {k})"),
    "shifted": (
        "word", "the word with each letter replaced by the one {k} places later in the alphabet, "
        "in which a follows z",
        "''.join(chr((ord(c) - 97 + {k}) % 26 + 97) for c in word)"),
    "every": (
        "word", "the letters at the positions 0, {k}, 2 * {k} and so on, as one text",
        "word[::{k}]"),
    "chunks": (
        "word", "a list of pieces of {k} letters each, of which the last one may be shorter",
        "[word[i:i + {k}] for i in range(0, len(word), {k})]"),
    "long_words": (
        "sentence", "a list of the words that have more than {k} letters",
        "[word for word in sentence.split() if len(word) > {k}]"),
    "initials": (
        "sentence", "the first {k} letters of each word, joined without spaces",
        "''.join(word[:{k}] for word in sentence.split())"),
    "digit_powers": (
        "n", "the sum of the decimal digits of n, each raised to the power {k}",
        "sum(int(digit) ** {k} for digit in str(n))"),
    "steps": (
        "n", "a list of all multiples of {k} from {k} up to n",
        "list(range({k}, n + 1, {k}))"),
}
NEW = ["rotated", "chunks", "initials"]  # the kinds that are held out
WORDS = "a bee candle door elephant far garden hat ink jungle key lantern moon nest open".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_argument(rng, argument):
    """A value for an argument of this name. Lists and words are longer than every k."""
    if argument == "numbers":
        return [rng.randint(-20, 20) for _ in range(rng.randint(6, 9))]
    if argument == "word":
        return "".join(rng.choices(LETTERS, k=rng.randint(6, 12)))
    if argument == "sentence":
        return " ".join(rng.sample(WORDS, 6))
    return rng.randint(11, 99)


def solution(name, k):
    """A right program."""
    argument, _, expression = KINDS[name]
    return f"def {name}({argument}):\n    return {expression.format(k=k)}"


def draw(rng, names):
    """A question about a function of one of these kinds, with its tests."""
    name = rng.choice(names)
    k = rng.randint(2, 5)
    argument, text, _ = KINDS[name]
    program = {}
    exec(solution(name, k), program)
    calls = []
    for _ in range(4):
        value = draw_argument(rng, argument)
        calls.append(f"{name}({value!r}) == {program[name](value)!r}")
    example, *others = calls
    question = (f"Write a Python function {name}({argument}) that returns {text.format(k=k)}. "
                f"Example: {example}. Answer with one ```python block.")
    return {"question": question, "tests": [f"assert {call}" for call in others],
            "kind": name, "k": k}


def trained(rng):
    return draw(rng, [name for name in KINDS if name not in NEW])


def held_out(rng):
    return draw(rng, NEW)


def make(split, size, seed):
    """Rows of the trained kinds: no question is in both splits."""
    return generate(trained, split, size, seed)


def new_kinds(split, size, seed):
    """Rows of the held-out kinds."""
    return generate(held_out, split, size, seed)
