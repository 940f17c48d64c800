"""learn/ladder/: a step of the ladder and the one before it do the same where they should."""
import importlib
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import nano_rlvr as nr
from conftest import close, fixed_rollouts, float64, make_config, naive_logps
from learn.ladder import ladder

FILES = sorted(ladder.HERE.glob("[0-9]_*.py"))
reinforce, in_groups, clip, packs, vllm = (
    importlib.import_module(f"learn.ladder.{path.stem}") for path in FILES)
REWARD = torch.tensor([float(i % 8 < 1 + i // 8) for i in range(16)])


def tiny(noise=0.0):
    """The bundled model with noise in its weights: a model that has moved."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(ladder.MODEL).to(torch.get_default_dtype())
    with torch.no_grad():
        for p in model.parameters():
            p += noise * torch.randn_like(p)
    return model


@pytest.fixture(scope="module")
def rollouts(tokenizer):
    """2 groups of 8, of different lengths; both rewards are in each group."""
    found = fixed_rollouts(tokenizer, 2, 8)
    for r, reward in zip(found, REWARD.tolist()):
        r.reward = reward
    return found


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


def moved(step, answers, *ref):
    """How far one update of a step moves the weights by plain gradient descent, in float64."""
    with float64():
        model, start = tiny(0.01), tiny(0.01)
        descent = torch.optim.SGD(model.parameters(), 1e-4)
        torch.manual_seed(0)  # of the order of the answers
        step.update(model, *ref, descent, answers, REWARD.double())
        return torch.cat([(a - b).flatten()
                          for a, b in zip(model.parameters(), start.parameters())])


def test_each_step_does_what_the_one_before_does_without_what_it_adds(rollouts, monkeypatch):
    with float64():
        ref, model, batch = tiny(), tiny(0.01), padded(rollouts)
        sampled = [(r.prompt, r.completion, naive_logps(model, r)[0].tolist()) for r in rollouts]
    first, second, third = (moved(reinforce, batch), moved(in_groups, batch),
                            moved(clip, batch, ref))
    assert not torch.allclose(first, second) and not torch.allclose(second, third)
    monkeypatch.setattr(clip, "MINIBATCHES", 1)
    monkeypatch.setattr(clip, "KL_COEF", 0.0)
    close(moved(clip, batch, ref), second)
    for size in (packs.PACK, 3):
        monkeypatch.setattr(packs, "PACK", size)
        close(moved(packs, pairs(rollouts), ref), third)
    close(moved(vllm, sampled, ref), third)
    monkeypatch.setattr(in_groups, "advantages", lambda reward: reward)
    close(moved(in_groups, batch), first)


def test_the_loss_of_step_4_has_the_gradient_of_the_scripts(rollouts, group, monkeypatch):
    """With other log-probs as old and reference: the clip acts."""
    monkeypatch.setattr(packs, "PACK", len(rollouts))
    cfg = make_config(samples=8, prompts=2, aggregate="token", correction="none",
                      kl_coef=packs.KL_COEF)
    with float64():
        groups = [rollouts[i:i + 8] for i in range(0, len(rollouts), 8)]
        nr.assign_advantages(groups, cfg, math.nan)
        batch = nr.collate(nr.assign_token_weights(rollouts, cfg))
        logp = batch.vllm_logps.double().requires_grad_()  # (R,)
        old, ref = logp.detach() + 0.3 * torch.randn(2, len(logp))  # (R,), (R,)
        loss, terms = nr.policy_loss(logp, old, ref, batch, cfg)
        advantages = packs.advantages(REWARD.double()).tolist()
        [pack] = packs.make_packs([(*pair, a) for pair, a in zip(pairs(rollouts), advantages)])
        assert pack["targets"].equal(batch.targets) and terms["clip_ratio"].any()
        own = packs.policy_loss(logp, pack | {"old": old, "ref": ref})
        close(*(torch.autograd.grad(x, logp)[0] for x in (own, loss)))


def test_step_5_stops_if_vllm_has_old_weights_and_a_sync_brings_the_new(fresh_llm, tokenizer):
    model, examples = tiny(0.01), ladder.questions(0)[2][:vllm.SAMPLES]

    def update():
        sequences, _ = vllm.sample(fresh_llm, tokenizer, examples)
        descent = torch.optim.SGD(model.parameters(), 0.0)
        vllm.update(model, tiny(), descent, sequences, torch.arange(8.0))

    with pytest.raises(AssertionError, match="different weights"):
        update()
    vllm.sync(model, fresh_llm)
    update()


def test_the_check_of_a_students_file_knows_the_steps_and_a_missing_mask(
        monkeypatch, tmp_path, capsys):
    def loss_of(model, prompts, completions, reward):
        batch = padded([nr.Rollout(*pair, "", False, []) for pair in zip(prompts, completions)])
        mask = batch["mask"].clamp(min=int("no step" in said))  # 1 for padding, too: wrong
        return reinforce.policy_loss(reinforce.log_probs(model, batch), weigh(reward), mask)

    monkeypatch.setattr(ladder, "RUNS", tmp_path)
    monkeypatch.setattr(vllm, "loss_of", loss_of, raising=False)
    for weigh, said in ((torch.clone, "that of step 1"), (in_groups.advantages, "that of no step"),
                        (in_groups.advantages, "that of steps 2 to 5")):
        ladder.check("5_vllm")
        assert said in (text := capsys.readouterr().out)
        ladder.write("5_vllm", 0, [0.1] * 5 + [0.8] * 5, 8, {"sampling": 1.0}, 0.9)
    assert "batches 80.0%, held-out accuracy 90.0%: it learns" in text


def test_the_files_are_short_and_their_figures_make_the_table(monkeypatch, tmp_path):
    assert all(len(path.read_text().splitlines()) <= 150 for path in FILES)
    monkeypatch.setattr(ladder, "RUNS", tmp_path)
    questions = ladder.questions(0)
    monkeypatch.setattr(ladder, "questions", lambda seed: (*questions[:2], questions[2][:8]))
    for step in (reinforce, in_groups, clip, packs):
        monkeypatch.setattr(step, "STEPS", 1)
        monkeypatch.setattr(step, "PROMPTS", step.PROMPTS // 4)
        step.train()
    results = ladder.figures()
    assert all(0 < runs[0]["rewards"][0] < 1 for runs in results.values())
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- table -->\n<!-- table -->\nb\n")
    monkeypatch.setattr(ladder, "PAGE", page)
    ladder.write_table(results)
    assert page.read_text().count("\n| `") == 4
