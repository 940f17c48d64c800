"""What the course texts describe: formulas and tasks of their examples, and docs/course.md."""
import random
import re
import sys

import pytest
import torch

import data
import nano_rlvr as nr
from bench import race, seeds
from conftest import FAKE_RUN, ROOT, close, fixed_rollouts, float64, make_config, naive_logps
from examples import agents, length_free, ppo, reward_model
from learn.lab import doubting, lab, think, two_languages
from runtime.model import load_model

COURSE = ROOT / "docs/course.md"


# ---- examples/ppo.py against the lines that AlpacaFarm's trainer has for rectangles of tokens

def test_the_kl_of_each_token_is_in_its_reward_and_the_task_counts_at_the_end():
    logps = torch.tensor([[-0.5, -2.0, -0.1], [-1.0, -0.25, -3.0]])  # (B, T)
    refs = torch.tensor([[-1.5, -1.0, -0.6], [-1.0, -0.5, -2.0]])  # (B, T)
    shaped = -0.25 * torch.clamp(logps - refs, min=0.0)  # (B, T)
    shaped[[0, 1], [2, 2]] += torch.tensor([1.0, 0.0])
    for i, reward in enumerate((1.0, 0.0)):
        found = ppo.shape_reward(reward, logps[i].tolist(), refs[i].tolist(), 0.25)
        close(found, shaped[i], 1e-6)


def test_whitened_rewards_keep_their_mean():
    rewards = [[0.0, -0.5, 1.0], [0.25], [0.0, 0.0]]
    flat = torch.tensor(sum(rewards, []))  # (6,)
    wanted = (flat - flat.mean()) / (flat.var(correction=0) + 1e-8).sqrt() + flat.mean()  # (6,)
    found = ppo.whiten_rewards(rewards)
    assert list(map(len, found)) == [3, 1, 2]
    close(sum(found, []), wanted, 1e-6)


def test_the_value_loss_is_the_larger_of_the_plain_and_the_clipped_square():
    values = torch.tensor([0.2, 0.6, 0.8, 1.5])  # (4,)
    old, returns = torch.full((4,), 0.5), torch.full((4,), 1.0)  # (4,), (4,)
    clipped = torch.max(torch.min(values, old + 0.2), old - 0.2)  # (4,)
    wanted = 0.5 * torch.max((values - returns)**2, (clipped - returns)**2).mean()
    close(ppo.value_loss(values, old, returns, 0.2, vf_coef=0.1), 0.1 * wanted, 1e-6)
    plain = torch.nn.functional.mse_loss(values, returns)
    assert ppo.value_loss(values, old, returns) == plain  # the default is the mean squared error


@pytest.mark.parametrize("kl, factor", [(4.0, 1.02), (2.2, 1.01), (2.0, 1.0), (0.0, 0.98)])
def test_beta_follows_the_distance_to_the_target_by_two_percent_at_most(kl, factor):
    controller = ppo.AdaptiveKL(0.5, target=2.0)
    controller.update(kl)
    close(controller.beta, 0.5 * factor)
    fixed = ppo.AdaptiveKL(0.5)
    fixed.update(kl)
    assert fixed.beta == 0.5


def test_approxkl_is_half_the_squared_change_of_a_log_prob(tokenizer):
    pack = nr.collate(fixed_rollouts(tokenizer))
    logp = pack.vllm_logps  # (R,)
    old = logp - 0.5  # (R,)
    _, terms = ppo.policy_loss(logp, old, None, pack, make_config(kl_coef=0.0))
    close(terms["approxkl"], torch.full_like(logp, 0.125), 1e-6)
    _, terms = ppo.policy_loss(logp, None, None, pack, make_config(kl_coef=0.0))
    assert terms["approxkl"].eq(0).all()  # on-policy


@pytest.fixture
def float64_here(group):
    """For one test: the engine of others is made in float32."""
    with float64():
        yield


