"""A reward: does a text follow its instructions? They have IFEval's ids (arXiv 2311.07911).

    python nano_rlvr.py --data my.jsonl --answer_key none \\
        --rewards examples/instructions.py:instruction

Why not a library: the checks in lm-eval need NLTK's data, downloaded at run time, and the separate
package is a git fork that needs NLTK too.
"""
import functools
import json
import re

from rewards import after_thinking, each


@functools.cache
def identifier():
    """py3langid's identifier; its model is read once per process."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_pickled_model(MODEL_FILE)


def language_of(text):
    """The ISO 639-1 code of the language of a text's first 5,000 characters; None without letters.

    >>> language_of("Wie viele Eier legen die Enten?"), language_of("3 + 4 = 7")
    ('de', None)
    """
    letters = " ".join("".join(c if c.isalpha() else " " for c in text[:5000]).split())
    return identifier().classify(letters)[0] if letters else None


RELATIONS = {"at least": int.__ge__, "less than": int.__lt__, "at most": int.__le__,
             "exactly": int.__eq__}
WORD = re.compile(r"\w+(?:['’-]\w+)*")
BULLET = re.compile(r"^[ \t]{0,9}(?:\*(?!\*)|-(?!-))[ \t]{0,9}\S", re.M)


def _compare(n, wanted, **relation):  # IFEval's names: relation, let_relation, capital_relation
    name = next(iter(relation.values()), "at least")
    if name not in RELATIONS:
        raise ValueError(f"unknown relation {name!r}; known: {', '.join(RELATIONS)}")
    return RELATIONS[name](n, int(wanted))


def _occurrences(word, text):
    return len(re.findall(rf"(?<!\w){re.escape(word.lower())}(?!\w)", text.lower()))


def _count_filled(parts):
    return sum(part.strip() != "" for part in parts)


def _sentences(text):
    # remove dots that end no sentence
    text = re.sub(r"(?<=\d)\.(?=\d)|\b(?:Mr|Mrs|Ms|Dr|e\.g|i\.e|etc)\.", "", text)
    parts = re.split(r"(?<![.!?。！？])[.!?。！？]++(?=\s|$|[^\x00-\x7f])", text)
    return sum(any(map(str.isalnum, part)) for part in parts)


def _json(text):
    text = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.I)
    try:
        # str: int refuses more than 4,300 digits
        return isinstance(json.loads(text, parse_int=str), (dict, list))
    except (ValueError, RecursionError):
        return False


def _first_word(paragraph):
    """The first word in lower case, up to its first punctuation mark."""
    word = paragraph.split()[0].lstrip("'").lstrip('"')
    return re.split("""[.,?!'"]""", word)[0].lower()


def _nth_paragraph(text, num_paragraphs, nth_paragraph, first_word):
    """Whether the text has so many paragraphs and the nth of them (from 1) begins with the word."""
    paragraphs = text.split("\n\n")
    if _count_filled(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    paragraph = paragraphs[nth_paragraph - 1]
    return paragraph.strip() != "" and _first_word(paragraph) == first_word.lower()


def _two_responses(text):
    """Whether the text is two different ones with six stars between them, and perhaps around."""
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


OPTIONS = "My answer is yes.", "My answer is no.", "My answer is maybe."
INSTRUCTIONS = {  # id: f(text, **arguments) -> whether the text follows it
    "change_case:english_lowercase":
        lambda t: t == t.lower() and t != t.upper(),
    "change_case:english_capital":
        lambda t: t == t.upper() and t != t.lower(),
    "change_case:capital_word_frequency":
        lambda t, capital_frequency, **relation:
            _compare(sum(map(str.isupper, WORD.findall(t))), capital_frequency, **relation),
    "length_constraints:number_words":
        lambda t, num_words, **relation:
            _compare(len(WORD.findall(t)), num_words, **relation),
    "length_constraints:number_sentences":
        lambda t, num_sentences, **relation:
            _compare(_sentences(t), num_sentences, **relation),
    "length_constraints:number_paragraphs":
        lambda t, num_paragraphs:
            _count_filled(re.split(r"\s?\*\*\*\s?", t)) == num_paragraphs,
    "keywords:existence":
        lambda t, keywords:
            all(_occurrences(word, t) for word in keywords),
    "keywords:forbidden_words":
        lambda t, forbidden_words:
            not any(_occurrences(word, t) for word in forbidden_words),
    "keywords:frequency":
        lambda t, keyword, frequency, **relation:
            _compare(_occurrences(keyword, t), frequency, **relation),
    "keywords:letter_frequency":
        lambda t, letter, let_frequency, **relation:
            _compare(t.lower().count(letter.lower()), let_frequency, **relation),
    "detectable_format:json_format":
        _json,
    "detectable_format:number_bullet_lists":
        lambda t, num_bullets:
            len(BULLET.findall(t)) == num_bullets,
    "detectable_format:number_highlighted_sections":
        lambda t, num_highlights:
            _count_filled(re.findall(r"\*{1,2}([^\n*]++)\*{1,2}", t)) >= num_highlights,
    "detectable_format:title":
        lambda t: _count_filled(re.findall(r"<<([^\n<>]++)>>", t)) > 0,
    "detectable_content:number_placeholders":
        lambda t, num_placeholders:
            len(re.findall(r"\[[^\[\]]++\]", t)) >= num_placeholders,
    "detectable_content:postscript":
        lambda t, postscript_marker:
            postscript_marker.lower() in t.lower(),
    "punctuation:no_comma":
        lambda t: "," not in t,
    "startend:end_checker":
        lambda t, end_phrase:
            t.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation":
        lambda t: len(t.strip()) > 1 and t.strip()[0] == t.strip()[-1] == '"',
    "language:response_language":
        lambda t, language:
            language_of(t) == language,
    "length_constraints:nth_paragraph_first_word":
        _nth_paragraph,
    "detectable_format:constrained_response":
        lambda t: any(option in t for option in OPTIONS),
    "detectable_format:multiple_sections":
        lambda t, section_spliter, num_sections:
            len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d", t)) >= num_sections,
    "combination:two_responses":
        _two_responses,
    "combination:repeat_prompt":
        lambda t, prompt_to_repeat:
            t.strip().lower().startswith(prompt_to_repeat.strip().lower()),
}


def follows(text, name, arguments=None):
    """Whether a text follows one instruction. An empty text follows none.

    Raises ValueError for an unknown name, TypeError for a missing argument, also if it is empty.

    >>> [follows(text, "startend:quotation") for text in ('"Yes"', 'Yes')]
    [True, False]
    """
    if name not in INSTRUCTIONS:
        raise ValueError(f"unknown instruction {name!r}; known: {', '.join(INSTRUCTIONS)}")
    # IFEval's table has all arguments in every row
    arguments = {key: value for key, value in (arguments or {}).items() if value is not None}
    passed = INSTRUCTIONS[name](text, **arguments)
    return passed and text.strip() != ""


@each
def instruction(text, instruction_id_list, kwargs):
    """1.0 if the text after </think> follows every instruction, else 0.0; None without one.

    The two columns are IFEval's: a list of ids, and a list of their arguments. An empty answer
    follows no instruction. Raises ValueError for an unknown id.
    """
    text = after_thinking(text).strip()
    passed = [follows(text, name, arguments)
              for name, arguments in zip(instruction_id_list, kwargs, strict=True)]
    return float(all(passed)) if passed else None


instruction.reads_gold = True  # a row with an unknown instruction is found at the start
