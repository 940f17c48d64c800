"""The number that a short text states, exactly, with whatever typography and LaTeX a model puts around it."""
import re
from fractions import Fraction

WORTH = {"hundred": 10**2, "thousand": 10**3, "k": 10**3, "million": 10**6, "billion": 10**9}
DRESS = [  # (what, becomes); ¤ parts what must not run together
    (r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\0]|\\[!,;]|\\left|\\right|\^\{?\\circ\}?|°", ""),
    (r"[\u00a0\u2007\u2009\u202f]|\\ |~", " "),
    (r"\{,\}", ","),
    (r"\\(?:text(?:bf|it)?|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}", r" \1 "),
    (r"(?<=\d)\s?(?=\\[dtc]?frac)", " "),  # 1\frac{1}{2}
    (r"\\[dtc]?frac\s?\{?(-?\d+)\}?\s?\{?(\d+)\}?(?!\d)", r"\1/\2 "),
    (r"(?<!\d)\*\*|\*\*(?![\d(])|[`_]{2}|`|\\?%|\\[()\[\]]", "¤"),  # Markdown; 10**3 stays what it is
    (r"([-+]?)\s?\\?[$€£¥₹]\s?", r"¤\1"),
    (r"(?<=[A-Za-z])[-/](?=[A-Za-z])", " "),  # km/h
    (r"(?<![A-Za-z])([kcmd]?m|ft|in|units?|inches|feet|met(?:er|re)s?)\s{0,2}\^\{?[23]\}?", r"\1 "),
]
DIGITS = str.maketrans("０１２３４５６７８９−–－＋，．％＄", "0123456789---+,.%$")
BLOB = re.compile(  # everything that hangs together around digits; whether it is a number is for NUMBER to say
    r"(?<![A-Za-z0-9_.^+*/\\-])[-+]?\.?\d(?:[\d.,:/^]|[eE*×x+-](?=[-+]?\.?\d)| (?=\d{3}(?!\d))| (?=\d{1,9}/\d)| ?/ ?(?=\d))*")
PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d{0,99})(?:\.\d{1,99})?"
NUMBER = re.compile(rf"([-+]?)(?:(\d{{1,9}}) (?=\d+/))?(?=[\d.])({PLAIN})(?:[eE]([-+]?\d\d?))?(?: ?/ ?(\d{{1,99}}))?")


def read_number(text, only=True):
    r"""The one number that a short text states, exactly, or None; with only=False the last of its numbers.

    Reads signs, thousands separators, decimals, fractions, mixed numbers, exponents, words of size (5 thousand),
    currency, units and LaTeX around them. A percent sign is a unit. Two different numbers, a range, an expression, a
    variable or a bound (> 7) are no answer; behind an equals sign only what follows the last one counts.

    >>> read_number(r"$1{,}234.50 per day"), read_number("1 1/2"), read_number(r"-\frac{3}{4}"), read_number("5-10")
    (Fraction(2469, 2), Fraction(3, 2), Fraction(-3, 4), None)
    """
    text = text.translate(DIGITS)
    for what, becomes in DRESS:
        text = re.sub(what, becomes, text)
    if only:
        text = re.split(r"=|≈|\\approx", text)[-1]
    values = []
    for m in list(BLOB.finditer(text))[0 if only else -1:]:
        value, size = _exact(m[0]), re.match(r"\s?([A-Za-z]+)", text[m.end():m.end() + 9])
        values.append(value and value * WORTH.get(size and size[1].lower(), 1))
    hedge = only and re.search(r"[-+*/^<>≤≥±×÷\\_|]|(?i:\b(?:not|or|than|between)\b)", BLOB.sub("", text))
    return None if hedge or len(set(values)) != 1 else values[0]


def _exact(blob):
    m = NUMBER.fullmatch(blob.rstrip(".,:/"))
    if not m or int(m[5] or 1) == 0:
        return None
    sign, whole, number, power, below = m.groups()
    value = int(whole or 0) + Fraction(re.sub("[ ,]", "", number)) * Fraction(10) ** int(power or 0) / int(below or 1)
    return -value if sign == "-" else value
