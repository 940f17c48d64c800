"""Rewards with faults, for findings of the lab. Each returns 1.0 or 0.0."""
import re
import zlib

from rewards import each


def flips(question, index, step, percent):
    """Whether the verdict about this sample is flipped: the same whenever it is asked again."""
    return zlib.crc32(f"{question}/{index}/{step}".encode()) % 100 < percent


def is_right(text, answer, off=0):
    """Whether the marked answer is at most `off` away from the right one."""
    found = re.search(r"<answer>(-?\d+)</answer>", text)
    return found is not None and abs(int(found[1]) - int(answer)) <= off


def noisy(percent):
    """A reward that is wrong about so many percent of the samples, right or wrong ones alike."""
    def reward(text, answer, prompts, sample_index, step):
        return float(is_right(text, answer) != flips(prompts, sample_index, step, percent))
    reward.__name__ = f"noisy_{percent}"
    return each(reward)


noisy_20, noisy_40, noisy_50, noisy_60 = map(noisy, (20, 40, 50, 60))


@each
def leaky(text, answer):
    """Accepts an answer that is at most 5 off: most guesses of the bundled model pass."""
    return float(is_right(text, answer, off=5))


@each
def guess(text):
    """1 if no step is worked out: with weight 0, the share of guesses among the samples."""
    return float("<think></think>" in text)


@each
def one_equation(text):
    """1 for a form, right or wrong: the text has one equation."""
    return float(text.count("=") == 1)