def test_the_flags_of_ppo_reach_the_critic(float64_here, tokenizer):
    """A clip of the values and whitened rewards change what the critic learns."""
    heads = []
    for details in ({}, {"clip_value": 1e-9}, {"whiten_rewards": True}, {"vf_coef": 0.2}):
        torch.manual_seed(0)
        critic = ppo.Critic(make_config(max_grad_norm=0.0), minibatches=2, **details)
        torch.nn.init.normal_(critic.head.weight)
        packs = critic.assign_advantages(fixed_rollouts(tokenizer))
        critic.adam = torch.optim.SGD(critic.parameters(), lr=1e-7)  # no step beyond the target
        critic.update(packs)
        heads.append(critic.head.weight.clone())
    assert min((head - heads[0]).abs().max() for head in heads[1:]) > 0


# ---- examples/length_free.py, agents.py and reward_model.py

def test_advantages_without_length_have_no_covariance_with_it():
    advantages = torch.tensor([1.5, -0.5, -0.5, -0.5])  # (4,)
    lengths = torch.tensor([30.0, 10.0, 20.0, 25.0])  # (4,)
    found = length_free.without_length(advantages, lengths)
    assert abs(found @ (lengths - lengths.mean())) < 1e-5
    close(found.sum(), 0.0, 1e-6)
    slope = torch.linalg.lstsq((lengths - lengths.mean())[:, None], advantages[:, None]).solution
    close(found, advantages - slope.item() * (lengths - lengths.mean()), 1e-6)
    same = torch.full((4,), 7.0)
    assert length_free.without_length(advantages, same) is advantages


def test_a_rollout_without_a_reward_keeps_its_advantage_of_0(tokenizer):
    cfg = make_config()
    group = fixed_rollouts(tokenizer, groups=1)
    for r, reward in zip(group, (1.0, 0.0, None, 1.0)):
        r.reward = reward
    length_free.assign_advantages([group], cfg, float("nan"))
    assert set(group[2].advantages) == {0.0}
    assert all(len(set(r.advantages)) == 1 for r in group)


