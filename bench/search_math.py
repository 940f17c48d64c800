r"""Searches for answers that the reward math judges wrongly.

    python -m bench.search_math --data ../shared/data             20,000 pairs, some minutes
    python -m bench.search_math --data my_golds.jsonl --show 50   files with a column "answer"

Golds are those of data sets. Three kinds of pairs are made from them, with a seed:

    changed    the gold with one change: a number, a sign, a letter, the order of a tuple, a member
               more or less, a bracket, a function, a word. It must not earn 1.
    universal  an answer that says nothing, for any question: x=x, 0=0, no solution. It must not.
    rewritten  the gold in another form: 0.5 for 1/2, other spaces, terms in another order, without
               its unit. It must earn 1.

Prints how many pairs of each kind and change earn 1, and the wrong ones. A change may be equal by
chance (2^4 and 4^2), so each pair in the list is to be looked at.
"""
import json
import random
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import rewards
from bench import common

UNIVERSAL = (
    "x^2+1=0", "x=x", "0=0", "1=1", "x^2+x+1=0", "y=y", r"\varnothing", r"\emptyset", r"\{\}",
    "i", "e", "nan", "NaN", "oo", r"\infty", r"(-\infty,\infty)", r"\mathbb{R}", r"x\in\mathbb{R}",
    "", "{}", "()", "[]", "?", "...", "None", "null", "N/A", r"\text{no solution}",
    r"\text{none}", r"\text{undefined}", r"\text{all real numbers}", r"\text{true}", "x", "n",
    "x=0 or x=1", "1,2,3,4,5,6,7,8,9,10", "a=b", "x^2=-1", r"\sqrt{-1}=i", "f(x)=f(x)",
    r"\frac{dy}{dx}", "2<3", "x<x+1", r"x\ne x", r"\frac{0}{0}", r"\frac{1}{0}",
    "0^0", r"\int_0^1 x dx", r"\sum_{k=1}^n k", r"\lim_{x\to 0} x", "answer",
    r"\text{answer}", r"\boxed{}", r"\text{}", "proof", r"z=\bar{z}", "x^2+y^2=-1", "1=2", "xy=yx")

# ---------------------------------------------------------------------------------------- changes

NUMBER = re.compile(r"(?<![A-Za-z_{\d.])\d+(?![\d.])|(?<=\{)\d+(?=\})")
LETTER = re.compile(r"(?<![A-Za-z\\{])[A-Za-z](?![A-Za-z])")
WORDS = re.compile(r"\\(?:text|mathrm|mbox|begin)")


def changed_number(gold, rng):
    return replaced_one(gold, NUMBER, rng, lambda m: str(int(m[0]) + rng.randint(1, 9)))


def changed_digit(gold, rng):
    return replaced_one(gold, re.compile(r"\d"), rng,
                        lambda m: str((int(m[0]) + rng.randint(1, 9)) % 10))


def changed_sign(gold, rng):
    if gold == "0" or "text" in gold or gold.startswith(r"\pm"):
        return None
    signs = re.compile(r"(?<=[\w})]) ?[+-] ?(?=[\w\\({])")
    other = replaced_one(gold, signs, rng, lambda m: "-" if "+" in m[0] else "+")
    return other or f"-{gold}"


def changed_letter(gold, rng):
    if r"\in" in gold:  # the name of a variable that any integer may have
        return None
    letters = "abcdkmnpqrstuvwxyz"
    return replaced_one(gold, LETTER, rng, lambda m: rng.choice(letters.replace(m[0].lower(), "")))


def dropped_letter(gold, rng):
    if WORDS.search(gold):
        return None
    return replaced_one(gold, re.compile(r"(?<=[\da-z}])\s?[a-z](?![a-z({])"), rng, lambda m: "")


def other_case(gold, rng):
    return replaced_one(gold, LETTER, rng, lambda m: m[0].swapcase())


def changed_exponent(gold, rng):
    return replaced_one(gold, re.compile(r"\^\{?\d\}?"), rng,
                        lambda m: rng.choice(("", f"^{{{int(re.sub('[^0-9]', '', m[0])) + 1}}}")))


def swapped(gold, rng):
    """Two members of a tuple change places."""
    found = re.fullmatch(r"(.*[(\[])([^()\[\],]+),([^()\[\],]+)([)\],].*)", gold)
    if not found or "cup" in gold or found[2].strip() == found[3].strip():
        return None
    return f"{found[1]}{found[3]},{found[2]}{found[4]}"


