r"""Rewards: what a completion is worth. Every reward is a function in TRL's convention,

    f(completions, **columns) -> list[float | None]

with one value per completion. None means "no reward": the completion is left out, it does not
count as 0. Completions are strings or TRL's lists of messages, columns are those of the data set
and what Verifier adds. So TRL's reward functions work here, and these functions work in TRL.
KNOWN, at the end of this file, has their names; examples/README.md names more.

Your own reward is a file and a flag. `@each` turns a function of one text and its columns into
TRL's convention:

    # my_file.py; use it with: python nano_rlvr.py --rewards my_file.py:brief
    from rewards import each, final_answer

    @each
    def brief(text, answer):
        return float(final_answer(text) == answer and len(text) < 400)

gsm8k, math and countdown read the final answer in this way: only the text after the last
</think> counts. The answer is the last <answer>, \boxed{} or `####` in it; without these the last
"answer is ...", "Answer: ..." or line "A: ..." (see _answer_sentence); for gsm8k alone, without any
of these, the last number. Words after a marked answer change nothing. A second marked answer
replaces the first, but boxes with only a comma or "and" between them are one answer.

`Verifier` (runtime/verify/verifier.py) runs the rewards of a spec in processes that can be killed,
weights and adds them. Only there has a function a time limit, apart from `math`, which has its own.
"""
import functools
import inspect
import math
import re
from pathlib import Path

from runtime.verify import verifier
from runtime.verify.answer import read_number
from runtime.verify.verifier import text_of


def each(score_one):
    """Decorator: turns score_one(text, **columns) -> float or None into a reward function.

    The parameters of score_one are the columns it reads. A column may also be a single number or
    string, which then holds for every completion. Where a column is missing or None, the default is
    taken.

    >>> each(lambda text, wanted, by=1.0: by * (text == wanted))(["a", "b"], ["a", "a"], by=0.5)
    [0.5, 0.0]
    """
    parameters = list(inspect.signature(score_one).parameters.values())[1:]
    names = [p.name for p in parameters]
    with_default = {p.name for p in parameters if p.default is not p.empty}

    @functools.wraps(score_one)
    def reward(completions, *args, **columns):
        columns |= zip(names, args)
        columns = {name: [column] * len(completions) if isinstance(column, (str, int, float))
                   else column for name in names if (column := columns.get(name)) is not None}
        values = []
        for completion, *row in zip(completions, *columns.values(), strict=True):
            given = {name: value for name, value in zip(columns, row)
                     if value is not None or name not in with_default}
            values.append(score_one(text_of(completion), **given))
        return values

    return reward


# -------------------------------------------------------------------------------- reading an answer

MAX_ANSWER = 1000  # characters; a longer final answer does not count, which bounds the cost
ANSWER_MARK = re.compile(  # "#### 1. April" is a heading
    r"<answer>|\\f?boxed\s{0,3}\{|####[ \t]{0,9}(?=[-+−$€£¥₹\\.\d])"
    r"(?!\d{1,3}(?:\.\d{1,3})?(?:\\?[.):](?:[ \t]{1,9}\S|[^\W\d])|[ \t][-–—:][ \t]{1,9}[^\W\d]"
    r"|(?:st|nd|rd|th)\b|\ufe0f?\u20e3))")
ANSWER_PHRASE = re.compile(  # "The answer is correct." states none; "A: north" may be an option
    r"(?im)(?:\banswer\W{0,4}(?:is\b|:|=)(?!\s{1,9}correct\b[^\d\\\n]*$)"
    r"|^(?:\#{1,6}[ \t]|\*\*)(?:[^\w\n]|the\b|final\b){0,9}answer[:* \t]{0,9}\n"  # a heading
    r"(?=\s{0,9}(?:[$*\\]|\S{1,99}\s{0,9}$))"
    r"|^[ \t]{0,9}A[ \t]?:(?=[\s:*]{0,9}[^\n]{0,99}[\d\\]))[\s:*]{0,9}")
