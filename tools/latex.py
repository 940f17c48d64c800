r"""Whether two answers in LaTeX are equal: by math-verify, where it takes more than reading them."""
import contextlib
import functools
import logging
import re
import resource
from fractions import Fraction
from pathlib import Path

PLAIN = re.compile(r"-?(?:\d{1,99}|\d{1,3}(?:,\d{3})+)(?:\.\d{1,99})?|-?\.\d{1,99}")


@functools.lru_cache(1 << 14)  # a group's completions often agree
def same_math(gold, answer):
    r"""Whether two LaTeX answers are equal. Both are whole answers: nothing is searched for inside them.

    Has no time limit of its own: sympy may hang. Raises MemoryError at the process's limit, if it has one.

    >>> same_math(r"\frac{1}{2}", "0.5"), same_math(r"\text{(B)}", "B"), same_math("5", "5 eggs")
    (True, True, False)
    """
    a, b = _tidy(gold), _tidy(answer)
    if a == b:
        return True
    if PLAIN.fullmatch(a) and PLAIN.fullmatch(b):
        return Fraction(a.replace(",", "")) == Fraction(b.replace(",", ""))
    if r"\text" in gold or re.fullmatch("[A-Za-z]{2,}", a):  # a word or a letter of choice: (B) is B, East is east
        words = [re.sub(r"\\[a-z]+|[^a-z0-9]", "", side.lower()) for side in (a, b)]
        if words[0] == words[1] and words[0].isalpha():  # no digits: 5.4 cents is not 54 cents
            return True
    return _compare(a, b)


def _compare(a, b):
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit == resource.RLIM_INFINITY:  # not one of Verifier's workers
        return _math_verify()(a, b)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _peak()
    same = _math_verify()(a, b)
    if not same and _peak() - before > (limit - before) / 2:
        _math_verify.cache_clear()  # it may have kept what it failed to read
        raise MemoryError("too near the limit to believe that they differ: math-verify swallows MemoryError")
    return same


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # bytes


def _tidy(latex):
    invisible = r"(?<!\\)\\(?:left|right|[!,; ])(?![a-z])|\.\s*$|(?<!\\)\$|[\u200b-\u200f\u202a-\u202e\u2066-\u2069]"
    latex = re.sub(invisible, "", latex)
    return re.sub(r"\s+", " ", re.sub(r"\\[dt]frac", r"\\frac", latex.replace("−", "-").replace("{,}", ","))).strip()


@functools.cache
def _math_verify():
    from math_verify import LatexExtractionConfig, parse, verify  # here: 0.3 s that other rewards need not spend

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that we switched its own timeouts off
    latex = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]

    @functools.lru_cache(1 << 12)  # a group's completions share their gold answer
    def read(text):  # timeouts: its signal.alarm cannot interrupt sympy's C code; Verifier kills the process instead
        return parse(rf"\boxed{{{text}}}", latex, "no_fallback", "first_match", parsing_timeout=None)

    return lambda gold, answer: verify(read(gold), read(answer), timeout_seconds=None)


def warm_math():
    """Compares one of each kind, so that every worker begins with the parser's and sympy's caches filled."""
    kinds = (r"\frac{3\sqrt{3}}{4}", "(1,2]", r"(3, \frac{\pi}{2})", r"\{1,\pi\}", "x=1", "y<2", "x^2+2x-1", "(x+1)^3", r"30^\circ",
             r"1 \pm \sqrt{19}", r"(-\infty, 2) \cup (3, \infty)", r"\begin{pmatrix} 1 \\ a \end{pmatrix}", r"\text{cents}", "1+2i",
             r"\cot x", "4_{5}", "1,-2", "12", r"33\%", r"\$18.90")
    for gold, answer in zip(kinds, kinds[1:] + kinds[:1]):
        same_math(gold, answer)
