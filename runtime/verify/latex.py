r"""Whether two answers in LaTeX are equal; math_reward in rewards.py asks this.

Outside a worker of Verifier, as when TRL calls the reward, a comparison has a limit of 5 seconds;
its verdict is then None.
"""
import contextlib
import functools
import logging
import os
import random
import re
import resource
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from runtime.verify import pool
from runtime.verify.answer import PLAIN, in_ascii, replaced

PLAIN_NUMBER = re.compile(f"-?{PLAIN}")
# as JSON, Python and calculators write them; 2e-5 may be Euler's number, 2e-05 and 2e5 are not
E_NOTATION = re.compile(
    r"-?(?:\d+(?:\.\d+)?[eE](?:[-+]\d{2,3}|\d{1,2})|(?:1|\d+\.\d+)[eE]-\d{1,2})")
WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm)|mbox)\s?\{([^{}]*)\}")
CHOICE = re.compile(  # an option with its letter, \textbf{(D)} 15, and no second letter
    r"\\(?:text|math)(?:bf|rm)?\s?\{\s?\(([A-J])\)\s?\}\s*-?(?:\d|\\(?:[dt]?frac|sqrt|\$))"
    r"(?!.*(?:\([A-J]\)|\b(?:or|and)\b|,\s))")
HALF_OF_DAY = re.compile(r"(?i)(?<![A-Z\\])([ap])\.?\s?m(?![A-Z])")  # a.m., PM, but not \pm
COUNTS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}  # powers of ten
BASES = "zero one two three four five six seven eight nine ten eleven twelve".split()


def _based(m):
    """25_8 -> 77 b_{8}, which no number without a base 8 is equal to. 77 is 25 in base 36."""
    digits, base = m[1], re.sub(r"\\[a-z]+|base|[^A-Za-z\d]", "", m[2]) or "0"
    base = str(BASES.index(base)) if base in BASES else base
    number = int(digits.replace(".", "z"), 36)
    return digits if base == "10" else rf"{number} b_{{{int(base, 36)}}} "


def _repeating(m):
    """0.1\\overline{6} -> \\frac{15}{90}"""
    first, period = m[1] + m[2], m[3] or m[4]
    difference = int(first + period) - int(first or 0)
    return rf"\frac{{{difference}}}{{{10**len(m[2]) * (10**len(period) - 1)}}}"


def _ratio(m):
    """3:4:5 -> (\\frac{3}{5}, \\frac{4}{5}); the library divides 3 by 4 and by 5."""
    *parts, last = m[0].split(":")
    return "(" + ", ".join(rf"\frac{{{part}}}{{{last}}}" for part in parts) + ")"


