r"""Whether a final answer in LaTeX equals the gold answer: the comparison of the reward math.

An answer is read as one of these kinds. Answers of different kinds are different, apart from what
the right column says.

    formula   \frac{1}{2}, 3x+2, 5 cm    the same value (formula.py). A unit may be left off; 50% is
                                         50 or 0.5; 0.333333 is a third, rounded
    named     x=5, f(x)=2x, e=1/2        the same name and value; the name may be left off
    relation  x^2+y^2=1, y < 2x          the same difference of the sides, up to a constant factor;
                                         3+4=7 is 4+3=7, but not 5+2=7
    list      1,2; \{1,2\}; 1 \pm i      the same members in any order
    tuple     (1,2), a matrix            the same members in this order; (1,2) also as 1,2
    system    x=1,y=2                    the same value of each name; (1,2) has them in order
    range     [1,2), 1 \le x<2, x \ne 3  the same ends; (1,2) may be a range, too
    ratio     3:4:5                      the same proportions; beside it also 3 to 4 to 5
    text      n \text{ is even}, 25_8    the same words, and between them equal formulas
    option    (B) 42                     the same letter, with or without its text

A question is not its answer: sums, integrals and what is to be solved (2x=10, x^2 \le 4) are not
equal to their solutions, and 25_8 is not 21. Equal texts are equal, also where the gold answer
cannot be read. A sentence can be said in other words, so it cannot be read as a gold answer. But
"no solution" is the empty set, and "all real numbers" is a range.
"""
import functools
import itertools
import re
from collections import namedtuple
from fractions import Fraction

from runtime.verify import formula
from runtime.verify.answer import is_float
from runtime.verify.formula import ONE, ZERO, Unreadable, is_word, names_of, tokens_of, typed
from runtime.verify.units import MEASURES, PERCENT, read_unit, same_units, start_of_unit

Formula = namedtuple("Formula", "tree unit plain", defaults=[(), ""])  # plain: a number as typed
Named = namedtuple("Named", "name value tree")  # tree: of the name, None if it is no formula
Relation = namedtuple("Relation", "sign left right")  # sign: "=", "<" or "\le"
Members = namedtuple("Members", "values is_set", defaults=[False])  # is_set: it has braces
Tuple = namedtuple("Tuple", "values brackets")
System = namedtuple("System", "names values")
Range = namedtuple("Range", "name pieces")
Piece = namedtuple("Piece", "low high left right")  # trees, and a bracket at each end
Ratio = namedtuple("Ratio", "parts unit is_time")
Text = namedtuple("Text", "parts")  # words as str, formulas and others
Rounded = namedtuple("Rounded", "exact rounded")  # \pi \approx 3.14

LETTERS = "ABCDEFGHIJ"  # of options
# golds of data sets that have none
PLACEHOLDERS = set("proof proofs proven proved seeproof seesolution seeexplanation n/a nan null"
                   " noanswer unknown tbd todo omitted missing seebelow".split())
NOT_GIVEN = re.compile(
    "(((the)?answer(is|was)?)?not|none|noanswer)"
    "(found|provided|given|available|specified|applicable|stated|shown)")


@functools.lru_cache(1 << 14)  # the completions of a group often agree
def same_math(gold, answer):
    r"""Whether two answers in LaTeX are equal; None if the gold answer cannot be read.

    Both are taken whole: no number is searched for inside them.

    >>> same_math(r"\frac{1}{2}", "0.5"), same_math(r"\text{(B)}", "B"), same_math("5", "6, 5")
    (True, True, False)
    """
    gold, said = tokens_of(gold), tokens_of(answer)
    if not gold or is_placeholder(gold):
        return None
    if gold == said or same_words(gold, said):
        return True
    option, other = option_of(gold), option_of(said)
    if is_product(answer):
        other = None
    if option and other:
        return same_options(option, other)
    if option and option.text:
        return bool(same_tokens(option.text, said))
    if other and other.text:
        return same_tokens(gold, other.text)
    return same_tokens(gold, said)


def is_placeholder(tokens):
    """Whether a gold answer is "proof", "not found" or other words in place of an answer."""
    words = re.sub(r"[.:]", "", typed(tokens)).lower()
    return words in PLACEHOLDERS or bool(NOT_GIVEN.fullmatch(words))


# what reading a text that is no mathematics may raise; Unreadable is a ValueError
CANNOT_READ = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)


def same_tokens(gold, said):
    """same_math for tokens."""
    gold, remark = without_remark(gold)
    said, other_remark = without_remark(said)
    try:
        value = read_answer(gold)
    except CANNOT_READ:
        return None
    try:
        return same_remarks(remark, other_remark) and same(value, read_answer(said))
    except CANNOT_READ:
        return False


