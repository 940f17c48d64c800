"""The language of a text, and of its words, by py3langid."""
import functools
import re
from collections import Counter

EAST_ASIAN = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"


@functools.cache
def identifier():
    """py3langid's identifier; its model is read once per process."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_pickled_model(MODEL_FILE)


def language_of(text):
    """The ISO 639-1 code of the language of a text's first 5,000 characters. None if it has no letters.

    >>> language_of("Wie viele Eier legen die Enten?"), language_of("3 + 4 = 7")
    ('de', None)
    """
    letters = " ".join("".join(c if c.isalpha() else " " for c in text[:5000]).split())
    return identifier().classify(letters)[0] if letters else None


def words_by_language(text):
    """{language: number of words} of a text's first 100,000 characters.

    Each run of sentences with at least 40 letters is classified as a whole, because langid is unreliable on
    less. Chinese, Japanese and Korean are counted by character.

    >>> words_by_language("Die Enten legen jeden Tag sechzehn Eier. Sie isst drei. 鸭子每天下蛋。")
    {'de': 10, 'zh': 6}
    """
    count = Counter()
    for run in re.findall(rf"[{EAST_ASIAN}]+|[^{EAST_ASIAN}]+", text[:100_000]):
        if re.match(f"[{EAST_ASIAN}]", run):
            count[language_of(run)] += len(run)
            continue
        start = words = letters = 0
        for m in re.finditer(r"[^.!?\n]*(?:[.!?\n]|\Z)", run):
            words += len(re.findall(r"[^\W\d_]{2,}", m[0]))
            letters += sum(map(str.isalpha, m[0]))
            if words and (letters >= 40 or m.end() == len(run)):
                count[language_of(run[start:m.end()])] += words
                start, words, letters = m.end(), 0, 0
    return dict(count)