def another_member(gold, rng):
    if gold in ("13", "x", "-7"):
        return None
    member = rng.choice(("13", "x", "-7", r"\frac{17}{19}"))
    end = re.search(r"(?:\\right)?\s?(?:\\?[)\]}])?$", gold).start()
    if "," not in gold or r"\end" in gold or r"\text" in gold:
        return f"{gold}, {member}"
    return f"{gold[:end]}, {member}{gold[end:]}"


def one_member_less(gold, rng):
    if "," not in gold or r"\text" in gold or re.fullmatch(r"[\d,.\\!$]+", gold):
        return None
    first, _, rest = gold.partition(",")
    opening = re.match(r"(?:\\left)?\s?(?:\\?[(\[{])?", first)[0]
    return opening + rest.strip()


def changed_bracket(gold, rng):
    if not re.search(r"\\infty|\\cup|\(.*\]|\[.*\)", gold):
        return None
    other = {"(": "[", "[": "(", ")": "]", "]": ")"}
    return replaced_one(gold, re.compile(r"[()\[\]]"), rng, lambda m: other[m[0]])


def turned_fraction(gold, rng):
    fraction = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
    return replaced_one(gold, fraction, rng, lambda m: rf"\frac{{{m[2]}}}{{{m[1]}}}")


def other_function(gold, rng):
    others = {r"\sin": r"\cos", r"\cos": r"\sin", r"\tan": r"\cot", r"\ln": r"\exp",
              r"\pi": r"\theta", r"\sqrt": "", r"\cot": r"\tan", r"\infty": "9", r"\pm": "+",
              r"\cup": ",", "<": ">", r"\le": r"\ge", r"\ge": "<", "=": "<"}
    return replaced_one(gold, re.compile("|".join(map(re.escape, others))), rng,
                        lambda m: others[m[0]])


def other_word(gold, rng):
    if r"\begin" in gold:
        return None
    words = ("odd", "even", "north", "minutes", "maximum", "false", "rational", "Peter")
    return replaced_one(gold, re.compile(r"(?<=[{ ])[A-Za-z]{3,}(?=[} ])"), rng,
                        lambda m: rng.choice([word for word in words if word != m[0]]))


def another_word(gold, rng):
    if re.search(r"\([A-J]\)", gold):  # the text of an option
        return None
    if gold.endswith("0"):
        return None
    words = "million", "or more", "squared", "is odd", "if x > 0", "tenths", "or 99", "not", "to 9"
    return rf"{gold} \text{{ {rng.choice(words)}}}"


def another_term(gold, rng):
    if re.search(r"(?<!\d)[012]$|text", gold):  # 0x is 0, and 2! is 2
        return f"{gold}+1" if "text" not in gold else None
    return gold + rng.choice((
        "+1", "-x", r"\cdot 2", "^3", "+k", "i", "x", "+0.001", r"\pi", "/3", "!+3"))


CHANGES = (
    changed_number, changed_digit, changed_sign, changed_letter, dropped_letter, other_case,
    changed_exponent, swapped, another_member, one_member_less, changed_bracket, turned_fraction,
    other_function, other_word, another_word, another_term)


def replaced_one(text, pattern, rng, replacement):
    """The text with one match of a pattern replaced; None without a match."""
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    match = rng.choice(matches)
    before = text[:match.start()]
    after = text[match.end():]
    return before + replacement(match) + after


# -------------------------------------------------------------------------------------- other forms

def as_decimal(gold, rng):
    found = re.fullmatch(r"(-?)\\[dt]?frac\s?\{?(\d+)\}?\s?\{?(\d+)\}?", gold)
    if not found or not re.fullmatch("2*5*", factors_2_and_5(int(found[3]))):
        return None
    value = Fraction(int(found[2]), int(found[3]))
    return f"{found[1]}{float(value)}"


def factors_2_and_5(n):
    """"225" for 20; with an x for other factors."""
    text = ""
    for factor in 2, 5:
        while n % factor == 0:
            n //= factor
            text += str(factor)
    return text + "x" * (n > 1)


def expanded_fraction(gold, rng):
    k = rng.randint(2, 7)
    return replaced_one(gold, re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}"), rng,
                        lambda m: rf"\dfrac{{{int(m[1]) * k}}}{{{int(m[2]) * k}}}")


def with_slash(gold, rng):
    found = re.fullmatch(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}", gold)
    return f"{found[1]}{found[2]}/{found[3]}" if found else None


