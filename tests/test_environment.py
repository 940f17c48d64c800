"""Episodes of several turns: examples/environment.py and turn_credit.py in the real vLLM.

The environment of these tests asks the bundled model three sums. Known faults of several turns are
planted, one by one: `check` must notice each of them."""
import copy
import dataclasses
import math
import time
from collections import Counter
from itertools import groupby

import pytest
from transformers import AutoTokenizer

import data
import nano_rlvr as nr
from conftest import close, make_config
from examples import environment, guess, guess_model, turn_credit
from examples.environment import Episode, message_ids, player
from runtime import guard

MAX_TOKENS = 72
SEEDS = [data.request_seed(i) for i in range(4)]
SUMS = ["2+3+4", "5-1+7"]  # what the environment asks after the question of the row
MESSAGES = [f"<|user|>{text}<|assistant|>" for text in SUMS]
PLAYED = []  # the texts that `step` got


class Asks:
    """Pays 1 for each turn. With a `fault` in its row it raises or hangs."""

    def reset(self, row):
        self.row = row
        self.asked = 0
        if row.get("fault") == "reset raises":
            raise KeyError("row")
        return "another question" if row.get("fault") == "other prompt" else row["question"]

    def step(self, text):
        PLAYED.append(text)
        fault = self.row.get("fault")
        if fault == "step raises":
            raise OSError("the server is gone")
        if fault == "step hangs":
            time.sleep(60)
        if fault == "no reward":
            return "", None, False
        self.asked += 1
        if self.asked > len(SUMS):
            return "", 1.0, True
        return SUMS[self.asked - 1], 1.0, False


append, add_turn = Episode.append, Episode.add_turn
TOKENIZER = guess_model.make_tokenizer()
EOS = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def rows(tokenizer):
    short = [e for e in data.load("arithmetic", "test", 500) if len(e["question"]) == 8]
    return [e | {"prompt_ids": data.encode(e, tokenizer, "chat")} for e in short[:4]]


@pytest.fixture
def requests(llm, monkeypatch):
    """What vLLM was given and returned: (context, sampled ids, log-probs)."""
    recorded, generate = [], llm.generate

    def record(*args, **kwargs):
        results = generate(*args, **kwargs)
        for result in results:
            context = tuple(result.prompt_token_ids)
            for s in result.outputs:
                recorded.append((context, tuple(s.token_ids), tuple(s.logprobs.logprobs)))
        return results
    monkeypatch.setattr(llm, "generate", record)
    return recorded


def sample(llm, rows, max_tokens=MAX_TOKENS, max_turns=4, n=4, seconds=30.0):
    PLAYED.clear()
    prompts = [row["prompt_ids"] for row in rows]
    play = player(Asks, max_turns, seconds)
    return play(llm, prompts, n, 1.0, max_tokens, SEEDS[:len(rows)], examples=rows)


def segments(r):
    """(sampled, ids) of each run of sampled tokens or of an observation."""
    tokens = iter(r.completion)
    return [(sampled, [next(tokens) for _ in run]) for sampled, run in groupby(r.loss_mask)]


def turns(r):
    """The turns of a Rollout: (context, sampled ids, log-probs)."""
    end = 0
    for sampled, ids in segments(r):
        start = end
        end += len(ids)
        if sampled:
            context = (*r.prompt, *r.completion[:start])
            yield context, tuple(ids), tuple(r.vllm_logps[start:end])


def faults_of(rollouts, requests, tokenizer):
    """Which facts about episodes do not hold."""
    faults = set()
    read = 0  # observations that are not trained
    sampled = Counter()
    longest = len(rollouts[0].prompt) + MAX_TOKENS  # all prompts have the same length
    for context, ids, logps in requests:
        room = longest - len(context)
        sampled[context, ids[:room], logps[:room]] += 1
    trained = Counter()
    whole = Counter()
    for r in rollouts:
        trained.update(turns(r))
        said = [tokenizer.decode(ids) for is_sampled, ids in segments(r) if not is_sampled]
        if said != MESSAGES[:len(said)]:
            faults.add("an observation is not read")
        read += len(said)
        for _, ids, _ in turns(r):
            if ids[-1] == tokenizer.eos_token_id:
                whole[tokenizer.decode(ids[:-1])] += 1
    if read != len(requests) - len(rollouts):  # one before each turn but the first
        faults.add("an observation is trained")
    contexts = Counter(context for context, *_ in sampled.elements())
    if contexts != Counter(context for context, *_ in trained.elements()):
        faults.add("a context is not what was sampled before")
    if sampled != trained:
        faults.add("other ids are trained")
    if Counter(PLAYED) - whole:
        faults.add("a turn is played that was cut")
    return faults


