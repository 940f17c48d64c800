"""Metrics of hand-made rollout steps with several minibatches and epochs, and what is left out of them.

A step of the loop has several optimizer steps. Its metrics are means over all tokens of all of them, not
means of means: an optimizer step with few tokens counts less. `mismatch/max` is the largest of all.
"""
import contextlib
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
from conftest import close, make_config
from runtime import log
from runtime.checkpoint import Progress
from test_wiring import Trainer


class Given(Trainer):
    """A policy of one number: its log-prob of token t is -t/8, plus 1/4 per optimizer step that was taken;
    its entropy of token t is t."""

    def __init__(self, events):
        super().__init__(events)
        self.taken = 0

    def __call__(self, batch):
        logp = (-batch.targets / 8 + self.taken / 4).requires_grad_()
        return logp, batch.targets.float()

    def step(self):
        super().step()
        self.taken += 1

    def get_global_grad_norm(self):
        return float(2 ** self.taken)


def metrics_of(groups, monkeypatch, ref=0.0, vllm=0.0, **changes):
    """Metrics of one step of train() with these groups: lists of (tokens, advantage).

    log pi_ref is log pi before the step plus `ref`; vLLM's log-prob is log pi before the step plus `vllm`
    for the first token of a completion.
    """
    written = []

    def rollouts(cfg, llm, train_set, verifier, step, metrics):
        made = [[nr.Rollout([i], list(ids), "", False, [-t / 8 + vllm * (k == 0) for k, t in enumerate(ids)],
                            reward=a) for ids, a in group] for i, group in enumerate(groups)]
        return [made[i::cfg.minibatches] for i in range(cfg.minibatches)], made

    def fixed(policy, reference, batches, cfg):
        for batch in batches:
            batch.old = policy(batch)[0].detach() if cfg.epochs * cfg.minibatches > 1 else None
            batch.ref = policy(batch)[0].detach() + ref if reference is not None else None

    class Written(list):
        def write(self, step, metrics, *_, **__):
            self.append(metrics)

    run = Written()
    run.folder, run.say, run.trace, run.close = Path("none"), lambda _: None, lambda _: None, lambda: None
    run.token_numbers = lambda *_: contextlib.nullcontext()
    checkpoints = SimpleNamespace(restore=lambda *_: Progress(), check=lambda: None, wait=lambda: None,
                                  save=lambda final: None)
    for name, replacement in (
            ("sync_weights", lambda *_: None), ("collect_rollouts", rollouts), ("store_fixed_logps", fixed),
            ("summary", lambda *_: {}), ("evaluate", lambda *_: ({}, []))):
        monkeypatch.setattr(nr, name, replacement)
    base = dict(steps=1, prompts=len(groups), samples=len(groups[0]), baseline="none", scale="none",
                aggregate="token", mismatch_bound=1e9, correction="none", eval_every=100, save_every=0)
    cfg = make_config(**base | changes)
    reference = SimpleNamespace(model=None) if cfg.kl_coef else None
    nr.train(cfg, None, Given(written), reference, [], [], None, run, checkpoints)
    return run[0]


# minibatch 0 has 1 + 1 tokens, minibatch 1 has 3 + 3
GROUPS = [[([8], 1.0), ([16], 1.0)], [([8, 8, 8], 1.0), ([24, 24, 24], 1.0)]]


def test_entropy_ratio_and_kl_are_means_over_the_tokens_of_all_optimizer_steps(monkeypatch):
    """Entropies: 8 + 16 = 24 of 2 tokens, 24 + 72 = 96 of 6: 120 / 8 = 15; the mean of means would be 14."""
    m = metrics_of(GROUPS, monkeypatch, minibatches=2, kl_coef=0.1, ref=0.5)
    close(m["entropy"], 15, 1e-6)
    # the second step is 1/4 above the log-probs before the first
    close(m["ratio"], (2 * 1 + 6 * math.exp(0.25)) / 8, 1e-6)
    kl = [math.exp(d) - d - 1 for d in (0.5, 0.25)]  # the reference is 1/2, then 1/4 above the policy
    close(m["kl"], (2 * kl[0] + 6 * kl[1]) / 8, 1e-6)


def test_epochs_are_optimizer_steps_too(monkeypatch):
    m = metrics_of(GROUPS, monkeypatch, minibatches=2, epochs=2, kl_coef=0.0)
    ratios = [math.exp(x / 4) for x in range(4)]
    close(m["ratio"], (2 * ratios[0] + 6 * ratios[1] + 2 * ratios[2] + 6 * ratios[3]) / 16, 1e-6)
    close(m["entropy"], 15, 1e-6)


def test_clipped_is_the_share_of_all_tokens(monkeypatch):
    """Ratios 1 and e^(1/4) = 1.28: the bound of 1.2 is active in the second step only."""
    m = metrics_of(GROUPS, monkeypatch, minibatches=2, kl_coef=0.0)
    close(m["clipped"], 6 / 8, 1e-6)


