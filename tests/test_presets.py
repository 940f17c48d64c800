"""Every preset makes rewarded samples more likely, in a few optimizer steps on one batch.

Whole runs that learn are in the notebooks, whose asserts test_notebooks.py runs.
"""
import dataclasses
import math

import pytest
import torch

import data
import nano_rlvr as nr
from conftest import make_config
from runtime import stats

TOY = dict(lr=2e-4, prompts=8, samples=8, epochs=3, eval_size=8)
MARGIN = 0.1  # nats per completion; without learning, or with the wrong sign, it is 0 or below


@pytest.fixture(scope="module")
def groups(llm, tokenizer):
    """Samples of the bundled model. Reward 1 for working the sum out, right or not: about half."""
    cfg = make_config(**TOY)
    train_set, _ = data.load_splits(cfg, tokenizer)
    prompts = [e["prompt_ids"] for e in train_set[:cfg.prompts]]
    rollouts = nr.rollout(llm, prompts, cfg.samples, 1.0, cfg.max_tokens, seeds=range(cfg.prompts))
    for r in rollouts:
        r.reward = float("=" in r.text)
    return [rollouts[i:i + cfg.samples] for i in range(0, len(rollouts), cfg.samples)]


@pytest.mark.parametrize("algo", nr.ALGOS)
def test_preset_raises_the_likelihood_of_what_was_rewarded(groups, algo):
    cfg = make_config(**nr.ALGOS[algo] | TOY)
    policy, ref = nr.make_policy(cfg), nr.make_reference(cfg)
    own = [[dataclasses.replace(r) for r in group] for group in groups
           if not (cfg.drop_flat_groups and stats.is_flat(group))]
    nr.assign_advantages(own, cfg, math.nan)
    rollouts = nr.assign_token_weights([r for group in own for r in group], cfg)
    batch = nr.collate(rollouts)
    nr.store_fixed_logps(policy, ref, [batch], cfg)
    for _ in range(cfg.epochs):
        nr.update(policy, [batch], cfg)
    with torch.no_grad():
        gained = nr.sequence_sum(policy(batch)[0] - batch.old, batch)  # (B,)
    rewarded = torch.tensor([r.reward == 1 for r in rollouts])  # (B,)
    assert gained[rewarded].mean() > gained[~rewarded].mean() + MARGIN