def same_words(gold, said):
    r"""Whether both are the same letters, and words: \text{Yes} is yes."""
    if not any(map(is_word, gold + said)):
        return False
    for change in str, str.lower:
        texts = []
        for tokens in gold, said:
            words = [change(token) if is_word(token) else token for token in tokens]
            texts.append(re.sub(r"[(),.!]", "", typed(words)))
        if texts[0] == texts[1] and texts[0].isalpha():
            return True
    return False


# ---------------------------------------------------------------------------- options and remarks

Option = namedtuple("Option", "letter text")  # text: tokens


def option_of(tokens):
    """B, (B), (B) 42 or Option B as an option; None for others."""
    if typed(tokens[:1]).lower() in ("option", "choice"):
        tokens = tokens[1:]
    letter = re.match(r"\(([A-J])\)|([A-J])[).:]|([A-J])$", typed(tokens[:3]))
    if not letter:
        return None
    text = tokens[len(letter[0]):]
    has_others = re.search(r"[A-J][).:]", typed(text)) or text[1:] and text[-1] in LETTERS
    if has_others or {",", '"or', '"and'} & set(text):
        return None
    if re.match(r"[-+*/^_=<>,;!'(]", typed(text)):
        return None  # a formula with a letter
    return Option(letter[1] or letter[2] or letter[3], text)


def is_product(answer):
    """Whether a letter in brackets is a factor: (B)x, but not (B) x."""
    letter = r"(?:\\\w+\{)?\([A-J]\)\}?"
    factor = r"(?:[A-Za-z]|\\(?![,;: ]|text|[dt]?frac|sqrt|q?quad))"
    return bool(re.match(letter + factor, answer.strip()))


def same_options(gold, said):
    if gold.letter != said.letter:
        return False
    return not gold.text or not said.text or bool(same_tokens(gold.text, said.text))


def without_remark(tokens):
    r"""The tokens before \text{for all } x, \text{where } ..., (x > 0), k \in \Z; and the rest."""
    for at in range(1, len(tokens)):
        phrase = " ".join(tokens[at:at + 2]).lower()
        if re.match(r'"for "(all|every|any|each)$|"where\b|\\forall\b', phrase):
            end = at - 1 if tokens[at - 1] == "," else at
            return tokens[:end], tokens[at:]
    if re.search(r",[a-z]\\in\\[ZNRQ]$", typed(tokens)):
        return tokens[:-4], tokens[-4:]
    at = len(tokens) - 1
    while at > 0 and tokens[-1] == ")" and not is_bracket(tokens[at:]):
        at -= 1
    if at > 0 and tokens[at] == "(" and RELATIONS & set(tokens[at:]):
        return tokens[:at], tokens[at:]
    return tokens, ()


def same_remarks(gold, said):
    """A remark may be left off, or, without numbers and bounds, be in other words."""
    has_bounds = re.search(r"[\d<>=]|\\[lg]e", typed(gold + said))
    return not gold or not said or gold == said or not has_bounds


# -------------------------------------------------------------------------- reading: lists, names

OPENING = {"(", "[", "{", r"\{", r"\begin", r"\lfloor", r"\lceil"}
CLOSING = {")", "]", "}", r"\}", r"\end", r"\rfloor", r"\rceil"}
RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx"}
TURNED = {">": "<", r"\ge": r"\le"}


def split(tokens, separators):
    """The parts of tokens between separators that stand in no bracket, and these separators."""
    parts, used = [()], []
    depth = 0
    for token in tokens:
        depth += (token in OPENING) - (token in CLOSING)
        if token in separators and depth == 0:
            parts.append(())
            used.append(token)
        else:
            parts[-1] += (token,)
    return parts, used


def parts_of(tokens, *separators):
    parts, _ = split(tokens, separators)
    return parts


