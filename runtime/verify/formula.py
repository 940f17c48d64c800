r"""Formulas in LaTeX: their tokens, their tree, and whether two of them have the same value.

    >>> equal(read(tokens_of(r"\frac{x}{2}+1")), read(tokens_of("0.5x + 1")))
    True

A tree is a tuple that begins with its operation: ("number", Fraction(1, 2)), ("name", "x"),
("+", a, b), ("call", "sin", a). Two trees are equal if they have the same value whatever their
letters stand for. This is tried at points drawn at random, with fractions where all is rational and
with 300 digits elsewhere. Letters under a square root stand for numbers for which it is real. The
odd root of a negative number is real, e is Euler's number, i the imaginary unit.

What is not read raises Unreadable: integrals, sums and limits, because such an answer may only
repeat the question, and all commands that are not named in this file.
"""
import functools
import math
import operator
import random
import re
from fractions import Fraction

from mpmath import mp

from runtime.verify.answer import in_ascii, replaced


class Unreadable(ValueError):
    """The text is no formula, or one of a kind that is not read."""


# ----------------------------------------------------------------------------------------- names

SAME_TOKENS = r"""
    \frac     \dfrac \tfrac \cfrac \sfrac \nicefrac
    \binom    \dbinom \tbinom
    \le       \leq \leqslant <= ≤ ⩽
    \ge       \geq \geqslant >= ≥ ⩾
    \ne       \neq != ≠
    <         \lt
    >         \gt
    \approx   ≈
    \in       ∈
    \cup      ∪
    \cap      ∩
    \setminus \smallsetminus \backslash
    \emptyset \varnothing ∅
    \{        \lbrace
    \}        \rbrace
    (         \langle
    )         \rangle
    [         \lbrack
    ]         \rbrack
    |         \vert \lvert \rvert \mid \Vert \lVert \rVert \|
    *         \times \cdot \ast × · ∙ ⋅ ∗
    /         \div ÷ ⁄ ∕
    -         − ‐ ‑ – ﹣
    :         \colon ∶
    \pm       ±
    \mp       ∓
    '         ′ ’
    ''        ″
    %         \%
    &         \&
    \\        \cr
    \dots     \ldots \cdots \lcdots ... …
    \degree   °
    \infty    \infinity \inf \oo ∞
    \sqrt     √
    \sqrt[3]  ∛
    \sqrt[4]  ∜
    \R        ℝ
    \arctan   \arctg
    \tan      \tg
    \cot      \ctg
    \vec      \overrightarrow
    i         \imath
    \angle    ∠
    \triangle △
    \pi       π
    \alpha    α
    \beta     β
    \gamma    γ
    \delta    δ
    \epsilon  \varepsilon ε
    \theta    \vartheta θ
    \lambda   λ
    \mu       μ
    \rho      ρ
    \sigma    σ
    \tau      τ
    \phi      \varphi φ
    \omega    ω
    \Delta    Δ
    \Omega    Ω
"""
SYNONYMS = {}
for line in SAME_TOKENS.strip().splitlines():
    token, *others = line.split()
    SYNONYMS |= dict.fromkeys(others, token)
TYPED = {ord(sign): f"{token} " for sign, token in SYNONYMS.items() if len(sign) == 1}
GREEK = set(r"\alpha \beta \gamma \delta \epsilon \zeta \eta \theta \kappa \lambda \mu \nu \xi"
            r" \rho \sigma \tau \phi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Pi \Sigma"
            r" \Phi \Psi \Omega \ell \hbar \partial".split())
