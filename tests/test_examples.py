"""examples/: each idea against its formula. What they import is nano_rlvr as it is."""
import copy
import dataclasses
import math
import random
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

import data
import nano_rlvr as nr
from conftest import ROOT, close, fixed_rollouts, make_config, naive_logps, write_rows
from examples import (
    async_rl,
    calculator,
    curriculum,
    distill,
    dpo,
    entropy,
    kl,
    preferences,
    products,
    sft,
    stories,
    tags,
)
from examples.ppo import Critic, gae
from rewards import anywhere, numbers_in, right
from runtime.messages import RunError


@pytest.fixture
def models(in_float64):
    """A policy and another model, both TokenLogps in float64."""
    torch.manual_seed(0)
    policy = nr.TokenLogps(nr.load_model(make_config()))
    other = copy.deepcopy(policy).requires_grad_(False)
    for p in other.parameters():
        p += 0.02 * torch.randn_like(p)
    return policy, other


def alone(model, rollout, temperature=1.0):
    """naive_logps of a TokenLogps, which from now on runs sequences one at a time."""
    model.model.set_attn_implementation("eager")
    return naive_logps(model.model, rollout, temperature)


def close_gradients(policy, *losses):
    """Asserts that two losses have the same gradient."""
    gradients = [torch.autograd.grad(loss, [*policy.parameters()]) for loss in losses]
    for ours, wanted in zip(*gradients):
        close(ours, wanted)


