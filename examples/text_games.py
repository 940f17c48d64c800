"""Games of four packages as environments of examples/environment.py.

    pip install gymnasium==1.4.0 textarena==0.7.4 reasoning-gym==0.1.25 "verifiers[ta]==0.4.0"
    G=examples/text_games.py
    python nano_rlvr.py --data $G:blackjack --rollout $G:play_blackjack \\
        --rewards examples/environment.py:outcome ...

Each needs its own package only: `blackjack` of gymnasium, `arena` (guess a number from 1 to 20) of
textarena, `riddles` of reasoning-gym, with a second try, `verified`, the game of `arena` in the
environment that verifiers has for textarena. A prompt begins with the number of the game, because
the questions of two rows must differ.
"""
import random
from functools import partial
from types import SimpleNamespace

from examples.environment import player

GAME = "GuessTheNumber-v0"  # of textarena


def rows(first_text, split, size, seed):
    """Rows for --data, without end: the split and the seed decide which games they are."""
    first = random.Random(f"{split}/{seed}").randrange(10**9)
    for number in range(first, first + (size or 1024)):
        yield {"question": f"{number}: {first_text(number)}", "number": number, "answer": ""}


# ---- gymnasium

def cards(observation):
    mine, dealer, has_ace = observation
    return f"you have {mine}, {'with' if has_ace else 'without'} an ace; the dealer shows {dealer}"


class Blackjack:
    """Any text but "hit" stands."""

    def start(self, number):
        import gymnasium
        self.env = gymnasium.make("Blackjack-v1")
        observation, _ = self.env.reset(seed=number)
        return cards(observation)

    def reset(self, row):
        self.start(row["number"])
        return row["question"]

    def step(self, text):
        action = int(text.strip() == "hit")
        observation, reward, ended, cut, _ = self.env.step(action)
        return cards(observation), reward, ended or cut


# ---- textarena

class Arena:
    """A game of one player. It pays when it ends."""

    def start(self, number):
        import textarena
        self.env = textarena.make(GAME)
        self.env.reset(num_players=1, seed=number)
        _, observation = self.env.get_observation()
        return observation.strip()

    def reset(self, row):
        self.start(row["number"])
        return row["question"]

    def step(self, text):
        done, _ = self.env.step(text)
        if done:
            rewards, _ = self.env.close()
            return "", rewards[0], True
        _, observation = self.env.get_observation()
        return observation.rpartition("[GAME]")[2].strip(), 0.0, False  # without what was said


# ---- reasoning-gym

class Riddle:
    """A task of one turn, with a second try, which pays half."""

    def start(self, number):
        import reasoning_gym
        self.task = reasoning_gym.create_dataset("chain_sum", size=1, seed=number)
        return self.task[0]["question"]

    def reset(self, row):
        self.start(row["number"])
        self.pays = 1.0
        return row["question"]

    def step(self, text):
        score = self.pays * self.task.score_answer(text.strip(), self.task[0])
        done = score > 0.1 or self.pays < 1  # an answer with a number that is wrong gets 0.01
        self.pays /= 2
        return "wrong, try again", score, done


# ---- verifiers

class Seat:
    """What verifiers' environment takes for an agent. Its `turn` gives an observation to whoever
    runs the coroutine and waits for a text."""

    def __init__(self):
        self.paid = 0.0
        self.trace = SimpleNamespace(record_reward=self.pay, info={})

    def pay(self, name, value, weight):
        self.paid += weight * value

    def interaction(self, task):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    def turn(self, observation=""):
        self.observation = observation
        return self

    def __await__(self):
        text = yield self.observation
        return SimpleNamespace(last_reply=text, terminated=False)


class Verified:
    """An environment of verifiers owns the loop, `run`, a coroutine that asks its agent for turns.
    Here it is run from turn to turn. It must wait for nothing but turns."""

    def start(self, number):
        from verifiers.v1.tasksets.textarena.taskset import TextArenaData, TextArenaEnv
        self.seat = Seat()
        data = TextArenaData(info={"game": GAME, "seed": number})
        env = TextArenaEnv.__new__(TextArenaEnv)  # __init__ would start agents
        self.run = env.run(SimpleNamespace(data=data), SimpleNamespace(player=self.seat))
        self.run.send(None)  # up to the first turn
        return "Guess the number between 1 and 20. Write it in square brackets."

    def reset(self, row):
        self.start(row["number"])
        return row["question"]

    def step(self, text):
        try:
            return self.run.send(text), 0.0, False
        except StopIteration:
            return "", self.seat.paid, True


def texts_of(game):
    return partial(rows, lambda number: game().start(number))


blackjack, play_blackjack = texts_of(Blackjack), player(Blackjack, 6)
arena, play_arena = texts_of(Arena), player(Arena, 10)
riddles, play_riddles = texts_of(Riddle), player(Riddle, 2)
verified, play_verified = texts_of(Verified), player(Verified, 10)
