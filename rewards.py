r"""Verifiers: what a completion is worth. Every reward is a function in TRL's convention,

    f(completions, **columns) -> list[float | None]        # None: no verdict, left out of the group, never counted as 0

with completions as strings or TRL's message lists and columns the dataset's other columns, one value a completion: TRL's
reward functions work here and these work in TRL. `Verifier` (tools/verifier.py) runs them in processes that can be
killed, weighs and adds them:

    >>> with Verifier("gsm8k:1,format:0.2") as verify:
    ...     verify(["<think>6*12</think><answer>72</answer>", "It is 71."], answer=["#### 72", "#### 72"])
    ([1.2, 0.0], {'gsm8k': [1.0, 0.0], 'format': [1.0, 0.0]}, {'reward/timeouts': 0.0, 'reward/crashes': 0.0})

name         columns it reads                     1.0 means
gsm8k        answer                               the final answer is this number
math         answer (LaTeX)                       the final answer is equal to it (math-verify)
countdown    numbers, target                      an expression over exactly these numbers makes the target
format       -                                    <think>…</think><answer>…</answer> and nothing else
code         tests                                the program passes every test, in a jail
instruction  instruction_id_list, kwargs          every instruction is followed (IFEval's ids and arguments)
judge        question, [rubric], [answer]         a language model gives it 10 of 10
language     question or prompts                  all words of the reasoning are in the prompt's language
overlong, length_kimi, repetition, random         shaping and control: see each function

Which answer counts (gsm8k, math, countdown): only text after the last </think>; there the last <answer>, \boxed{} or
`####`; without any of them the last "answer is …", "Answer: …" or line "A: …"; for gsm8k alone, failing these, the last
number. So words added after a marked answer change nothing, and a second marked answer replaces the first.

Called directly, as TRL does, a function has no time limit of its own: `math` may hang on 9^{9^9}. Verifier's may not.
"""
import ast
import functools
import hashlib
import inspect
import json
import math
import re
import time
from fractions import Fraction

import sandbox
from tools import judge
from tools.instructions import INSTRUCTIONS, follows  # noqa: F401
from tools.language import identifier, language_of, words_by_language
from tools.latex import same_math, warm_math
from tools.number import read_number
from tools.verifier import Verifier, load  # noqa: F401


def text_of(completion):
    """The text of a completion, be it a string or TRL's list of messages (the contents joined).

    >>> text_of([{"role": "assistant", "content": "72"}])
    '72'
    """
    return completion if isinstance(completion, str) else "".join(m.get("content") or "" for m in completion)


def each(worth):
    """Makes a reward in TRL's convention of f(text, **row) -> float or None, which judges one completion.

    f's parameters are the columns it reads. A single number, text or None is a column with that value in every row.

    >>> each(lambda text, wanted, factor=1.0: factor * (text == wanted))(["a", "b"], ["a", "a"], factor=0.5)
    [0.5, 0.0]
    """
    names = list(inspect.signature(worth).parameters)[1:]

    @functools.wraps(worth)
    def reward(completions, *unnamed, **columns):
        columns |= zip(names, unnamed)
        given = {name: columns[name] for name in names if columns.get(name) is not None}
        rows = [[column] * len(completions) if isinstance(column, (str, int, float)) else column for column in given.values()]
        return [worth(text_of(completion), **dict(zip(given, row)))
                for completion, *row in zip(completions, *rows, strict=True)]

    return reward


# ------------------------------------------------------------------------------------------------ reading an answer

LONGEST = 1000  # characters a final answer may have: beyond it nobody has answered, and costs stay bounded
MARK = re.compile(r"<answer>|\\f?boxed\s{0,3}\{|####[ \t]{0,9}(?=[-+−$€£¥₹\\.\d])")
SAYS = re.compile(r"(?im)(?:\banswer\W{0,4}(?:is\b|:|=)|^[ \t]{0,9}A[ \t]?:)[\s:*]{0,9}(?=[^\n]{0,99}[\d\\])")


def after_thinking(text):
    """What follows the last </think>; nothing if a <think> was not closed (the completion was cut at the length limit)."""
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def final_answer(text):
    r"""The answer that counts (the rule is at the top of the file), "" if it cannot be read, None if nothing is marked.

    >>> final_answer(r"\boxed{1}? No, \boxed{\frac{1}{2}}. I am sure."), final_answer("The answer is 7 km.\nBye")
    ('\\frac{1}{2}', '7 km.')
    """
    text = after_thinking(text)
    marks = list(MARK.finditer(text))
    if not marks:
        text = text[-LONGEST:]
        marks = list(SAYS.finditer(text))
    if not marks:
        return None
    mark, rest = marks[-1][0], text[marks[-1].end():]
    if mark.endswith("{"):
        answer = _to_closing_brace(rest[:LONGEST + 1])
    else:
        answer = rest.partition("</answer>")[0]  # it may be missing: vLLM strips the stop string it ended on
        if mark != "<answer>":
            answer = answer.partition("\n")[0]
    return answer.strip() if len(answer) <= LONGEST else ""