def test_dpo_has_the_gradient_of_its_loss(models, tokenizer):
    """Of -log sigmoid of the margin of each pair, one sequence at a time. Of the 4 groups one has
    only wrong rollouts, and one a rollout without a reward."""
    policy, ref = models
    rollouts = fixed_rollouts(tokenizer)
    for i, r in enumerate(rollouts):
        r.reward = float(i % 4 == 1 and i // 4 != 2) if i else None
        r.parts = {"x": r.reward}
    groups = [rollouts[i:i + 4] for i in range(0, 16, 4)]
    cfg = make_config(aggregate="constant", kl_coef=0.0, correction="none")
    found = dpo.assign_pairs(groups, policy, ref, 0.3, cfg)
    ours = sum(nr.policy_loss(policy(pack)[0], None, None, pack, cfg)[0]
               for pack in nr.make_packs(groups, cfg))
    losses = []
    for number, *pair in [(0, 1, 2), (1, 1, 0), (3, 1, 0)]:  # group, first right, first wrong
        right, wrong = (alone(policy, r)[0].sum() - alone(ref, r)[0].sum()
                        for r in map(groups[number].__getitem__, pair))
        losses.append(-torch.nn.functional.logsigmoid(0.3 * (right - wrong)))
    loss = torch.stack(losses).mean()
    assert found["dpo/pairs"] == 3
    close(found["dpo/loss"], loss)
    close_gradients(policy, ours, loss)


@pytest.mark.parametrize("name", preferences.BETA)
def test_a_loss_on_pairs_has_the_gradient_of_its_formula(models, tokenizer, name):
    """As the papers write it, one sequence at a time; of 4 groups one has no right rollout."""
    policy, ref = models
    rollouts = fixed_rollouts(tokenizer)
    for i, r in enumerate(rollouts):
        r.reward = float(i % 4 == 1 and i // 4 != 2)
        r.parts = {"x": r.reward}
    groups = [rollouts[i:i + 4] for i in range(0, 16, 4)]
    cfg = make_config(aggregate="constant", kl_coef=0.0, correction="none")
    beta = preferences.BETA[name]
    own = SimpleNamespace(loss=name, beta=beta)
    found = preferences.assign_pairs(groups, policy, ref, own, cfg)
    ours = sum(nr.policy_loss(policy(pack)[0], None, None, pack, cfg)[0]
               for pack in nr.make_packs(groups, cfg))
    pairs = [(rollouts[first + 1], rollouts[first]) for first in (0, 4, 12)]
    logps = [[alone(policy, r)[0] for r in pair] for pair in pairs]
    ratios = [[logp.sum() - alone(ref, r)[0].sum().detach() for logp, r in zip(both, pair)]
              for both, pair in zip(logps, pairs)]
    z = beta * max(sum(map(sum, ratios)).item() / 6, 0)
    sigmoid, losses = torch.sigmoid, []
    for (good, bad), (gain, loss) in zip(logps, ratios):
        p, q = good.mean().exp(), bad.mean().exp()
        odds = p / (1 - p) / (q / (1 - q))
        losses.append({
            "dpo": -sigmoid(beta * (gain - loss)).log(),
            "ipo": (gain - loss - 1 / (2 * beta))**2,
            "simpo": -sigmoid(beta * (good.mean() - bad.mean()) - preferences.GAMMA).log(),
            "orpo": -good.mean() - beta * sigmoid(odds.log()).log(),
            "kto": 2 - sigmoid(beta * gain - z) - sigmoid(z - beta * loss)}[name])
    wanted = torch.stack(losses).mean()
    assert found["preference/pairs"] == 3
    close(found["preference/loss"], wanted)
    close_gradients(policy, ours, wanted)


def test_a_step_without_a_pair_has_no_loss(models, tokenizer):
    rollouts = fixed_rollouts(tokenizer, groups=1)
    for r in rollouts:
        r.reward, r.parts = 0.0, {"x": 0.0}
    for name in preferences.BETA:
        own = SimpleNamespace(loss=name, beta=0.1)
        found = preferences.assign_pairs([rollouts], *models, own, make_config())
        assert found == {"preference/pairs": 0, "preference/loss": 0.0}
        assert not any(sum(r.advantages) for r in rollouts)


def test_a_distilled_token_has_the_advantage_log_teacher_minus_log_student(models, tokenizer):
    student, teacher = models
    prefix = tokenizer.encode("Think.", add_special_tokens=False)
    rollouts = fixed_rollouts(tokenizer)
    rollouts[1].loss_mask[0] = False  # a tool wrote it
    mean = distill.token_advantages(student, teacher, rollouts, prefix, make_config())
    for r in rollouts:
        told = dataclasses.replace(r, prompt=[*prefix, *r.prompt])
        with torch.no_grad():
            gap = alone(teacher, told)[0] - alone(student, r)[0]  # (L,)
        gap *= torch.tensor(r.loss_mask)
        close(r.advantages, gap)
    close(mean, sum(sum(r.advantages) for r in rollouts) / sum(r.length for r in rollouts))


def test_sft_imitates_the_right_and_complete_lines_of_a_file_and_their_ends(tokenizer, tmp_path):
    path = write_rows(tmp_path / "demos.jsonl", [
        {"question": "1+2", "completion": "3", "right": True},
        {"question": "1+2", "completion": "4", "right": False},
        {"question": "5+6+7", "completion": "5+6=11", "finish": "length"},
        {"question": "5+6+7", "completion": "5+6=11\u2028\n11+7=18"}], encoding="utf-8-sig")
    with open(path, "a") as file:
        file.write("\n" + '{"question": "8", "completion": "%s"}' % ("1" * 10**5))
    notes, cfg = [], make_config(max_tokens=40)
    demos = sft.read_demos(path, tokenizer, cfg, {"1+2"}, notes.append)
    assert [r.text for r in demos] == ["5+6=11\u2028\n11+7=18"]
    assert notes == ["1 of 3 demonstrations left out: their questions are held out",
                     "1 of 3 demonstrations left out: longer than --max_prompt or --max_tokens"]
    for bad in b'{"question": "\xe9"}', b"[" * 10**5, b"[]", b'{"question": "1", "completion": 2}':
        (tmp_path / "bad.jsonl").write_bytes(b"\n" + bad)
        with pytest.raises(RunError, match="^--demos .*bad.jsonl:?2?: .*"):
            sft.checked_sampler(cfg, str(tmp_path / "bad.jsonl"))


def test_flags_that_are_not_the_example_s_idea_and_a_sampler_that_hangs_end_the_run(monkeypatch):
    monkeypatch.setattr(nr, "Sampler", None)
    for changes, says in (({"aggregate": "sequence"}, "dpo.py needs --aggregate constant"),
                          ({"ratio": "product"}, "dpo.py needs --ratio token"), ({}, "--beta nan")):
        fine = dict(aggregate="constant", kl_coef=0.0, correction="none")
        with pytest.raises(RunError, match=says):
            dpo.checked_sampler(make_config(**fine | changes), math.nan)
    with pytest.raises(RunError, match="^--teacher: --model nowhere: its config.json"):
        distill.checked_sampler(make_config(), "nowhere")
    # a sampler that hangs
    llm = SimpleNamespace(started=Future(), seconds=0.1, process=SimpleNamespace(_processes={}))
    run = SimpleNamespace(llm=llm, checkpoints=SimpleNamespace(progress=SimpleNamespace(step=0)))
    with pytest.raises(RunError, match="has not answered for --timeout minutes"):
        async_rl.train(run)


def test_the_kl_in_the_reward_is_subtracted_from_it_and_not_in_the_loss(
        models, tokenizer, monkeypatch):
    """The rewards of a group are equal: what is left is the KL. The logged rewards stay."""
    policy, ref = models
    rollouts, cfg = fixed_rollouts(tokenizer, groups=1), make_config(scale="none", kl_coef=0.5)
    for r in rollouts:
        r.reward = 1.0
    run = SimpleNamespace(policy=policy, ref=ref, metrics={}, cfg=cfg)
    seen = []
    monkeypatch.setattr(nr, "train", lambda run, assign_advantages: seen.append(
        (run.ref, assign_advantages([rollouts], cfg, math.nan))))
    kl.train_with_kl_in_reward(run)
    with torch.no_grad():
        kls = [(alone(policy, r)[0] - alone(ref, r)[0]).sum().item() for r in rollouts]
    close([r.advantages[0] for r in rollouts], [-0.5 * (x - sum(kls) / 4) for x in kls])
    close(run.metrics["kl"], sum(kls) / sum(r.length for r in rollouts))
    close(seen[0][1], 1 - 0.5 * sum(kls) / 4)
    assert seen[0][0] is None and {r.reward for r in rollouts} == {1.0}


def test_the_band_has_the_questions_in_it_or_the_nearest():
    rates = {"a": 0.0, "b": 0.1, "c": 0.5, "d": 0.6, "e": 1.0}
    for least, wanted in ((1, "cd"), (3, "cdb")):  # b is 0.1 away, a and e 0.2
        found = curriculum.in_band([{"question": q} for q in rates], rates, 0.2, 0.8, least)
        assert "".join(e["question"] for e in found) == wanted


def test_the_entropy_has_the_gradient_of_autograd_in_several_chunks(models, tokenizer):
    policy, _ = models
    policy.temperature, policy.chunk = 0.7, 100
    rollouts = fixed_rollouts(tokenizer, groups=2)
    pack = nr.collate(rollouts)
    logp, pack.entropy = policy(pack)  # (R,), (R,)
    a, b = torch.randn(2, len(logp)).unbind()  # (R,) twice
    own, entropies = map(torch.cat, zip(*(alone(policy, r, 0.7) for r in rollouts)))
    close(pack.entropy, entropies)
    close_gradients(policy, (a * logp + b * pack.entropy).sum(), (a * own + b * entropies).sum())


def test_the_bonus_and_gmpo_are_their_formulas(in_float64, tokenizer):
    """GMPO's as a product, sequence by sequence; the bonus as a sum over the tokens."""
    rollouts = fixed_rollouts(tokenizer, groups=1)
    pack, cfg = nr.collate(rollouts), make_config(correction="none")
    old = torch.randn(len(pack.targets)) - 3  # (R,)
    logp = (old + torch.randn_like(old)).requires_grad_()  # (R,)
    pack.entropy = torch.rand_like(old)  # (R,)
    loss, terms = entropy.gmpo_loss(logp, old, None, pack, cfg)
    wanted, clipped, parts = 0.0, [], pack.lengths.tolist()
    for r, ours, before in zip(rollouts, logp.split(parts), old.split(parts)):
        a = r.advantages[0]  # that of each token
        ratio = (ours - before).exp()  # (L,)
        bounded = ratio.clamp(max=math.exp(0.4)) if a > 0 else ratio.clamp(min=math.exp(-0.4))
        clipped += (bounded != ratio).tolist()
        wanted = wanted - r.weight * len(ours) * a * bounded.prod() ** (1 / len(ours))
    close(loss, wanted)
    assert terms["clip_ratio"].tolist() == clipped and any(clipped) and not all(clipped)
    close(*(torch.autograd.grad(x, logp)[0] for x in (loss, wanted)))
    plain, _ = nr.policy_loss(logp, old, None, pack, cfg)
    loss, _ = entropy.with_bonus(0.5)(logp, old, None, pack, cfg)
    close(plain - loss, 0.5 * (pack.weight * pack.entropy).sum())


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.97, 0.0), (0.97, 1.0)])
def test_gae_solves_its_linear_equations(gamma, lam):
    """A = delta + gamma lam (A one token later), with V = 0 after the last token."""
    rng = random.Random(0)
    for n in (1, 2, 5, 9):
        rewards, values = ([rng.gauss(0, 1) for _ in range(n)] for _ in range(2))
        later = torch.diag(torch.ones(n - 1).double(), 1)  # (n, n) row t picks column t + 1
        r, v = torch.tensor([rewards, values], dtype=torch.float64)
        delta = r + gamma * later @ v - v  # (n,)
        a = torch.linalg.solve(torch.eye(n).double() - gamma * lam * later, delta)  # (n,)
        close(gae(rewards, values, gamma, lam), a)


