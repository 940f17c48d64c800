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
# two groups of 8, with 1 and 2 right completions
REWARD = torch.tensor([1.0] + 7 * [0.0] + 2 * [1.0] + 6 * [0.0])  # (16,)


def tiny(noise=0.0):
    """The bundled model with noise in its weights: a model that has moved."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(ladder.MODEL)
    model.to(torch.get_default_dtype())
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


@pytest.fixture(scope="module")
def batch(rollouts):
    prompts = [r.prompt for r in rollouts]
    completions = [r.completion for r in rollouts]
    return padded(prompts, completions)


def padded(prompts, completions):
    """The batch that step 1 makes of these token ids."""
    P = max(map(len, prompts))
    C = max(map(len, completions))
    ids, attention = [], []
    for prompt, completion in zip(prompts, completions):
        tokens = prompt + completion
        left = P - len(prompt)
        right = C - len(completion)
        ids.append([256] * left + tokens + [256] * right)
        attention.append([0] * left + [1] * len(tokens) + [0] * right)
    ids = torch.tensor(ids)  # (N, P + C)
    attention = torch.tensor(attention)  # (N, P + C)
    mask = attention[:, P:]  # (N, C)
    return reinforce.Batch(ids, attention, mask)


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def moved(step, completions, advantage, *ref_model):
    """How far one update of a step moves the weights by plain gradient descent, in float64."""
    with float64():
        model = tiny(0.01)
        start = flat(model.parameters()).detach()
        descent = torch.optim.SGD(model.parameters(), 1e-4)
        torch.manual_seed(0)  # of the order of the completions
        step.update(model, *ref_model, descent, completions, advantage.double())
        return flat(model.parameters()) - start


def test_each_step_does_what_the_one_before_does_without_what_it_adds(
        rollouts, batch, monkeypatch):
    sequences = []
    sampled = []
    with float64():
        ref_model = tiny()
        model = tiny(0.01)
        for r in rollouts:
            logps, _ = naive_logps(model, r)  # (R,)
            sequences.append(packs.Sequence(r.prompt, r.completion))
            sampled.append(vllm.Sequence(r.prompt, r.completion, logps.tolist()))
    advantage = in_groups.advantages(REWARD)  # (16,)
    for step in (clip, packs, vllm):
        assert step.advantages(REWARD).equal(advantage)
    first = moved(reinforce, batch, REWARD)
    second = moved(in_groups, batch, advantage)
    third = moved(clip, batch, advantage, ref_model)
    assert not torch.allclose(first, second)
    assert not torch.allclose(second, third)
    close(moved(in_groups, batch, REWARD), first)
    for size in (packs.PACK, 3):
        monkeypatch.setattr(packs, "PACK", size)
        close(moved(packs, sequences, advantage, ref_model), third)
    close(moved(vllm, sampled, advantage, ref_model), third)
    monkeypatch.setattr(clip, "MINIBATCHES", 1)
    monkeypatch.setattr(clip, "KL_COEF", 0.0)
    close(moved(clip, batch, advantage, ref_model), second)


def test_the_losses_of_steps_3_to_5_have_the_gradient_of_the_scripts(
        rollouts, group, monkeypatch):
    """With other log-probs as old and reference: the clip acts."""
    monkeypatch.setattr(packs, "PACK", len(rollouts))
    cfg = make_config(samples=8, prompts=2, aggregate="token", correction="none",
                      kl_coef=packs.KL_COEF)
    groups = [rollouts[:8], rollouts[8:]]
    sequences = []
    with float64():
        nr.assign_advantages(groups, cfg, math.nan)
        batch = nr.collate(nr.assign_token_weights(rollouts, cfg))
        logp = batch.vllm_logps.double().requires_grad_()  # (R,)
        old = logp.detach() + 0.3 * torch.randn(len(logp))  # (R,)
        ref = logp.detach() + 0.3 * torch.randn(len(logp))  # (R,)
        loss, terms = nr.policy_loss(logp, old, ref, batch, cfg)  # (), (R,) each
        [gradient] = torch.autograd.grad(loss, logp)  # (R,)
        assert terms["clip_ratio"].any()
        advantage = packs.advantages(REWARD.double())  # (16,)
        for r, value in zip(rollouts, advantage.tolist()):
            sequences.append(packs.Sequence(r.prompt, r.completion, value))
        [pack] = packs.make_packs(sequences)
        assert pack.targets.equal(batch.targets)
        losses = [
            packs.policy_loss(logp, old, ref, pack.advantage, pack.weight),  # ()
            vllm.policy_loss(logp, old, ref, pack.advantage, pack.weight),  # ()
        ]
        # for step 3, each token is a completion of its own
        column = logp.unsqueeze(-1)  # (R, 1)
        mask = torch.ones_like(column)  # (R, 1)
        losses.append(clip.policy_loss(
            column, old.unsqueeze(-1), ref.unsqueeze(-1), pack.advantage, mask))  # ()
        for loss in losses:
            [gradient_of_step] = torch.autograd.grad(loss, logp)  # (R,)
            close(gradient_of_step, gradient)


def rows(questions):
    return [vars(question) for question in questions]


@pytest.mark.parametrize("seed", [0, 1])
def test_step_5_makes_the_questions_of_the_script(tokenizer, seed):
    _, train_set, test_set = ladder.load_questions(seed)
    made = vllm.make_questions(tokenizer, "train", 64, seed)
    assert rows(made) == rows(train_set[:64])
    made = vllm.make_questions(tokenizer, "test", 256, seed=0)
    assert rows(made) == rows(test_set)


def test_the_reward_of_the_steps_is_the_scripts_for_what_the_model_writes(llm, tokenizer):
    questions = vllm.make_questions(tokenizer, "test", 256, seed=0)
    _, texts = vllm.sample(llm, questions)
    answers = [question.answer for question in questions]
    rewards = gsm8k_reward(texts, answer=answers)
    assert set(rewards) == {0.0, 1.0}
    for step in STEPS:
        assert step.score(texts, questions).tolist() == rewards


def test_step_5_stops_if_vllm_has_old_weights_and_a_sync_brings_the_new(fresh_llm, tokenizer):
    questions = vllm.make_questions(tokenizer, "test", 8, seed=0)
    model = tiny(0.01)
    ref_model = tiny()
    descent = torch.optim.SGD(model.parameters(), 0.0)

    def update():
        sequences, _ = vllm.sample(fresh_llm, questions)
        vllm.update(model, ref_model, descent, sequences, torch.ones(8))

    with pytest.raises(AssertionError, match="different weights"):
        update()
    vllm.sync(model, fresh_llm)
    update()


WITHOUT_MASK = "that of no step"


@pytest.mark.parametrize("weigh, verdict", [
    (torch.clone, "that of step 1"),
    (in_groups.advantages, "that of steps 2 to 5"),
    (in_groups.advantages, WITHOUT_MASK),
])
def test_the_check_of_a_students_file_knows_the_steps_and_a_missing_mask(
        weigh, verdict, monkeypatch, tmp_path, capsys):
    def loss_of(model, prompts, completions, reward):
        batch = padded(prompts, completions)
        if verdict == WITHOUT_MASK:
            batch.mask = torch.ones_like(batch.mask)  # (N, C) also where there is padding
        logp = reinforce.log_probs(model, batch)  # (N, C)
        return reinforce.policy_loss(logp, weigh(reward), batch.mask)  # ()

    monkeypatch.setattr(ladder, "RUNS", tmp_path)
    monkeypatch.setattr(vllm, "loss_of", loss_of, raising=False)
    ladder.check_gradient("5_vllm")
    assert f"the gradient is {verdict}" in capsys.readouterr().out


def test_the_check_of_a_students_file_reads_the_rewards_of_its_last_run(
        monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ladder, "RUNS", tmp_path)
    ladder.check_run("mine")
    assert "no run yet" in capsys.readouterr().out
    log = []
    for reward in [0.1] * 5 + [0.8] * 5:
        log.append({"reward": reward, "sampling": 1.0, "updating": 1.0})
    ladder.report("mine", 0, log, accuracy=0.9)
    ladder.check_run("mine")
    text = capsys.readouterr().out
    assert "batches 80.0%, held-out accuracy 90.0%: it learns" in text


def test_every_file_runs_and_the_figures_of_the_runs_make_the_table(
        monkeypatch, tmp_path, fresh_llm):
    monkeypatch.setattr(ladder, "RUNS", tmp_path)
    tokenizer, train_set, test_set = ladder.load_questions(0)
    few_questions = (tokenizer, train_set, test_set[:8])
    monkeypatch.setattr(ladder, "load_questions", lambda seed: few_questions)
    monkeypatch.setattr(vllm, "start_vllm", lambda **args: fresh_llm)
    for step in STEPS:
        monkeypatch.setattr(step, "STEPS", 1)
        monkeypatch.setattr(step, "PROMPTS", step.PROMPTS // 4)
        step.train()
    figures = ladder.read_figures()
    assert list(figures) == ladder.step_names()
    for [run] in figures.values():
        assert 0 < run["rewards"][0] < 1
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- table -->\n<!-- table -->\nb\n")
    monkeypatch.setattr(ladder, "PAGE", page)
    ladder.write_table(figures)
    assert page.read_text().count("\n| `") == len(STEPS)
