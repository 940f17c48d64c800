"""learn/ladder/: a step of the ladder and the one before it do the same where they should."""
import importlib
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import ladder
import nano_rlvr as nr
from conftest import close, fixed_rollouts, float64, make_config, naive_logps
from runtime.model import load_model

FILES = sorted(ladder.HERE.glob("[0-9]_*.py"))
reinforce, in_groups, clip, packs, vllm = (importlib.import_module(p.stem) for p in FILES)


def tiny(noise=0.0, model=None):
    """The bundled model with noise in its weights: a model that has moved."""
    torch.manual_seed(1)
    model = model or AutoModelForCausalLM.from_pretrained(ladder.MODEL)
    model = model.to(torch.get_default_dtype())
    with torch.no_grad():
        for p in model.parameters():
            p += noise * torch.randn_like(p)
    return model


@pytest.fixture(scope="module")
def rollouts(tokenizer):
    """4 groups of 8, of different lengths; both rewards are in each group."""
    found = fixed_rollouts(tokenizer, 4, 8)
    for i, r in enumerate(found):
        r.reward = float(i % 8 < 1 + i // 8)
    return found


@pytest.fixture(scope="module")
def reward(rollouts):
    return torch.tensor([r.reward for r in rollouts])


def padded(rollouts):
    """The batch that step 1 makes of these answers."""
    P, C = (max(map(len, rows)) for rows in zip(*((r.prompt, r.completion) for r in rollouts)))
    left = [P - len(r.prompt) for r in rollouts]
    right = [C - len(r.completion) for r in rollouts]
    ids = [[256] * a + r.prompt + r.completion + [256] * b
           for a, r, b in zip(left, rollouts, right)]
    attention = [[0] * a + [1] * len(r) + [0] * b for a, r, b in zip(left, rollouts, right)]
    attention = torch.tensor(attention)
    return {"ids": torch.tensor(ids), "attention": attention, "mask": attention[:, P:]}


def pairs(rollouts):
    return [(r.prompt, r.completion) for r in rollouts]


def moved(step, answers, reward, *ref):
    """How far one update of a step moves the weights by plain gradient descent, in float64."""
    with float64():
        model, start = tiny(0.01), tiny(0.01)
        descent = torch.optim.SGD(model.parameters(), 1e-4)
        torch.manual_seed(0)  # of the order of the answers
        step.update(model, *ref, descent, answers, reward.double())
        return torch.cat([(a - b).flatten()
                          for a, b in zip(model.parameters(), start.parameters())])


@pytest.fixture
def ref():
    with float64():
        return tiny()


def test_each_step_does_what_the_one_before_does_without_what_it_adds(
        rollouts, reward, ref, monkeypatch):
    batch = padded(rollouts)
    first, second, third = (moved(reinforce, batch, reward), moved(in_groups, batch, reward),
                            moved(clip, batch, reward, ref))
    assert not torch.allclose(first, second) and not torch.allclose(second, third)
    monkeypatch.setattr(clip, "MINIBATCHES", 1)
    monkeypatch.setattr(clip, "KL_COEF", 0.0)
    close(moved(clip, batch, reward, ref), second)
    for size in (packs.PACK, 3):
        monkeypatch.setattr(packs, "PACK", size)
        close(moved(packs, pairs(rollouts), reward, ref), third)
    with float64():
        model = tiny(0.01)
        sampled = [(r.prompt, r.completion, naive_logps(model, r)[0].tolist()) for r in rollouts]
    close(moved(vllm, sampled, reward, ref), third)
    sampled[7][2][-1] += 0.02
    with pytest.raises(AssertionError, match="different weights"):
        moved(vllm, sampled, reward, ref)
    monkeypatch.setattr(in_groups, "advantages", lambda reward: reward)
    close(moved(in_groups, batch, reward), first)


def test_the_gradient_of_step_4_is_that_of_the_script(rollouts, reward, ref, group):
    """With log-probs of other models as old and reference: the clip acts."""
    with float64():
        cfg = make_config(samples=8, prompts=4, aggregate="token", correction="none",
                          kl_coef=packs.KL_COEF)
        ours, script = tiny(0.01), nr.TokenLogps(tiny(0.01, load_model(cfg)))
        old, script_old = tiny(0.02), nr.TokenLogps(tiny(0.02, load_model(cfg)))
        script_ref = nr.TokenLogps(load_model(cfg))

        advantages = packs.advantages(reward.double())
        rows = [(*pair, a) for pair, a in zip(pairs(rollouts), advantages.tolist())]
        for pack in packs.make_packs(rows):
            with torch.no_grad():
                pack |= {"old": packs.log_probs(old, pack), "ref": packs.log_probs(ref, pack)}
            packs.policy_loss(packs.log_probs(ours, pack), pack).backward()

        groups = [rollouts[i:i + 8] for i in range(0, len(rollouts), 8)]
        nr.assign_advantages(groups, cfg, math.nan)
        clipped = 0
        for batch in nr.make_batches(groups, rollouts[0], cfg):
            with torch.no_grad():
                batch.old, batch.ref = script_old(batch)[0], script_ref(batch)[0]
            loss, terms = nr.policy_loss(script(batch)[0], batch.old, batch.ref, batch, cfg)
            loss.backward()
            clipped += terms["clipped"].sum().item()
        assert clipped
        for p, wanted in zip(ours.parameters(), script.model.parameters(), strict=True):
            close(p.grad, wanted.grad)


def test_after_the_sync_vllm_answers_like_transformers_and_without_it_the_update_stops(
        fresh_llm, tokenizer):
    model, ref = tiny(0.01), tiny()
    examples = ladder.questions(0)[2][:vllm.SAMPLES]
    stale, _ = vllm.sample(fresh_llm, tokenizer, examples)
    descent = torch.optim.SGD(model.parameters(), 0.0)
    reward = torch.arange(8.0)
    with pytest.raises(AssertionError, match="different weights"):
        vllm.update(model, ref, descent, stale, reward)
    vllm.sync(model, fresh_llm)
    sequences, texts = vllm.sample(fresh_llm, tokenizer, examples, greedy=True)
    wanted, same_texts = packs.sample(model, tokenizer, examples, greedy=True)
    assert [s[:2] for s in sequences] == wanted and texts == same_texts
    vllm.update(model, ref, descent, vllm.sample(fresh_llm, tokenizer, examples)[0], reward)


def test_the_files_are_short_and_their_figures_make_the_table(monkeypatch, tmp_path, capsys):
    assert all(len(path.read_text().splitlines()) <= 150 for path in FILES)
    monkeypatch.setattr(ladder, "RUNS", tmp_path)
    questions = ladder.questions(0)
    monkeypatch.setattr(ladder, "questions", lambda seed: (*questions[:2], questions[2][:8]))
    for step in (reinforce, in_groups, clip, packs):
        monkeypatch.setattr(step, "STEPS", 1)
        step.train()
    results = ladder.figures()
    assert [*results] == [step.__name__ for step in (reinforce, in_groups, clip, packs)]
    for runs in results.values():
        assert 0 < runs[0]["rewards"][0] < 1 and runs[0]["rate"] > 0
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- table -->\n<!-- table -->\nb\n")
    monkeypatch.setattr(ladder, "PAGE", page)
    ladder.write_table(results)
    assert page.read_text().count("\n| `") == 4
    assert json.loads((tmp_path / "4_pack-0.json").read_text()) == results["4_pack"][0]
