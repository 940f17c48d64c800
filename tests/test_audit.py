"""learn/audit.py: exact statements about the expected gradient, and the tables of docs/audit.md.

Sums over all groups in float64, so EXACT (1e-9) holds. EPSILON stands for group_advantages' 1e-4
where a statement is about the formula without it: it changes an advantage by 1e-12 of itself."""
import itertools
import math
from functools import partial

import pytest
import torch

import nano_rlvr as nr
from conftest import close, float64, within
from examples import kl
from learn import audit as lab
from learn.audit import UNBIASED, WHOLE, Question, after_updates, config, with_sampler

pytestmark = pytest.mark.numeric
EPSILON = 1e-13
KNOBS = (4.0, 2.0, -0.5)  # easy, middle, hard


def mean_of(question, eps=1e-4, loss=nr.policy_loss, **changes):
    """The expected gradient (P,) of a step with one group."""
    return lab.audit(config(**changes), [question], loss, eps).mean[0]


def j_of(question):
    return question.gradient(question.correct)


def step_by_step(cfg, questions):
    """Mean and variance with every ordered group as Rollouts, through the stages of the script."""
    mean, square, leaves = 0.0, 0.0, [q.logits.clone().requires_grad_() for q in questions]
    running = sum(q.correct(q.sampler).item() for q in questions) / len(questions)
    logp, vllm, old, ref = (
        torch.cat([q.logps(table) for q, table in zip(questions, tables)])  # (R,)
        for tables in (leaves, *zip(*((q.sampler, q.old, q.ref) for q in questions))))
    # a token's id is its row in these
    rows = iter(torch.arange(len(vllm)).split(torch.cat([q.lengths for q in questions]).tolist()))
    members = [[(i, next(rows), reward) for reward in q.rewards] for i, q in enumerate(questions)]
    for batch in itertools.product(*(own for own in members for _ in range(cfg.samples))):
        rollouts = [nr.Rollout([i], ids.tolist(), "", False, vllm[ids].tolist(), reward=reward)
                    for i, ids, reward in batch]
        groups = [rollouts[i:i + cfg.samples] for i in range(0, len(rollouts), cfg.samples)]
        nr.assign_advantages(groups, cfg, running)
        packed = nr.collate(nr.assign_token_weights(rollouts, cfg))
        ids = packed.targets
        loss, _ = nr.policy_loss(
            logp[ids], old[ids], ref[ids] if cfg.kl_coef else None, packed, cfg)
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
        step = -torch.stack([x.flatten() for x in gradients])  # (Q, P)
        probability = vllm[ids].sum().exp()
        mean = mean + probability * step
        square = square + probability * step.square().sum()
    return mean, square - mean.square().sum()


@pytest.mark.parametrize("changes, questions", [
    (dict(samples=2, kl_coef=0.1), [1.0]),
    (dict(samples=2, aggregate="token", scale="group_mean", surrogate="sapo"), [0.0]),
    (dict(samples=2, ratio="sequence", clip_high=0.01, correction="sequence_mask"), [1.0]),
    (dict(samples=1, baseline="batch", scale="batch", aggregate="token"), [2.0, -1.0])])
def test_the_audit_is_the_mean_and_the_variance_over_all_groups_of_the_scripts_stages(
        changes, questions, group):
    """With earlier updates and an engine that samples from another policy, all at once."""
    questions = [after_updates(Question(knob, steps=2), 0.5) for knob in questions]
    for i, question in enumerate(questions):
        with_sampler(question, 0.5, seed=i)
    result = lab.audit(config(**changes), questions)
    with float64():  # the stages make float32 tensors
        mean, variance = step_by_step(config(**changes), questions)
    close(result.mean, mean)
    close(result.variance, variance)


def expected_deviation(p, n):
    """The mean standard deviation of n rewards that are 1 with probability p."""
    return sum(math.comb(n, k) * p**k * (1 - p)**(n - k) * math.sqrt(k / n * (1 - k / n))
               for k in range(n + 1))


