"""The game of Nim, and a small model that plays it at random.

    python -m examples.nim_model --out runs/nim      about two minutes on one core; seeded (--seed)

A heap has up to MOST stones. A player takes one to three of them, and who takes the last one wins.
An illegal move loses. Who leaves a multiple of four can always win, so the best move from a heap of
h stones is h % 4; from a multiple of four there is none. examples/nim.py trains the model.
"""
import random
from functools import partial

import data
from examples.environment import Episode
from examples.guess_model import make_model

MOST = 11


def position(rng):
    """A row. The number after the heap is the name of the game: questions must differ."""
    heap = rng.randint(1, MOST)
    name = rng.randrange(10**6)
    return {"question": f"{heap:02} {name:06}", "answer": str(heap)}


def games(split, size, seed):
    """Rows for --data: the model plays both sides."""
    return data.generate(position, split, size or 8192, seed)


def against(opponent, split, size, seed):
    """Rows for --eval_data. The model begins, and can win, but not with its first move."""
    for row in games(split, 2 * size, seed):
        heap = int(row["answer"])
        if heap > 4 and heap % 4:
            yield row | {"opponent": opponent}


against_random = partial(against, "random")
against_optimal = partial(against, "optimal")


class Nim:
    """The game, an environment of examples/environment.py. It pays 1 if the first player wins."""

    def reset(self, row):
        self.heap = int(row["answer"])
        self.opponent = row.get("opponent")  # None: the next turn of the model is the other's
        self.rng = random.Random(row["question"])
        self.player = 0
        self.winner = None
        return row["question"]

    def take(self, stones):
        """A move of the player whose turn it is."""
        other = 1 - self.player
        most = min(3, self.heap)
        self.heap -= stones
        if not 1 <= stones <= most:
            self.winner = other
        elif self.heap == 0:
            self.winner = self.player
        self.player = other

    def random_move(self, rng):
        most = min(3, self.heap)
        return rng.randint(1, most)

    def step(self, text):
        self.take(int(text) if text.isdecimal() else 0)
        if self.opponent and self.winner is None:
            move = self.random_move(self.rng)
            if self.opponent == "optimal":
                move = self.heap % 4 or move
            self.take(move)
        done = self.winner is not None
        return f"{self.heap:02}", float(self.winner == 0), done


def demonstration(row, rng, turn, reply):
    """A game of two random players: a Rollout. turn and reply: see make_model."""
    game = Episode(Nim, row, row["prompt_ids"])
    game.reset()
    while game.env.winner is None:
        if game.rollout.completion:
            ids = reply(f"{game.env.heap:02}")
            game.append(ids, [0.0] * len(ids), False)
        game.text = str(game.env.random_move(rng))
        game.step()
        ids = turn(game.text)
        game.append(ids, [0.0] * len(ids), True)
    r = game.rollout
    r.advantages = [0.0] * len(r.completion)
    return r


def main(argv=None):
    make_model(argv, __doc__, "runs/nim", games, demonstration, steps=200)


if __name__ == "__main__":
    main()
