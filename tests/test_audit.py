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


def p_of(question):
    return question.correct(question.logits).item()


# ---- the audit itself


def step_by_step(cfg, questions):
    """Mean and variance with every ordered group as Rollouts, through the stages of the script."""
    mean, square = 0.0, 0.0
    running = sum(q.correct(q.sampler).item() for q in questions) / len(questions)
    members = [range(len(q.completions)) for q in questions for _ in range(cfg.samples)]
    for batch in itertools.product(*members):
        groups = [batch[i:i + cfg.samples] for i in range(0, len(batch), cfg.samples)]
        rollouts, probability, tables = [], 1.0, []
        leaves = [q.logits.clone().requires_grad_() for q in questions]
        for i, (question, group, leaf) in enumerate(zip(questions, groups, leaves)):
            vllm, logp = question.logps(question.sampler), question.logps(leaf)  # (R,), (R,)
            old = logp.detach() if question.old is None else question.logps(question.old)
            tables.append((logp, old, question.logps(question.ref)))
            for s in group:
                rows = (question.sequence_ids == s).nonzero()[:, 0]
                ids = (1000 * i + rows).tolist()  # a token's id names its row and its question
                rollouts.append(nr.Rollout([i], ids, "", False, vllm[rows].tolist(),
                                           reward=question.rewards[s]))
                probability *= vllm[rows].sum().exp().item()
        by_group = [rollouts[i:i + cfg.samples] for i in range(0, len(batch), cfg.samples)]
        nr.assign_advantages(by_group, cfg, running)
        packed = nr.collate(nr.assign_token_weights(rollouts, cfg))
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


def test_the_64_strings_are_40_completions_whose_probabilities_add_up_to_one():
    question = Question()
    assert len(question.completions) == 40 and len(question.prefixes) == 13
    close(question.probs(question.logits).sum(), 1.0)
    assert 4**max(question.lengths) == 64
    groups = lab.enumerate_groups(question, [[s] for s in range(40)], 2)
    close(sum(p for _, p in groups), 1.0)


# ---- baseline and scale


@pytest.mark.parametrize("knob", KNOBS)
def test_rloo_is_unbiased_and_the_groups_own_mean_only_shortens_the_gradient(knob):
    question = Question(knob)
    for n in 2, 3, 4:
        for options in (UNBIASED, WHOLE, UNBIASED | dict(baseline="none"),
                        UNBIASED | dict(baseline="running")):
            close(mean_of(question, samples=n, **options), j_of(question))
        own = UNBIASED | dict(baseline="group")
        close(mean_of(question, samples=n, **own), (n - 1) / n * j_of(question))


def test_the_mean_of_the_batch_shortens_it_by_one_sample_of_the_batch():
    questions = [Question(knob) for knob in KNOBS[::2]]
    result = lab.audit(config(**UNBIASED | dict(baseline="batch")), questions)
    j = torch.stack([j_of(q) for q in questions]) / 2  # (Q, P)
    close(result.mean, (1 - 1 / 8) * j)


def test_a_baseline_changes_the_variance_and_not_the_mean():
    question = Question(4.0)  # easy: most rewards are 1, so that 0 is a bad baseline
    with_baseline, without = (
        lab.audit(config(**UNBIASED | dict(baseline=x)), [question])
        for x in ("leave_one_out", "none"))
    assert with_baseline.variance < without.variance


def expected_deviation(p, n):
    """The mean standard deviation of n rewards that are 1 with probability p."""
    return sum(math.comb(n, k) * p**k * (1 - p)**(n - k) * math.sqrt(k / n * (1 - k / n))
               for k in range(n + 1))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_standard_deviation_multiplies_a_questions_gradient_by_a_function_of_p(n):
    """E[std] / (p (1 - p)): the direction for one question stays right."""
    for question in map(Question, KNOBS):
        p = p_of(question)
        found = mean_of(question, EPSILON, scale="group", aggregate="constant", samples=n)
        close(found, expected_deviation(p, n) / (p * (1 - p)) * j_of(question))


def test_the_standard_deviation_prefers_easy_and_hard_questions_from_four_samples_on():
    """With 2 or 3 samples, all groups that are not flat have the same deviation: a constant."""
    def factor(p, n):
        return expected_deviation(p, n) / (p * (1 - p))

    for p in 0.01, 0.1, 0.9, 0.99:
        close([factor(p, 2), factor(p, 3)], [1.0, math.sqrt(2)])
        for n in 4, 8:
            assert factor(p, n) > factor(0.5, n)


def test_maxrl_climbs_the_series_of_log_p_up_to_n_minus_1_and_without_baseline_up_to_n():
    """log p = -sum over k of (1 - p)^k / k (arXiv:2602.02710)."""
    def series(question, terms, logits):
        return -sum((1 - question.correct(logits))**k / k for k in range(1, terms + 1))

    for question, n in itertools.product(map(Question, KNOBS), (2, 4, 8)):
        for baseline, terms in ("group", n - 1), ("none", n):
            found = mean_of(question, EPSILON, baseline=baseline, scale="mean",
                            aggregate="constant", samples=n)
            close(found, question.gradient(partial(series, question, terms)))


