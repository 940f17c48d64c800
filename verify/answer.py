r"""What an answer says: its number, or LaTeX that is compared with the gold answer's.

Why not a library for numbers: of the 166 marked answers in tests/adversarial.txt, math-verify gets
27 wrong (units, 1 thousand, full-width digits, several numbers) and quantulum3 26.
"""
import contextlib
import functools
import logging
import os
import random
import re
import resource
import unicodedata
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from verify import pool

MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "k": 10**3, "million": 10**6, "billion": 10**9}
CLEAN_UP = [  # (pattern, replacement); ¤ keeps apart what must not become one number
    (r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\0]", ""),
    (r"\\[!,;]|\\left|\\right|\^\{?\\circ\}?|°", ""),
    (r"[\u00a0\u2007\u2009\u202f]|\\ |~", " "),
    (r"\{,\}", ","),
    (r"[¼-¾⅐-⅞]", lambda m: f" {_plain(m[0])}"),  # 2½ is 2 1/2
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
PLAIN_NUMBER = re.compile(f"-?{PLAIN}")
NUMBER = re.compile(  # sign, integer part of a mixed number, number, exponent, denominator
    rf"([-+]?)(?:(\d{{1,9}}) (?=\d+/))?({PLAIN})(?:[eE]([-+]?\d\d?))?"
    r"(?: ?/ ?(\d{1,99}))?")
# as JSON, Python and calculators write them; 2e-5 may be Euler's number, 2e-05 is not
E_NOTATION = re.compile(
    r"-?(?:\d+(?:\.\d+)?[eE][-+]\d{2,3}|(?:1|\d+\.\d+)[eE]-?\d{1,2})")
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
    text = _replaced(text.translate(DIGITS), CLEAN_UP)
    if only:
        text = re.split(r"=|≈|\\approx", text)[-1]
    values = []
    for m in list(CANDIDATE.finditer(text))[0 if only else -1:]:
        value, unit = _exact(m[0]), re.match(r"\s?([A-Za-z]+)", text[m.end():m.end() + 9])
        values.append(value and value * MULTIPLIERS.get(unit and unit[1].lower(), 1))
    rest = CANDIDATE.sub("", text)
    if only and re.search(r"[-+*/^<>≤≥±×÷\\_|]|(?i:\b(?:not|or|than|between)\b)", rest):
        return None  # an expression, a bound, or several answers
    return values[0] if len(set(values)) == 1 else None


def _replaced(text, table):
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
    if not m or int(m[5] or 1) == 0:
        return None
    sign, integer, number, exponent, denominator = m.groups()
    number = Fraction(re.sub("[ ,]", "", number)) * Fraction(10) ** int(exponent or 0)
    value = int(integer or 0) + number / int(denominator or 1)
    return -value if sign == "-" else value


def _plain(typed):
    """Superscripts, fractions and full-width letters in ASCII: "⁻²" -> "-2", "½" -> "1/2"."""
    return unicodedata.normalize("NFKC", typed).translate({0x2212: "-", 0x2044: "/", 0x2215: "/"})


def _based(m):
    """25_8 -> 77 b_{8}, which no number without a base 8 is equal to. 77 is 25 in base 36."""
    digits, base = m[1], re.sub(r"\\[a-z]+|base|[^A-Za-z\d]", "", m[2]) or "0"
    number = int(digits.replace(".", "z"), 36)
    return digits if base == "10" else rf"{number} b_{{{int(base, 36)}}} "


def _repeating(m):
    """0.1\\overline{6} -> \\frac{15}{90}"""
    first, period = m[1] + m[2], m[3] or m[4]
    difference = int(first + period) - int(first or 0)
    return rf"\frac{{{difference}}}{{{10**len(m[2]) * (10**len(period) - 1)}}}"


# What math-verify 0.9 and its latex2sympy2_extended 1.11 read wrongly or not at all
LATEX = (
    (r"[⁰¹²³⁴-⁾ⁿ]+", lambda m: f"^{{{_plain(m[0])}}}"),
    (r"[₀-₉]+", lambda m: f"_{{{_plain(m[0])}}}"),
    (r"[¼-¾⅐-⅞]", lambda m: r"\frac{%s}{%s}" % tuple(_plain(m[0]).split("/"))),
    (r"([√∛∜])\s?(\d+(?:\.\d+)?|[^\W\d]|\([^()]*\)|(?=\{))",
     lambda m: r"\sqrt[%d]" % ("√∛∜".find(m[1]) + 2) + (m[2] and f"{{{m[2]}}}")),
    ("[！-～⁄∕𝐀-𝟿]", lambda m: _plain(m[0])),
    ("∞", r"\\infty "), ("[·∙]", r"\\cdot "), ("∈", r"\\in "), ("°", r"^\\circ "),
    ("[−‐‑﹣]|(?<!\\d)(?<!\\d )–", "-"),
    (r"(?<![\\A-Za-z])(?:oo|[Ii]nfinity)(?![A-Za-z])", r"\\infty "),
    # names of functions and letters, upright or without a backslash
    (r"(?:\\(?:mathrm|operatorname|text)\s?(\{)|(?<![\\A-Za-z])(?<!(?:rm|xt|me)\{))"
     r"(pi|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp|alpha|beta|gamma|theta|lambda|phi|omega)"
     r"(?![A-Za-z])(?(1)\})", r"\\\2 "),
    (rf"(?<![\w.)}}]){E_NOTATION.pattern}(?![\w.])", lambda m: re.sub(
        "[eE](.+)", r" \\cdot 10^{\1}", m[0])),
    (r"\*\*", "^"), (r"\^\s?(-\d+)", r"^{\1}"),
    # mixed numbers without LaTeX; the library multiplies
    (r"(?<![\d.^_/}])(?<!frac )(\d+)\s([1-9]\d?)\s?/\s?(\d{1,3})(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s?\{?(\d+)\}?|\((\d+)\))", _repeating),
    (r"(?<![\w^.])\(([\dA-F.]+)\)(?=_)", r"\1"),
    (r"(?<![\w^.])([\dA-F]*\d[\dA-F.]*(?=_\s?\{?1[1-6])|\d[\d.]*)"
     r"_\s?(\d+|\w|\{(?:[^{}]|\{[^{}]*\})*\})", _based),
    # it takes all from the first \text to a } at the end for a unit: 5 \text{ to } \sqrt{36} was 5
    (r"\\(?:text|mbox|mathrm)\s?\{([^{}]*)\}(?=.+\}(?:\^\d)?$)", r" \1 "),
    # upright constants
    (r"\\(?:math(?:rm|it)|text(?:rm|it|normal)?|operatorname|rm)\s*(\{)?\s*([ei]|\\pi)(?![A-Za-z])"
     r"\s*(?(1)\})", r"{\2}"), (r"I(?=\s?\^)", "{I}"),  # it drops I's exponent
)

SECONDS = 5.0  # limit of a comparison outside Verifier, which has its own


@functools.lru_cache(1 << 14)  # the completions of a group often agree
def same_math(gold, answer):
    r"""Whether two LaTeX answers are equal; None if the gold answer cannot be read or time is over.

    Both are taken whole: no number is searched for inside them. Equal texts are equal, also where
    the gold answer cannot be read; one of letters only, in any script, always can. sympy hangs on
    some answers (9^{9^9}): outside a worker of Verifier, which has its own limit, the comparison
    runs in a process that can be killed. Raises MemoryError near the memory limit of a worker.

    >>> same_math(r"\frac{1}{2}", "0.5"), same_math(r"\text{(B)}", "B"), same_math("5", "5 eggs")
    (True, True, False)
    """
    gold, answer = _tidy(gold), _tidy(answer)
    if gold == answer != "":  # also if math-verify cannot read it
        return True
    if PLAIN_NUMBER.fullmatch(gold) and PLAIN_NUMBER.fullmatch(answer):
        return Fraction(gold) == Fraction(answer)
    if r"\text" in gold or re.fullmatch("[A-Za-z]{2,}", gold):  # a word or a multiple-choice letter
        words = [re.sub(r"\\[a-z]+|[^a-z0-9]", "", side.lower()) for side in (gold, answer)]
        if words[0] == words[1] and words[0].isalpha():  # no digits: 5.4 cents is not 54 cents
            return True
    if _amounts(gold) == _amounts(answer) != []:
        return True
    if pool.in_pool.is_set():
        equal = _compare(gold, answer)
    else:
        [equal] = _own_pool(os.getpid()).run([(gold, answer)])
    if isinstance(equal, bool):
        return equal
    return False if gold.isalpha() else None


def _amounts(text):
    """[("10", "hens"), ("9", "cows")] for "9 cows and 10 \\text{ hens}"; [] for any other text."""
    text = re.sub(r"\\(?:text|mathrm|mbox)\s?\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\band\b|[,;&]|\\(?=[\s,;&])", " ", text)
    amount = r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]{2}[A-Za-z\s]*)"
    found = re.findall(amount, text) if re.fullmatch(f"(?:{amount})+", text) else []
    return sorted((number, " ".join(words.split())) for number, words in found)