def is_bracket(tokens):
    """Whether the first token is a bracket that the last one closes."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0:
            return 0 < at == len(tokens) - 1
    return False


@functools.lru_cache(1 << 13)  # the completions of a group share their gold answer
def read_answer(tokens):
    """An answer as one of the kinds above. Raises Unreadable."""
    following = (*tokens[1:], "")
    tokens = tuple(token for token, after in zip(tokens, following)
                   if token != "," or after not in ('"and', '"or'))  # 1, 2, and 3
    alternatives = parts_of(tokens, ";", '"or')
    if len(alternatives) == 1:
        return read_list(tokens, "and")
    values = tuple(read_list(part, "or") for part in alternatives)
    if any(isinstance(value, System) for value in values):
        return Members(values)
    return joined(flat(values), "or")


def read_list(tokens, word):
    """The value of items between commas. word: "and" or "or", which joins ranges."""
    items = parts_of(tokens, ",", '"and', "&")
    return joined(flat(map(read_item, items)), word)


def flat(values):
    """Values, and in place of lists without braces their members."""
    members = ()
    for value in values:
        is_list = isinstance(value, Members) and not value.is_set
        members += value.values if is_list else (value,)
    return members


def joined(values, word):
    """One value of several between which a comma, "and" or "or" stands."""
    first, *others = values
    if not others:
        return first
    kinds = set(map(type, values))
    if kinds == {Range}:
        names = {value.name for value in values} - {None}
        if len(names) < 2:
            return joined_ranges(values, word)
    if kinds == {Named}:
        return systems(values)
    if isinstance(first, Named) and not kinds & {Range, Relation}:  # x=1,2
        return first._replace(value=Members((first.value, *others)))
    return Members(values)


def systems(values):
    """x=1,x=2 are two values of x; x=1,y=2 is a system; where a name returns, the next begins."""
    names = {value.name for value in values}
    if len(names) == 1:
        members = tuple(value.value for value in values)
        return values[0]._replace(value=Members(members))
    members = [System((), ())]
    for name, value, _ in values:
        if name in members[-1].names:
            members.append(System((), ()))
        names, others = members[-1]
        members[-1] = System((*names, name), (*others, value))
    return members[0] if len(members) == 1 else Members(tuple(members))


def read_item(tokens):
    """A value or relation without commas; else a text."""
    try:
        return read_relation(tokens)
    except Unreadable:
        if any(map(is_word, tokens)):
            return read_text(tokens)
        raise


def read_relation(tokens):
    if r"\pm" in tokens or r"\mp" in tokens:
        return joined(tuple(map(read_relation, both_signs(tokens))), "or")
    sides, signs = split(tokens, RELATIONS)
    if not signs:
        return read_value(tokens)
    if r"\approx" in signs:
        return read_rounded(sides, signs)
    if set(signs) == {"="}:
        return read_equation(sides)
    name = name_of(sides[0])
    if signs == [r"\in"] and name:
        value = as_range(read_value(sides[1]))
        is_range = isinstance(value, Range)
        return value._replace(name=name) if is_range else Named(name, value, None)
    if signs == [r"\ne"] and name:
        point = read_formula(sides[1])
        return reals_without([point])._replace(name=name)
    return read_inequality(sides, signs)


def both_signs(tokens):
    r"""The tokens with + and with - for each \pm; with \mp in them all signs change together."""
    if tokens.count(r"\pm") > 3:
        raise Unreadable("too many signs")
    versions = []
    for plus, minus in ("+", "-"), ("-", "+"):
        if r"\mp" in tokens:
            signs = {r"\pm": plus, r"\mp": minus}
            versions.append(tuple(signs.get(token, token) for token in tokens))
        else:
            at = tokens.index(r"\pm")
            version = tokens[:at] + (plus,) + tokens[at + 1:]
            versions += both_signs(version) if r"\pm" in version else [version]
    return versions


def read_equation(sides):
    """Named if one side is a name: the first, or the last one of 5=x."""
    left, *between, right = sides
    if not name_of(left) and name_of(right):
        if not names_of(read_formula(left).tree):
            left, right = right, left
    if any(isinstance(value, Text) for value in map(read_value, between)):
        raise Unreadable("words in a chain")
    name, value = name_of(left), read_value(right)
    if not name:
        return Relation("=", read_value(left), value)
    if name[0] == "(" and isinstance(value, Tuple):  # (x,y) = (1,2)
        names = tuple(name[1:-1].split(","))
        if len(names) != len(value.values):
            raise Unreadable("a name for each value")
        return System(names, value.values)
    try:
        return Named(name, value, formula.read(left))
    except Unreadable:
        return Named(name, value, None)


LETTER = r"(?:\\[a-z]+|[A-Za-z])(?:_\{?\w+\}?|'|\^\{(?:-1|\([\dkn]\))\})*"
NAME = re.compile(rf"[A-Z]{{2,4}}|\|[A-Za-z]{{1,2}}\||m?\\angle\{{?[A-Z\d]+\}}?"
                  rf"|{LETTER}\([A-Za-z\d,\\]*\)|\(({LETTER},)+{LETTER}\)")


def name_of(tokens):
    r"""The name that tokens are: x, x_1, y', AB, |AB|, f(x), (x,y), \text{area}; else ""."""
    if all(map(is_word, tokens)) or NAME.fullmatch(typed(tokens)):
        return typed(tokens)
    try:
        tree = formula.read(tokens)
    except Unreadable:
        return ""
    return tree[1] if tree[0] in ("name", "constant") else ""