# between two boxes around a comma or "and": they are one answer
AROUND_AND = re.compile(r"\\(?:text|mathrm|q?quad|[()\[\],;:! ])|[\s${}*~]")
# numeric=True in final_answer
LINE_WITH_NUMBER = re.compile(r"(?=[^\n]{0,99}[\d\\])(?:(?!</answer>)[^\n])*")
FORMULA_OR_LETTER = re.compile(r"\$|\(?[A-Z]\b")
SENTENCE = re.compile(r"""(?xm)
    (?s: \$\$ .*? \$\$ | \\\[ .*? \\\] )?  # a displayed formula may have several lines
    (?: 1\.\s (?!I\ hope) )?  # the first item of a list
    [^\n]*?
    (?= </answer> | \*{0,3}\.?\*{0,3}[ \t]*$ | [。।] | ,?\s+(?:because|since|I\ hope)\b
      | \*{0,3}\.\*{0,3} (?= [ \t]+[^\W\d_a-z] )  # then a capital: 3.5 and "e.g. 5" go on
        (?! \s+(?i: no|not|wait|actually|sorry|hmm|or|but|however|alternatively|maybe|perhaps
                    |unless|if)\b )
        (?! [^\n]*\sB[.:)] ) )  # A. 5 B. 6: a list of options""")


def after_thinking(text):
    """The text after the last </think>; "" if a <think> is not closed: it was cut off."""
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def final_answer(text, numeric=False):
    r"""The final answer by the rule at the top; "" if cut off or too long, None if not marked.

    numeric=True is gsm8k's rule for an answer that is not marked: only a line with a number counts,
    and it is returned to its end.

    >>> final_answer(r"\boxed{1}? No, \boxed{\frac{1}{2}}. I am sure.")
    '\\frac{1}{2}'
    >>> final_answer("The final answer is $3.5$. I hope it is correct.")
    '$3.5$'
    """
    text = after_thinking(text)
    marks = list(ANSWER_MARK.finditer(text))
    if not marks:
        return _answer_sentence(text[-MAX_ANSWER:], numeric)
    mark, rest = marks[-1][0], text[marks[-1].end():]
    if mark.endswith("{"):
        answer = _joined_boxes(text, marks)
    else:
        answer = rest.partition("</answer>")[0]  # may be missing: vLLM removes a stop string
        if mark != "<answer>":
            answer = answer.partition("\n")[0]
    return answer.strip() if len(answer) <= MAX_ANSWER else ""


def _answer_sentence(text, numeric):
    r"""What follows the last "answer is", "Answer:" or "A:", or None.

    If that line has no number and no LaTeX command, it counts only if it begins with a formula or a
    capital letter (Answer: C), or if no earlier one has a number. The answer ends with its line,
    before "because", "since" or "I hope", or at a full stop that a capital letter follows, but not
    before a word that takes it back ("5. No, 6"). A closing $ does not end it: "$3$ or $4$" and
    "$5$ million" are not 3 and 5."""
    starts = [m.end() for m in ANSWER_PHRASE.finditer(text)]
    lines = [line for start in starts if (line := LINE_WITH_NUMBER.match(text, start))]
    if numeric:
        return lines[-1][0].strip() if lines else None
    if lines and not FORMULA_OR_LETTER.match(text, starts[-1]):
        starts = [line.start() for line in lines]
    return SENTENCE.match(text, starts[-1])[0].strip() if starts else None


def _joined_boxes(text, marks):
    """The content of the last box and of those before it that "," or "and" joins to it: "1, 2"."""
    boxes, start = [], None
    for mark in reversed(marks):
        content = _up_to_closing_brace(text[mark.end():mark.end() + MAX_ANSWER + 1])
        between = text[mark.end() + len(content) + 1:start]
        if boxes and not (content and boxes[0]
                          and AROUND_AND.sub("", between) in (",", "and", ",and")):
            break  # such as "Wait, it is": the later box replaces this one
        boxes.append(content)
        start = mark.start()
    return ", ".join(reversed(boxes))


def _up_to_closing_brace(text):
    depth = 1
    for m in re.finditer(r"\\.|[{}]", text, re.S):  # \{ is a character, not a LaTeX group
        depth += (m[0] == "{") - (m[0] == "}")
        if depth == 0:
            return text[:m.start()]
    return ""  # cut off: \boxed{7 may be the start of \boxed{72}