@torch.no_grad()
def values_of(critic, rollout):
    """(R,) values before each token of a completion, from a pass of this sequence alone."""
    row = torch.tensor([rollout.prompt + rollout.completion])
    hidden = critic.decoder(input_ids=row, use_cache=False).last_hidden_state[0]  # (L, H)
    return critic.head(hidden[len(rollout.prompt) - 1:-1])[:, 0]


def test_ppos_advantages_are_normalised_gae_and_its_targets_are_gae_plus_the_values(
        in_float64, tokenizer):
    """The loop of examples/ppo.py runs in notebook 03."""
    torch.manual_seed(0)
    critic = Critic(make_config(), minibatches=3, lam=0.7)
    torch.nn.init.normal_(critic.head.weight)  # values that are not 0
    rollouts = fixed_rollouts(tokenizer)
    packs = critic.assign_advantages(rollouts)
    critic.decoder.set_attn_implementation("eager")
    wanted = {}  # id(rollout) -> GAE
    for i, pack in enumerate(packs):
        values = [values_of(critic, r) for r in rollouts[i::3]]
        for r, v in zip(rollouts[i::3], values):
            rewards = [0.0] * (len(v) - 1) + [r.reward]
            wanted[id(r)] = torch.tensor(gae(rewards, v.tolist(), 1.0, 0.7))
        close(pack.values, torch.cat(values))
        close(pack.returns, torch.cat([wanted[id(r)] for r in rollouts[i::3]]) + pack.values)
    wanted = torch.cat([wanted[id(r)] for r in rollouts])  # (tokens,)
    normalised = (wanted - wanted.mean()) / (wanted.std(correction=0) + 1e-4)
    close(nr.collate(rollouts).advantage, normalised)  # each token has its own in the loss
    for critic.cfg.max_grad_norm in (1.0, 0.0):  # 0 = no clipping
        before = critic.head.weight.clone()
        critic.update(packs)
        assert (critic.head.weight - before).abs().max() > 1e-4