def _to_closing_brace(text):
    depth = 1
    for m in re.finditer(r"\\.|[{}]", text, re.S):  # \{ is a set's brace, not LaTeX's
        depth += (m[0] == "{") - (m[0] == "}")
        if depth == 0:
            return text[:m.start()]
    return ""  # cut off in the middle: \boxed{7 may have been going to be 72


# ------------------------------------------------------------------------------------------------ one right answer


@each
def gsm8k_reward(text, answer):
    """1.0 if the final answer is exactly the gold number, else 0.0 (Cobbe et al., arXiv 2110.14168).

    `answer` is a number or a whole GSM8K solution with `#### 72`; where no number can be read from it, None.
    """
    gold, said = read_number(str(answer).rpartition("####")[2]), final_answer(text)
    value = read_number(said) if said is not None else read_number(after_thinking(text)[-LONGEST:], only=False)
    return None if gold is None else float(value == gold)


@each
def math_reward(text, answer):
    r"""1.0 if the final answer is mathematically equal to the gold LaTeX, else 0.0.

    Numbers and text are compared by tools/latex.py, the rest (sets, intervals, matrices, expressions) by math-verify; its
    rules hold: x=5 is 5, a decimal is equal to 6 places. `answer` may be a whole solution: its last \boxed{} counts, then.

    >>> math_reward([r"\boxed{\{2, 1\}}", r"\boxed{(1, 2]}"], answer=[r"\{1,2\}", "[1,2]"])
    [1.0, 0.0]
    """
    gold, said = str(answer), final_answer(text)
    gold = final_answer(gold) if r"\boxed" in gold else gold
    return None if not gold else float(bool(said) and same_math(gold, said))


math_reward.warm = warm_math

SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": ""}
OPERATORS = {ast.Add: Fraction.__add__, ast.Sub: Fraction.__sub__, ast.Mult: Fraction.__mul__, ast.Div: Fraction.__truediv__}


@each
def countdown_reward(text, numbers, target):
    """1.0 if the final answer is an expression in + - * / ( ) that uses exactly `numbers`, each once, and is `target`.

    "(2 + 3) * 4" or, with its value, "(2 + 3) * 4 = 20". Exact arithmetic; no powers, no //, no signs, no other numbers.
    """
    answer = final_answer(text) or ""
    for sign, plain in SIGNS.items():
        answer = answer.replace(sign, plain)
    answer, equals, value = (side.strip() for side in answer.strip(" $").partition("="))
    if not re.fullmatch(r"[\d+\-*/() ]{1,300}", answer, re.A) or equals and value != str(target):
        return 0.0
    if sorted(map(int, re.findall(r"\d+", answer))) != sorted(map(int, numbers)):
        return 0.0  # before parsing: from here on the expression is as small as the numbers are few
    try:
        return float(_evaluate(ast.parse(answer, mode="eval").body) == Fraction(target))
    except (SyntaxError, ZeroDivisionError, KeyError, AttributeError, MemoryError, RecursionError):
        return 0.0


def _evaluate(node):  # KeyError: // or **, AttributeError: a sign, a call
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    return OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))


# ------------------------------------------------------------------------------------------------ form, programs, opinions

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


@each
def format_reward(text, format_partial=False):
    """1.0 for DeepSeek-R1's format, <think>…</think><answer>…</answer> and nothing else (arXiv 2501.12948), else 0.0.

    Each tag once, in order, the answer not empty; only white space between the blocks and around them. A completion may
    begin after a <think> that the prompt ended with. format_partial=True: 0.2 for each tag that occurs exactly once.
    """
    if "<think>" not in text and "</think>" in text:
        text = "<think>" + text
    pieces = re.split(f"({'|'.join(TAGS)})", text)  # text, tag, text, tag, …
    tags = pieces[1::2]
    if tags == TAGS and pieces[6].strip() and not (pieces[0] + pieces[4] + pieces[8]).strip():
        return 1.0
    return 0.2 * sum(tags.count(tag) == 1 for tag in TAGS) * format_partial


def _share(passed, partial):
    """All or nothing, or with partial the share of what was passed; None if there was nothing to pass."""
    return None if not passed else sum(passed) / len(passed) if partial else float(all(passed))


FENCE = re.compile(r"```[ \t]{0,9}([\w+-]{0,20})[^\n`]{0,99}\n(.*?)\n?```", re.S)  # of any language: a bash block ends, too


