"""Rewards that shape how a model answers: its language, length and repetitions.

    python nano_rlvr.py --rewards gsm8k:1,examples/shaping_rewards.py:length_kimi:0.5

They show what a reward file can do: columns of the trainer (prompts, completion_ids), a function
that sees the whole batch (length_kimi), and one that loads a model before the workers are forked
(language).
"""
import re
from collections import Counter

from examples.instructions import identifier, language_of
from rewards import each, math_reward
from runtime.verify.verifier import text_of

EAST_ASIAN = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"


def words_by_language(text):
    """{language: number of words} of a text's first 100,000 characters.

    Each run of sentences with at least 40 letters is classified as a whole, because langid is
    unreliable on less. Chinese, Japanese and Korean are counted by character.

    >>> text = "Die Enten legen jeden Tag sechzehn Eier. Sie isst drei. 鸭子每天下蛋。"
    >>> words_by_language(text)
    {'de': 10, 'zh': 6}
    """
    count = Counter()
    for run in re.findall(rf"[{EAST_ASIAN}]+|[^{EAST_ASIAN}]+", text[:100_000]):
        if re.match(f"[{EAST_ASIAN}]", run):
            count[language_of(run)] += len(run)
            continue
        start = 0
        words = 0
        letters = 0
        for m in re.finditer(r"[^.!?\n]*(?:[.!?\n]|\Z)", run):
            words += len(re.findall(r"[^\W\d_]{2,}", m[0]))
            letters += sum(map(str.isalpha, m[0]))
            end = m.end()
            if words and (letters >= 40 or end == len(run)):
                count[language_of(run[start:end])] += words
                start = end
                words = 0
                letters = 0
    return dict(count)


@each
def language(text, question=None, prompts=None):
    """The share of the reasoning's words in the question's language, 0.0 to 1.0 (arXiv 2501.12948).

    The reasoning is the text before the last </think>, or all of it. None without words, or if
    py3langid finds no language in question or prompts.
    """
    if question is None:
        question = text_of(prompts)
    wanted = language_of(question)
    reasoning = text.rpartition("</think>")[0] if "</think>" in text else text
    count = words_by_language(reasoning.replace("<think>", ""))
    if not count or not wanted:
        return None
    return count.get(wanted, 0) / sum(count.values())


language.warm = identifier


@each
def repetition(text, completion_ids=None, repetition_ngram=4):
    """Minus the share of n-grams that occurred before, 0.0 to -1.0 (arXiv 2502.03373, C.2).

    >>> repetition(["a b c d e", "go go go go go go"])
    [0.0, -0.6666666666666667]
    """
    words = text.split() if completion_ids is None else completion_ids
    shifted = [words[i:] for i in range(repetition_ngram)]
    ngrams = list(zip(*shifted))
    if not ngrams:
        return 0.0
    return len(set(ngrams)) / len(ngrams) - 1.0


def length_kimi(completions, prompts, correct=None, completion_ids=None, **columns):
    """Kimi k1.5's length reward of a prompt's samples, -0.5 to 0.5 (arXiv 2501.12599, 2.3.3).

    0.5 - (length - shortest) / (longest - shortest) for a correct answer, the same but at most 0
    for a wrong one, and 0 if all lengths are equal. `correct` is the first reward of the spec
    (passed by Verifier; 1 is correct); without it `math` decides. Lengths are in tokens if
    completion_ids is given, else in characters.

    >>> length_kimi(["a", "ab", "abc"], prompts=["q"] * 3, correct=[1, 0, 0])
    [0.5, 0.0, -0.5]
    """
    if correct is None:
        correct = math_reward(completions, **columns)
    prompts = [repr(prompt) for prompt in prompts]  # a prompt may be a list of messages
    lengths = [len(x) for x in completion_ids or map(text_of, completions)]
    lengths_of = {}
    for prompt, length in zip(prompts, lengths, strict=True):
        lengths_of.setdefault(prompt, []).append(length)
    rewards = []
    for prompt, length, score in zip(prompts, lengths, correct, strict=True):
        shortest = min(lengths_of[prompt])
        longest = max(lengths_of[prompt])
        value = 0.0
        if longest > shortest:
            value = 0.5 - (length - shortest) / (longest - shortest)
        if score != 1:
            value = min(0.0, value)
        rewards.append(None if score is None else value)
    return rewards


length_kimi.whole_batch = True  # it compares with the other completions of the prompt
