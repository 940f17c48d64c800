"""examples/: each idea against its formula. What they import is nano_rlvr as it is."""
import copy
import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch

import curriculum
import distill
import dpo
import entropy
import nano_rlvr as nr
from conftest import EXACT, close, fixed_rollouts, make_config, naive_logps, within


@pytest.fixture
def models(in_float64):
    """A policy and another model, both TokenLogps in float64."""
    torch.manual_seed(0)
    policy = nr.TokenLogps(nr.load_model(make_config()))
    other = copy.deepcopy(policy).requires_grad_(False)
    for p in other.parameters():
        p += 0.02 * torch.randn_like(p)
    return policy, other


def groups_of(tokenizer):
    """4 groups of 4 rollouts: right and wrong ones, only wrong ones, one without a verdict."""
    rollouts = fixed_rollouts(tokenizer)
    for i, r in enumerate(rollouts):
        r.reward = float(i % 4 == 1 and i // 4 != 2)
        r.parts = {"x": r.reward}
    rollouts[0].reward, rollouts[0].parts = None, {"x": None}
    return [rollouts[i:i + 4] for i in range(0, 16, 4)]


def test_dpo_has_the_gradient_of_its_loss(models, tokenizer):
    """Of -log sigmoid of the margin of each pair, from autograd, one sequence at a time."""
    policy, ref = models
    groups = groups_of(tokenizer)
    cfg = make_config(aggregate="constant", kl_coef=0.0, correction="none")
    found = dpo.assign_pairs(groups, policy, ref, 0.3, cfg, groups[0][0])
    for batch in nr.make_batches(groups, groups[0][0], cfg):
        logp, _ = policy(batch)
        nr.policy_loss(logp, None, None, batch, cfg)[0].backward()
    ours = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    for model in models:
        model.model.set_attn_implementation("eager")
    places = [(0, 1, 2), (1, 1, 0), (3, 1, 0)]  # group, first right, first wrong
    pairs = [(groups[g][right], groups[g][wrong]) for g, right, wrong in places]
    losses = []
    for pair in pairs:
        right, wrong = (naive_logps(policy.model, r)[0].sum() - naive_logps(ref.model, r)[0].sum()
                        for r in pair)
        losses.append(-torch.nn.functional.logsigmoid(0.3 * (right - wrong)))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert found["dpo/pairs"] == 3
    close(found["dpo/loss"], loss)
    for p, own in zip(policy.parameters(), ours):
        close(own, p.grad)


def test_a_distilled_token_has_the_advantage_log_teacher_minus_log_student(models, tokenizer):
    student, teacher = models
    prefix = tokenizer.encode("Think.", add_special_tokens=False)
    rollouts = fixed_rollouts(tokenizer)
    rollouts[1].sampled[0] = False  # a tool wrote it
    mean = distill.token_advantages(
        student, teacher, rollouts, prefix, make_config(), rollouts[0])
    for model in models:
        model.model.set_attn_implementation("eager")
    gaps = []
    for r in rollouts:
        told = dataclasses.replace(r, prompt=[*prefix, *r.prompt])
        with torch.no_grad():
            gap = naive_logps(teacher.model, told)[0] - naive_logps(student.model, r)[0]  # (L,)
        gap *= torch.tensor(r.sampled)
        close(r.advantages, gap)
        gaps += gap.tolist()
    within(abs(mean - sum(gaps) / (len(gaps) - 1)), EXACT)


def test_the_band_has_the_questions_in_it_or_the_nearest():
    rates = {"a": 0.0, "b": 0.1, "c": 0.5, "d": 0.6, "e": 1.0}
    examples = [{"question": q} for q in rates]
    names = lambda *args: "".join(e["question"] for e in curriculum.in_band(*args))  # noqa: E731
    assert names(examples, rates, 0.2, 0.8, 1) == "cd"
    assert names(examples, rates, 0.2, 0.8, 3) == "cdb"  # b is 0.1 away, a and e 0.2
    assert names(examples, rates, 0.0, 1.0, 2) == "abcde"


def test_the_entropy_has_the_gradient_of_autograd_in_several_chunks(models, tokenizer):
    policy, _ = models
    policy.temperature, policy.chunk = 0.7, 100
    rollouts = fixed_rollouts(tokenizer, groups=2)
    batch = nr.collate(rollouts)
    logp, batch.entropy = policy(batch)  # (R,), (R,)
    a, b = torch.randn(2, len(logp)).unbind()  # (R,) twice
    (a * logp + b * batch.entropy).sum().backward()
    ours = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    policy.model.set_attn_implementation("eager")
    own, entropies = map(torch.cat, zip(*(naive_logps(policy.model, r, 0.7) for r in rollouts)))
    close(batch.entropy, entropies)
    (a * own + b * entropies).sum().backward()
    for p, own in zip(policy.parameters(), ours):
        close(own, p.grad)


def test_the_bonus_and_gmpo_are_their_formulas(models, tokenizer):
    """GMPO's as a product, sequence by sequence; the bonus as a sum over the tokens."""
    rollouts = fixed_rollouts(tokenizer, groups=1)
    batch, cfg = nr.collate(rollouts), make_config(correction="none")
    old = torch.randn(len(batch.targets)) - 3  # (R,)
    logp = (old + torch.randn_like(old)).requires_grad_()  # (R,)
    batch.entropy = torch.rand_like(old)  # (R,)
    loss, terms = entropy.gmpo_loss(logp, old, None, batch, cfg)
    wanted, clipped, parts = 0.0, [], batch.lengths.tolist()
    for r, ours, before in zip(rollouts, logp.split(parts), old.split(parts)):
        a = torch.tensor(r.advantages[0])
        rollout_a = torch.tensor(r.advantages)  # (L,) equal in each token
        ratio, sign = (ours - before).exp(), a.sign()
        bounded = torch.minimum(ratio**sign, (ratio**sign).clamp(2.718281828459045**-0.4,
                                                                 2.718281828459045**0.4))
        clipped += (bounded != ratio**sign).tolist()
        mean = (bounded**sign).prod() ** (1 / len(ours))
        wanted = wanted - (r.weight * mean * rollout_a).sum()
    close(loss, wanted)
    assert terms["clipped"].tolist() == clipped and any(clipped) and not all(clipped)
    wanted_grad, = torch.autograd.grad(wanted, logp)
    close(torch.autograd.grad(loss, logp)[0], wanted_grad)
    plain, _ = nr.policy_loss(logp, old, None, batch, cfg)
    loss, _ = entropy.with_bonus(0.5)(logp, old, None, batch, cfg)
    close(plain - loss, 0.5 * (batch.weight * batch.entropy).sum())


def test_clip_cov_draws_from_the_tokens_with_a_large_product_of_distances():
    first = SimpleNamespace(sampled=[True, True, False, True], advantages=[2.0, -2.0, 9.0, 1.0])
    second = SimpleNamespace(sampled=[True, True], advantages=[-1.0, 0.0])
    logps = [[0.0, -4.0, -4.0], [0.0, -2.0]]  # distances 2, -2, -2; 2, 0: products 4, 4, -2, -2, 0
    assert entropy.clip_cov([first, second], logps, 0.2, random.Random(0)) == 1
    assert sorted(first.advantages) in ([-2.0, 0.0, 1.0, 9.0], [0.0, 1.0, 2.0, 9.0])
    first.advantages[:2] = [2.0, -2.0]
    assert entropy.clip_cov([first, second], logps, 1.0, random.Random(0)) == 2
    assert first.advantages == [0.0, 0.0, 9.0, 1.0] and second.advantages == [-1.0, 0.0]