def program_of(text):
    """The program a completion hands in: see code_reward; None if there is none.

    >>> program_of("<think>```python\\n1\\n```</think> Here:\\n```python\\nprint(2)\\n```")
    'print(2)'
    """
    text = after_thinking(text)
    blocks = [block for language, block in FENCE.findall(text) if language.lower() in ("", "python", "python3", "py")]
    return blocks[-1] if blocks else final_answer(text) if "<answer>" in text else None


@each
def code_reward(text, tests, timeout=5.0, allow_unsafe_code=False, code_partial=False):
    """1.0 if the program passes every test, else 0.0 (code_partial=True: the share it passes); runs in sandbox.py's jail.

    The program is the last fenced block after </think>, or else what is in <answer>. `tests`, a list or its JSON text:
    {"input": "2 3", "output": "5"} is standard input and output (compared line by line, spaces at line ends aside),
    "assert add(2, 3) == 5" is Python run behind the program. All tests of a sample share 0.9 × timeout seconds; a
    program that needs longer has failed. Raises sandbox.NoIsolation where the jail cannot be built.
    """
    tests = json.loads(tests) if isinstance(tests, str) else tests
    program, end = program_of(text), time.monotonic() + 0.9 * timeout
    if not program:
        return _share([False] * len(tests), code_partial)
    asserts = [test for test in tests if isinstance(test, str)]
    pairs = [test for test in tests if not isinstance(test, str)]
    passed = sandbox.run_asserts(program, asserts, 0.9 * timeout, allow_unsafe_code) if asserts else []
    outputs = sandbox.run_program(program, [pair["input"] for pair in pairs], end - time.monotonic(),
                                  allow_unsafe_code=allow_unsafe_code) if pairs else []
    passed += [out is not None and _lines(out) == _lines(pair["output"]) for out, pair in zip(outputs, pairs)]
    return _share(passed, code_partial)


def _lines(text):
    return [line.rstrip() for line in text.rstrip().splitlines()]


code_reward.warm = sandbox.isolation


@each
def instruction_reward(text, instruction_id_list, kwargs, instruction_loose=False, instruction_partial=False):
    """1.0 if the text after </think> follows every instruction, else 0.0 (instruction_partial=True: the share followed).

    The two columns are IFEval's: per example a list of ids (INSTRUCTIONS has those known) and a list of their arguments.
    An empty answer follows nothing. instruction_loose=True is IFEval's loose rule: an instruction also counts as
    followed without the first line, the last line, both, or Markdown's asterisks. An unknown id raises ValueError.
    """
    text = after_thinking(text).strip()
    followed = [follows(text, name, arguments, instruction_loose)
                for name, arguments in zip(instruction_id_list, kwargs, strict=True)]
    return _share(followed, instruction_partial)


@each
def judge_reward(text, question, rubric=None, answer=None, judge_url=None, judge_model=None, judge_cache=None, timeout=5.0):
    """A language model's mark for the text after </think>, 0.0 to 1.0; None if there is no verdict in 0.9 × timeout.

    judge_url is an OpenAI-compatible endpoint such as http://localhost:8001/v1 (`vllm serve` is one), judge_model its
    model; the key, if it needs one, is in OPENAI_API_KEY. Verdicts are kept in the SQLite file judge_cache (default
    ~/.cache/nano_rlvr/judge.sqlite), so that a resumed run gets the marks it had. Optional columns: rubric, answer (a
    reference). A model's opinion is not a verifier: watch what it comes to like.
    """
    if not judge_url or not judge_model:
        raise ValueError("judge needs judge_url and judge_model")
    text = after_thinking(text).strip()
    return judge.ask(text, question, rubric, answer, judge_url, judge_model, judge_cache, 0.9 * timeout) if text else 0.0


# ------------------------------------------------------------------------------------------------ shaping and control


@each
def language_reward(text, question=None, prompts=None, language=None):
    """The share of the reasoning's words in the language of the question, 0.0 to 1.0 (DeepSeek-R1, arXiv 2501.12948).

    The reasoning is what precedes the last </think>, or everything. `language` (a code such as "en", one or one a
    completion) overrides what py3langid finds in question or prompts. None where there are no words, or no language.
    """
    wanted = language or language_of(question if question is not None else text_of(prompts))
    reasoning = text.rpartition("</think>")[0] if "</think>" in text else text
    count = words_by_language(reasoning.replace("<think>", ""))
    return count.get(wanted, 0) / sum(count.values()) if count and wanted else None


language_reward.warm = identifier


