"""Pairs of answers for the reward `math`, with a second opinion: intervals of 120 digits (mpmath).

A kind draws numbers and writes down one value in several forms. A pair is a form of one value and a
form of it or of another one that is close to it. The texts are not parsed for the second opinion:
the value is computed from the drawn numbers, by interval arithmetic, so it rounds to no side."""
import math
import random
from fractions import Fraction

import numpy
from mpmath import iv

iv.dps = 120
SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
KINDS = {}  # name -> what its numbers are drawn from, and its function


def kind(*numbers):
    """Makes a function a kind, which yields a value and its forms. numbers: of each argument."""
    def register(forms):
        KINDS[forms.__name__] = numbers, forms
    return register


def both_signs(low, high):
    return [*range(-high, 1 - low), *range(low, high + 1)]


def number(x):
    return iv.mpf(x.numerator) / x.denominator if isinstance(x, Fraction) else iv.mpf(x)


@kind(range(1, 10), range(2, 13), range(2, 91))
def power(c, b, k):
    """c / b^k"""
    yield (number(c) / iv.mpf(b)**k,)
    yield from (rf"\frac{{{c}}}{{{b}^{{{k}}}}}", rf"{c} \cdot {b}^{{-{k}}}", f"{c}*{b}^-{k}",
                rf"\frac{{{2 * c}}}{{2 \cdot {b}^{{{k}}}}}",
                f"{c}·{b}{str(-k).translate(SUPERSCRIPT)}")


@kind(range(1, 10), range(5, 41))
def factorial(c, n):
    """c / n!"""
    yield (number(Fraction(c, math.factorial(n))),)
    yield from (rf"\frac{{{c}}}{{{n}!}}", rf"\frac{{{c}}}{{{n} \cdot {n - 1}!}}",
                rf"\frac{{{c * n}}}{{{n} \cdot {n}!}}")


@kind(both_signs(11, 99), range(-40, 41))
def scientific(c, k):
    """c / 10 * 10^k"""
    yield (number(Fraction(c, 10)) * iv.mpf(10)**k,)
    yield from (rf"{c / 10} \times 10^{{{k}}}", rf"{c} \times 10^{{{k - 1}}}", f"{c / 10}*10**{k}",
                f"{c / 10}×10{str(k).translate(SUPERSCRIPT)}", f"{c / 10}e{k:+03d}")


