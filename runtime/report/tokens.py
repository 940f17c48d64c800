"""Which rollouts of a run a report shows, and the numbers of their tokens."""
import itertools
import math

LIMIT = 2000  # rollouts of a run
SHARE = 32  # one of so many rollouts gets numbers per token, which take two forward passes


def shown(step, rollouts, samples, steps):
    """The rollouts of a step that the report shows, in groups of `samples`: those of every k-th of
    the run's `steps`, with the smallest k that gives at most LIMIT; [] in the other steps."""
    rollouts = rollouts[:max(1, LIMIT // samples) * samples]
    most = max(1, LIMIT // max(1, len(rollouts)))  # steps
    k = max(1, math.ceil(steps / most))
    return rollouts if step % k == 0 else []


def numbers(r, before, after, tokenizer):
    """For rollouts.jsonl, lists with one entry per completion token; None = it was not sampled.

    text; logp: the trainer's log-prob before the update; change: by the update; gap: logp - vLLM's
    log-prob; advantage, unless all tokens have the same. Two digits, at most five decimals.
    before, after: the trainer's log-probs of the sampled tokens.
    """
    logps = itertools.compress(r.vllm_logps, r.loss_mask)  # of the sampled tokens
    columns = {"logp": before, "change": [y - x for x, y in zip(before, after)],
               "gap": [x - y for x, y in zip(before, logps)]}
    if len(set(r.advantages)) > 1:
        columns["advantage"] = itertools.compress(r.advantages, r.loss_mask)
    lists = {"text": texts(r.completion, tokenizer)}
    for name, column in columns.items():
        rounded = iter([float(f"{round(x, 5):.2g}") for x in column])
        lists[name] = [next(rounded) if sampled else None for sampled in r.loss_mask]
    return lists


def texts(ids, tokenizer):
    """The text of each token, special tokens included. If several tokens make one character, the
    last one has its text and the others have none."""
    found, start = [], 0
    for end in range(1, len(ids) + 1):
        first = max(0, start - 1)  # alone, SentencePiece would drop the space before a word
        before, text = (tokenizer.decode(ids[first:i]) for i in (start, end))
        is_part = text.endswith("\ufffd") and end < min(start + 4, len(ids))  # 4 bytes at most
        found.append("" if is_part else text[len(before):])
        start = start if is_part else end
    return found