def test_the_ids_trained_are_the_ids_sampled_and_observations_are_only_read(
        llm, rows, requests, tokenizer):
    rollouts = sample(llm, rows)
    assert faults_of(rollouts, requests, tokenizer) == set()
    assert {True, False} == {r.truncated for r in rollouts}  # both ends occur
    for r in rollouts:
        assert len(r.completion) == len(r.loss_mask) == len(r.vllm_logps) <= MAX_TOKENS
        assert r.loss_mask[-1]  # nothing would follow an observation at the end
        ends = [i for i, token in enumerate(r.completion) if token == EOS]
        assert [i for i, reward in enumerate(r.extra["reward"]) if reward] == ends
        assert r.outcome == len(ends) and r.truncated == (len(ends) <= len(SUMS))


def train_observations(self, ids, logps, sampled):
    append(self, ids, logps, True)


def lose_the_end_of_turn(self, turn, max_tokens):
    ends = turn.completion[-1] == EOS
    whole = slice(0, len(turn.completion) - ends)
    turn = dataclasses.replace(
        turn, completion=turn.completion[whole], vllm_logps=turn.vllm_logps[whole])
    add_turn(self, turn, max_tokens)


def encode_again(self, turn, max_tokens):
    """The text of the turn, encoded in another way: the tag <think> as seven bytes."""
    again = turn.completion[1:]
    for letter in reversed("<think>"):
        again = TOKENIZER(letter)["input_ids"] + again
    turn = dataclasses.replace(turn, completion=again, vllm_logps=[-1.0] * len(again))
    add_turn(self, turn, max_tokens)


def play_cut_turns(self, turn, max_tokens):
    add_turn(self, turn, max_tokens)
    self.is_on = True


@pytest.mark.parametrize("method, fault, name", [
    ("append", train_observations, "an observation is trained"),
    ("add_turn", lose_the_end_of_turn, "other ids are trained"),
    ("add_turn", encode_again, "other ids are trained"),
    ("add_turn", play_cut_turns, "a turn is played that was cut")])
def test_a_planted_fault_of_several_turns_is_noticed(
        llm, rows, requests, tokenizer, monkeypatch, method, fault, name):
    monkeypatch.setattr(Episode, method, fault)
    rollouts = sample(llm, rows)
    assert name in faults_of(rollouts, requests, tokenizer)


@pytest.mark.parametrize("fault, error", [
    ("reset raises", "KeyError"), ("other prompt", "ValueError"), ("step raises", "OSError"),
    ("step hangs", "TimeoutError"), ("no reward", "TypeError")])
def test_an_environment_that_fails_gives_no_reward_and_leaves_the_others_alone(
        llm, rows, capfd, fault, error):
    broken = [rows[0] | {"fault": fault}, rows[1]]
    rollouts = sample(llm, broken, n=2, seconds=3.0, max_tokens=160)
    assert [r.outcome for r in rollouts] == [None, None, 3.0, 3.0]
    assert f"an environment failed, no reward: {error}" in capfd.readouterr().out
    for r in rollouts[:2]:
        assert guard.misfit(r, r.prompt, 263, 160) == "" and all(r.loss_mask)


def test_the_outcome_reaches_the_reward_beside_the_text(llm, rows):
    rollouts = sample(llm, [rows[0] | {"fault": "step raises"}, rows[1]], n=2, max_tokens=160)
    spec = f"{environment.__file__}:outcome"
    with nr.rewards.Verifier(spec, workers=1) as verifier:
        nr.score(rollouts, rows[:2], verifier)
    assert [r.reward for r in rollouts] == [None, None, 3.0, 3.0]
    same_text = copy.deepcopy(rollouts[2:])
    for r in same_text:
        r.outcome = -0.25
    with nr.rewards.Verifier(spec, workers=1) as verifier:
        nr.score(same_text, rows[1:2], verifier)
    assert [r.reward for r in same_text] == [-0.25, -0.25]