def read_inequality(sides, signs):
    r"""A range if it bounds one name, 1 \le x < 2; else a relation such as y^2 < x."""
    if set(signs) <= TURNED.keys():
        signs = [TURNED[sign] for sign in reversed(signs)]
        sides = sides[::-1]
    if not set(signs) <= {"<", r"\le"}:
        raise Unreadable("relations that differ")
    places = [at for at, side in enumerate(sides) if name_of(side)]
    if len(sides) > 3 or len(sides) == 3 and places != [1]:
        return Text(("".join(signs), *map(read_formula, sides)))  # a < b < c
    if not places:
        return Relation(signs[0], *map(read_formula, sides))
    at = places[0]
    low, left = MINUS_INFINITY, "("
    high, right = INFINITY, ")"
    if at > 0:
        low = read_formula(sides[at - 1]).tree
        left = "[" if signs[at - 1] == r"\le" else "("
    if at + 1 < len(sides):
        high = read_formula(sides[at + 1]).tree
        right = "]" if signs[at] == r"\le" else ")"
    piece = Piece(low, high, left, right)
    return Range(name_of(sides[at]), (piece,))


def read_rounded(sides, signs):
    r"""\pi \approx 3.14 is \pi or 3.14, x \approx 3.14 is x = 3.14."""
    if not set(signs) <= {"=", r"\approx"}:
        raise Unreadable("relations that differ")
    *before, last = [side for side in sides if side]
    if not before:
        return read_value(last)
    if len(before) == 1 and name_of(before[0]):
        return read_equation([*before, last])
    exact = read_equation(before) if len(before) > 1 else read_value(before[0])
    value = exact.value if isinstance(exact, Named) else exact
    rounded = read_value(last)
    if isinstance(value, Formula) and isinstance(rounded, Formula):
        if not is_near(value, rounded, formula.number(rounded.tree) / 50):
            return exact
    return Rounded(exact, rounded)


# --------------------------------------------------------------------------- reading: one value

INFINITY = ("constant", "infinity")
MINUS_INFINITY = ("-", ZERO, INFINITY)
MATRICES = {"matrix", "pmatrix", "bmatrix", "smallmatrix", "array"}
LINES = {"cases", "aligned", "array"}
BASES = "zero one two three four five six seven eight nine ten eleven twelve".split()
BASED = re.compile(r"\(?(-?[\dA-F]*\d[\dA-F.]*)\)?_\{?(?:base)?([a-z]+|\d+)\}?")
NO_SOLUTION = re.compile("no(real)?solutions?")
ALL_REALS = re.compile("(all|the)?real(s|numbers)")
DATE = re.compile(r"(\d{4})[-/](\d\d?)[-/](\d\d?)|(\d\d?)[-/](\d\d?)[-/](\d{4})")


def read_value(tokens):
    """A value without relation or comma outside brackets."""
    if not tokens:
        raise Unreadable("nothing")
    words = typed(tokens).lower() if all(map(is_word, tokens)) else ""
    if tokens == (r"\emptyset",) or NO_SOLUTION.fullmatch(words):
        return Members((), True)
    parts = parts_of(tokens, r"\cup")
    if len(parts) > 1:
        return joined_ranges(list(map(read_range, parts)), "or")
    if tokens == (r"\R",) or ALL_REALS.fullmatch(words):
        return reals_without([])
    if tokens[:2] in [(r"\R", r"\setminus"), (r"\R", "-")]:
        return reals_without(read_value(tokens[2:]).values)
    if tokens[0] == r"\begin" and r"\end" in tokens[-4:-3]:
        return read_lines(tokens)
    if tokens[:2] == (r"\{", r"\begin"):  # \left\{ ... \right.
        return read_lines(tokens[1:])
    if is_bracket(tokens):
        value = read_bracket(tokens)
        if value:
            return value
    if date := DATE.fullmatch(typed(tokens)):
        numbers = [number.lstrip("0") for number in date.groups() if number]
        return Text(tuple(numbers))
    if based := BASED.fullmatch(typed(tokens)):
        return read_based(*based.groups())
    if ":" in tokens or start_of_unit(tokens) < len(tokens):
        return read_quantity(tokens)
    return read_formula(tokens)


def read_formula(tokens):
    plain = typed(tokens)
    is_plain = re.fullmatch(r"-?(?:\d+(?:\.\d+)?|\.\d+)", plain)
    return Formula(formula.read(tokens), (), plain if is_plain else "")


