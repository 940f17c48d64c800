r"""Whether two answers in LaTeX are equal: identical, equal numbers, the same word, or equal for math-verify.

math-verify normalizes \left, \dfrac, {,} and the like itself; _tidy removes only what it cannot read.
"""
import contextlib
import functools
import logging
import re
import resource
from fractions import Fraction
from pathlib import Path

PLAIN_NUMBER = re.compile(r"-?(?:\d{1,99}|\d{1,3}(?:,\d{3})+)(?:\.\d{1,99})?|-?\.\d{1,99}")


@functools.lru_cache(1 << 14)  # the completions of a group often agree
def same_math(gold, answer):
    r"""Whether two LaTeX answers are equal. Both are taken whole: no number is searched for inside them.

    There is no time limit here: sympy may hang. Raises MemoryError near the memory limit of the process, if
    it has one.

    >>> same_math(r"\frac{1}{2}", "0.5"), same_math(r"\text{(B)}", "B"), same_math("5", "5 eggs")
    (True, True, False)
    """
    gold, answer = _tidy(gold), _tidy(answer)
    if gold == answer:
        return True
    if PLAIN_NUMBER.fullmatch(gold) and PLAIN_NUMBER.fullmatch(answer):
        return Fraction(gold.replace(",", "")) == Fraction(answer.replace(",", ""))
    if r"\text" in gold or re.fullmatch("[A-Za-z]{2,}", gold):  # a word or a multiple-choice letter
        words = [re.sub(r"\\[a-z]+|[^a-z0-9]", "", side.lower()) for side in (gold, answer)]
        if words[0] == words[1] and words[0].isalpha():  # digits are excluded: 5.4 cents is not 54 cents
            return True
    return _compare(gold, answer)


def _compare(gold, answer):
    """math-verify's verdict. Raises MemoryError where it may have failed for lack of memory."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit == resource.RLIM_INFINITY:  # not in a worker of Verifier
        return _math_verify()(gold, answer)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak_bytes()
    equal = _math_verify()(gold, answer)
    if not equal and _peak_bytes() - before > (limit - before) / 2:
        _math_verify.cache_clear()  # it may have cached a failed parse
        raise MemoryError("near the memory limit; math-verify swallows MemoryError and reports unequal")
    return equal


def _peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _tidy(latex):
    """Without LaTeX's spaces, dollar signs, invisible characters and the full stop at the end."""
    spaces, invisible = r"(?<!\\)\\[!,; ](?![a-z])", r"[\u200b-\u200f\u202a-\u202e\u2066-\u2069]"
    return re.sub(rf"{spaces}|{invisible}|(?<!\\)\$|\.\s*$", "", latex).strip()


@functools.cache
def _math_verify():
    from math_verify import LatexExtractionConfig, parse, verify  # takes 0.3 s: only where it is used

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its timeouts are off
    latex = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]

    @functools.lru_cache(1 << 12)  # the completions of a group share their gold answer
    def read(text):  # its own timeout is signal.alarm, which cannot interrupt sympy's C code
        return parse(rf"\boxed{{{text}}}", latex, "no_fallback", "first_match", parsing_timeout=None)

    return lambda gold, answer: verify(read(gold), read(answer), timeout_seconds=None)


def warm_math():
    """Compare one answer of each kind. Workers are forked with the caches that this fills."""
    answers = (
        r"\frac{3\sqrt{3}}{4}", "(1,2]", r"(3, \frac{\pi}{2})", r"\{1,\pi\}", "x=1", "y<2", "x^2+2x-1",
        "(x+1)^3", r"30^\circ", r"1 \pm \sqrt{19}", r"(-\infty, 2) \cup (3, \infty)",
        r"\begin{pmatrix} 1 \\ a \end{pmatrix}", r"\text{cents}", "1+2i", r"\cot x", "4_{5}", "1,-2", "12",
        r"33\%", r"\$18.90")
    for gold, answer in zip(answers, answers[1:] + answers[:1]):
        same_math(gold, answer)