# ------------------------------------------------------------------------------- one correct answer

@each
def gsm8k_reward(text, answer):
    """1.0 if the final answer is exactly the gold number, else 0.0 (arXiv 2110.14168).

    `answer` is a number or a GSM8K solution that ends with `#### 72`. None if it has no number."""
    gold = read_number(str(answer).rpartition("####")[2])
    return None if gold is None else float(final_number(text) == gold)


gsm8k_reward.reads_gold = True  # such attributes: see Traits in runtime/verify/verifier.py


def final_number(text):
    """The number in the final answer as a Fraction, by gsm8k's rule, or None."""
    said = final_answer(text, numeric=True)
    if said is None:
        return read_number(after_thinking(text)[-MAX_ANSWER:], only=False)
    return read_number(said)


# ------------------------------------------------------------------------------ the task `products`

def numbers_in(text):
    return re.findall(r"-?\d+", text.replace(",", ""))


@each
def right(text, answer):
    """1.0 if the last number of the text is the answer."""
    return float(numbers_in(text)[-1:] == [answer])


@each
def anywhere(text, answer):
    """1.0 if any number of the text is the answer: what the format alone can gain is the difference
    to `right`. With weight 0 it is only shown."""
    return float(answer in numbers_in(text))


# --------------------------------------------------------------------------------------- by name

EXAMPLES = Path(__file__).parent / "examples"
KNOWN = {  # name: function  # the columns it reads; what 1.0 means
    "gsm8k": "rewards:gsm8k_reward",  # answer; the final answer is this number
    "math": f"{EXAMPLES}/math_reward.py:math_reward",  # answer (LaTeX); they are equal
    "countdown": f"{EXAMPLES}/countdown.py:countdown_reward",  # numbers, target
    "right": "rewards:right",  # answer; the last number of the text is this number
    "anywhere": "rewards:anywhere",  # answer; any number of the text is this number
    "format": f"{EXAMPLES}/shaping_rewards.py:format_reward",  # <think>...</think><answer>...
    "overlong": f"{EXAMPLES}/shaping_rewards.py:overlong",  # completion_ids; -1 at max_tokens
    "random": f"{EXAMPLES}/random_reward.py:random_reward",  # heads of a coin: a control
}
# only processes that can be killed import a user's file: Verifier gets names, not functions
Verifier = functools.partial(verifier.Verifier, known=KNOWN)
parse_spec = functools.partial(verifier.parse_spec, known=KNOWN)


def columns_of(rollouts, examples, step):
    """The columns that the reward functions of a run get: {name: a value per rollout}.

    Those of the examples, None where one lacks it; prompts (the questions), completion_ids and step
    (of the loop); sample_index, the number of a completion among those of its prompt. Verifier adds
    others. rollouts: the same number for each example, in their order."""
    n = len(rollouts) // len(examples)
    names = set().union(*examples) - {"prompt_ids", "completions"}  # the trainer's own
    columns = {name: [e.get(name) for e in examples for _ in range(n)] for name in names}
    return columns | {"prompts": columns["question"], "step": step,
                      "sample_index": [*range(n)] * len(examples),
                      "completion_ids": [r.completion for r in rollouts]}


def start_verifier(cfg, train_set, eval_set, notify=print):
    """The Verifier of --rewards. notify(text) is called if some gold answers cannot be read. Raises
    ValueError with one line if a reward reads a column that its rows lack, or no gold answer."""
    started = Verifier(
        cfg.rewards, timeout=cfg.reward_timeout, messages=cfg.template == "chat",
        random_seed=cfg.seed, max_tokens=cfg.max_tokens,
        overlong_buffer=math.ceil(cfg.overlong_buffer * cfg.max_tokens) or None)
    source = cfg.data or cfg.task
    for examples, name in (train_set, source), (eval_set, cfg.eval_data or source):
        started.check_columns(examples, name)
        started.count_unreadable(examples, notify)
    return started