def read_bracket(tokens):
    """What stands in brackets: a set, a tuple or a matrix; None for a formula."""
    inside = tokens[1:-1]
    is_list = len(parts_of(inside, ",", ";")) > 1
    has_condition = len(parts_of(inside, "|")) == 2
    if tokens[0] == r"\{" or tokens[0] == "{" and (is_list or has_condition):
        return read_set(inside)
    if tokens[0] in "([" and is_list:
        return read_tuple(tokens)
    return read_value(inside) if inside[:1] == (r"\begin",) else None


def read_set(tokens):
    """A set, or a range such as {x | x > 2}. tokens: those between the braces."""
    head, *condition = parts_of(tokens, "|", ":")
    variable, *_ = parts_of(head, r"\in")
    if len(condition) == 1 and variable and name_of(variable):
        value = read_item(condition[0])
        if not isinstance(value, Range):
            raise Unreadable("a set of no range")
        return value
    items = parts_of(tokens, ",", ";") if tokens else []
    return Members(flat(map(read_item, items)), True)


def read_tuple(tokens):
    """A tuple or a range. tokens: with its brackets."""
    values = tuple(map(read_item, parts_of(tokens[1:-1], ",", ";")))
    left, right = tokens[0], tokens[-1]
    ends = [value.tree for value in values if isinstance(value, Formula)]
    is_infinite = INFINITY in ends or MINUS_INFINITY in ends
    if is_infinite or left + right in ("(]", "[)"):
        if len(ends) != 2:
            raise Unreadable("a range has two ends")
        return Range(None, (Piece(*ends, left, right),))
    return Tuple(values, left + right if len(values) == 2 else "()")


def read_lines(tokens):
    r"""A matrix as a tuple of tuples; the lines of cases as a system or a list."""
    kind = typed(tokens[2:3])
    if kind not in MATRICES | LINES or tokens[-2] != tokens[2]:
        raise Unreadable(f"{kind} is not read")
    lines = tokens[4:-4]
    if kind == "array":
        lines = lines[lines.index("}") + 1:]
    rows = []
    for line in parts_of(lines, r"\\"):
        if line:
            rows.append(tuple(map(read_item, parts_of(line, "&"))))
    if kind in LINES and max(map(len, rows)) == 1:
        return joined(sum(rows, ()), "and")
    return Tuple(tuple(Tuple(row, "row") for row in rows), "matrix")


def read_based(digits, base):
    """A number in a base as a text, 25_8; in base ten as a formula."""
    if base in BASES:
        base = str(BASES.index(base))
    if base == "10":
        return read_formula((digits,))
    if not base.isdigit():
        raise Unreadable("no base")
    if int(base) < 11 and re.search("[A-F]", digits):
        raise Unreadable("a digit that is too large")
    return Text((f"{digits.lstrip('0')} in base {base}",))


# ------------------------------------------------------------------------------- reading: ranges

def as_range(value):
    """A pair as the range that it may be; other values as they are."""
    if not isinstance(value, Tuple) or len(value.values) != 2:
        return value
    low, high = value.values
    if not isinstance(low, Formula) or not isinstance(high, Formula):
        return value
    return Range(None, (Piece(low.tree, high.tree, *value.brackets),))


def read_range(tokens):
    """A range, a pair as a range, or the numbers of a set as ranges."""
    value = as_range(read_value(tokens))
    if isinstance(value, Range):
        return value
    if not isinstance(value, Members) or not value.is_set:
        raise Unreadable("no range")
    points = [member.tree for member in value.values if isinstance(member, Formula)]
    pieces = [Piece(point, point, "[", "]") for point in points]
    return Range(None, tuple(pieces))


def reals_without(points):
    """The real numbers without some numbers."""
    trees = sorted([point.tree for point in points], key=order)
    pieces, low = [], MINUS_INFINITY
    for high in [*trees, INFINITY]:
        pieces.append(Piece(low, high, "(", ")"))
        low = high
    return Range(None, tuple(pieces))


def order(tree):
    """The number by which trees are sorted; letters have none, and stay."""
    return 0 if names_of(tree) else formula.number(tree)


def joined_ranges(ranges, word):
    """The union of ranges, or for "and" their intersection. Unreadable if a bound has a letter,
    because nobody knows then which bound is the larger one."""
    names = {value.name for value in ranges} - {None}
    pieces = ranges[0].pieces
    for value in ranges[1:]:
        if word == "or":
            pieces += value.pieces
        elif any(names_of(p.low) or names_of(p.high) for p in pieces + value.pieces):
            raise Unreadable
        else:
            pieces = intersection(pieces, value.pieces)
    return Range(names.pop() if names else None, in_order(pieces))