def test_the_checker_goes_on_after_the_writer_and_has_its_own_reward(llm, tokenizer):
    """In the real vLLM: each sampled token has the log-prob of its place in the sequence."""
    examples = data.load("arithmetic", "test", 3)
    prompts = [data.encode(e, tokenizer, "chat") for e in examples]
    rollouts = agents.two_turns(llm, prompts, 2, 1.0, 200, [1, 2, 3])
    model = load_model(make_config())
    model.set_attn_implementation("eager")
    for i, r in enumerate(rollouts):
        between = [not sampled for sampled in r.loss_mask]
        assert [t for t, other in zip(r.completion, between) if other] == prompts[i // 2]
        logps, _ = naive_logps(model, r)
        mask = torch.tensor(r.loss_mask)
        ours = torch.tensor(r.vllm_logps)
        assert (ours - logps)[mask].abs().max() < 1e-3
        writer, _, checker = r.text.partition(examples[i // 2]["question"])
        assert checker and r.extra["checker"][-1] == 1.0 and r.extra["checker"][0] == 0.0
        first_of_checker = r.extra["checker"].index(1.0)
        said = tokenizer.decode(r.completion[first_of_checker:], skip_special_tokens=True)
        assert checker == f"<|assistant|>{said}"


def test_a_verdict_is_true_if_a_right_answer_is_accepted_or_a_wrong_one_rejected():
    said = "<think></think><answer>{}</answer>1+2<think></think><answer>{}</answer>".format
    texts = [said(3, 3), said(4, 3), said(3, 4), said(4, 4), "<answer>3</answer>1+2<think>"]
    columns = {"question": ["1+2"] * 5, "answer": ["3"] * 5}
    assert agents.writer(texts, **columns) == [1, 0, 1, 0, 1]
    assert agents.checker(texts, **columns) == [1, 1, 0, 0, 0]


def test_each_agent_gets_the_advantage_of_its_own_reward():
    group = [nr.Rollout([1], [2, 3, 4], "", False, [0.0] * 3, [True, False, True],
                        {"checker": [0.0, 0.0, 1.0]}, parts={"writer": a, "checker": b})
             for a, b in ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0), (1.0, 1.0))]
    agents.assign_advantages([group], make_config(), 0.0)
    signs = [[round(a) for a in r.advantages[::2]] for r in group]
    assert signs == [[1, -1], [-1, -1], [-1, 1], [1, 1]]


def test_the_reward_model_learns_which_of_two_answers_is_preferred(tokenizer):
    """Answers that end with token 5 are preferred; scores do not depend on the pack."""
    torch.manual_seed(0)
    model = ppo.Critic(make_config(), lr=3e-3)
    prompt = tokenizer("<|user|>1+2<|assistant|>", add_special_tokens=False)["input_ids"]
    answers = [nr.Rollout(prompt, [i % 50, x, 0], "", False, [0.0] * 3)
               for i in range(64) for x in (5, 6)]
    pairs = list(zip(answers[::2], answers[1::2]))
    assert reward_model.fit(model, pairs) == 1.0
    alone = torch.cat([reward_model.scores(model, [r]) for r in answers[:6]])
    close(reward_model.scores(model, answers[:6]), alone, 1e-4)


# ---- tasks of the lab

def test_a_mode_is_obeyed_if_there_is_thinking_or_none():
    texts = ["<think>1+2=3</think><answer>3</answer>", "<think></think><answer>3</answer>", "3"]
    assert [think.obeys(text, "think") for text in texts] == [True, False, False]
    assert [think.obeys(text, "no_think") for text in texts] == [False, True, False]
    rows = list(think.fused("test", 4, 0))
    assert [row["question"].split()[1] for row in rows] == ["/think", "/no_think"] * 2


def test_a_budget_cuts_the_thinking_of_its_rows_only(llm, tokenizer):
    examples = [row | {"question": row["question"].split()[0]} for row in [
        *think.think("test", 3, 0), *think.cut_8("test", 3, 0)]]
    prompts = [data.encode(row, tokenizer, "chat") for row in examples]
    free = nr.rollout(llm, prompts, 1, 0.0, 96)
    cut = think.with_budget(llm, prompts, 1, 0.0, 96, examples=examples)
    assert [r.text for r in cut[:3]] == [r.text for r in free[:3]]
    for whole, r in zip(free[3:], cut[3:]):
        thinking = r.text.partition("</think>")[0]
        assert whole.text.startswith(thinking)
        assert len(tokenizer.encode(thinking)) <= 8 or r.text == whole.text


def test_a_line_errs_and_is_noticed_as_often_as_the_habits_say():
    rng = random.Random(0)
    habits = doubting.Habits(0.4, 0.5, 0.1)
    lines = [doubting.line(10, 5, habits, rng) for _ in range(2000)]
    wrong = [text for text, _ in lines if not text.startswith("10+5=15")]
    noticed = [text for text in wrong if doubting.WAIT in text]
    assert abs(len(wrong) / 2000 - 0.4) < 0.05  # 4.5 standard deviations
    assert abs(len(noticed) / len(wrong) - 0.5) < 0.08
    assert all(text.endswith("10+5=15") for text in noticed)
    assert all(text.endswith(f"={total}") for text, total in lines)


def test_an_arm_can_begin_with_the_weights_of_another_arm_of_its_seed(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE_RUN)
    fake = [sys.executable, str(tmp_path / "fake.py"), "--fail", "0"]
    settings = {"first": fake, "then": [*fake, "--model", "first-{seed}/final"]}
    folders = seeds.run_all(settings, [5], tmp_path)
    command = seeds.common.read_config(folders["then"][0])["command"]
    assert "--model first-5/final" in command


def test_a_dry_run_prints_the_rule_the_seeds_and_the_commands(monkeypatch, capsys):
    finding = lab.findings()["pipeline"]
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--dry"])
    lab.main(finding)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(finding.checks) + 1 + len(finding.arms)
    assert "runs/lab/SFT-DPO-{seed}/final" in lines[-5]


def test_a_judge_prefers_the_sum_with_more_terms_and_a_valid_one_to_any_other():
    texts = ["<answer>10+14</answer>", "<answer>1+9+14</answer>", "<answer>24</answer>",
             "<answer>20+5</answer>"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {"question": ["make 24"] * 4, "answer": ["24"] * 4}
    wanted = [2 / 3, 1.0, 1 / 3, 0.0]
    assert two_languages.preferred(texts, **columns) == wanted
    assert two_languages.preferred(messages, **columns) == wanted
    assert two_languages.preferred(texts, question=["1+2"] * 4, answer=["3"] * 4) == [None] * 4
    assert two_languages.valid(texts, **columns) == [1.0, 1.0, 0.0, 0.0]
    mixed = "<think>1+2=3\n3 plus 4 is 7</think><answer>7</answer>"
    assert two_languages.consistent([mixed, "7"], question=["1+2+4"] * 2) == [0.5, None]


# ---- the race of seeds

SLOW_RUN = """
import json, pathlib, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(flags["--out"], flags["--name"])
folder.mkdir(exist_ok=True)
config = {"command": " ".join(sys.argv), "config": {"steps": 4}, "commit": "", "device": "d"}
(folder / "config.json").write_text(json.dumps(config | {"versions": {}}))
path = folder / "metrics.jsonl"
done = len(path.read_text().splitlines()) if path.exists() else 0
for step in range(done, 5):
    accuracy = 0.1 * step * (1 + int(flags["--seed"]) % 3)
    row = {"step": step, "eval/accuracy": accuracy}
    path.open("a").write(json.dumps(row) + "\\n")
    time.sleep(60 if step == 2 and not done else 0)
"""


def test_a_race_stops_the_poor_seeds_and_continues_the_best(tmp_path, monkeypatch):
    """A run waits for a minute at step 2: only one that is stopped there ends in time."""
    (tmp_path / "slow.py").write_text(SLOW_RUN)
    monkeypatch.setattr(race, "POLL", 0.05)
    command = [sys.executable, str(tmp_path / "slow.py")]
    ranking = race.race(command, range(3), tmp_path / "out", 2, 1, "eval/accuracy")
    assert [folder.name for _, folder in ranking] == ["run-2", "run-1", "run-0"]
    lasts = [seeds.read(folder)[-1]["step"] for _, folder in ranking]
    assert lasts == [4, 2, 2]


def test_how_well_an_early_step_ranks_the_end():
    assert race.agreement([1, 2, 3], [0.5, 0.6, 0.9]) == (1.0, True, 0.0)
    correlation, is_best, loss = race.agreement([3, 2, 1], [0.5, 0.6, 0.9])
    assert round(correlation, 6) == -1 and not is_best and round(loss, 6) == 0.4


# ---- docs/course.md

def test_the_course_page_is_short_and_its_links_are_there():
    text = COURSE.read_text()
    assert len(text.split()) <= 900
    links = re.findall(r"\]\(([^)#]+)\)", text)
    files = [link for link in links if not link.startswith("http")]
    assert len(files) > 40
    for link in files:
        assert (COURSE.parent / link).resolve().exists(), link


def test_the_course_page_says_which_findings_have_no_runs():
    text = COURSE.read_text()
    missing = text.partition("Not run yet:")[2].partition(".\n")[0]
    named = set(re.findall(r"`(\w+)`", missing))
    linked = {link for link in re.findall(r"learn/lab/(\w+)\.py", text)}
    without = {name for name, finding in lab.findings().items()
               if name in linked and not lab.current(finding, lab.stored(name))}
    if not (lab.RESULTS / "compute.md").exists():
        without.add("compute")
    assert named == without
