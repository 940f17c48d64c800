"""The largest pack is trained once before step 0: if memory is too small, that shows in the first minute."""
from runtime import engines


def largest_pack(cfg):
    """(prompt tokens, completion tokens) of each sequence of the largest pack that can occur."""
    longest = cfg.max_prompt + cfg.max_tokens
    lengths = [longest] * max(1, cfg.pack_tokens // longest)
    lengths += [max(2, cfg.pack_tokens - sum(lengths))]  # the rest of the budget
    completions = [min(n - 1, cfg.max_tokens) for n in lengths]
    return [(n - c, c) for n, c in zip(lengths, completions)]


def run(engine, step):
    """Calls step() twice at learning rate 0, then resets AdamW: weights and optimizer are as before.

    Twice, because the first step creates AdamW's moments and the second needs memory beside them.
    """
    engines.set_lr(engine, 0.0)
    for _ in range(2):
        step()
    for state in engine.optimizer.optimizer.state.values():
        for name in state:
            state[name] *= 0  # in place for tensors; DeepSpeed's CPU AdamW counts its steps in an int