@each
def overlong_reward(text, completion_ids, max_tokens, overlong_buffer=None):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to max_tokens - buffer, then down to -1.

    The buffer is a fifth of max_tokens unless given (4,096 of 20,480 in the paper).

    >>> overlong_reward(["", "", ""], completion_ids=[[0] * 80, [0] * 90, [0] * 101], max_tokens=100, overlong_buffer=20)
    [0.0, -0.5, -1.0]
    """
    buffer = max_tokens // 5 if overlong_buffer is None else overlong_buffer
    over = len(completion_ids) - (max_tokens - buffer)
    return 0.0 if over <= 0 else -1.0 if over >= buffer else -over / buffer


@each
def repetition_reward(text, completion_ids=None, repetition_ngram=4):
    """Minus the share of n-grams that occurred before, 0.0 to -1.0 (Yeo et al., arXiv 2502.03373, appendix C.2).

    >>> repetition_reward(["a b c d e", "go go go go go go"])
    [0.0, -0.6666666666666667]
    """
    words = text.split() if completion_ids is None else completion_ids
    grams = list(zip(*(words[i:] for i in range(repetition_ngram))))
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def length_kimi_reward(completions, prompts, correct=None, completion_ids=None, **columns):
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), between -0.5 and 0.5, within the answers to a prompt.

    0.5 - (length - shortest) / (longest - shortest) for a right answer; for a wrong one the same but at most 0; all 0
    when the lengths are equal. `correct` is the first reward of the spec (Verifier passes it; right means 1); without
    it `math` decides. Lengths are in tokens where completion_ids is given, else in characters.

    >>> length_kimi_reward(["a", "ab", "abc"], prompts=["q"] * 3, correct=[1, 0, 0])
    [0.5, 0.0, -0.5]
    """
    correct = math_reward(completions, **columns) if correct is None else correct
    sizes = [len(x) for x in completion_ids or map(text_of, completions)]
    groups = {}
    for prompt, size in zip(prompts, sizes, strict=True):
        groups.setdefault(repr(prompt), []).append(size)
    rewards = []
    for prompt, size, right in zip(prompts, sizes, correct, strict=True):
        low, high = min(groups[repr(prompt)]), max(groups[repr(prompt)])
        value = 0.5 - (size - low) / (high - low) if high > low else 0.0
        rewards.append(None if right is None else value if right == 1 else min(0.0, value))
    return rewards


length_kimi_reward.whole_batch = True  # needs the other answers to its prompt: Verifier calls it once, after the rest


def random_reward(completions, prompts=None, index=None, step=None, random_seed=0, **_):
    """A fair coin that knows nothing of the answer: the control of Shao et al. (Spurious Rewards, arXiv 2506.10947).

    0.0 or 1.0 from a hash of (random_seed, step, place in the batch, prompt, completion), so that a resumed run tosses
    the same coins. Without the place, equal texts would always share a coin, which is something to learn; `index` and
    `step` are columns (Verifier adds index; pass step, a number, so that the same text at the same place is tossed anew).
    """
    n = len(completions)
    rows = zip(index or range(n), prompts or [None] * n, map(text_of, completions), strict=True)
    return [float(hashlib.blake2b(repr((random_seed, step, *row)).encode(), digest_size=1).digest()[0] & 1) for row in rows]


# ------------------------------------------------------------------------------------------------ names and weights

REWARDS = {
    "gsm8k": gsm8k_reward, "math": math_reward, "countdown": countdown_reward, "format": format_reward,
    "code": code_reward, "instruction": instruction_reward, "judge": judge_reward, "overlong": overlong_reward,
    "length_kimi": length_kimi_reward, "language": language_reward, "repetition": repetition_reward, "random": random_reward,
}


def parse_rewards(spec):
    """"name:weight,…" -> [(name, weight, function), …]; the weight may be left out (1).

    A name of REWARDS, "my_file.py:function" or "installed.module:function". ValueError, in one line, for anything else.

    >>> [(name, weight) for name, weight, _ in parse_rewards("gsm8k,format:0.2,trl.rewards:think_format_reward:0.1")]
    [('gsm8k', 1.0), ('format', 0.2), ('think_format_reward', 0.1)]
    """
    parts = []
    for item in map(str.strip, spec.split(",")):
        where, *rest = item.split(":")
        if where not in REWARDS and not rest:
            raise ValueError(f"unknown reward {where!r}; known: {', '.join(REWARDS)}; or my_file.py:function, module:function")
        name = where if where in REWARDS else rest.pop(0)
        try:
            weight = float(":".join(rest)) if rest else 1.0
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            raise ValueError(f"reward {item!r}: {':'.join(rest)!r} is not a weight, which must be finite")
        if name in [other for other, *_ in parts]:
            raise ValueError(f"reward {name!r} is named twice")
        parts.append((name, weight, REWARDS.get(where) or load(where, name)))
    return parts