ACCENTS = set(r"\vec \hat \bar \overline \widehat \dot \ddot \tilde".split())
ORDER = re.compile(r"\^\{\((\d|[kn])\)\}")  # of a derivative of one of these letters
OFTEN_DERIVED = set("fghuyFGH")
FIGURES = set(r"\angle \triangle \odot".split())  # ABC after them is one name, in this order
CALLS = {
    "abs": abs, "floor": mp.floor, "ceil": mp.ceil, "exp": mp.exp, "ln": mp.ln,
    "factorial": mp.factorial, "binomial": mp.binomial,
    "max": lambda *numbers: max(map(mp.mpmathify, numbers)),
    "min": lambda *numbers: min(map(mp.mpmathify, numbers)),
    "gcd": lambda *numbers: Fraction(math.gcd(*map(int, numbers))),
    "lcm": lambda *numbers: Fraction(math.lcm(*map(int, numbers))),
    "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec, "csc": mp.csc,
    "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan,
    "arccot": mp.acot, "arcsec": mp.asec, "arccsc": mp.acsc,
    "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh}
FUNCTIONS = {rf"\{name}" for name in CALLS} | {r"\log", r"\lg"}
NAMED = {name[1:] for name in GREEK | FUNCTIONS} | set(
    "pi infinity oo inf sqrt tg ctg arctg".split())  # also without their backslash
# short words that are not in \text; units may follow a digit without a space
WORDS = set("and or to of is are not if in out no yes all odd per day pct".split())
UNITS = set("km cm mm kg mg ml ft hr hrs mins sec lb lbs oz yd mph kph deg".split())
UNIT_LETTERS = set("mgshlLNJWVAKCFtd")  # in \text, after a number

# ---------------------------------------------------------------------------------------- tokens

CLEAN = (  # (pattern, replacement)
    (r"(?<=\d)(?:,\\!\s?|\{,\})(?=\d{3})", ""),  # thousands: 11,\! 111 and 1{,}000
    (r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\0]|\\!|\\?[$€£¥₹]", ""),
    (r"[⁰¹²³⁴-⁾ⁿ]+", lambda m: f"^{{{in_ascii(m[0])}}}"),
    (r"[₀-₎]+", lambda m: f"_{{{in_ascii(m[0])}}}"),
    (r"[¼-¾⅐-⅞]", lambda m: r"\frac{%s}{%s}" % tuple(in_ascii(m[0]).split("/"))),
    ("[！-～𝐀-𝟿]", lambda m: in_ascii(m[0])),
    (r"(?<=[√∛∜])\s?(\d+(?:\.\d+)?)", r"{\1}"),
    (r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s?\{?(\d+)\}?|\((\d+)\))",
     lambda m: repeating_decimal(m[1], m[2], m[3] or m[4])),
    # spaces, sizes, frames, colours, signs around a formula, heights of rows
    (r"(?<!\\)\\[,:;> ]|~|\\q?quad|\\hspace\s?\{\w+\}|[\u00a0\u2007\u2009\u202f]", " "),
    (r"\\(?:left|right)\s?\.", ""),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|limits|[lL]arge|small)(?![A-Za-z])", ""),
    (r"\\f?box(?:ed)?(?=\s?\{)|\\(?:text)?color\s?\{\w+\}", ""),
    (r"(?<!\\)\\[()\[\]]|(?<=\\\\)\s?\[\d[\d.]*\s?[a-z]{2}\]", ""),
    (r"\^\s?\{?\s?\\circ\s?\}?", r"\\degree "),
    (r"\^\s?\{?\s?((?:\\prime\s?)+)\}?", lambda m: "'" * m[1].count("p")),
    (r"\\(?:mathbb|Bbb)\s?\{?\s?([A-Z])\s?\}?", r"\\\1 "),
    (r"\*\*", "^"),
    (r"(?<=[\d{])-to-(?=[\d}])", " to "),
    # as JSON, Python and calculators write numbers; 2e-5 may be Euler's number, 2e-05 is not
    (r"(?<![\w.)}])(\d+(?:\.\d+)?)[eE]\+?(-?\d{2,3}|\d)(?![\w.])", r"\1*10^{\2}"),
    (r"(?<![\w.)}])(1|\d+\.\d+)[eE](-\d)(?![\w.])", r"\1*10^{\2}"),
    # halves of a day
    (r"(?i)(?<![A-Z\\])([ap])\.\s?m\.?(?![A-Z])", r" \\text{\1m}"),
    (r"(?i)(?<=:\d\d)\s?([ap])m(?![A-Z])", r" \\text{\1m}"),
)
THOUSANDS = re.compile(
    r"(?<![\w.,])(?<!frac )(?<!sqrt )\d{1,3}(?:(?:,\d{3})+(?![\d,])|(?: \d{3})+(?! ?\d))")