def in_order(pieces):
    """Pieces from left to right; those that meet are one. With letters in them, as they are."""
    for piece in pieces:
        if names_of(piece.low) or names_of(piece.high):
            return pieces
    merged = []
    for piece in sorted(pieces, key=lambda piece: order(piece.low)):
        last = merged[-1] if merged else None
        gap = order(piece.low) - order(last.high) if last else 1
        touch = gap == 0 and (last.right == "]" or piece.left == "[")
        if order(piece.low) > order(piece.high):
            continue
        if gap >= 0 and not touch:
            merged.append(piece)
        elif order(piece.high) > order(last.high):
            merged[-1] = last._replace(high=piece.high, right=piece.right)
    return tuple(merged)


def intersection(some, others):
    """The pieces that lie in both."""
    pieces = []
    for a in some:
        for b in others:
            low, left = max((a.low, a.left), (b.low, b.left), key=start)
            high, right = min((a.high, a.right), (b.high, b.right), key=end)
            if order(low) < order(high):
                pieces.append(Piece(low, high, left, right))
    return tuple(pieces)


def start(bound):
    """By this the later one of two beginnings is found; of 1, the open one."""
    tree, bracket = bound
    return order(tree), bracket == "("


def end(bound):
    tree, bracket = bound
    return order(tree), bracket == "]"


# ---------------------------------------------------------------------- reading: units and words

MOST_WORDS = 6  # of a text; a longer one can be said in other words


def read_quantity(tokens):
    """A number or ratio with its unit; else a text."""
    at = start_of_unit(tokens)
    try:
        factor, unit = read_unit(tokens[at:])
        parts = list(map(read_formula, parts_of(tokens[:at], ":")))
    except Unreadable:
        return read_text(tokens)
    words = {name for name, _ in unit} - MEASURES
    if words and names_of(parts[0].tree):  # n odd
        return read_text(tokens)
    if len(parts) == 1 and factor == 1:
        return parts[0]._replace(unit=unit)
    if len(parts) == 1:
        return Formula(("*", parts[0].tree, ("number", factor)), unit)
    if factor != 1:
        return read_text(tokens)
    is_time = bool(words & {"am", "pm"})
    is_time = is_time or any(part.plain[:1] == "0" for part in parts)  # 5:06
    return Ratio(tuple(part.tree for part in parts), unit, is_time)


def read_text(tokens):
    """Words, and between them the values of formulas."""
    parts, run = [], []
    for token in (*tokens, '"'):
        if not is_word(token):
            run.append(token)
            continue
        value = value_between(run)
        if value:
            parts.append(value)
        run = []
        word = token.strip('"').lower()
        if parts and isinstance(parts[-1], str):
            parts[-1] += word
        elif word:
            parts.append(word)
    words = sum(map(is_word, tokens))
    if words == 0 or words > MOST_WORDS:
        raise Unreadable("no words, or too many")
    return Text(tuple(parts))


def value_between(tokens):
    """The value of what stands between two words, without signs such as commas; or its text."""
    while tokens and tokens[0] in ",.()!?:;":
        del tokens[0]
    while tokens and tokens[-1] in ",.()!?:;":
        del tokens[-1]
    try:
        return read_item(tuple(tokens)) if tokens else ""
    except Unreadable:
        return "".join(tokens)


# ------------------------------------------------------------------------------------- comparing

def same(gold, said):
    """Whether two answers are equal, each of one of the kinds at the top."""
    for kind, compare in MIXED:
        if isinstance(gold, kind) or isinstance(said, kind):
            return compare(gold, said)
    return type(gold) is type(said) and ALIKE[type(gold)](gold, said)


def same_rounded(gold, said):
    """A value is equal to either side of a sign for rounding."""
    if isinstance(gold, Rounded) and isinstance(said, Rounded):
        return same(gold.exact, said.exact)
    if isinstance(gold, Rounded):
        return same(gold.exact, said) or same(gold.rounded, said)
    return same(gold, said.exact) or same(gold, said.rounded)


def same_systems(gold, said):
    """The values of each name. Beside a list or tuple: in the order of x, y, z or as written."""
    if isinstance(gold, System) and isinstance(said, System):
        values = dict(zip(said.names, said.values))
        if sorted(gold.names) != sorted(values):
            return False
        return all(same(value, values[name]) for name, value in zip(*gold))
    system, other = gold, said
    if isinstance(said, System):
        system, other = said, gold
    letters = {name.partition("_")[0] for name in system.names}
    if isinstance(other, Named) and {other.name} == letters:  # x=1,2 and x_1=1, x_2=2
        other = other.value
    if not isinstance(other, (Tuple, Members)):
        return False
    if isinstance(other, Members) and (system is said or len(letters) == 1):  # x_1, x_2: the roots
        return same_members(Members(system.values), other)
    values = system.values
    if letters <= {"x", "y", "z"}:
        value_of = dict(zip(system.names, values))
        values = [value_of[name] for name in sorted(value_of)]
    return same_in_order(values, other.values)


