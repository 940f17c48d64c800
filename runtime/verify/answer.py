"""What a short text says: its number. The reward math compares LaTeX: examples/math_reward.py.

Why not a library for numbers: of the 166 marked answers in tests/adversarial.txt, math-verify gets
27 wrong (units, 1 thousand, full-width digits, several numbers) and quantulum3 26.
"""
import re
import unicodedata
from fractions import Fraction

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


def replaced(text, table):
    """The text after re.sub for each (pattern, replacement) of the table."""
    for pattern, replacement in table:
        text = re.sub(pattern, replacement, text)
    return text


def vote(answer):
    r"""What a final answer votes for: its number, or its text if it is more than a number.

    Equal numbers are one vote, in whatever form they are written. 5x and 5 eggs are not 5. Texts
    are compared without spaces and $, which is cheaper than math-verify for every pair of answers.

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