def test_clip_cov_draws_from_the_tokens_with_a_large_product_of_distances():
    first, second = (nr.Rollout([1], [0] * len(mask), "", False, [], mask, advantages=advantages)
                     for mask, advantages in (([True, True, False, True], [2.0, -2.0, 9.0, 1.0]),
                                              ([True, True], [-1.0, 0.0])))
    logps = [[0.0, -4.0, -4.0], [0.0, -2.0]]  # distances 2, -2, -2; 2, 0: products 4, 4, -2, -2, 0
    assert entropy.clip_cov([first, second], logps, 1.0, random.Random(0)) == 2
    assert first.advantages == [0.0, 0.0, 9.0, 1.0] and second.advantages == [-1.0, 0.0]


def test_the_rows_of_a_task_depend_on_split_and_seed_and_near_seeds_share_none():
    task = f"{ROOT / 'examples/gym_tasks.py'}:chain_sum"
    first, *others = [{e["question"] for e in data.load(task, *args) if len(e["question"]) > 80}
                      for args in (("train", 300, 0), ("train", 300, 1), ("test", 300, 0))]
    assert len(first) > 100 and first.isdisjoint(set.union(*others))


def test_no_pair_of_held_out_numbers_is_trained_and_a_story_knows_its_answer():
    train, rows = (list(stories.make(split, 2000, 0)) for split in ("train", "test"))
    trained, held_out = ({frozenset(numbers_in(row["question"])) for row in part}
                         for part in (train, rows))
    assert not trained & held_out
    assert {row["kind"] for row in train} == {row["kind"] for row in rows} == {0, 1, 2, 3, 4}
    story, answer = stories.STORIES[rows[0]["kind"]]
    a, b = map(int, numbers_in(rows[0]["question"]))
    assert rows[0]["answer"] == str(answer(a, b))
    assert rows[0]["question"].endswith(story.rpartition("}")[2])
    assert right(["7 times 8 is 56.", "56 or 54"], ["56"] * 2) == [1.0, 0.0]
    assert anywhere(["7 times 8 is 56.", "56 or 54"], ["56"] * 2) == [1.0, 1.0]


