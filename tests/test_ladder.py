"""learn/ladder/: a step of the ladder and the one before it do the same where they should."""
import importlib
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import nano_rlvr as nr
from conftest import close, fixed_rollouts, float64, make_config, naive_logps
from learn.ladder import ladder
from rewards import gsm8k_reward

STEPS = [importlib.import_module(f"learn.ladder.{name}") for name in ladder.step_names()]
reinforce, in_groups, clip, packs, vllm = STEPS
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
    rollouts = fixed_rollouts(tokenizer, 2, 8)
    for r, reward in zip(rollouts, REWARD.tolist()):
        r.reward = reward
    return rollouts


def padded(prompts, completions):
    """The batch that step 1 makes of these token ids."""
    P = max(map(len, prompts))
    C = max(map(len, completions))
    ids = torch.full((len(prompts), P + C), 256)  # (N, P + C)
    attention = torch.zeros_like(ids)  # (N, P + C)
    for row, (prompt, completion) in enumerate(zip(prompts, completions)):
        tokens = prompt + completion
        first = P - len(prompt)
        ids[row, first:first + len(tokens)] = torch.tensor(tokens)
        attention[row, first:first + len(tokens)] = 1
    return reinforce.Batch(ids, attention, mask=attention[:, P:])


def moved(step, completions, *ref_model):
    """How far one update of a step moves the weights by plain gradient descent, in float64."""
    with float64():
        model, start = tiny(0.01), tiny(0.01)
        descent = torch.optim.SGD(model.parameters(), 1e-4)
        torch.manual_seed(0)  # of the order of the completions
        step.update(model, *ref_model, descent, completions, REWARD.double())
        changes = [(a - b).flatten() for a, b in zip(model.parameters(), start.parameters())]
        return torch.cat(changes)


def test_each_step_does_what_the_one_before_does_without_what_it_adds(rollouts, monkeypatch):
    batch = padded([r.prompt for r in rollouts], [r.completion for r in rollouts])
    with float64():
        ref_model, model = tiny(), tiny(0.01)
        sequences, sampled = [], []
        for r in rollouts:
            sequences.append(packs.Sequence(r.prompt, r.completion))
            logps, _ = naive_logps(model, r)  # (R,)
            sampled.append(vllm.Sequence(r.prompt, r.completion, logps.tolist()))
    first = moved(reinforce, batch)
    second = moved(in_groups, batch)
    third = moved(clip, batch, ref_model)
    assert not torch.allclose(first, second) and not torch.allclose(second, third)
    monkeypatch.setattr(clip, "MINIBATCHES", 1)
    monkeypatch.setattr(clip, "KL_COEF", 0.0)
    close(moved(clip, batch, ref_model), second)
    for size in (packs.PACK, 3):
        monkeypatch.setattr(packs, "PACK", size)
        close(moved(packs, sequences, ref_model), third)
    close(moved(vllm, sampled, ref_model), third)
    monkeypatch.setattr(in_groups, "advantages", lambda reward: reward)
    close(moved(in_groups, batch), first)


def test_the_loss_of_step_4_has_the_gradient_of_the_scripts(rollouts, group, monkeypatch):
    """With other log-probs as old and reference: the clip acts."""
    monkeypatch.setattr(packs, "PACK", len(rollouts))
    cfg = make_config(samples=8, prompts=2, aggregate="token", correction="none",
                      kl_coef=packs.KL_COEF)
    with float64():
        nr.assign_advantages([rollouts[:8], rollouts[8:]], cfg, math.nan)
        batch = nr.collate(nr.assign_token_weights(rollouts, cfg))
        logp = batch.vllm_logps.double().requires_grad_()  # (R,)
        old, ref = logp.detach() + 0.3 * torch.randn(2, len(logp))  # (R,), (R,)
        loss, terms = nr.policy_loss(logp, old, ref, batch, cfg)  # (), (R,) each
        sequences = []
        for r, advantage in zip(rollouts, packs.advantages(REWARD.double()).tolist()):
            sequences.append(packs.Sequence(r.prompt, r.completion, advantage))
        [pack] = packs.make_packs(sequences)
        assert pack.targets.equal(batch.targets) and terms["clip_ratio"].any()
        ladders = packs.policy_loss(logp, old, ref, pack.advantage, pack.weight)  # ()
        close(*(torch.autograd.grad(x, logp)[0] for x in (ladders, loss)))