def same_relations(gold, said):
    """Relations; or one and a value, if the left side only says what the value is."""
    if not isinstance(said, (Relation, Named)):
        is_line = isinstance(gold.left, Formula) and names_of(gold.left.tree) & COORDINATES
        return not is_line and is_label(gold) and same(gold.right, said)
    if not isinstance(gold, (Relation, Named)):
        return is_label(said) and same(gold, said.right)
    if isinstance(gold, Named) and not is_curve(gold):  # solved, unlike 2x = 10
        return False
    return same_curves(as_relation(gold), as_relation(said))


def same_named(gold, said):
    """A name may be left off. Two names may be those of one curve: y=x/2, x=2y."""
    if isinstance(gold, Named) and isinstance(said, Named) and gold.name != said.name:
        return is_curve(gold) and same_curves(as_relation(gold), as_relation(said))
    return same(gold.value if isinstance(gold, Named) else gold,
                said.value if isinstance(said, Named) else said)


COORDINATES = {"x", "y", "z"}


def is_label(relation):
    """Whether the left side says what the right one is the value of, as in 8 * 9 = 72 or x+y = 3.

    x^2 + 1 = 0 and x^2 = 4 are to be solved, and x^2 + y^2 = 9 is a circle."""
    sign, left, right = relation
    if sign != "=" or isinstance(left, Ratio):
        return sign == "="
    if not isinstance(left, Formula) or not isinstance(right, Formula):
        return False
    names = names_of(left.tree)
    if not names:
        return not left.plain and same(left, right)
    has_power = names & COORDINATES and "'^'" in str(left.tree)
    is_solved = not names_of(right.tree) and not formula.equal(right.tree, ZERO)
    return is_solved and len(names) > 1 and not has_power and not formula.has_number(left.tree)


def is_curve(named):
    value = named.value
    return isinstance(value, Formula) and len(names_of(value.tree)) > 0


def as_relation(value):
    if isinstance(value, Relation):
        return value
    left = Formula(value.tree) if value.tree else None
    return Relation("=", left, value.value)


def same_curves(gold, said):
    """Whether the differences of the sides are the same, up to a constant factor."""
    sides = gold.left, gold.right, said.left, said.right
    if gold.sign != said.sign or set(map(type, sides)) != {Formula}:
        return False
    difference = ("-", gold.left.tree, gold.right.tree)
    other = ("-", said.left.tree, said.right.tree)
    if gold.sign != "=":
        return formula.proportional(difference, other, positive=True)
    if formula.proportional(formula.numerator(difference), formula.numerator(other)):
        return True
    if gold.left.plain or said.left.plain:
        return False  # 1=1 says nothing
    if not names_of(difference):  # 2^2=4 and 1+3=4 are both true, and say different things
        return same(gold.right, said.right) and formula.same_operands(
            gold.left.tree, said.left.tree)
    # (x+1)^2 = x^2+2x+1 holds always: side by side
    return same(gold.left, said.left) and same(gold.right, said.right)


def same_members(gold, said):
    """Each member of one has an equal one in the other. A list without braces may be a tuple."""
    for members, other in (gold, said), (said, gold):
        if isinstance(other, Tuple) and not members.is_set and other.brackets == "()":
            return same_in_order(gold.values, said.values)
    if isinstance(gold, Tuple):
        return False
    golds = set(gold.values) if isinstance(gold, Members) else {gold}
    saids = set(said.values) if isinstance(said, Members) else {said}
    units = {value.unit for value in golds | saids if isinstance(value, Formula)}
    compare = same_with_units if len(units) > 2 else same
    for value in golds:
        if not any(compare(value, other) for other in saids):
            return False
    for other in saids:
        if not any(compare(value, other) for value in golds):
            return False
    return bool(golds) == bool(saids)


def same_with_units(gold, said):
    """Units that differ are names, as in 9 hens and 10 cows, and cannot be left off."""
    are_formulas = isinstance(gold, Formula) and isinstance(said, Formula)
    if are_formulas and gold.unit != said.unit:
        return False
    return same(gold, said)


def same_in_order(gold, said):
    return len(gold) == len(said) and all(map(same, gold, said))


def same_tuples(gold, said):
    return gold.brackets == said.brackets and same_in_order(gold.values, said.values)


