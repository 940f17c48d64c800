r"""What a completion answers: its final answer, the number in a short text, and a vote.

Rewards read the final answer in this way. Only the text after the last </think> counts. The answer
is the last <answer>, \boxed{} or `####` in it. A text without these answers with its last
"answer is ...", "Answer: ..." or line "A: ..." (see _answer_sentence). For gsm8k alone, a text
without any of these answers with its last number. Words after a marked answer change nothing. A
second marked answer replaces the first, but boxes with only a comma or "and" between them are one
answer.

Numbers are read here and not by a library: of the 166 marked answers in tests/adversarial.txt,
math-verify gets 27 wrong (units, 1 thousand, full-width digits, several numbers), quantulum3 26.
"""
import re
import unicodedata
from fractions import Fraction

# ------------------------------------------------------------------------------- the final answer

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
    r"""The final answer by the rule above; "" if cut off or too long, None if not marked.

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


def final_number(text):
    """The number in the final answer as a Fraction, by gsm8k's rule, or None."""
    said = final_answer(text, numeric=True)
    if said is None:
        return read_number(after_thinking(text)[-MAX_ANSWER:], only=False)
    return read_number(said)


# ------------------------------------------------------------------------------- the number in it

MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "k": 10**3, "million": 10**6, "billion": 10**9}
CLEAN_UP = [  # (pattern, replacement); ¤ keeps apart what must not become one number
    (r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\0]"
     r"|\\[!,;]|\\left|\\right|\^\{?\\circ\}?|°", ""),
    (r"[\u00a0\u2007\u2009\u202f]|\\ |~", " "),
    (r"\{,\}", ","),
    (r"[¼-¾⅐-⅞]", lambda m: f" {in_ascii(m[0])}"),  # 2½ is 2 1/2
    (r"\\(?:text(?:bf|it)?|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}", r" \1 "),
    (r"(?<=\d)\s?(?=\\[dtc]?frac)", " "),  # 1\frac{1}{2}
    (r"\\[dtc]?frac\s?\{?(-?\d+)\}?\s?\{?(\d+)\}?(?!\d)", r"\1/\2 "),
    (r"(?<!\d)\*\*|\*\*(?![\d(])|[`_]{2}|`|\\?%|\\[()\[\]]", "¤"),  # Markdown, but not 10**3
    (r"([-+]?)\s?\\?[$€£¥₹]\s?", r"¤\1"),
    (r"(?<=[A-Za-z])[-/](?=[A-Za-z])", " "),  # km/h
    (r"(?<![A-Za-z])([kcmd]?m|ft|in|units?|inches|feet|met(?:er|re)s?)\s{0,2}\^\{?[23]\}?", r"\1 "),
]
DIGITS = str.maketrans(
    "０１２３４５６７８９−–－＋，．％＄", "0123456789---+,.%$")
CANDIDATE = re.compile(  # digits and all that is attached to them; NUMBER decides what is a number
    r"(?<![A-Za-z0-9_.^+*/\\-])[-+]?\.?\d"
    r"(?:[\d.,:/^]|[eE*×x+-](?=[-+]?\.?\d)| (?=\d{3}(?!\d))| (?=\d{1,9}/\d)| ?/ ?(?=\d))*")
PLAIN = r"(?=[\d.])(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ ~]\d{3})+|\d{0,99})(?:\.\d{1,99})?"
NUMBER = re.compile(  # sign, integer of a mixed number, number with exponent, denominator (not 0)
    rf"([-+]?)(?:(\d{{1,9}}) (?=\d+/))?({PLAIN}(?:[eE][-+]?\d\d?)?)(?: ?/ ?(?!0+$)(\d{{1,99}}))?")
BARE_NUMBER = re.compile(r"(?:[\d\s.,/%${}+-]|\\(?:[dt]?frac|[!,;%$() \[\]]))+")


def read_number(text, only=True):
    r"""The one number that a short text states, as a Fraction, or None; only=False: its last one.

    Reads signs, thousands separators, decimals, fractions, mixed numbers, exponents, words such as
    thousand, and currency, units and LaTeX around them. A percent sign counts as a unit. Returns
    None for two different numbers, a range, an expression, a variable or a bound (> 7). In an
    equation only the part after the last equals sign counts.

    >>> [read_number(text) for text in (r"$1{,}234.50 per day", "1 1/2", r"-\frac{3}{4}", "5-10")]
    [Fraction(2469, 2), Fraction(3, 2), Fraction(-3, 4), None]
    """
    text = replaced(text.translate(DIGITS), CLEAN_UP)
    if only:
        text = re.split(r"=|≈|\\approx", text)[-1]
    values = []
    for m in list(CANDIDATE.finditer(text))[0 if only else -1:]:
        value, unit = _exact(m[0]), re.match(r"\s?([A-Za-z]+)", text[m.end():m.end() + 9])
        values.append(value and value * MULTIPLIERS.get(unit and unit[1].lower(), 1))
    rest = CANDIDATE.sub(" 0 ", text)
    if only and re.search(
            r"[-+*/^<>≤≥±×÷\\_|√π]| 0  ?[²³xyzni]\b|(?i:\b(?:not|or|than|between|and a half)\b"
            r"|\b(?:minus|negative|plus|times|by|x|twice|double|half of)\b\W* 0 "
            r"| 0 \s*(?:squared|tenths|hundredths|lakh|crore|bn|trillion)\b)", rest):
        return None  # an expression, a bound, or several answers
    return values[0] if len(set(values)) == 1 else None


def is_float(text):
    """Whether a decimal has as many digits as a float, so that the last ones may be noise.

    >>> is_float("3244047.0999999996"), is_float("0.3000001")
    (True, False)
    """
    digits = re.sub(r"^[-+0.,]+|\D", "", text)
    return "." in text and len(digits) >= 15


def replaced(text, table):
    """The text after re.sub for each (pattern, replacement) of the table."""
    for pattern, replacement in table:
        text = re.sub(pattern, replacement, text)
    return text


def vote(answer):
    r"""What a final answer votes for: its number, or its text if it is more than a number.

    Equal numbers are one vote, in whatever form they are written. 5x and 5 eggs are not 5. Texts
    are compared without spaces and $, which is cheaper than same_math for every pair of answers.

    >>> [vote(text) for text in ("72.0", "$72$", "1{,}000", r"\frac{3}{4}", "5x", "(1, 2)")]
    [Fraction(72, 1), Fraction(72, 1), Fraction(1000, 1), Fraction(3, 4), '5x', '(1,2)']
    """
    number = read_number(answer) if BARE_NUMBER.fullmatch(answer) else None
    return re.sub(r"[\s$]", "", answer) if number is None else number


def _exact(candidate):
    m = NUMBER.fullmatch(candidate.rstrip(".,:/"))
    if not m:
        return None
    sign, integer, number, denominator = m.groups()
    value = int(integer or 0) + Fraction(re.sub("[ ,]", "", number)) / int(denominator or 1)
    return -value if sign == "-" else value


def in_ascii(typed):
    """Superscripts, fractions and full-width letters in ASCII: "⁻²" -> "-2", "½" -> "1/2"."""
    return unicodedata.normalize("NFKC", typed).translate({0x2212: "-", 0x2044: "/", 0x2215: "/"})