def other_commands(gold, rng):
    text = gold.replace(r"\frac", r"\dfrac").replace(r"\le ", r"\leq ").replace(r"\left", "")
    text = text.replace(r"\right", "").replace("pmatrix", "bmatrix").replace(r"\pi", "π")
    return text if text != gold else None


def other_spaces(gold, rng):
    if WORDS.search(gold) or re.search(r"\d,", gold):
        return rf"\,{gold}\;"
    return re.sub(r"(?<=[\w})])([+,=<>-])(?=[\w\\({])", r" \1\\, ", gold)


def with_signs_around(gold, rng):
    return rng.choice(("${}$", r"\({}\)", "{}.", r"\displaystyle {}", "**{}**"[2:-2])).format(gold)


def other_order(gold, rng):
    """Terms of a sum, or members of a list, in another order."""
    is_date = re.fullmatch(r"\d{4}-\d\d-\d\d", gold)
    if is_date or re.search(r"[=<>&]|text|mbox|mathrm|\\in|\\begin|_|\\pm|\\cup|\d,", gold):
        return None
    if re.search(r"[(\[{]", gold.replace("^{", "").replace("frac{", "").replace("}{", "")):
        return None
    parts = gold.split(",")
    if len(parts) > 1:
        return ",".join(reversed(parts))
    terms = re.findall(r"[+-]?[^+-]+", gold)
    if len(terms) < 2 or "^{-" in gold or any(term.count("{") != term.count("}") for term in terms):
        return None
    turned = "+".join(reversed(terms)).replace("+-", "-").replace("++", "+")
    return turned.removeprefix("+")


def list_in_other_order(gold, rng):
    if not re.fullmatch(r"-?[\w\\/]+(, ?-?[\w\\/]+)+", gold) or re.fullmatch(r"[\d,]+", gold):
        return None
    return ", ".join(reversed(re.split(", ?", gold)))


def without_unit(gold, rng):
    text = re.sub(r"\s?\^\{?\\circ\}?$|\\?\$|\\?%$", "", gold)
    text = re.sub(r"(?<=[\d}])\s?\\(?:text|mbox|mathrm)\{\s?~?(?:cm|inches|degrees|cents|meters|"
                  r"feet|hours|km|m|miles|units)\}(?:\^\{?\d\}?)?$", "", text)
    return text if text != gold else None


def with_name(gold, rng):
    is_value = not re.search(r"[=<>]|text|\\in|,|\\pm|mbox", gold)
    without_commands = re.sub(r"\\[a-z]+", "", gold)
    if not is_value or re.search("[a-z]", without_commands):
        return None
    return f"{rng.choice('kmtx')} = {gold}"


def without_name(gold, rng):
    found = re.fullmatch(r"[a-z]\s?=\s?([^=]+)", gold)
    return found[1] if found else None


def with_point_zero(gold, rng):
    return f"{gold}.0" if re.fullmatch(r"-?\d+", gold) else None


def with_thousands(gold, rng):
    return f"{int(gold):,}" if re.fullmatch(r"-?\d{4,}", gold) else None


def without_text(gold, rng):
    found = re.fullmatch(r"\\text\{([^{}]+)\}", gold)
    return rng.choice((found[1], rf"\textbf{{{found[1]}}}")) if found else None


def with_dots(gold, rng):
    if re.search(r"\\(?:sin|cos)\^", gold):  # "\cos^2 x" has no product
        return None
    return replaced_one(gold, re.compile(r"(?<=\d)\s?(?=[a-z]\b|\\pi|\\sqrt)"), rng,
                        lambda m: r" \cdot ")


def as_inequality(gold, rng):
    found = re.fullmatch(r"([(\[])([^()\[\],]+),([^()\[\],]+)([)\]])", gold)
    if not found or (found[1] + found[4] in ("()", "[]") and "infty" not in gold):
        return None
    low = r"\le" if found[1] == "[" else "<"
    high = r"\le" if found[4] == "]" else "<"
    if "infty" in found[2]:
        return f"x {high} {found[3]}"
    if "infty" in found[3]:
        return f"{found[2]} {low} x"
    return f"{found[2]} {low} x {high} {found[3]}"


def doubled_equation(gold, rng):
    found = re.fullmatch(r"([^=]*[a-z][^=]*[a-z][^=]*)=([^=]+)", gold)
    if not found or "text" in gold or not re.search(r"[+-]", found[1]):
        return None
    return f"2({found[1]}) = 2({found[2]})"


FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")


def as_mixed_number(gold, rng):
    found = FRACTION.fullmatch(gold)
    if not found:
        return None
    whole, rest = divmod(int(found[2]), int(found[3]))
    if not whole or not rest:
        return None
    return rf"{found[1]}{whole}\frac{{{rest}}}{{{found[3]}}}"


