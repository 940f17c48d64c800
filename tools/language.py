"""Which language a text is in, by py3langid."""
import functools
import re

EAST_ASIAN = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"


@functools.cache
def identifier():
    """py3langid's identifier, read once a process."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_pickled_model(MODEL_FILE)


def language_of(text):
    """The ISO 639-1 code of a text's language, told from the letters of its first 5,000 characters; None without letters.

    >>> language_of("Wie viele Eier legen die Enten?"), language_of("3 + 4 = 7")
    ('de', None)
    """
    letters = " ".join("".join(c if c.isalpha() else " " for c in text[:5000]).split())
    return identifier().classify(letters)[0] if letters else None


def words_by_language(text):
    """{language: words} of a text's first 100,000 characters, told apart in stretches of 40 letters or more.

    langid guesses on less. Chinese, Japanese and Korean count by character.

    >>> words_by_language("Die Enten legen jeden Tag sechzehn Eier. Sie isst drei. 鸭子每天下蛋。")
    {'de': 10, 'zh': 6}
    """
    count = {}

    def add(stretch, words):
        language = language_of(stretch)
        count[language] = count.get(language, 0) + words

    for run in re.findall(rf"[{EAST_ASIAN}]+|[^{EAST_ASIAN}]+", text[:100_000]):
        if re.match(f"[{EAST_ASIAN}]", run):
            add(run, len(run))
            continue
        start = words = letters = 0
        for m in re.finditer(r"[^.!?\n]*(?:[.!?\n]|\Z)", run):
            words += len(re.findall(r"[^\W\d_]{2,}", m[0]))
            letters += sum(map(str.isalpha, m[0]))
            if words and (letters >= 40 or m.end() == len(run)):
                add(run[start:m.end()], words)
                start, words, letters = m.end(), 0, 0
    return count
