"""Makes a small model that plays at random, for a game: guess a number from 1 to 64.

    python -m examples.guess_model --out runs/guess      four minutes on one core; seeded (--seed)

The game answers a guess, such as 20, with "higher than 20" or "lower than 20". A wrong guess costs
0.1, and the game ends after TURNS guesses. The supervised examples are whole games: a guess is a
number that the answers allow, each of them equally likely. With a share of CARELESS it is any
number.

Binary search needs 5.1 guesses on average. A player who takes any number that is allowed needs 6.6.
examples/guess.py trains the model.
"""
import argparse
import functools

import data
import nano_rlvr as nr
from examples.environment import message_ids, player
from models.tiny.make_tiny import cold_start, make_tokenizer, new_model
from rewards import each

MOST = 64  # the numbers are 1 to MOST
TURNS = 16
CARELESS = 0.05  # share of the guesses that ignore the answers
NUMBERS = [f"{number:02}" for number in range(1, MOST + 1)]
ANSWERS = ["higher than", "lower than"]  # and the guess: one token each


def game(rng):
    """A row. The question is the name of the game, which does not tell the number."""
    letters = rng.choices("abcdefgh", k=5)
    return {"question": "".join(letters), "answer": rng.choice(NUMBERS)}


def games(split, size, seed):
    """Rows for --data."""
    return data.generate(game, split, size or 8192, seed)


def every_number(split, size, seed):
    """Rows for --eval_data: a game of each number."""
    for row, number in zip(games(split, MOST, seed), NUMBERS):
        yield row | {"answer": number}


class Guess:
    """The game, an environment of examples/environment.py."""

    def reset(self, row):
        self.number = int(row["answer"])
        return row["question"]

    def step(self, text):
        guess = int(text) if text.isdecimal() else 0
        if guess == self.number:
            return "", 0.0, True
        return f"{ANSWERS[guess > self.number]} {guess:02}", -0.1, False


play = player(Guess, TURNS)


@each
def won(text, answer, outcome=None):
    """1.0 if the last guess is the number, else 0.0."""
    return None if outcome is None else float(text.endswith(answer))


@each
def guesses(text, answer, outcome=None):
    """The number of guesses of a game, to be logged. TURNS + 1 if the number was not found."""
    if outcome is None:
        return None
    return 1 - round(10 * outcome) if text.endswith(answer) else TURNS + 1


def demonstration(row, rng, turn, reply):
    """A game that is played at random: a Rollout. turn and reply: texts -> token ids."""
    r = nr.Rollout(row["prompt_ids"], [], "", False, [])
    env = Guess()
    env.reset(row)
    low, high = 1, MOST
    for _ in range(TURNS):
        allowed = (1, MOST) if rng.random() < CARELESS else (low, high)
        guess = rng.randint(*allowed)
        played = turn(f"{guess:02}")
        r.completion += played
        r.loss_mask += [True] * len(played)
        answer, _, done = env.step(str(guess))
        if done:
            break
        if answer.startswith("higher"):
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        message = reply(answer)
        r.completion += message
        r.loss_mask += [False] * len(message)
    r.vllm_logps = [0.0] * len(r.completion)
    r.advantages = [0.0] * len(r.completion)
    return r


def make_model(argv, description, out, rows, demonstration, words=(), steps=700):
    """Makes a model that has seen games and saves it: a command, whose flags are argv.

    out, steps: defaults of flags. rows(split, size, seed): as for --data. demonstration(row, rng,
    turn, reply): a game as a Rollout; turn(text) gives the token ids of a turn of the model, and
    reply(text) those of a reply. words: texts that become one token each."""
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--out", default=out)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(words))
    examples = list(rows("train", 8192, args.seed))
    for row in examples:
        row["prompt_ids"] = data.encode(row, tokenizer, "chat")

    @functools.cache
    def turn(text):
        return tokenizer(f"{text}<|endoftext|>")["input_ids"]

    @functools.cache
    def reply(text):
        return message_ids(tokenizer, text, tokenizer.eos_token_id)

    def sample(rng):
        return demonstration(rng.choice(examples), rng, turn, reply)

    model = new_model(tokenizer, args.seed, args.layers)
    cold_start(model, sample, args.steps, args.batch, args.lr, args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


def main(argv=None):
    words = list(NUMBERS)
    for answer in ANSWERS:
        words += [f"{answer} {number}" for number in NUMBERS]
    make_model(argv, __doc__, "runs/guess", games, demonstration, words, 1500)


if __name__ == "__main__":
    main()
