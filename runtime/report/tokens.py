"""Which rollouts of a run a report shows, and the numbers of their tokens."""
import itertools
import math

LIMIT = 2000  # rollouts of a run
SHARE = 32  # one of so many rollouts gets numbers per token, for which a forward pass is made


def shown(step, rollouts, samples, steps):
    """The rollouts of a step that the report shows, in groups of `samples`: those of every k-th of
    the run's `steps`, with the smallest k that gives at most LIMIT; [] in the other steps."""
    groups = max(1, LIMIT // samples)
    rollouts = rollouts[:groups * samples]
    most = max(1, LIMIT // max(1, len(rollouts)))  # steps
    k = max(1, math.ceil(steps / most))
    return rollouts if step % k == 0 else []


def numbers(r, before, after, tokenizer):
    """For rollouts.jsonl, lists with one entry per completion token; None = it was not sampled.

    text; logp: the trainer's log-prob before the update; change: by the update; gap: logp - vLLM's
    log-prob; advantage, unless all tokens have the same. Two digits, at most five decimals.
    before, after: the trainer's log-probs of the sampled tokens.
    """
    vllm_logps = itertools.compress(r.vllm_logps, r.loss_mask)  # of the sampled tokens
    columns = {
        "logp": before,
        "change": [y - x for x, y in zip(before, after)],
        "gap": [x - y for x, y in zip(before, vllm_logps)],
    }
    if len(set(r.advantages)) > 1:
        columns["advantage"] = itertools.compress(r.advantages, r.loss_mask)
    lists = {"text": texts(r.completion, tokenizer)}
    for name, column in columns.items():
        values = iter(column)
        lists[name] = [two_digits(next(values)) if sampled else None for sampled in r.loss_mask]
    return lists


def two_digits(x):
    """A number with two digits and at most five decimals."""
    return float(f"{round(x, 5):.2g}")


def texts(ids, tokenizer):
    """The text of each token, special tokens included. If several tokens make one character, the
    last one has its text and the others have none."""
    pieces = []
    start = 0
    for end in range(1, len(ids) + 1):
        first = max(0, start - 1)  # alone, SentencePiece would drop the space before a word
        before = tokenizer.decode(ids[first:start])
        text = tokenizer.decode(ids[first:end])
        if text.endswith("\ufffd") and end < min(start + 4, len(ids)):  # 4 bytes at most
            pieces.append("")
        else:
            pieces.append(text[len(before):])
            start = end
    return pieces
