"""Instructions a text can be checked against: ids and arguments are IFEval's (Zhou et al., arXiv 2311.07911)."""
import json
import re

from tools.language import language_of

COMPARE = {"at least": int.__ge__, "less than": int.__lt__, "at most": int.__le__, "exactly": int.__eq__}
WORDS = re.compile(r"\w+(?:['’-]\w+)*")


def _count(n, wanted, **relation):  # whatever IFEval calls it: relation, let_relation, capital_relation
    return COMPARE[next(iter(relation.values()), "at least")](n, int(wanted))


def _times(word, text):
    return len(re.findall(rf"(?<!\w){re.escape(word.lower())}(?!\w)", text.lower()))


def _filled(parts):
    return sum(part.strip() != "" for part in parts)


def _sentences(text):
    text = re.sub(r"(?<=\d)\.(?=\d)|\b(?:Mr|Mrs|Ms|Dr|e\.g|i\.e|etc)\.", "", text)
    return sum(any(map(str.isalnum, part)) for part in re.split(r"(?<![.!?。！？])[.!?。！？]++(?=\s|$|[^\x00-\x7f])", text))


def _json(text, json_schema=None):
    text = text.strip()
    if text.startswith("```"):
        text = text.removeprefix("```").removeprefix("json").removesuffix("```")
    try:
        value = json.loads(text)
        if json_schema is None:
            return isinstance(value, (dict, list))
        from jsonschema.validators import validator_for

        validator = validator_for(json_schema)
        validator.check_schema(json_schema)
        return validator(json_schema).is_valid(value)
    except (ValueError, RecursionError):  # ValueError: also integers of more than 4300 digits
        return False


INSTRUCTIONS = {  # id: f(text, **arguments) -> whether the text does it
    "change_case:english_lowercase": lambda t: t == t.lower() and t != t.upper(),
    "change_case:english_capital": lambda t: t == t.upper() and t != t.lower(),
    "change_case:capital_word_frequency": lambda t, capital_frequency, **relation: _count(
        sum(map(str.isupper, WORDS.findall(t))), capital_frequency, **relation),
    "length_constraints:number_words": lambda t, num_words, **relation: _count(len(WORDS.findall(t)), num_words, **relation),
    "length_constraints:number_sentences": lambda t, num_sentences, **relation: _count(_sentences(t), num_sentences, **relation),
    "length_constraints:number_paragraphs": lambda t, num_paragraphs: _filled(re.split(r"\s?\*\*\*\s?", t)) == num_paragraphs,
    "keywords:existence": lambda t, keywords: all(_times(w, t) for w in keywords),
    "keywords:forbidden_words": lambda t, forbidden_words: not any(_times(w, t) for w in forbidden_words),
    "keywords:frequency": lambda t, keyword, frequency, **relation: _count(_times(keyword, t), frequency, **relation),
    "keywords:letter_frequency": lambda t, letter, let_frequency, **relation: _count(
        t.lower().count(letter.lower()), let_frequency, **relation),
    "detectable_format:json_format": _json,
    "detectable_format:number_bullet_lists": lambda t, num_bullets: len(
        re.findall(r"^[ \t]{0,9}(?:\*(?!\*)|-(?!-))[ \t]{0,9}\S", t, re.M)) == num_bullets,
    "detectable_format:number_highlighted_sections": lambda t, num_highlights: _filled(
        re.findall(r"\*{1,2}([^\n*]++)\*{1,2}", t)) >= num_highlights,
    "detectable_format:title": lambda t: _filled(re.findall(r"<<([^\n<>]++)>>", t)) > 0,
    "detectable_content:number_placeholders": lambda t, num_placeholders: len(re.findall(r"\[[^\[\]]++\]", t)) >= num_placeholders,
    "detectable_content:postscript": lambda t, postscript_marker: postscript_marker.lower() in t.lower(),
    "punctuation:no_comma": lambda t: "," not in t,
    "startend:end_checker": lambda t, end_phrase: t.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation": lambda t: len(t.strip()) > 1 and t.strip()[0] == t.strip()[-1] == '"',
    "language:response_language": lambda t, language: language_of(t) == language,
}


def follows(text, name, arguments=None, loose=False):
    """Whether a text follows one instruction; an empty text follows none. An unknown name raises ValueError.

    loose is IFEval's loose rule: it may also follow it without its first line, its last line, both, or Markdown's asterisks.

    >>> follows('Sure:\\n"Yes"', "startend:quotation"), follows('Sure:\\n"Yes"', "startend:quotation", loose=True)
    (False, True)
    """
    if name not in INSTRUCTIONS:
        raise ValueError(f"unknown instruction {name!r}; known: {', '.join(INSTRUCTIONS)}")
    arguments = {k: v for k, v in (arguments or {}).items() if v is not None}  # as a table, IFEval has every argument, None
    views = {text}
    if loose:
        lines = text.split("\n")
        views = {"\n".join(lines[a:b]).strip() for a in (0, 1) for b in (None, -1)}
        views |= {view.replace("*", "") for view in views}
    return any(view.strip() != "" and INSTRUCTIONS[name](view, **arguments) for view in views)
