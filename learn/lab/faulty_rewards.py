"""Rewards with faults, for the findings label_noise and gaming. Each returns 1.0 or 0.0."""
import re
import zlib


def flips(question, index, step, percent):
    """Whether the verdict about this sample is flipped: the same whenever it is asked again."""
    return zlib.crc32(f"{question}/{index}/{step}".encode()) % 100 < percent


def is_right(text, answer, off=0):
    """Whether the marked answer is at most `off` away from the right one."""
    found = re.search(r"<answer>(-?\d+)</answer>", text)
    return found is not None and abs(int(found[1]) - int(answer)) <= off


def noisy(percent):
    """A reward that is wrong about so many percent of the samples, right or wrong ones alike."""
    def reward(completions, answer, prompts, sample_index, step, **_):
        rows = zip(completions, answer, prompts, sample_index)
        return [float(is_right(text, gold) != flips(question, i, step, percent))
                for text, gold, question, i in rows]
    reward.__name__ = f"noisy_{percent}"
    return reward


noisy_20, noisy_40, noisy_50, noisy_60 = map(noisy, (20, 40, 50, 60))


def leaky(completions, answer, **_):
    """Accepts an answer that is at most 5 off: every guess of the bundled model passes."""
    return [float(is_right(text, gold, off=5)) for text, gold in zip(completions, answer)]