@kind(both_signs(1, 60), range(2, 25))
def rational(p, q):
    x = Fraction(p, q)
    yield (number(x),)
    p, q, sign = abs(x.numerator), x.denominator, "-" * (x < 0)
    yield from (rf"{sign}\frac{{{p}}}{{{q}}}", f"{sign}{p}/{q}",
                rf"{sign}\dfrac{{{3 * p}}}{{{3 * q}}}")
    if p > q > 1:
        yield from (f"{sign}{p // q} {p % q}/{q}", rf"{sign}{p // q}\frac{{{p % q}}}{{{q}}}")
    rest, digits, seen = p % q, "", {}
    while rest and rest not in seen:
        seen[rest] = len(digits)
        digits, rest = digits + str(10 * rest // q), 10 * rest % q
    if not rest:
        yield f"{sign}{p // q}.{digits or 0}"
    else:
        first, period = digits[:seen[rest]], digits[seen[rest]:]
        yield from (rf"{sign}{p // q}.{first}\overline{{{period}}}",
                    rf"{sign}{p // q}.{first}\bar{{{period}}}")


@kind(range(-9, 10), both_signs(2, 9), (2, 3, 5, 6, 7))
def surd(a, b, c):
    yield (a + b * iv.sqrt(c),)
    yield from (rf"{a}{b:+}\sqrt{{{c}}}", rf"{b}\sqrt{c}{a:+}", f"{a} {'-+'[b > 0]} {abs(b)}√{c}",
                rf"{a}{'-+'[b > 0]}\sqrt{{{b * b * c}}}",
                rf"\frac{{{2 * a}{2 * b:+}\sqrt{{{c}}}}}{{2}}")


@kind(range(1, 10), range(2, 10), range(1, 4))
def constant(a, b, k):
    """a pi / b - e^k"""
    yield (a * iv.pi / b - iv.exp(k),)
    yield from (rf"\frac{{{a}\pi}}{{{b}}}-e^{{{k}}}", rf"{a}π/{b} - \mathrm{{e}}^{{{k}}}",
                rf"-{{\rm e}}^{k} + \frac{{{a}}}{{{b}}}\pi", f"{a}*pi/{b} - e^{k}")


@kind(range(-20, 21), both_signs(2, 20))
def complex_number(a, b):
    """(a + b i) / 4"""
    yield number(Fraction(a, 4)), number(Fraction(b, 4))
    yield from (rf"\frac{{{a}{b:+}i}}{{4}}", f"{a / 4}{b / 4:+}i", rf"{a / 4}{b / 4:+}\mathrm{{i}}",
                rf"\frac{{{b}i}}{{4}}{a / 4:+}")


@kind(range(8, 501), range(2, 11))
def based(n, base):
    yield (number(n), number(base))  # the base counts: 25_8 may only repeat the question for 21
    if base == 10:
        yield str(n)
    digits = numpy.base_repr(n, base)
    yield from (f"{digits}_{base}", f"{digits}_{{{base}}}", digits + str(base).translate(SUBSCRIPT))


@kind(range(1, 10), range(1, 10), (2, 3))
def letters(k, m, q):
    """The q-th root of k a / (m b), at two points"""
    yield tuple(iv.exp(iv.log(number(Fraction(k * a, m * b))) / q) for a, b in ((2, 3), (7, 5)))
    root = r"\sqrt" if q == 2 else r"\sqrt[3]"
    yield from (rf"{root}{{\frac{{{k}a}}{{{m}b}}}}", rf"\frac{{{root}{{{k}a}}}}{{{root}{{{m}b}}}}",
                rf"{root}{{{k}}}{root}{{a}}/({root}{{{m}}}{root}{{b}})",
                rf"\left(\frac{{{k}a}}{{{m}b}}\right)^{{1/{q}}}")


@kind(range(1, 31), range(1, 31))
def amounts(a, b):
    yield number(a), number(b)
    yield from (f"{a} pigs and {b} hens", rf"{a} \text{{ pigs and }} {b} \text{{ hens}}",
                rf"{a}\text{{ pigs}}, {b}\text{{ hens}}", rf"\text{{{b} hens and {a} pigs}}")


WRAPPED = ("{}", "{}", "({}, 1)", r"\{{{}, 77\}}", "[{}, ∞)", "{} + 1", "x = {}")


def same(a, b):
    """Whether two values are equal, by intervals that are far narrower than differences."""
    assert all(x.delta < abs(x).b * 1e-110 or x.b == 0 for x in (*a, *b))
    return all(x.a <= y.b and y.a <= x.b for x, y in zip(a, b, strict=True))


def pairs(count, seed=0):
    """Yields (kind, gold, answer, whether they are equal)."""
    rng = random.Random(seed)
    for _ in range(count):
        kind = rng.choice(list(KINDS))
        numbers, forms = KINDS[kind]
        first = list(map(rng.choice, numbers))
        second = list(first)
        if rng.random() < 0.6:
            place = rng.randrange(len(second))
            second[place] = rng.choice(numbers[place])
        (value, *golds), (other, *answers) = list(forms(*first)), list(forms(*second))
        gold, answer = rng.choice(golds), rng.choice(answers)
        if kind not in ("amounts", "complex_number", "letters", "based"):
            wrap = rng.choice(WRAPPED)
            gold, answer = wrap.format(gold), wrap.format(answer)
        yield kind, gold, answer, same(value, other)