def sign_inside(gold, rng):
    found = FRACTION.fullmatch(gold)
    if not found or not found[1]:
        return None
    return rf"\frac{{-{found[2]}}}{{{found[3]}}}"


def without_braces(gold, rng):
    """\\frac12 and \\sqrt2"""
    text = re.sub(r"frac\{(\d)\}\{(\d)\}(?!\d)", r"frac\1\2", gold)
    text = re.sub(r"sqrt\{(\d)\}(?!\d)", r"sqrt\1", text)
    return text if text != gold else None


def as_percent(gold, rng):
    decimal = as_decimal(gold, rng) or gold
    if not re.fullmatch(r"0\.\d+", decimal):
        return None
    percent = Fraction(decimal) * 100
    return rf"{percent}\%" if percent.denominator == 1 else None


def as_fraction(gold, rng):
    if not re.fullmatch(r"-?\d*\.\d{1,6}", gold):
        return None
    value = Fraction(gold)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def as_power(gold, rng):
    """\\sqrt{3} as 3^{1/2}"""
    root = re.fullmatch(r"\\sqrt\{(\d+)\}", gold)
    return f"{root[1]}^{{1/2}}" if root else None


def rational_denominator(gold, rng):
    """\\frac{\\sqrt{2}}{2} as \\frac{1}{\\sqrt{2}}"""
    found = re.fullmatch(r"\\frac\{\\sqrt\{(\d+)\}\}\{(\d+)\}", gold)
    if not found:
        return None
    return rf"\frac{{{found[1]}}}{{{found[2]}\sqrt{{{found[1]}}}}}"


def factor_behind(gold, rng):
    found = re.fullmatch(r"(\d+)(\\sqrt\{\d+\}|\\pi)", gold)
    return rf"{found[2]} \cdot {found[1]}" if found else None


def as_set(gold, rng):
    """A list in braces, in another order."""
    other = list_in_other_order(gold, rng)
    return rf"\{{{other}\}}" if other else None


def with_or(gold, rng):
    other = list_in_other_order(gold, rng)
    if not other:
        return None
    *first_members, last = other.split(", ")
    words = rng.choice((" and ", r" \text{ and } ", r" \text{ or } "))
    return words.join((", ".join(first_members), last))


def each_with_name(gold, rng):
    other = list_in_other_order(gold, rng)
    if not other or re.search("[a-z]", re.sub(r"\\[a-z]+", "", other)):
        return None
    return ", ".join(f"x={member}" for member in other.split(", "))


def with_a_unit(gold, rng):
    if not re.fullmatch(r"-?\d+(\.\d+)?|\\frac\{\d+\}\{\d+\}", gold):
        return None
    words = (r"\text{ cm}", r"\text{ units}", r"\text{ meters}", " dollars", r"\text{ square feet}",
             r"\text{ apples}")
    return gold + rng.choice(words)


def with_dollar(gold, rng):
    return rf"\${gold}" if re.fullmatch(r"\d+(\.\d\d)?", gold) else None


def other_thousands(gold, rng):
    if not re.fullmatch(r"\d{4,}", gold):
        return None
    sign = rng.choice((r"{,}", r"\,", r",\!", " "))
    return f"{int(gold):,}".replace(",", sign)


def as_scientific(gold, rng):
    found = re.fullmatch(r"([1-9])(0{3,})", gold)
    if not found:
        return None
    return rf"{found[1]} \times 10^{{{len(found[2])}}}"


def other_degrees(gold, rng):
    found = re.fullmatch(r"(\d+)\s?\^\{?\\circ\}?", gold)
    words = ("{}°", r"{} \text{{ degrees}}", "{} degrees", r"{}^{{\circ}}")
    return rng.choice(words).format(found[1]) if found else None


def other_interval(gold, rng):
    """An interval after x \\in, with other brackets."""
    if not re.fullmatch(r"[(\[][^()\[\]]+,[^()\[\]]+[)\]]", gold):
        return None
    is_tuple = gold[0] + gold[-1] in ("()", "[]") and "infty" not in gold
    text = rf"\left{gold[:-1]}\right{gold[-1]}"
    return text if is_tuple else rf"x \in {text}"