LIST_IN_BRACKETS = re.compile(r"(?:^\{|[(\[]|\\\{)[^()\[\]{}]*,")
STYLE = re.compile(r"\\(text(?:bf|it|rm|normal|sf|tt)?|mbox|operatorname|math(?:bf|rm|it|sf|cal)"
                   r"|boldsymbol|bm|underline|rm|bf|it)(?![A-Za-z])\*?\s*")
TOKEN = re.compile(
    r"\d+(?:\.\d+|\.(?=[/*]))?|\.\d+|\\[A-Za-z]+|\\.|[^\W\d_]+|[<>!]=|\.{3}|\S", re.S)
TEXT_TOKEN = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)+|" + TOKEN.pattern, re.S)
SPACE = re.compile(r"\s*")


def repeating_decimal(integer, first, period):
    r"""repeating_decimal("0", "1", "6") is \frac{15}{90}, which is 0.1666..."""
    digits = integer + first
    difference = int(digits + period) - int(digits or 0)
    return rf"\frac{{{difference}}}{{{10**len(first) * (10**len(period) - 1)}}}"


@functools.lru_cache(1 << 14)
def tokens_of(latex):
    r"""The tokens of a text: numbers, letters, signs, commands, and words, which begin with ".

    >>> tokens_of(r"\dfrac{x}{2}\text{ cm}")
    ('\\frac', '{', 'x', '}', '{', '2', '}', '"cm')
    """
    if r"\begin" not in latex:
        latex = re.sub(r"\\\\(?=[A-Za-z])", r"\\", latex)  # escaped twice: \\frac
    text = replaced(latex.strip(), CLEAN).translate(TYPED).strip().removesuffix(".")
    if not LIST_IN_BRACKETS.search(text):
        text = THOUSANDS.sub(lambda m: re.sub("[ ,]", "", m[0]), text)
    tokens = []
    _scan(text.rstrip(), "", tokens)
    return tuple(tokens)


def typed(tokens):
    """The text of tokens."""
    return "".join(token.strip('"') for token in tokens)


def is_word(token):
    return token[0] == '"'


def _scan(text, style, tokens):
    """Appends the tokens of a text. style: the command around it, "" in a formula."""
    at = 0
    while at < len(text):
        start = SPACE.match(text, at).end()
        command = STYLE.match(text, start)
        if command and text[command.end():command.end() + 1] == "{":
            end = _closing_brace(text, command.end())
            _scan(text[command.end() + 1:end], command[1], tokens)
            at = end + 1
        elif command:  # \bf 5
            at = command.end()
        elif start < len(text):
            token = (TEXT_TOKEN if style else TOKEN).match(text, start)
            before = tokens[-1] if tokens else END
            tokens += _named(token[0], style, before, glued=start == at)
            at = token.end()
        else:
            return