@pytest.mark.parametrize("first", [0, 1])
def test_the_largest_mismatch_is_that_of_all_optimizer_steps_whichever_has_it(monkeypatch, first):
    """vLLM's log-prob differs in the first token of each completion; once more in one of the minibatches."""
    rollouts = nr.Rollout.__post_init__

    def shifted(r):  # 0.25 for all first tokens, 0.75 in one group
        rollouts(r)
        r.vllm_logps = [r.vllm_logps[0] + 0.5 * (r.prompt == [first]), *r.vllm_logps[1:]]

    monkeypatch.setattr(nr.Rollout, "__post_init__", shifted)
    m = metrics_of(GROUPS, monkeypatch, minibatches=2, kl_coef=0.0, vllm=0.25)
    close(m["mismatch/max"], 0.75, 1e-6)
    total = 2 * 0.25 + 2 * 0.25 + 2 * 0.5  # two first tokens per minibatch
    close(m["mismatch/mean_abs"], total / 8, 1e-6)


def test_the_effective_sample_size_is_that_of_all_tokens(monkeypatch):
    """Weights e^-0.5 for the first token of each completion, 1 for the others: 4 of 8 tokens."""
    m = metrics_of(GROUPS, monkeypatch, minibatches=2, kl_coef=0.0, vllm=0.5, correction="token_truncate",
                   correction_cap=10.0)
    w = [math.exp(-0.5)] * 4 + [1.0] * 4
    close(m["correction/w"], sum(w) / 8, 1e-6)
    close(m["correction/ess"], sum(w) ** 2 / (8 * sum(x * x for x in w)), 1e-6)


def test_one_optimizer_step_has_its_own_numbers(monkeypatch):
    m = metrics_of(GROUPS, monkeypatch, kl_coef=0.1, ref=0.5)
    close([m["ratio"], m["entropy"], m["kl"], m["clipped"]], [1, 15, math.exp(0.5) - 1.5, 0], 1e-6)
    close(m["loss"], -1 + 0.1 * (math.exp(0.5) - 1.5), 1e-6)


def test_a_step_without_an_optimizer_step_has_no_such_metrics(monkeypatch):
    nothing = [[([8], None), ([16], None)]]
    m = metrics_of(nothing, monkeypatch, kl_coef=0.1)
    assert not m.keys() & {"loss", "ratio", "clipped", "entropy", "kl", "mismatch/max"} and "lr" in m


# ---- clipped, per gate: the tokens without a gradient

POINTS = [(r, a) for r in (0.5, 1.0, 2.0, 1e-10, 1e10) for a in (1.0, -1.0)]  # 1e10 is beyond e^20


@pytest.mark.parametrize("gate", ["clip", "soft", "squared"])
def test_clipped_counts_the_tokens_without_a_gradient(gate):
    ratio, advantage = torch.tensor(POINTS, dtype=torch.float64).T
    n = len(ratio)
    batch = SimpleNamespace(lengths=torch.ones(n), sequence_ids=torch.arange(n), advantage=advantage,
                            weight=torch.ones_like(ratio))
    cfg = dataclasses.replace(make_config(), gate=gate, correction="none")
    logp = ratio.log().requires_grad_()
    loss, sums = nr.policy_loss(logp, torch.zeros_like(ratio), None, batch, cfg)
    [gradient] = torch.autograd.grad(loss, logp)
    assert int(sums["clipped"]) == int((gradient == 0).sum())
    if gate == "squared":  # its penalty holds the ratio where it is farthest away
        assert int(sums["clipped"]) == 0


# ---- what is written about the rewards of a step


def summary(*rollouts):
    seconds = {"seconds/rollout": 1.0, "seconds/update": 1.0}
    return log.summary(make_config(), [], [list(rollouts)], seconds)


def judged(reward, **parts):
    return nr.Rollout([0], [1], "", False, [0.0], reward=reward, parts=parts)


def test_a_reward_without_any_verdict_in_a_step_is_absent(group):
    m = summary(judged(1.0, math=1.0, judge=None), judged(0.0, math=0.0, judge=None))
    assert m["reward/math"] == 0.5 and "reward/judge" not in m and m["reward/mean"] == 0.5
    m = summary(judged(1.0, math=1.0, judge=0.0), judged(0.0, math=0.0, judge=None))
    assert m["reward/judge"] == 0.0 and m["reward/no_verdict"] == 0


def test_the_reward_of_a_step_by_hand(group):
    m = summary(judged(1.0, math=1.0), judged(0.0, math=0.0), judged(None, math=None), judged(2.0, math=2.0))
    assert m["reward/mean"] == 1.0 and m["reward/no_verdict"] == 1 / 4
    close(m["reward/std"], math.sqrt(2 / 3))  # of the population
    assert m["group/flat"] == 0