def same_ranges(gold, said):
    gold, said = as_range(gold), as_range(said)
    if not isinstance(gold, Range) or not isinstance(said, Range):
        return False
    names = {gold.name, said.name}
    if len(names) == 2 and None not in names:
        return False
    if len(names) == 2 and "|" in str(names):  # |x| < 2 may be the question
        return False
    rest = list(said.pieces)
    for piece in gold.pieces:
        equals = [other for other in rest if same_pieces(piece, other)]
        if not equals:
            return False
        rest.remove(equals[0])
    return not rest


def same_pieces(gold, said):
    if (gold.left, gold.right) != (said.left, said.right):
        return False
    return same_trees(gold.low, said.low) and same_trees(gold.high, said.high)


def same_trees(gold, said):
    return same_formulas(Formula(gold), Formula(said))


def same_ratios(gold, said):
    """Proportional; a ratio of two is a fraction. But 12:00 and 5:06 are times."""
    gold, said = as_ratio(gold), as_ratio(said)
    if gold is None or said is None:
        return False
    if len(gold.parts) != len(said.parts) or not same_units(gold.unit, said.unit):
        return False
    if gold.is_time or said.is_time:
        return all(map(formula.equal, gold.parts, said.parts))
    columns = zip(gold.parts, said.parts)
    for column, other in itertools.combinations(columns, 2):
        a, b = column
        c, d = other
        left = ("*", a, d)
        right = ("*", b, c)
        if not formula.equal(left, right):
            return False
    return not has_zeros_only(gold) and not has_zeros_only(said)


def has_zeros_only(ratio):
    """0:0 would be proportional to every ratio."""
    return all(formula.equal(part, ZERO) for part in ratio.parts)


def as_ratio(value):
    """A number, or 3 to 2 in words, as a ratio. Two texts in words are never compared as ratios,
    because 3 to 8 may be a range; 6 to 16 is another one."""
    if isinstance(value, Formula):
        return Ratio((value.tree, ONE), value.unit, False)
    if isinstance(value, Text):
        parts = value.parts[::2]
        words = value.parts[1::2]
        has_numbers = set(map(type, parts)) == {Formula}
        if has_numbers and set(words) == {"to"} and len(parts) > len(words):
            trees = [part.tree for part in parts]
            return Ratio(tuple(trees), (), False)
    return value if isinstance(value, Ratio) else None


def same_texts(gold, said):
    if len(gold.parts) != len(said.parts):
        return False
    for part, other in zip(gold.parts, said.parts):
        is_text = isinstance(part, str) or isinstance(other, str)
        if part != other and (is_text or not same(part, other)):
            return False
    return True


# ---------------------------------------------------------------------------- comparing: numbers

def same_formulas(gold, said):
    """The same value and unit; 50% is 50 or 0.5."""
    if not same_units(gold.unit, said.unit):
        return False
    if same_values(gold, said):
        return True
    if (PERCENT in gold.unit) == (PERCENT in said.unit):
        return False
    return formula.equal(without_percent(gold), without_percent(said))


def without_percent(value):
    hundred = ("number", Fraction(100))
    return ("/", value.tree, hundred) if PERCENT in value.unit else value.tree


def same_values(gold, said):
    """Whether two values are equal, or equal where one is rounded.

    A gold decimal with the digits of a float has noise at its end. A decimal of six places or more
    is a rounded fraction or root. Two shorter decimals are equal only if they are the same."""
    if formula.equal(gold.tree, said.tree):
        return True
    if names_of(gold.tree) or names_of(said.tree):
        return False
    if is_float(gold.plain):
        noise = Fraction(gold.plain) / 10**14
        if is_near(gold, said, noise):
            return True
    plain = gold.plain or said.plain
    decimals = len(plain.partition(".")[2])
    if decimals < 6 or gold.plain and said.plain:
        return False
    half = Fraction(1, 2 * 10**decimals)
    percent = abs(Fraction(plain)) / 100
    return is_near(gold, said, min(half, percent))


def is_near(gold, said, distance):
    """Whether two values differ by at most a distance; halves are rounded either way."""
    try:
        difference = formula.number(("-", gold.tree, said.tree))
    except Unreadable:
        return False
    return abs(difference) <= abs(float(distance)) * 1.001


MIXED = (  # the comparison of the first kind that one of two answers is
    (Rounded, same_rounded), (System, same_systems), (Relation, same_relations),
    (Named, same_named), (Members, same_members), (Range, same_ranges), (Ratio, same_ratios))
ALIKE = {Formula: same_formulas, Tuple: same_tuples, Text: same_texts}