REWRITINGS = (
    as_decimal, expanded_fraction, with_slash, other_commands, other_spaces, with_signs_around,
    other_order, list_in_other_order, without_unit, with_name, without_name, with_point_zero,
    with_thousands, without_text, with_dots, as_inequality, doubled_equation,
    as_mixed_number, sign_inside, without_braces, as_percent, as_fraction, as_power,
    rational_denominator, factor_behind, as_set, with_or, each_with_name, with_a_unit, with_dollar,
    other_thousands, as_scientific, other_degrees, other_interval)


# ------------------------------------------------------------------------------------------- pairs

def golds_of(path):
    """The distinct answers of a jsonl file, or of those in the folders of a folder."""
    files = sorted(path.glob("*/test.jsonl")) if path.is_dir() else [path]
    golds = {}
    for file in files:
        for line in file.read_text().splitlines():
            gold = str(json.loads(line)["answer"]).rpartition("####")[2].strip()
            golds[gold] = len(golds)
    return [gold for gold in golds if gold]


def pairs_of(golds, count, seed):
    """[(kind, how, gold, answer)], without repetitions: 60 % changed, 15 % universal."""
    rng = random.Random(seed)
    shares = {"changed": 0.6, "universal": 0.15, "rewritten": 0.25}
    tools = {"changed": CHANGES, "universal": UNIVERSAL, "rewritten": REWRITINGS}
    pairs = {}
    for kind, share in shares.items():
        made = 0
        for _ in range(100 * count):
            gold, tool = rng.choice(golds), rng.choice(tools[kind])
            answer = tool if kind == "universal" else tool(gold, rng)
            if answer is None or answer.strip() == gold or (gold, answer) in pairs:
                continue
            pairs[gold, answer] = kind, tool if kind == "universal" else tool.__name__
            made += 1
            if made >= share * count:
                break
    return [(*about, *pair) for pair, about in pairs.items()]


def by_math_verify(pairs):
    """Whether math-verify alone judges the pairs as equal, each side as it is in the data."""
    from math_verify import parse, verify
    found = []
    for _, _, gold, answer in pairs:
        sides = [parse(f"${text}$", parsing_timeout=None) for text in (gold, answer)]
        found.append(verify(*sides, timeout_seconds=None))
    return found


def by_reward(pairs):
    """The rewards of the pairs, and the metrics of their judge."""
    texts = [f"<answer>{answer}</answer>" for *_, answer in pairs]
    golds = [gold for _, _, gold, _ in pairs]
    with rewards.Verifier("math", timeout=10.0) as verify:
        values, _, metrics = verify(texts, answer=golds)
    return values, metrics


def table_of_kinds(pairs, values):
    counts = Counter()
    for (kind, *_), value in zip(pairs, values):
        counts[kind, value] += 1
    rows = []
    for kind in "changed", "universal", "rewritten":
        rows.append([kind, *(counts[kind, value] for value in (1.0, 0.0, None))])
    return common.table(["kind", "1", "0", "None"], rows)


def table_of_rewritings(pairs, values, others):
    """How many rewritten golds do not earn, by the reward and by math-verify."""
    made, ours, theirs = Counter(), Counter(), Counter()
    for (kind, how, *_), value, other in zip(pairs, values, others):
        if kind == "rewritten":
            made[how] += 1
            ours[how] += value != 1.0
            theirs[how] += not other
    rows = [[how, made[how], ours[how], theirs[how]] for how in sorted(made)]
    rows.append(["all", made.total(), ours.total(), theirs.total()])
    return common.table(["rewriting", "pairs", "reward: not 1", "math-verify: not equal"], rows)


def main(argv=None):
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=100, help="most pairs that are printed")
    parser.add_argument("--math_verify", action="store_true", help="judges the rewritten ones too")
    args = parser.parse_args(argv)
    golds = []
    for path in args.data:
        golds += golds_of(path)
    pairs = pairs_of(golds, args.pairs, args.seed)
    values, metrics = by_reward(pairs)
    wrong = []
    for pair, value in zip(pairs, values):
        if (value == 1.0) != (pair[0] == "rewritten"):
            wrong.append([*pair, value])
    print(f"{len(golds)} golds, {len(pairs)} pairs, {metrics}")
    print(table_of_kinds(pairs, values))
    if args.math_verify:
        rewritten = [pair for pair in pairs if pair[0] == "rewritten"]
        others = dict(zip(rewritten, by_math_verify(rewritten)))
        print(table_of_rewritings(pairs, values, map(others.get, pairs)))
    print(Counter((kind, how) for kind, how, *_ in wrong if kind != "universal"))
    for line in wrong[:args.show]:
        print(*line, sep=" | ")


if __name__ == "__main__":
    main()
