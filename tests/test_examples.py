"""examples/: each idea against its formula. What they import is nano_rlvr as it is."""
import copy
import dataclasses
import random
import sys
from types import SimpleNamespace

import pytest
import torch

import curriculum
import data
import distill
import dpo
import entropy
import kl
import nano_rlvr as nr
import r1
import sft
from conftest import (
    EXACT,
    ROOT,
    close,
    fixed_rollouts,
    make_config,
    naive_logps,
    within,
    write_rows,
)
from runtime import dist

GYM = str(ROOT / "examples/gym_tasks.py")


@pytest.fixture
def models(in_float64):
    """A policy and another model, both TokenLogps in float64."""
    torch.manual_seed(0)
    policy = nr.TokenLogps(nr.load_model(make_config()))
    other = copy.deepcopy(policy).requires_grad_(False)
    for p in other.parameters():
        p += 0.02 * torch.randn_like(p)
    return policy, other


def close_gradients(policy, *losses):
    """Asserts that two losses have the same gradient."""
    gradients = [torch.autograd.grad(loss, [*policy.parameters()]) for loss in losses]
    for ours, wanted in zip(*gradients):
        close(ours, wanted)


def test_dpo_has_the_gradient_of_its_loss(models, tokenizer):
    """Of -log sigmoid of the margin of each pair, one sequence at a time. Of the 4 groups one has
    only wrong rollouts, and one a rollout without a verdict."""
    policy, ref = models
    rollouts = fixed_rollouts(tokenizer)
    for i, r in enumerate(rollouts):
        r.reward = float(i % 4 == 1 and i // 4 != 2)
        r.parts = {"x": r.reward}
    rollouts[0].reward, rollouts[0].parts = None, {"x": None}
    groups = [rollouts[i:i + 4] for i in range(0, 16, 4)]
    cfg = make_config(aggregate="constant", kl_coef=0.0, correction="none")
    found = dpo.assign_pairs(groups, policy, ref, 0.3, cfg, groups[0][0])
    ours = sum(nr.policy_loss(policy(batch)[0], None, None, batch, cfg)[0]
               for batch in nr.make_batches(groups, groups[0][0], cfg))
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
    assert found["dpo/pairs"] == 3
    close(found["dpo/loss"], loss)
    close_gradients(policy, ours, loss)


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


def test_sft_imitates_the_right_and_complete_lines_of_a_file_and_their_ends(tokenizer, tmp_path):
    rows = [{"question": "1+2", "completion": "3", "right": True},
            {"question": "1+2", "completion": "4", "right": False},
            {"question": "5+6+7", "completion": "5+6=11", "finish": "length"},
            {"question": "5+6+7", "completion": "5+6=11\n11+7=18"}]
    path = tmp_path / "demos.jsonl"
    write_rows(path, rows)
    demos = sft.read_demos(path, tokenizer, "chat")
    assert [tokenizer.decode(r.completion) for r in demos] == [
        f"{row['completion']}<|endoftext|>" for row in (rows[0], rows[3])]
    assert [r.reward for r in demos] == [1.0, 1.0]
    write_rows(path, [*rows, {}])
    with pytest.raises(dist.RunError, match=":5: no question and completion"):
        sft.read_demos(path, tokenizer, "chat")


def test_r1_works_a_sum_out_and_its_base_has_read_it_in_several_forms():
    assert r1.worked("14+2-9") == (["14+2=16", "16-9=7"], 7)
    texts = {r1.pretraining_text({"question": "14+2-9"}, random.Random(i)) for i in range(200)}
    assert "<think>14+2=16\n16-9=7</think><answer>7</answer>" in texts
    assert "14+2=16 hm\n16-9=7\n7" in texts and any(len(text) <= 3 for text in texts)
    example = r1.reverse(random.Random(0))
    assert example["question"] == f"reverse {example['answer'][::-1]}"


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
    policy.model.set_attn_implementation("eager")
    own, entropies = map(torch.cat, zip(*(naive_logps(policy.model, r, 0.7) for r in rollouts)))
    close(batch.entropy, entropies)
    close_gradients(
        policy, (a * logp + b * batch.entropy).sum(), (a * own + b * entropies).sum())


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


def test_kl_needs_a_kl_in_the_loss():
    for flags in dict(kl_coef=0.0), dict(kl_in="reward"):
        with pytest.raises(dist.RunError, match="^kl.py .*--kl_coef above 0, --kl_in loss$"):
            kl.make_sampler(make_config(**flags))


def test_a_task_of_reasoning_gym_is_judged_by_its_own_scorer():
    """Any expression with the value 20 is right, and a scorer that fails on a text gives it 0."""
    twenty = {"source_dataset": "countdown", "numbers": [2, 3, 4], "target": 20}
    primes = {"source_dataset": "prime_factorization", "factors": [2, 3]}
    texts = {"(2+3)*4": twenty, "4 * (3 + 2)": twenty, "2*3*4": twenty, "2*3": primes,
             "2 × 3": primes, "no primes": primes}
    with nr.rewards.Verifier(f"{GYM}:score", workers=1, timeout=60.0) as verifier:
        found, _, counts = verifier(
            [f"<answer>{text}</answer>" for text in texts], metadata=[*texts.values()],
            question=["?"] * 6, answer=["(2+3)*4"] * 3 + ["2 × 3"] * 3)
    assert [x == 1 for x in found] == [True, True, False, False, True, False]
    assert found[-1] == 0 and counts == {"reward/timeouts": 0, "reward/crashes": 0}


def test_the_rows_of_a_task_depend_on_split_and_seed_and_near_seeds_share_none():
    of = lambda task, *args: data.load(f"{GYM}:{task}", *args)  # noqa: E731
    rows = of("chain_sum", "train", 300, 0)
    assert rows == of("chain_sum", "train", 300, 0)
    for other in of("chain_sum", "train", 300, 1), of("chain_sum", "test", 300, 0):
        long = [{e["question"] for e in x if len(e["question"]) > 80} for x in (rows, other)]
        assert min(map(len, long)) > 100 and not long[0] & long[1]
    for e in of("sums", "test", 300, 0):
        assert eval(e["question"]) == int(e["answer"]) and 5 <= len(e["question"]) <= 11
    assert len({e["question"] for e in of("sums", "test", 300, 0)}) > 250


def test_without_reasoning_gym_or_for_an_unknown_task_there_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="^data .*: AttributeError: .* no task chess .line"):
        data.load(f"{GYM}:chess")
    (tmp_path / "gym.py").write_text((ROOT / "examples/gym_tasks.py").read_text())
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="^data .*ImportError: .*; pip install (.*) .line") as e:
        data.load(f"{tmp_path}/gym.py:sums")
    pinned = (ROOT / "requirements-dev.txt").read_text().splitlines()
    assert str(e.value).split("pip install ")[1].split()[0] in pinned