def _closing_brace(text, start):
    """The index of the brace that closes the one at `start`, or of the end."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.S):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return start + brace.start()
    return len(text)


def _named(token, style, before, glued):
    """The tokens that a match of TOKEN is: a command, a word, or the letters of a product.

    before: the token before it; glued: whether no space is between them."""
    if token in SYNONYMS:
        return [SYNONYMS[token]]
    if not token[0].isalpha():
        return [token]
    if token == "min" and re.search(r"[\d})]$", before):
        return ['"min']
    if token in NAMED:
        return [SYNONYMS.get("\\" + token, "\\" + token)]
    if len(token) == 1:
        is_unit = style and token in UNIT_LETTERS and re.search(r"[\w})]$", before)
        return ['"' + token] if is_unit else [token]
    function = re.fullmatch(r"(sin|cos|tan|cot|ln|log)([xyz])", token)
    if function and not style:  # sinx
        return ["\\" + function[1], function[2]]
    if token.isupper() and not style.startswith(("text", "mbox")):  # \mathrm{AB}
        return list(token)
    if style or not token.isascii() or token.lower() in UNITS:
        return ['"' + token]
    is_word = token.lower() in WORDS or len(token) > 3 and re.search("[aeiouy]", token)
    if is_word and not (glued and before[-1:].isdigit()):  # 2abcd is a product
        return ['"' + token]
    return list(token)


# ----------------------------------------------------------------------------------------- trees

END = ""
CLOSING = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
ATOMS = GREEK | ACCENTS | FUNCTIONS | FIGURES | CLOSING.keys() | {
    r"\frac", r"\sqrt", r"\binom", r"\pi", r"\infty", r"\dots"}
ZERO = ("number", Fraction(0))
ONE = ("number", Fraction(1))
DEGREE = ("/", ("constant", "pi"), ("number", Fraction(180)))


@functools.lru_cache(1 << 14)
def read(tokens):
    """The tree of a formula. tokens: as of tokens_of. Raises Unreadable."""
    reader = Reader(tokens)
    try:
        tree = reader.sum()
    except RecursionError:
        raise Unreadable("too many brackets") from None
    reader.expect(END)
    return tree


class Reader:
    """Reads a formula from left to right. Each method reads one part of it and returns its tree.

    A product without a sign binds closer than /, so 1/2x is 1/(2x)."""

    def __init__(self, tokens):
        self.tokens = [*tokens, END]
        self.at = 0
        self.bars = 0  # | that wait for the second one
        self.is_angle = False  # 30° is a number of radians in a function, else 30

    @property
    def next(self):
        return self.tokens[self.at]

    def take(self):
        if self.next == END:
            raise Unreadable("the formula ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def accept(self, *tokens):
        """The next token if it is one of these; else None, and it stays."""
        return self.take() if self.next != END and self.next in tokens else None

    def expect(self, token):
        if self.next != token:
            raise Unreadable(f"{self.next!r} where {token!r} was expected")
        self.at += 1

    def sum(self):
        tree = self.product()
        while sign := self.accept("+", "-"):
            tree = (sign, tree, self.product())
        return tree

    def product(self):
        tree = self.factors()
        while sign := self.accept("*", "/"):
            tree = (sign, tree, self.factors())
        return tree

    def factors(self):
        r"""Factors without a sign between them. 2 3/4 and 2\frac{3}{4} are mixed numbers."""
        if self.accept("-"):
            return ("-", ZERO, self.factors())
        if self.accept("+"):
            return self.factors()
        first = self.next
        tree = self.power()
        is_integer = first.isdigit() and tree[0] == "number"
        if is_integer and self.next.isdigit():
            top = self.number()
            self.expect("/")
            tree = ("+", tree, ("/", top, self.number()))
        elif is_integer and self.next == r"\frac":
            part = self.power()
            tree = ("+" if is_proper(part) else "*", tree, part)
        while self.is_factor():
            tree = ("*", tree, self.power())
        return tree

    def is_factor(self):
        """Whether the next token may begin a factor. A number may not, as x2 is no product, but
        (n-2) 2^n and 2!3! are."""
        if self.next == "|":
            return self.bars == 0
        if self.next[:1].isdigit():
            return self.tokens[self.at - 1] in (")", "!") or self.tokens[self.at + 1] == "^"
        return self.next in ATOMS or self.next.isalpha()

    def power(self):
        """An atom with what stands after it: an exponent, !, a degree sign."""
        tree = self.atom()
        while sign := self.accept("^", "!", r"\degree"):
            if sign == "^":
                tree = ("^", tree, self.exponent())
            elif sign == "!":
                tree = ("call", "factorial", tree)
            elif self.is_angle:
                tree = ("*", tree, DEGREE)
        return tree

    def exponent(self):
        """{...}, or what people type: -12, (1/2), n."""
        if self.accept("-"):
            return ("-", ZERO, self.exponent())
        return self.atom()

    def atom(self):
        if re.match(r"[\d.]", self.next):
            return self.number()
        token = self.take()
        if token == "|":
            self.bars += 1
            tree = ("call", "abs", self.sum())
            self.expect("|")
            self.bars -= 1
            return tree
        if token in CLOSING:
            return self.bracket(token)
        if token == r"\frac":
            return self.fraction()
        if token == r"\binom":
            return ("call", "binomial", self.argument(), self.argument())
        if token == r"\sqrt":
            return self.root()
        if token in FUNCTIONS:
            return self.function(token[1:])
        if token == r"\pi":
            return ("constant", "pi")
        if token in (r"\infty", r"\dots"):
            return ("constant", "infinity") if token == r"\infty" else ("name", token)
        if token.isalpha() or token in GREEK | ACCENTS | FIGURES:
            return self.name(token)
        raise Unreadable(f"{token!r} is not read")

    def bracket(self, opening):
        bars, self.bars = self.bars, 0
        tree = self.sum()
        self.expect(CLOSING[opening])
        self.bars = bars
        if opening in (r"\lfloor", r"\lceil"):
            return ("call", opening[2:], tree)
        return tree

    def number(self):
        token = self.take()
        if not re.match(r"\.?\d", token):
            raise Unreadable(f"{token!r} is no number")
        return ("number", Fraction(token))

    def argument(self):
        r"""The argument of a command: {...} or one token, of a number its first digit: \frac12."""
        token = self.next
        if token.isdigit() and len(token) > 1:
            self.tokens[self.at] = token[1:]
            return ("number", Fraction(token[0]))
        return self.atom()

    def raw_argument(self):
        """The text of an argument that is a part of a name."""
        if self.next != "{":
            return self.take().strip('"')
        text, depth = "", 0
        while depth or not text:
            token = self.take()
            depth += (token == "{") - (token == "}")
            text += token.strip('"')
        return text[1:-1]

    def fraction(self):
        r"""\frac{a}{b}; \frac{dy}{dx} and \frac{\partial u}{\partial x} are names."""
        start = self.at
        if self.next == "{":
            name = f"{self.raw_argument()}/{self.raw_argument()}"
            if re.match(r"(d|\\partial)[^+*/-]*/\1[^+*/-]+$", name):
                return ("name", name)
            self.at = start
        return ("/", self.argument(), self.argument())

    def root(self):
        index = ("number", Fraction(2))
        if self.accept("["):
            index = self.sum()
            self.expect("]")
        return ("^", self.argument(), ("/", ONE, index))

    def function(self, name):
        r"""\sin x, \sin^2 x, \log_2(x), \max(1,2)"""
        base = self.argument() if self.accept("_") else None
        power = self.exponent() if self.accept("^") else None
        was_angle, self.is_angle = self.is_angle, True
        arguments = self.arguments()
        self.is_angle = was_angle
        if name in ("log", "lg"):
            ten = ("number", Fraction(10))
            tree = ("/", ("call", "ln", *arguments), ("call", "ln", base or ten))
            return ("^", tree, power) if power else tree
        if base:
            raise Unreadable(f"{name} with an index")
        if power == ("-", ZERO, ONE) and "arc" + name in CALLS:
            return ("call", "arc" + name, *arguments)
        tree = ("call", name, *arguments)
        return ("^", tree, power) if power else tree

    def arguments(self):
        """What a function is applied to: a bracket, or the factors up to a bracket or function."""
        if opening := self.accept("(", "["):
            trees = [self.sum()]
            while self.accept(","):
                trees.append(self.sum())
            self.expect(CLOSING[opening])
            return trees
        if self.accept("-"):
            return [("-", ZERO, *self.arguments())]
        tree = self.power()
        following = "".join(self.tokens[self.at:self.at + 2])
        if tree[0] == "number" and re.match(r"\*[a-z]", following):  # \sin 2 \cdot x
            self.take()
        while self.is_factor() and self.next not in FUNCTIONS | {"(", "["}:
            tree = ("*", tree, self.power())
        if names_of(tree) == set() and "pi" in str(tree) and self.accept("/"):  # \sin \pi/3
            tree = ("/", tree, self.power())
        return [tree]

    def name(self, token):
        r"""A letter with its index and dashes, \vec{a}, \angle ABC, f(x), f^{(4)}."""
        name = token
        if token in ACCENTS:
            name += " " + self.raw_argument()
        while token in FIGURES and (self.next.isalpha() or self.next.isdigit()):
            name += self.take()
        while self.next in ("'", "_"):
            name += self.take()
            if name[-1] == "_":
                name += self.raw_argument()
        order = ORDER.match(typed(self.tokens[self.at:self.at + 6]))
        if order and token in OFTEN_DERIVED:
            self.at += 6
            name += "'" * int(order[1]) if order[1].isdigit() else f"'{order[1]}"
        if re.fullmatch(r"C_\d+", name) and self.next == "^":  # as in books of other countries
            self.take()
            return ("call", "binomial", ("number", Fraction(name[2:])), self.exponent())
        if self.next == "(" and (bracket := self.raw_bracket(name)):
            return ("name", name + bracket)
        if name in ("e", "i"):
            return ("constant", name)
        return ("name", name)

    def raw_bracket(self, name):
        """The text of a bracket if the name before it is that of a function: f(x+1), y'(x), x(0)
        and P(A); None in products such as a(b+1)."""
        start, text, depth = self.at, "", 0
        while depth or not text:
            token = self.take()
            depth += (token == "(") - (token == ")")
            text += token.strip('"')
        if (name in ("f", "g", "h") or "'" in name or re.fullmatch(r"\(\d+\)", text)
                or name.isupper() and re.fullmatch(r"\([A-Z][^-+*/^]*\)", text)):
            return text
        self.at = start
        return None


def is_proper(tree):
    """Whether a tree is a fraction of numbers that is smaller than 1."""
    if tree[0] != "/" or tree[1][0] != "number" or tree[2][0] != "number":
        return False
    return tree[1][1] < tree[2][1]


@functools.lru_cache(1 << 14)
def names_of(tree):
    """The names in a tree."""
    if tree[0] == "name":
        return {tree[1]}
    names = set()
    for part in tree[1:]:
        if isinstance(part, tuple):
            names |= names_of(part)
    return names


def has_number(tree):
    """Whether a number is in a tree, other than as an exponent."""
    operation, *parts = tree
    if operation == "number":
        return True
    parts = parts[:1] if operation == "^" else parts
    return any(has_number(part) for part in parts if isinstance(part, tuple))


def numerator(tree):
    """The numerator of a tree over one denominator, which is not reduced."""
    return _over_one_denominator(tree)[0]


def _over_one_denominator(tree):
    operation, first, *others = tree
    if operation not in ("+", "-", "*", "/"):
        return tree, ONE
    (top, bottom), (other_top, other_bottom) = map(_over_one_denominator, (first, *others))
    if operation == "*":
        return ("*", top, other_top), ("*", bottom, other_bottom)
    if operation == "/":
        return ("*", top, other_bottom), ("*", bottom, other_top)
    if bottom == other_bottom:
        return (operation, top, other_top), bottom
    left, right = ("*", top, other_bottom), ("*", other_top, bottom)
    return (operation, left, right), ("*", bottom, other_bottom)


def with_values(tree, point):
    """A tree with numbers for its names."""
    if tree[0] == "name":
        return ("number", point[tree[1]])
    parts = [with_values(part, point) if isinstance(part, tuple) else part for part in tree[1:]]
    return (tree[0], *parts)


# ----------------------------------------------------------------------------------------- values

DIGITS = 300
TRIES = 40  # of points, of which POINTS have to be in the domain
POINTS = 12


class OutsideDomain(ValueError):
    """A root is not real, or a value is too large."""


class NoLogarithm(OutsideDomain):
    """A logarithm is not real."""


def equal(a, b):
    """Whether two trees have the same value at all points where a is real, except those where a
    square root in b is not real. Where neither is real, complex values are compared."""
    names = sorted(names_of(a) | names_of(b))
    if not names:
        return _agree(a, b, {}, real=False) is True
    for real in True, False:
        verdicts = []
        for point in points(tuple(names)):
            verdict = _agree(a, b, dict(zip(names, point)), real)
            if verdict is False:
                return False
            verdicts += [verdict] if verdict else []
            if len(verdicts) == POINTS:
                break
        if len(verdicts) >= 3:
            return True
    return False


def proportional(a, b, positive=False):
    """Whether a is a constant times b, not 0; positive: and the constant is."""
    names = tuple(sorted(names_of(a) | names_of(b)))
    for drawn in points(names)[:3] if names else ():
        point = dict(zip(names, drawn))
        at_a, at_b = with_values(a, point), with_values(b, point)
        if equal(at_a, ZERO) or equal(at_b, ZERO):
            continue  # by chance; an equation that always holds is no curve
        if equal(a, at_a) or equal(b, at_b):
            return False  # x = x + 1 never holds
        if positive and number(("*", at_a, at_b)) < 0:
            return False
        return equal(("*", a, at_b), ("*", b, at_a))
    return False


def same_operands(a, b):
    """Whether two trees without names have one operation and equal operands: 3+4 and 4+3 have, 5+2
    has not, though its value is the same."""
    if a[0] != b[0] or len(operands(a)) != len(operands(b)):
        return False
    for part, other in zip(operands(a), operands(b)):
        is_tree = isinstance(part, tuple) and isinstance(other, tuple)
        if part != other and not (is_tree and equal(part, other)):
            return False
    return True


def operands(tree):
    """The parts of a tree; those of a sum or product without brackets, and sorted."""
    operation, *parts = tree
    if operation not in ("+", "*"):
        return parts
    found = []
    for part in parts:
        found += operands(part) if part[0] == operation else [part]
    return sorted(found, key=number)


def number(tree):
    """The value of a tree without names, a real number of mpmath. Raises Unreadable."""
    try:
        with mp.workdps(DIGITS):
            result = mp.mpmathify(value(tree, {}, False))
    except (ArithmeticError, ValueError, TypeError, KeyError):
        raise Unreadable("no number") from None
    if isinstance(result, mp.mpc):
        raise Unreadable("not real")
    return result


@functools.lru_cache(1 << 10)
def points(names):
    """Values for the names: small and large, half of the points positive."""
    rng = random.Random(0)
    drawn = []
    for n in range(TRIES):
        largest = 640 if n % 4 < 2 else 64_000
        values = [Fraction(rng.randint(1, largest), 64) for _ in names]
        if n % 2:
            values = [x * rng.choice((-1, 1)) for x in values]
        drawn.append(values)
    return drawn


def _agree(a, b, point, real):
    """Whether two trees have the same value at a point; None if one has none."""
    try:
        difference, size = _distance(a, b, point, real, DIGITS)
        if difference == 0 or mp.isinf(size):
            return difference == 0
        if isinstance(difference, Fraction) or difference > max(size, 1) * mp.mpf(10) ** -100:
            return False
        # with twice the digits, a difference that is only rounded is far smaller
        finer, _ = _distance(a, b, point, real, 2 * DIGITS)
        rounded = max(difference, size * mp.mpf(10) ** -DIGITS)
        return bool(finer <= rounded * mp.mpf(10) ** (-DIGITS // 2))
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        return None


def _distance(a, b, point, real, digits):
    """|a - b|, a Fraction if both are, and the larger of |a| and |b|."""
    with mp.workdps(digits):
        x = value(a, point, real)
        try:
            y = value(b, point, real)
        except NoLogarithm:  # ln x is not ln |x|
            y = mp.inf
        x, y = alike(x, y)
        return mp.zero if x == y else abs(x - y), max(abs(x), abs(y))


def value(tree, point, real):
    """The value of a tree, a Fraction or a number of mpmath. point: {name: value}. real: whether
    square roots and logarithms that are not real raise OutsideDomain."""
    operation, first, *others = tree
    if operation == "number":
        return first
    if operation == "name":
        return point[first]
    if operation == "constant":
        return CONSTANTS[first]()
    others = [value(part, point, real) for part in others]
    if operation == "call":
        if first == "ln" and real and not others[0] > 0:
            raise NoLogarithm
        if any(abs(x) > 10**15 for x in others) and first not in ("ln", "abs", "max", "min"):
            raise OutsideDomain  # the digits would not suffice, or the time
        return CALLS[first](*others)
    first = value(first, point, real)
    if operation == "^":
        return power(first, others[0], real)
    return OPERATORS[operation](*alike(first, others[0]))


def alike(a, b):
    """Two fractions, or two numbers of mpmath."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a, b
    return mp.mpmathify(a), mp.mpmathify(b)


def power(base, exponent, real):
    """base ** exponent; of a negative number the real root if there is one."""
    if base == 0 and exponent == 0:
        raise OutsideDomain
    if isinstance(exponent, Fraction):
        size = 0
        if isinstance(base, Fraction):
            size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1 and size and size * abs(exponent) < 20_000:
            return base ** exponent.numerator
        is_negative = not isinstance(base, mp.mpc) and base < 0
        if is_negative and exponent.denominator > 1:
            if exponent.denominator % 2:
                return (-1) ** exponent.numerator * mp.power(-base, exponent)
            if real:
                raise OutsideDomain
    base = mp.mpmathify(base)
    if base and abs(exponent * mp.ln(abs(base))) > 10**15:
        raise OutsideDomain
    return mp.power(base, exponent)


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
CONSTANTS = {"pi": lambda: +mp.pi, "e": lambda: +mp.e, "i": lambda: mp.mpc(0, 1),
             "infinity": lambda: mp.inf}