@pytest.mark.parametrize("baseline", ["batch", "running", "none"])
def test_a_flat_group_explodes_under_its_own_deviation_if_the_baseline_is_not_the_groups(baseline):
    """Its deviation is 0, so what the baseline leaves is divided by 1e-4 alone."""
    rewards = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    left = rewards[0] - {"batch": 0.75, "running": 0.5, "none": 0.0}[baseline]
    found = nr.group_advantages(rewards, baseline, "group", running=0.5)
    close(found[0], left * 1e4)
    close(nr.group_advantages(rewards, "group", "group")[0], [0.0, 0.0])


# ---- aggregation


@pytest.mark.parametrize("knob", KNOBS)
def test_the_mean_over_a_completions_tokens_climbs_another_objective_with_lengths_in_it(knob):
    """E[(r - p) / |o|], p fixed: right completions gain by being short, wrong ones by being long.
    """
    question = Question(knob)
    p = p_of(question)

    def objective(logits):
        rewards = torch.tensor(question.rewards, dtype=torch.float64)  # (S,)
        return question.probs(logits) @ ((rewards - p) / question.lengths)

    found = mean_of(question, **UNBIASED | dict(aggregate="sequence"))
    close(found, question.gradient(objective))
    along = found @ j_of(question) / j_of(question).square().sum()
    differ(found, along * j_of(question))  # another direction, not only another length


def test_on_policy_gspo_and_sapo_are_grpo_cispo_is_bnpo_and_kimi_is_rloo_times_a_factor():
    questions = [Question(knob, steps=2) for knob in KNOBS[::2]]
    found = {name: lab.audit(config(**row | dict(kl_coef=0.0)), questions)
             for name, row in nr.ALGOS.items()}
    for one, other, factor in (("gspo", "grpo", 1), ("sapo", "grpo", 1), ("cispo", "bnpo", 1),
                               ("kimi", "rloo", 3 / 4), ("dr_grpo", "rloo", 3 / 4)):
        close(found[one].mean, factor * found[other].mean)
        close(found[one].variance, factor**2 * found[other].variance)


# ---- KL


def kl_mean(question, kind, **changes):
    """The expected gradient of a KL term alone. kind None: the script's."""
    question.rewards = [0.0] * len(question.rewards)
    loss = partial(lab.kl_loss, kind) if kind else nr.policy_loss
    options = dict(loss=loss, baseline="none", scale="none", aggregate="constant", kl_coef=1.0,
                   samples=2)
    return mean_of(question, **options | changes)


def test_k3_as_a_loss_has_the_gradient_of_the_other_kl():
    """Exactly for one token; for several, of the next token's KL in the prefixes that pi visits."""
    one, three = Question(2.0, steps=1), Question(2.0)
    close(kl_mean(one, None), -one.gradient(one.other_kl))
    close(kl_mean(three, None), -three.gradient(three.other_token_kl))
    for question in one, three:
        close(kl_mean(question, None), kl_mean(question, "k3 (the script)"))
        differ(kl_mean(question, None), -question.gradient(question.kl))
    differ(kl_mean(three, None), -three.gradient(three.other_kl))


def test_k2_and_k3_times_the_ratio_have_the_gradient_of_the_next_tokens_kl_not_of_the_sequences():
    one, three = Question(2.0, steps=1), Question(2.0)
    for kind in "k2", "k3 times pi/old":
        close(kl_mean(one, kind), -one.gradient(one.kl))
        close(kl_mean(three, kind), -three.gradient(three.token_kl))
    differ(kl_mean(three, "k2"), -three.gradient(three.kl))


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_the_estimators_of_examples_kl_have_the_gradients_that_its_table_says(estimator):
    """On-policy; after an update, `unbiased` is still right for completions of one token."""
    for question in Question(2.0, steps=1), Question(2.0):
        wanted = {"k1": lambda z: 0 * z.sum(), "k2": question.token_kl,
                  "k3": question.other_token_kl, "unbiased": question.token_kl}[estimator]
        found = kl_mean(question, None, loss=kl.with_kl(estimator))
        within((found + question.gradient(wanted)).abs().max(), 1e-12)
    later = after_updates(Question(2.0, steps=1), 0.4)
    found = kl_mean(later, None, loss=kl.with_kl(estimator))
    (close if estimator == "unbiased" else differ)(found, -later.gradient(later.kl))


def test_k1_as_a_loss_does_nothing_on_average_unless_it_is_weighted_by_length():
    question = Question(2.0)
    within(kl_mean(question, "k1").abs().max(), 1e-12)
    by_length = kl_mean(question, "k1", aggregate="sequence")
    close(by_length, -question.gradient(lambda z: (question.probs(z) / question.lengths).sum()))
    assert by_length.norm() > 1e-3


def test_the_gradient_of_the_kl_of_completions_needs_the_log_ratios_of_the_later_tokens():
    question = Question(2.0)
    wanted = -question.gradient(question.kl)
    close(kl_mean(question, list(lab.KL_LOSSES)[-1]), wanted)
    question = lab.in_reward(Question(2.0, steps=2), "k1")  # --kl_in reward
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
