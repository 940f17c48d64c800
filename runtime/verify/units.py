"""The units of numbers: the words after them, and when these are more than a unit.

    >>> read_unit(('"million', '"km', '"per', '"hour'))
    (Fraction(1000000, 1), (('h', -1), ('km', 1)))
"""
import re
from fractions import Fraction

from runtime.verify.formula import Unreadable, is_word, typed

MULTIPLIERS = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5,
    "million": 10**6, "crore": 10**7, "billion": 10**9, "trillion": 10**12}
UNITS = {}  # name: the name that all names of this unit have
for names in (
        "m meter metre", "cm centimeter centimetre", "mm millimeter millimetre",
        "km kilometer kilometre", "g gram gm", "kg kilogram", "l liter litre",
        "ml milliliter millilitre", "h hour hr", "min minute", "s second sec", "ft foot feet",
        "in inch inche", "mi mile", "lb pound", "oz ounce", "yd yard", "gal gallon",
        "deg degree", "% percent percentage pct", "day", "week", "month", "yr year", "cent",
        "$ dollar", "person people", "n newton", "j joule", "w watt", "v volt", "a ampere",
        "k kelvin"):
    first, *others = names.split()
    UNITS |= dict.fromkeys([first, *others], first)
MEASURES = set(UNITS.values())
EXPONENTS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}
NO_UNITS = {"unit", "of", "the"}
# words after a number that say more than its unit
STATEMENT = set("or and not if unless except than to is are was were be between from through when"
                " base even odd below under minus negative squared cubed half halves thirds"
                " quarters left right prime".split())
FRACTION = re.compile(r"(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths?")
UNIT_WORD = re.compile(  # a word with its exponent; a letter only in km/h
    r'("\S+|%|\\degree "?[CF]|(?<=[/*] )[A-Za-z])(?: \^ (?:\{ )?((?:- )?\d)(?: \})?)?|\S+')


def start_of_unit(tokens):
    """Where a unit begins: at a word, %, or the degree sign of a temperature."""
    for at, token in enumerate(tokens):
        is_temperature = re.match(r"\\degree[CF]", typed(tokens[at:at + 2]))
        if is_word(token) or token == "%" or is_temperature:
            return at
    return len(tokens)


def read_unit(tokens):
    """The factor and the unit of the words after a number: 1 and (("h", -1), ("km", 1)).

    Raises Unreadable if they say more than a unit."""
    factor = Fraction(1)
    while tokens and unit_of(tokens[0]) in MULTIPLIERS:
        factor *= MULTIPLIERS[unit_of(tokens[0])]
        tokens = tokens[1:]
    powers, last = {}, ""
    sign, power = 1, 1
    text = " ".join(tokens).replace('"mph', '"mi / "h')
    for match in UNIT_WORD.finditer(text):
        token, exponent = match.groups()
        word = unit_of(token or match[0])
        if word in ("/", "per"):
            sign = -1
        elif word in ("squared", "cubed") and last:
            powers[last] *= EXPONENTS[word]
        elif word in ("square", "sq", "cubic"):
            power = EXPONENTS[word]
        elif token and is_unit(word, token):
            power *= int((exponent or "1").replace(" ", ""))
            powers[word] = powers.get(word, 0) + sign * power
            power, last = 1, word
        elif token or match[0] not in "*().{}":
            raise Unreadable(f"{word} is no unit")
    return factor, tuple(sorted(powers.items()))


def is_unit(word, token):
    spelled = token.strip('".').lower()
    return not (spelled in STATEMENT or word in MULTIPLIERS or FRACTION.fullmatch(spelled))


def unit_of(token):
    """The name of a unit: "hour, "Hours and "hrs are h."""
    word = token.strip('".').lower()
    if re.search("..[^s]s$|^..s$", word):
        word = word[:-1]
    return UNITS.get(word, word)


PERCENT = ("%", 1)


def same_units(gold, said):
    """A unit may be left off: all of it, or words such as more in 5 more apples."""
    unimportant = {PERCENT, *((name, 1) for name in NO_UNITS)}
    gold, said = set(gold) - unimportant, set(said) - unimportant
    measures = []
    for unit in gold, said:
        measures.append({(name, power) for name, power in unit if name in MEASURES})
    if all(measures) and measures[0] != measures[1]:
        return False
    return gold <= said or said <= gold