@functools.cache
def _own_pool(pid):
    """One worker for calls outside Verifier. Per process id: a fork does not inherit its thread."""
    return pool.Pool(_make_handler, workers=1, timeout=SECONDS)


def _make_handler():
    warm_math()
    return lambda task: _compare(*task), None


def _compare(gold, answer):
    """math-verify's verdict, None if it cannot read the gold answer.

    For workers: raises MemoryError where it may have failed for lack of their memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak_bytes()
    left = resource.getrlimit(resource.RLIMIT_DATA)[0] - pool.data_bytes()
    equal = _math_verify()(gold, answer)
    if not equal and _peak_bytes() - before > left / 2:
        _math_verify.cache_clear()  # it may have cached a failed parse
        raise MemoryError("near the memory limit, where math-verify reports unequal")
    return equal


def _peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _tidy(latex):
    r"""Without LaTeX's spaces, signs around a formula, invisible characters, the full stop at the
    end and the thousands separators of a number (1,000; 1 000; 11,\! 111)."""
    # before \! goes: "11, 111" would be a list
    latex = re.sub(r"(?<=\d),\\!\s*(?=\d{3})", ",", latex)
    latex = re.sub(r"(?<!\\)\\[,; ](?!\d{3}(?!\d)|[a-z])|~", " ", latex)  # 2\ 3/4 is not 23/4
    spaces, invisible = r"(?<!\\)\\[!,; ](?![a-z])", r"[\u200b-\u200f\u202a-\u202e\u2066-\u2069]"
    latex = re.sub(rf"{spaces}|{invisible}|(?<!\\)(?:\$|\\[()\[\]])", "", latex)
    latex = latex.strip().removesuffix(".").rstrip()
    if E_NOTATION.fullmatch(latex):
        return format(Decimal(latex), "f")
    return re.sub("[ ,~]", "", latex) if PLAIN_NUMBER.fullmatch(latex) else latex


@functools.cache
def _math_verify():
    from math_verify import LatexExtractionConfig, grader, parse, verify  # takes 0.3 s
    from sympy import Abs, FiniteSet, Float, Pow, Rational, Symbol, Tuple, UnevaluatedExpr, sign
    from sympy.core.function import AppliedUndef
    from sympy.core.relational import Relational
    from sympy.matrices import MatrixBase, MatrixExpr

    # it warns that its timeouts are off
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    latex = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]

    @functools.lru_cache(1 << 12)  # the completions of a group share their gold answer
    def read(text):  # its own timeout is signal.alarm, which cannot interrupt sympy's C code
        text = _replaced(text, LATEX)
        # i that is no index is I; to the library it is a letter. No interval (i, 2) ends at I
        complex_text = text if "_" in text else re.sub(r"(?<![A-Za-z\\])i(?![A-Za-z])", "{I}", text)
        found = [parse(rf"\boxed{{{each}}}", latex, "no_fallback", "first_match",
                       parsing_timeout=None) for each in dict.fromkeys((complex_text, text))]
        return found[0] or found[-1]

    def is_root(e):
        return isinstance(e, Pow) and e.exp.is_Rational and not e.exp.is_Integer

    def agree(pair, tolerance, equal):
        """Whether both are equal up to `tolerance`: with letters, at 12 points, of which 6 are
        positive. `equal` if fewer than 3 are left of those where no root is imaginary."""
        rng, tried = random.Random(0), 0
        pair = pair.xreplace({x: Rational(str(x)) for x in pair.atoms(Float)})
        letters = sorted(pair.free_symbols, key=str)
        roots = [e for e in pair.atoms(Pow) if is_root(e) and e.exp.q % 2 == 0 and e.free_symbols]
        pair = pair.replace(  # the cube root of a real number is real
            lambda e: is_root(e) and e.exp.q % 2 and e.free_symbols,
            lambda e: sign(e.base)**e.exp.p * Abs(e.base)**e.exp)
        for n in range(12 if letters else 3):
            low = 1 if n < 6 else -999
            point = {letter: Rational(rng.randint(low, 999), 10**rng.randint(1, 3))
                     for letter in letters}
            if all(root.base.subs(point).evalf() >= 0 for root in roots):
                a, b = (e.subs(point) for e in pair)
                largest = max(abs(a.evalf()), abs(b.evalf()))
                if not abs((a - b).evalf(maxn=300)) <= tolerance * largest:
                    return False
                tried += 1
        return tried >= 3 or equal

    library_equal = grader.sympy_numeric_eq

    def numeric_equal(a, b, *digits):
        """The library's verdict, corrected: it takes what is nearer than 1e-15 for equal, decimals
        nearer than 1e-6, and sqrt(a b) for another number than sqrt(a) sqrt(b)."""
        equal, pair = library_equal(a, b, *digits), Tuple(a, b)
        if pair.has(MatrixBase, MatrixExpr, UnevaluatedExpr):  # matrices entry by entry; percents
            return equal
        rounded = equal and (isinstance(a, Float) or isinstance(b, Float))
        if equal or pair.has(Float) or pair.free_symbols and any(map(is_root, pair.atoms(Pow))):
            with contextlib.suppress(Exception):  # of sympy, any type: it is no number
                return agree(pair, 0.01 if rounded else 1e-200, equal)
        return equal

    grader.sympy_numeric_eq = numeric_equal

    def is_range(answer, gold):
        """Whether the answer, such as 1 <= x < 2, may be compared with a gold interval.

        It must bound x or f(x) alone, because x^2 <= 4 may only repeat the question, and a variable
        that the gold answer names. math-verify would take 1 < x < 2 for the set {1, 2}, too."""
        if isinstance(gold, FiniteSet) or not gold.free_symbols <= answer.free_symbols:
            return False
        bounds = [[side for side in bound.args if side.free_symbols]
                  for bound in answer.atoms(Relational)]
        return all(len(b) == 1 and isinstance(b[0], Symbol | AppliedUndef) for b in bounds)

    def compare(gold, answer):
        if not read(gold):
            return None
        return verify(
            read(gold), read(answer), timeout_seconds=None,
            allow_set_relation_comp=any(is_range(said, read(gold)[0]) for said in read(answer)))

    return compare


def warm_math():
    """Compare one answer of each kind. Workers are forked with the caches that this fills."""
    answers = (
        r"\frac{3\sqrt{3}}{4}", "(1,2]", r"1<x\le 2", r"\{1,\pi\}", "x=1", "(x+1)^3", r"30^\circ",
        r"1 \pm \sqrt{19}", r"(-\infty, 2) \cup (3, \infty)", r"\cot x", "1,-2",
        r"\begin{pmatrix} 1 \\ a \end{pmatrix}", r"\frac{\sqrt{a}}{2}", r"0.5\sqrt{a}")
    for gold, answer in zip(answers, answers[1:] + answers[:1]):
        _math_verify()(_tidy(gold), _tidy(answer))
