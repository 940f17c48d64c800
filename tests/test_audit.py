"""learn/audit.py: exact statements about the expected gradient, and the tables of docs/audit.md.

Sums over all groups in float64, so EXACT (1e-9) holds. EPSILON stands for group_advantages' 1e-4
where a statement is about the formula without it: it changes an advantage by 1e-12 of itself.
"""
import itertools
import math
from functools import partial

import pytest
import torch

import audit as lab
import kl
import nano_rlvr as nr
from audit import UNBIASED, WHOLE, Question, after_updates, config, with_sampler
from conftest import close, float64, within

pytestmark = pytest.mark.numeric
EPSILON = 1e-13
KNOBS = (4.0, 2.0, -0.5)  # easy, middle, hard


def mean_of(question, eps=1e-4, loss=nr.policy_loss, **changes):
    """The expected gradient (P,) of a step with one group."""
    return lab.audit(config(**changes), [question], loss, eps).mean[0]


def differ(found, wanted):
    """Asserts that two gradients differ by more than a thousandth: rounding is 1e-15."""
    assert (found - wanted).norm() > 1e-3 * wanted.norm()


def j_of(question):
    return question.gradient(question.correct)


# ---- the audit itself


def step_by_step(cfg, questions):
    """Mean and variance with every ordered group as Rollouts, through the stages of the script."""
    mean, square = 0.0, 0.0
    running = sum(q.correct(q.sampler).item() for q in questions) / len(questions)
    members = [range(len(q.completions)) for q in questions for _ in range(cfg.samples)]
    for batch in itertools.product(*members):
        groups, probability, tables, drawn = [], 1.0, [], iter(batch)
        leaves = [q.logits.clone().requires_grad_() for q in questions]
        for i, (question, leaf) in enumerate(zip(questions, leaves)):
            vllm, logp = question.logps(question.sampler), question.logps(leaf)  # (R,), (R,)
            old = logp.detach() if question.old is None else question.logps(question.old)
            tables.append((logp, old, question.logps(question.ref)))
            groups.append([])
            for s in itertools.islice(drawn, cfg.samples):
                rows = (question.sequence_ids == s).nonzero()[:, 0]
                ids = (1000 * i + rows).tolist()  # a token's id names its row and its question
                groups[-1].append(nr.Rollout([i], ids, "", False, vllm[rows].tolist(),
                                             reward=question.rewards[s]))
                probability *= vllm[rows].sum().exp().item()
        nr.assign_advantages(groups, cfg, running)
        packed = nr.collate(nr.assign_token_weights(sum(groups, []), cfg))
        logp, old, ref = (torch.stack([tables[t // 1000][kind][t % 1000] for t in packed.targets])
                          for kind in range(3))
        loss, _ = nr.policy_loss(logp, old, ref if cfg.kl_coef else None, packed, cfg)
        step = -torch.stack([x.flatten() for x in torch.autograd.grad(loss, leaves)])  # (Q, P)
        mean = mean + probability * step
        square = square + probability * step.square().sum()
    return mean, square - mean.square().sum()


@pytest.mark.parametrize("changes, questions", [
    (dict(samples=2, kl_coef=0.1), [1.0]),
    (dict(samples=2, aggregate="token", scale="mean", gate="soft"), [0.0]),
    (dict(samples=2, ratio="product", baseline="leave_one_out", scale="none"), [1.0]),
    (dict(samples=2, ratio="sequence", clip_high=0.01, correction="sequence_mask"), [1.0]),
    (dict(samples=1, baseline="batch", scale="batch", aggregate="token"), [2.0, -1.0]),
    (dict(samples=1, baseline="running", scale="none", gate="squared"), [2.0, -1.0])])
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


def test_the_probabilities_of_the_40_completions_add_up_to_one():
    question = Question()
    assert len(question.completions) == 40
    close(question.probs(question.logits).sum(), 1.0)


# ---- baseline, scale, aggregation


def expected_deviation(p, n):
    """The mean standard deviation of n rewards that are 1 with probability p."""
    return sum(math.comb(n, k) * p**k * (1 - p)**(n - k) * math.sqrt(k / n * (1 - k / n))
               for k in range(n + 1))


def maxrl(question, terms):
    """The gradient of MaxRL's series: log p = -sum over k of (1 - p)^k / k (arXiv:2602.02710)."""
    return question.gradient(lambda logits: -sum(
        (1 - question.correct(logits))**k / k for k in range(1, terms + 1)))


def by_length(question, p):
    """E[(r - p) / |o|], p fixed: right completions gain by being short, wrong ones by being long.
    """
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
    "maxrl": (CONSTANT | dict(scale="mean"), lambda q, p, n: maxrl(q, n - 1)),
    "maxrl, no baseline": (CONSTANT | dict(scale="mean", baseline="none"),
                           lambda q, p, n: maxrl(q, n)),
    "sequence": (UNBIASED | dict(aggregate="sequence"), lambda q, p, n: by_length(q, p)),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_expected_gradient_of_a_question_is_that_of_the_page(rule):
    options, wanted = RULES[rule]
    for question, n in itertools.product(map(Question, KNOBS), (2, 3, 4)):
        p = question.correct(question.logits).item()
        close(mean_of(question, EPSILON, samples=n, **options), wanted(question, p, n))


def test_the_mean_of_the_batch_shortens_it_by_one_sample_of_the_batch():
    questions = [Question(knob) for knob in KNOBS[::2]]
    result = lab.audit(config(**UNBIASED | dict(baseline="batch")), questions)
    j = torch.stack([j_of(q) for q in questions]) / 2  # (Q, P)
    close(result.mean, (1 - 1 / 8) * j)


def test_on_policy_gspo_and_sapo_are_grpo_cispo_is_bnpo_and_kimi_is_rloo_times_a_factor():
    questions = [Question(knob, steps=2) for knob in KNOBS[::2]]
    found = {name: lab.audit(config(**row | dict(kl_coef=0.0)), questions)
             for name, row in nr.ALGOS.items()}
    for one, other, factor in (("gspo", "grpo", 1), ("sapo", "grpo", 1), ("cispo", "bnpo", 1),
                               ("kimi", "rloo", 3 / 4), ("dr_grpo", "rloo", 3 / 4)):
        close(found[one].mean, factor * found[other].mean)
        close(found[one].variance, factor**2 * found[other].variance)


# ---- KL


def kl_mean(question, loss, **changes):
    """The expected gradient of a KL term alone."""
    question.rewards = [0.0] * len(question.rewards)
    options = dict(baseline="none", scale="none", aggregate="constant", kl_coef=1.0, samples=2)
    return mean_of(question, loss=loss, **options | changes)


SUFFIX = list(lab.KL_LOSSES)[-1]  # with the log-ratios of the later tokens
KL_TERMS = {  # loss -> the KL whose gradient it has, a method of Question, or None
    **{kind: (partial(lab.kl_loss, kind), wanted) for kind, wanted in (
        ("k1", None), ("k2", "token_kl"), ("k3 (the script)", "other_token_kl"),
        ("k3 times pi/old", "token_kl"), (SUFFIX, "kl"))},
    **{f"examples/kl.py, {name}": (kl.with_kl(name), wanted) for name, wanted in (
        ("k1", None), ("k2", "token_kl"), ("k3", "other_token_kl"), ("unbiased", "token_kl"))},
    "policy_loss": (nr.policy_loss, "other_token_kl"),
}


@pytest.mark.parametrize("term", KL_TERMS)
def test_a_kl_in_the_loss_has_the_gradient_that_the_page_names(term):
    loss, wanted = KL_TERMS[term]
    for question in Question(2.0, steps=1), Question(2.0):
        gradient = question.gradient(getattr(question, wanted)) if wanted else 0.0
        within((kl_mean(question, loss) + gradient).abs().max(), 1e-12)


def test_the_kl_of_the_next_token_is_that_of_the_completion_for_one_token_only():
    one, three = Question(2.0, steps=1), Question(2.0)
    for of_token, whole in ("token_kl", "kl"), ("other_token_kl", "other_kl"):
        close(one.gradient(getattr(one, of_token)), one.gradient(getattr(one, whole)))
        differ(three.gradient(getattr(three, of_token)), three.gradient(getattr(three, whole)))
    differ(one.gradient(one.kl), one.gradient(one.other_kl))


def test_unbiased_of_examples_kl_is_right_after_an_update_too_for_one_token():
    for name in kl.ESTIMATORS:
        later = after_updates(Question(2.0, steps=1), 0.4)
        found, wanted = kl_mean(later, kl.with_kl(name)), -later.gradient(later.kl)
        (close if name == "unbiased" else differ)(found, wanted)


def test_k1_as_a_loss_that_is_weighted_by_length_climbs_the_mean_of_1_over_the_length():
    question = Question(2.0)
    found = kl_mean(question, partial(lab.kl_loss, "k1"), aggregate="sequence")
    close(found, -question.gradient(lambda z: (question.probs(z) / question.lengths).sum()))


def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_completions():
    question = lab.in_reward(Question(2.0, steps=2), "k1")
    wanted = -question.gradient(question.kl)
    close(mean_of(question, **UNBIASED | dict(samples=2)), wanted)
    half = UNBIASED | dict(samples=2, baseline="group")
    close(mean_of(question, **half), wanted / 2)


def test_a_kl_in_the_reward_of_equal_rewards_has_full_strength_however_small_its_coefficient():
    options = dict(scale="group", aggregate="constant", samples=2)
    found = []
    for coefficient in 1.0, 1e-3:
        question = lab.in_reward(Question(2.0, steps=2), "k1")
        question.rewards = [coefficient * x for x in question.rewards]
        found.append(mean_of(question, EPSILON, **options))
    close(*found, bound=1e-8)  # rewards of 1e-3 differ by 1e-4, of which EPSILON is 1e-9


# ---- importance correction and clip


def test_what_truncating_importance_weights_costs():
    """For one token: without a cap no bias, with one the bias is the weight that was cut off; the
    variance falls with the cap."""
    question = with_sampler(Question(0.0, steps=1), 1.0)
    ratio = question.probs(question.logits) / question.probs(question.sampler)  # (S,)
    assert ratio.max() > 1.5
    scores = torch.func.jacrev(question.logps)(question.logits).flatten(1)  # (S, P)
    rewards = torch.tensor(question.rewards, dtype=torch.float64)  # (S,)
    centred = rewards - question.correct(question.sampler)  # (S,)
    variances = []
    for cap in 1e9, 1.5, 1.2, 1.0:
        cut = (ratio - cap).clamp(min=0) * centred * question.probs(question.sampler)  # (S,)
        cfg = config(**UNBIASED, correction="token_truncate", correction_cap=cap)
        result = lab.audit(cfg, [question])
        close(result.mean[0], j_of(question) - cut @ scores)
        variances.append(result.variance)
    assert sorted(variances, reverse=True) == variances and len(set(variances)) == 4


def test_weights_per_token_are_biased_for_completions_and_the_weight_of_the_whole_is_not():
    question = with_sampler(Question(2.0), 0.7)
    per_token = dict(correction="token_truncate", correction_cap=1e9)
    found = mean_of(question, **UNBIASED, **per_token)
    differ(found, j_of(question))
    question.old = question.sampler  # the ratio of the loss as the weight
    close(mean_of(question, **WHOLE, **lab.OFF), j_of(question))


def test_the_clip_changes_nothing_while_all_ratios_are_inside_and_shortens_the_step_outside():
    for step, inside in (0.01, True), (0.4, False):
        question = after_updates(Question(-0.5), step)
        ratio = (question.logps(question.logits) - question.logps(question.old)).exp()  # (R,)
        assert ((ratio - 1).abs().max() < 0.2) == inside
        clipped, free = (mean_of(question, **UNBIASED | x) for x in ({}, lab.OFF))
        if inside:
            close(clipped, free)
        else:
            j = j_of(question)
            assert clipped @ j < 0.5 * (free @ j)  # earlier steps went that way: these tokens stop


# ---- the page


@pytest.mark.parametrize("name", lab.TABLES)
def test_the_page_has_the_tables_that_the_audit_computes(name):
    assert lab.mark(name).search(lab.PAGE.read_text())[2] == lab.markdown(name)