def test_the_questions_and_rewards_of_step_5_are_the_scripts(llm, tokenizer):
    for seed in (0, 1):
        _, train_set, test_set = ladder.load_questions(seed)
        makers = [(train_set[:64], "train", seed), (test_set, "test", 0)]
        for questions, split, of_seed in makers:
            made = vllm.make_questions(tokenizer, split, len(questions), of_seed)
            assert list(map(vars, made)) == list(map(vars, questions))
    _, texts = vllm.sample(llm, test_set)
    texts += [f"<think></think><answer>{question.answer}" for question in test_set]  # cut off
    answers = [question.answer for question in test_set] * 2
    reward = vllm.score(texts, test_set * 2)
    assert reward[:len(test_set)].tolist() == gsm8k_reward(texts[:len(test_set)], answer=answers)
    assert set(reward[:len(test_set)].tolist()) == {0.0, 1.0} and not reward[len(test_set):].any()


def test_step_5_stops_if_vllm_has_old_weights_and_a_sync_brings_the_new(fresh_llm, tokenizer):
    model = tiny(0.01)
    questions = vllm.make_questions(tokenizer, "test", vllm.SAMPLES, seed=0)

    def update():
        sequences, _ = vllm.sample(fresh_llm, questions)
        descent = torch.optim.SGD(model.parameters(), 0.0)
        vllm.update(model, tiny(), descent, sequences, torch.arange(8.0))

    with pytest.raises(AssertionError, match="different weights"):
        update()
    vllm.sync(model, fresh_llm)
    update()


def test_the_check_of_a_students_file_knows_the_steps_and_a_missing_mask(
        monkeypatch, tmp_path, capsys):
    def loss_of(model, prompts, completions, reward):
        batch = padded(prompts, completions)
        mask = batch.mask.clamp(min=int("no step" in verdict))  # 1 for padding, too: wrong
        return reinforce.policy_loss(reinforce.log_probs(model, batch), weigh(reward), mask)

    monkeypatch.setattr(ladder, "RUNS", tmp_path)
    monkeypatch.setattr(vllm, "loss_of", loss_of, raising=False)
    log = []
    for reward in [0.1] * 5 + [0.8] * 5:
        log.append({"reward": reward, "sampling": 1.0, "updating": 1.0})
    for weigh, verdict in ((torch.clone, "that of step 1"),
                           (in_groups.advantages, "that of no step"),
                           (in_groups.advantages, "that of steps 2 to 5")):
        ladder.check("5_vllm")
        text = capsys.readouterr().out
        assert f"the gradient is {verdict}" in text
        ladder.report("5_vllm", 0, log, accuracy=0.9)
    assert "batches 80.0%, held-out accuracy 90.0%: it learns" in text


def test_every_file_runs_and_the_figures_of_the_runs_make_the_table(
        monkeypatch, tmp_path, fresh_llm):
    monkeypatch.setattr(ladder, "RUNS", tmp_path)
    tokenizer, train_set, test_set = ladder.load_questions(0)
    few = (tokenizer, train_set, test_set[:8])
    monkeypatch.setattr(ladder, "load_questions", lambda seed: few)
    monkeypatch.setattr(vllm, "start_vllm", lambda **args: fresh_llm)
    for step in STEPS:
        monkeypatch.setattr(step, "STEPS", 1)
        monkeypatch.setattr(step, "PROMPTS", step.PROMPTS // 4)
        step.train()
    figures = ladder.read_figures()
    assert len(figures) == len(STEPS)
    assert all(0 < runs[0]["rewards"][0] < 1 for runs in figures.values())
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- table -->\n<!-- table -->\nb\n")
    monkeypatch.setattr(ladder, "PAGE", page)
    ladder.write_table(figures)
    assert page.read_text().count("\n| `") == len(STEPS)
