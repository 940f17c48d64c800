"""Run by test_memory.py in a process of its own: what an update holds and what stays after it."""
import nano_rlvr as nr
from bench.ranks import held
from conftest import fixed_rollouts, make_config
from runtime.memory import ModelShape


def test_between_updates_no_gradients_are_held(group, tokenizer):
    """Held bytes, each storage once: bench/ranks.py."""
    cfg = make_config(dtype="bfloat16", mismatch_bound=1e9)  # the log-probs of vLLM are drawn
    policy = nr.make_policy(cfg)
    packs = [nr.collate(fixed_rollouts(tokenizer))]
    at_step, step = [], policy.step
    policy.step = lambda: (at_step.append(held()), step())
    nr.update(policy, packs, cfg)  # creates AdamW's moments
    between = held()
    nr.update(policy, packs, cfg)
    assert held() == between
    sums = 4 * ModelShape.of(cfg.model).parameters
    assert at_step[1] - between >= sums, (at_step, between)