def maxrl(question, terms):
    """The gradient of MaxRL's series: log p = -sum over k of (1 - p)^k / k (arXiv:2602.02710)."""
    return question.gradient(lambda logits: -sum(
        (1 - question.correct(logits))**k / k for k in range(1, terms + 1)))


def by_length(question, p):
    """E[(r - p) / |o|], p fixed: right answers gain by being short, wrong ones by being long."""
    rewards = torch.tensor(question.rewards, dtype=torch.float64)  # (S,)
    return question.gradient(lambda z: question.probs(z) @ ((rewards - p) / question.lengths))


CONSTANT = dict(aggregate="constant")
RULES = {  # options -> the expected gradient for a question with the probability p, n samples
    "rloo": (UNBIASED, lambda q, p, n: j_of(q)),
    "product": (WHOLE, lambda q, p, n: j_of(q)),
    "no baseline": (UNBIASED | dict(baseline="none"), lambda q, p, n: j_of(q)),
    "running": (UNBIASED | dict(baseline="running"), lambda q, p, n: j_of(q)),
    "group": (UNBIASED | dict(baseline="group"), lambda q, p, n: (n - 1) / n * j_of(q)),
    "deviation": (CONSTANT | dict(scale="group"),
                  lambda q, p, n: expected_deviation(p, n) / (p * (1 - p)) * j_of(q)),
    "maxrl": (CONSTANT | dict(scale="group_mean"), lambda q, p, n: maxrl(q, n - 1)),
    "sequence": (UNBIASED | dict(aggregate="sequence"), lambda q, p, n: by_length(q, p)),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_expected_gradient_of_a_question_is_that_of_the_page(rule):
    options, wanted = RULES[rule]
    for question, n in itertools.product(map(Question, KNOBS), (2, 3, 4)):
        p = question.correct(question.logits).item()
        close(mean_of(question, EPSILON, samples=n, **options), wanted(question, p, n))


def kl_mean(question, loss):
    """The expected gradient of a KL term alone."""
    question.rewards = [0.0] * len(question.rewards)
    options = UNBIASED | dict(baseline="none", kl_coef=1.0, samples=2)
    return mean_of(question, loss=loss, **options)


SUFFIX = list(lab.KL_LOSSES)[-1]  # with the log-ratios of the later tokens
KL_TERMS = {  # loss -> the KL whose gradient it has, a method of Question, or None
    **{kind: (partial(lab.kl_loss, kind), wanted) for kind, wanted in (
        ("k1", None), ("k2", "token_kl"), ("k3 times pi/old", "token_kl"), (SUFFIX, "kl"))},
    **{f"examples/kl.py, {name}": (kl.with_kl(name), wanted) for name, wanted in (
        ("k1", None), ("k2", "token_kl"), ("k3", "other_token_kl"), ("unbiased", "token_kl"))},
    "policy_loss": (nr.policy_loss, "other_token_kl"),
}


@pytest.mark.parametrize("term", KL_TERMS)
def test_a_kl_in_the_loss_has_the_gradient_that_the_page_names(term):
    """For completions of one token the KL of the next token is the KL of the completion."""
    loss, wanted = KL_TERMS[term]
    for steps in (1, 3):
        question = Question(2.0, steps=steps)
        name = (wanted or "").replace("token_", "" if steps == 1 else "token_")
        gradient = question.gradient(getattr(question, name)) if wanted else 0.0
        within((kl_mean(question, loss) + gradient).abs().max(), 1e-12)


def test_unbiased_of_examples_kl_is_right_after_an_update_too_for_one_token():
    later = after_updates(Question(2.0, steps=1), 0.4)
    close(kl_mean(later, kl.with_kl("unbiased")), -later.gradient(later.kl))


def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_completions():
    question = lab.in_reward(Question(2.0, steps=2), "k1")
    for baseline, share in (("leave_one_out", 1), ("group", 1 / 2)):
        found = mean_of(question, **UNBIASED | dict(samples=2, baseline=baseline))
        close(found, -share * question.gradient(question.kl))


def test_the_page_has_the_table_of_presets_that_the_audit_computes():
    assert lab.mark("presets").search(lab.PAGE.read_text())[2] == lab.markdown("presets")
