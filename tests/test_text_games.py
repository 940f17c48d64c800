"""examples/text_games.py with the packages that are installed here. The others' games are skipped:
no group of pyproject.toml has them."""
from importlib.util import find_spec

import pytest

import data
from examples import text_games
from examples.text_games import Arena, Blackjack, Riddle, Verified


def needs(*packages):
    missing = [name for name in packages if find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed: see the first lines of examples/text_games.py"
    return pytest.mark.skipif(bool(missing), reason=reason)


def rewards_of(game, row, policy):
    """Plays an episode: the reward of each turn. policy(observation) -> the text of a turn."""
    env = game()
    observation = env.reset(row)
    assert observation == row["question"]
    rewards, done = [], False
    while not done:
        observation, reward, done = env.step(policy(observation))
        rewards.append(reward)
    return rewards


class Halving:
    """Halves the interval from 1 to 20."""

    def __init__(self):
        self.low, self.high, self.guess = 1, 20, None

    def __call__(self, observation):
        if self.guess and "higher" in observation:
            self.low = self.guess + 1
        elif self.guess:
            assert "lower" in observation
            self.high = self.guess - 1
        self.guess = (self.low + self.high) // 2
        return f"I guess [{self.guess}]"


MAKERS = [
    pytest.param(text_games.blackjack, marks=needs("gymnasium")),
    pytest.param(text_games.arena, marks=needs("textarena")),
    pytest.param(text_games.riddles, marks=needs("reasoning_gym")),
    pytest.param(text_games.verified, marks=needs("verifiers", "textarena"))]


@pytest.mark.parametrize("make", MAKERS)
def test_the_questions_of_a_game_differ_and_follow_from_split_and_seed(make):
    first, again, other, held_out = (
        [row["question"] for row in make(*args)]
        for args in (("train", 8, 0), ("train", 8, 0), ("train", 8, 1), ("test", 8, 0)))
    assert first == again and len({*first, *other, *held_out}) == 24


@needs("reasoning_gym")
def test_a_riddle_pays_half_at_the_second_try_and_nothing_after_it():
    for row in text_games.riddles("train", 8, 0):
        gold = Riddle()
        gold.reset(row)
        answer = gold.task[0]["answer"]
        assert rewards_of(Riddle, row, lambda _: f" {answer}\n") == [1.0]
        replies = []
        turns = iter(["no number", answer])
        assert rewards_of(Riddle, row, lambda text: replies.append(text) or next(turns)) == [0, 0.5]
        assert replies == [row["question"], "wrong, try again"]
        assert rewards_of(Riddle, row, lambda _: "no number") == [0, 0]


@needs("reasoning_gym")
def test_riddles_are_played_in_vllm_and_a_wrong_answer_gets_a_second_try(llm, tokenizer):
    rows = list(text_games.riddles("train", 4, 0))
    prompts = [data.encode(row, tokenizer, "chat") for row in rows]
    seeds = [data.request_seed(i) for i in range(4)]
    rollouts = text_games.play_riddles(llm, prompts, 4, 1.0, 160, seeds, examples=rows)
    again = "<|user|>wrong, try again<|assistant|>"
    tries = [1 + r.text.count(again) for r in rollouts]
    assert max(tries) == 2
    for r, number in zip(rollouts, tries):
        assert all(r.loss_mask) == (number == 1)
        assert 0 <= r.outcome <= (0.5 if number == 2 else 1.0)  # None: the game failed


@needs("gymnasium")
def test_who_always_hits_loses_and_who_stands_sometimes_wins():
    rows = list(text_games.blackjack("train", 40, 0))
    for row in rows:
        *turns, last = rewards_of(Blackjack, row, lambda _: "hit")
        assert last == -1 and not any(turns)
    ends = [rewards_of(Blackjack, row, lambda _: "stand") for row in rows]
    assert {len(rewards) for rewards in ends} == {1} and {-1, 1} <= {reward for [reward] in ends}


@pytest.mark.parametrize("game, make", [
    pytest.param(Arena, text_games.arena, marks=needs("textarena")),
    pytest.param(Verified, text_games.verified, marks=needs("verifiers", "textarena"))])
def test_who_halves_the_interval_finds_each_number(game, make):
    for row in make("train", 20, 0):
        *turns, last = rewards_of(game, row, Halving())
        assert last == 1 and not any(turns) and len(turns) < 5