TIDY = (
    (r"(?<=\d),\\!\s*(?=\d{3})", ","),  # before \! goes: "11, 111" would be a list
    (r"(?<!\\)\\[,; ](?!\d{3}(?!\d)|[a-z])|~", " "),  # 2\ 3/4 is not 23/4
    (r"(?<!\\)\\(?:[!,; ](?![a-z])|[()\[\]])|(?<!\\)\$"
     r"|[\u200b-\u200f\u202a-\u202e\u2066-\u2069]", ""),
)
# What math-verify 0.9 and its latex2sympy2_extended 1.11 read wrongly or not at all
LATEX = (
    # colours, weights and sizes
    (r"\\(?:text)?color\s?\{\w+\}|\\hspace\s?\{\w+\}|\\text\s?\{\\\$\}"
     r"|\\(?:[bB]igg?[lrm]?|boldsymbol|bm|bf|mathsf|underline|[lL]arge)(?![A-Za-z])", ""),
    (r"\\\\\s?\[\d[\d.]*\s?[a-z]{2}\]|\\cr(?![a-z])", r"\\\\ "), (r"\{smallmatrix\}", "{pmatrix}"),
    (r"\\lbrace(?![a-z])", r"\\{"), (r"\\rbrace(?![a-z])", r"\\}"),
    (r"\\varnothing", r"\\emptyset "),
    (r"\\mathbb\s?([A-Z])|\\([RZNQC])(?![A-Za-z])", r"\\mathbb{\1\2}"),
    (r"\\(?:sfrac|nicefrac)(?![a-z])", r"\\frac"),
    (r"\\([dt]?)frac\s+([A-Za-z])\s?([A-Za-z\d])", r"\\frac{\2}{\3}"),
    # as in books of other countries
    (r"\\(?:operatorname\s?(\{))?(arc)?tg(?![a-z])(?(1)\})", r"\\\2tan "),
    (r"(?<![A-Za-z\\])C_\{?(\d+)\}?\^\{?(\d+)\}?", r"\\binom{\1}{\2}"), (r"\s?;\s?", ", "),
    ("∶|\\\\colon(?![a-z])", ":"), (r"^[^:=]+(?::[^:=]+){2,}$", _ratio),
    (r"^\\\{\s?[a-z]\s?(?:\\in\s?\\mathbb\{R\}\s?)?(?:\\mid|[|:])(.*)\\\}$", r"\1"),  # {x | x > 2}
    # the library drops words at the end, whatever they say
    (rf"(?<=[\d}}])\s*(\\(?:text|mathrm|mbox)\s?\{{)?\s*({'|'.join(COUNTS)})s?\b",
     lambda m: rf" \cdot 10^{{{COUNTS[m[2]]}}} {m[1] or ''}"),
    (r"(?<=\d)\s*\\(?:text|mathrm)\s?\{\s*dozen\b", r" \\cdot 12 \\text{"),
    (r"\\(?:text|mathrm|mbox)\s?\{(\s*(?:squared|cubed|halves|thirds"
     r"|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?)\b[^{}]*"
     r"|[^{}]*\b(?:or|not|if|unless|except)\b[^{}]*|(?:[^{}]*[\s(,–-])?\d+\W*)\}$", r" \1 "),
    (r"(?<=[\d}])(?:,\s?)?(?:\\[lcd]?dots|\.\.\.|…)(?=\s?(?:\\\}|\))?$)", " d_{ots}"),
    (r"\}\s*/\s*\\(?:text|mathrm)\s?\{\s*", "/"),
    # degrees: it takes sin 30° for the sine of 30
    (r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s?\^\{?-?\d\}?)?\s?(?:\\left)?[({]?\s?)(\d+)\s?"
     r"(?:°|\^\{?\\circ\s?\}?)",
     r"\1{\\frac{\2\\pi}{180}}"),
    (r"^(?!.*['′]|.*prime|.*\\(?:sin|cos|tan|cot|sec|csc)).*$", lambda m: re.sub(
        r"\^\{?\\circ\s?\}?|°", "", m[0])),
    (r"[⁰¹²³⁴-⁾ⁿ]+", lambda m: f"^{{{in_ascii(m[0])}}}"),
    (r"[₀-₉]+", lambda m: f"_{{{in_ascii(m[0])}}}"),
    (r"[¼-¾⅐-⅞]", lambda m: r"\frac{%s}{%s}" % tuple(in_ascii(m[0]).split("/"))),
    (r"([√∛∜])\s?(\d+(?:\.\d+)?|[^\W\d]|\([^()]*\)|(?=\{))",
     lambda m: r"\sqrt[%d]" % ("√∛∜".find(m[1]) + 2) + (m[2] and f"{{{m[2]}}}")),
    ("[！-～⁄∕𝐀-𝟿]", lambda m: in_ascii(m[0])),
    ("∞", r"\\infty "), ("[·∙]", r"\\cdot "), ("∈", r"\\in "), ("°", r"^\\circ "),
    ("[−‐‑﹣]|(?<!\\d)(?<!\\d )–", "-"),
    (r"(?<![\\A-Za-z])(?:oo|[Ii]nfinity)(?![A-Za-z])", r"\\infty "),
    # names of functions and letters, upright or without a backslash
    (r"(?:\\(?:mathrm|operatorname|text)\s?(\{)|(?<![\\A-Za-z])(?<!(?:rm|xt|me)\{))"
     r"(pi|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp"
     r"|alpha|beta|gamma|theta|lambda|phi|omega)(?![A-Za-z])(?(1)\})", r"\\\2 "),
    (rf"(?<![\w.)}}]){E_NOTATION.pattern}(?![\w.])", lambda m: re.sub(
        "[eE](.+)", r" \\cdot 10^{\1}", m[0])),
    (r"(?<![\\A-Za-z])factorial\s?(\([^()]*\))", r"{\1!}"),
    (r"\*\*", "^"), (r"\^\s?(-\d+)", r"^{\1}"),
    # mixed numbers without LaTeX; the library multiplies
    (r"(?<![\d.^_/}])(?<!frac )(\d+)\s([1-9]\d?)\s?/\s?(\d{1,3})(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s?\{?(\d+)\}?|\((\d+)\))", _repeating),
    (r"(?<![\w^.])\(([\dA-F.]+)\)(?=_)", r"\1"),
    (r"(?<![\w^.])([\dA-F]*\d[\dA-F.]*(?=_\s?\{?1[1-6])|\d[\d.]*)"
     r"_\s?(\d+|\w|\{(?:[^{}]|\{[^{}]*\})*\})", _based),
    # it takes all from the first \text to a } at the end for a unit: 5 \text{ to } \sqrt{36} was 5
    (r"\\(?:text|mbox|mathrm)\s?\{([^{}]*)\}(?!\^\{?\d\}?$)(?=.+\}(?:\^\d)?$)", r" \1 "),
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
    if _typed(gold) == _typed(answer) != "":  # also if math-verify cannot read it
        return True
    halves = [{half.lower() for half in HALF_OF_DAY.findall(side)} for side in (gold, answer)]
    if all(halves) and halves[0] != halves[1]:
        return False
    chosen = [CHOICE.match(side) for side in (gold, answer)]
    letters = [m[1] if m else _typed(side).strip("()") for m, side in zip(chosen, (gold, answer))]
    if sum(map(bool, chosen)) == 1 and letters[0] == letters[1]:
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


def _typed(latex):
    """Without \\text{} and spaces that keep no digits apart: \\text{June }20 is June 20."""
    return re.sub(r"(?<![\d\s])\s+|\s+(?![\d\s])", "", WRAPPED.sub(r"\1", latex))


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
    latex = replaced(latex, TIDY).strip().removesuffix(".").rstrip()
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
        text = replaced(text, LATEX)
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