def test_a_call_of_the_calculator_is_computed_and_a_turn_without_one_is_the_answer():
    [row] = calculator.make("test", 1, 0)
    a, b = map(int, numbers_in(row["question"]))
    assert 21 <= a < 100 and 2 <= b < a
    for answer, reward in (row["answer"], 1.0), (str(int(row["answer"]) + 1), 0.0):
        game = calculator.Calculator()
        assert game.reset(row) == row["question"]
        for call, value in {
                "calc: 14 * 36": "504", "calc:2 * (30+4)-7 ": "61", "So calc: 7/2 = 3": "3.5",
                "calc: 99999 * 99999": "9999800001", "calc: 9**9**9": "error",
                "calc: 1/0": "error", "calc: x": "error", "calc: f(2)": "error",
                "calc: (2": "error", f"calc: {'1+' * 30}1": "error"}.items():
            assert game.step(call) == (value, 0.0, False), call
        assert game.step(f"It is {answer}.") == ("", reward, True)
    assert calculator.calls(["calc: 1 + 1\nuser\n2\nassistant\n2", "2"]) == [1.0, 0.0]


def test_variants_of_products_have_larger_numbers_or_an_answer_that_is_begun():
    for row in products.larger("test", 500, 0):
        a, b = map(int, numbers_in(row["question"]))
        assert max(a, b) >= 13 and row["answer"] == str(a * b)
    for row in products.primed("test", 500, 0):
        *_, a, b = map(int, numbers_in(row["question"]))
        assert row["question"].endswith(f"assistant\n{a} x {b} =") and row["answer"] == str(a * b)


def test_a_strict_answer_counts_only_in_its_tags_at_the_end():
    solution = "She has 1,000 + 200 = 1,200\n#### 1,200"
    for text, strict, loose in (
        ("1000 + 200 = 1200 <answer>1,200</answer>", 1, 1),
        ("<answer> $1200.0 </answer>\n", 1, 1),
        ("the answer is 1200", 0, 1),
        ("<answer>1200</answer> or 7", 0, 0),
        ("<answer>1201</answer>", 0, 0),
        ("<answer></answer>", 0, 0),
    ):
        assert tags.strict([text], [solution]) == [strict], text
        assert tags.loose([text], [solution]) == [loose], text