def test_every_rank_makes_the_same_number_of_calls(llm, rows, monkeypatch):
    calls, rollout = [], environment.rollout
    monkeypatch.setattr(environment, "rollout", lambda llm, contexts, *args, **sampling: (
        calls.append(len(contexts)) or rollout(llm, contexts, *args, **sampling)))
    sample(llm, [rows[0] | {"fault": "reset raises"}], n=3)
    assert calls == [3, 0, 0, 0]


def test_max_turns_ends_an_episode_with_a_turn_of_the_model_and_counts_as_truncated(llm, rows):
    for r in sample(llm, rows[:2], max_turns=2, max_tokens=160):
        assert [sampled for sampled, _ in segments(r)] == [True, False, True]
        assert r.truncated and r.outcome == 2.0


def test_episodes_are_functions_of_the_seeds(llm, rows):
    once, again = (sample(llm, rows[:2]) for _ in range(2))
    assert [r.completion for r in once] == [r.completion for r in again]
    assert len({tuple(r.completion) for r in once}) > 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_outcome_that_is_not_finite_does_not_fit(value):
    r = nr.Rollout([1], [2], "", False, [-1.0], outcome=value)
    assert guard.misfit(r, [1], 9, 9) == f"its outcome is {value}"


def test_the_end_of_a_turn_is_put_in_where_the_model_did_not_sample_it(tokenizer):
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    after = [message_ids(chat, "lower", last) for last in (EOS, 65)]
    assert [chat.decode(ids) for ids in after] == [
        "<|user|>lower<|endoftext|><|assistant|>",
        "<|endoftext|><|user|>lower<|endoftext|><|assistant|>"]


def episode(rewards, reward=0.0):
    """A Rollout with turns of two tokens that end with these rewards, an observation between."""
    mask, values = [], []
    for x in rewards:
        mask += [False] * bool(mask) + [True, True]
        values += [0.0] * (len(mask) - len(values) - 1) + [x]
    n = len(mask)
    return nr.Rollout([1], [2] * n, "", False, [-1.0] * n, mask, {"reward": values}, reward=reward)


def test_a_turn_gets_the_rewards_from_it_on_compared_with_the_same_turn_of_the_others():
    cfg = make_config(samples=3, baseline="group", scale="none")
    group = [episode([1, 0, 2]), episode([3, 4]), episode([0, 0])]
    failed = [episode([5, 5], reward=None), episode([1]), episode([2])]
    turn_credit.assign_advantages([group, failed], cfg, math.nan)
    # returns of turn 0: 3, 7, 0; of turn 1: 2, 4, 0; only one episode has turn 2
    wanted = [[-1 / 3, 0, 0], [11 / 3, 2], [-10 / 3, -2], [0, 0], [-0.5], [0.5]]
    for r, values in zip([*group, *failed], wanted):
        by_turn = [r.advantages[start] for start in turn_credit.turn_starts(r)]
        close(by_turn, values, 1e-6)
        assert all(r.advantages[i] == r.advantages[i + 1] for i in turn_credit.turn_starts(r))


def test_the_example_model_learns_guesses_at_random_but_not_the_answers(tmp_path, monkeypatch):
    packs, collate = [], nr.collate
    monkeypatch.setattr(
        nr, "collate", lambda rs, *device: packs.append(rs) or collate(rs, *device))
    guess_model.main(["--out", str(tmp_path), "--steps", "1"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    seen = set()
    for r in packs[0]:
        for is_sampled, ids in segments(r):
            text = tokenizer.decode(ids)
            if is_sampled:
                seen.add(int(text.removesuffix("<|endoftext|>")))
            else:
                assert len(ids) == 3 and guess.REPLY.fullmatch(text)
    assert len(seen) == 64 and min(seen) == 1 and max(seen) == 64


def test_the_game_answers_and_pays():
    game = guess_model.Guess()
    assert game.reset({"question": "7", "answer": "40"}) == "7"
    replies = [game.step(text) for text in ("32", "48", "?", "40")]
    texts = ["higher than 32", "lower than 48", "higher than 00", ""]
    assert replies == [*((text, -0.1, False) for text in texts[:3]), ("", 0.0, True)]
    paid = sum(reward for _, reward, _ in replies)
    texts = ["32 48 ? 40", "32 48 ? 4", "32"]  # the second one was cut
    outcomes = [paid, paid, None]
    assert guess_model.won(texts, answer=["40"] * 3, outcome=outcomes) == [1.0, 0.0, None]
    counts = guess_model.guesses(texts, answer=["40"] * 3, outcome=outcomes)
    assert counts == [len(replies), guess_model.TURNS + 1, None]
