"""Makes a small model that plays at random, for a game: guess a number from 1 to 64.

    python -m examples.guess_model --out runs/guess       two minutes on one core; seeded (--seed)
    G=examples/guess_model.py; E=examples/environment.py
    python nano_rlvr.py --model runs/guess --data $G:games --eval_data $G:games --template chat \\
        --rollout $G:play --rewards $G:won:0,$E:outcome,$G:guesses:0 ...

The game answers each guess with "higher" or "lower". A wrong guess costs 0.1, a hit pays 1, and the
game ends after TURNS guesses. The supervised examples are whole games: a guess is a number that the
answers allow, each of them equally likely. With a share of CARELESS it is any number.

Binary search needs 5.1 guesses on average. A player who takes any number that is allowed needs 6.6.
"""
import argparse

import data
import nano_rlvr as nr
from examples.environment import message_ids, player
from models.tiny.make_tiny import cold_start, make_tokenizer, new_model
from rewards import each

MOST = 64  # the numbers are 1 to MOST
TURNS = 10
CARELESS = 0.2  # share of the guesses that ignore the answers
WORDS = ["higher", "lower"]  # one token each


def game(rng):
    """A row. The question is the name of the game, which does not tell the number."""
    return {"question": f"{rng.randrange(10**6):06}", "answer": str(rng.randint(1, MOST))}


def games(split, size, seed):
    """Rows for --data."""
    return data.generate(game, split, size or 8192, seed)


class Guess:
    """The game, an environment of examples/environment.py."""

    def reset(self, row):
        self.number = int(row["answer"])
        return row["question"]

    def step(self, text):
        guess = int(text) if text.isdecimal() else 0
        if guess == self.number:
            return "", 1.0, True
        return WORDS[guess > self.number], -0.1, False


play = player(Guess, TURNS)


@each
def won(text, outcome=None):
    """1.0 if the number was found, else 0.0."""
    return None if outcome is None else float(outcome > 0)


@each
def guesses(text, outcome=None):
    """The number of guesses of a game that was won, to be logged."""
    return None if outcome is None or outcome <= 0 else round(11 - 10 * outcome)


def demonstration(row, rng, ids):
    """A game that is played at random: a Rollout. ids: {guess or answer: its token ids}."""
    r = nr.Rollout(row["prompt_ids"], [], "", False, [])
    env = Guess()
    env.reset(row)
    low, high = 1, MOST
    for _ in range(TURNS):
        allowed = (1, MOST) if rng.random() < CARELESS else (low, high)
        guess = rng.randint(*allowed)
        r.completion += ids[guess]
        r.loss_mask += [True] * len(ids[guess])
        answer, _, done = env.step(str(guess))
        if done:
            break
        if answer == "higher":
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        r.completion += ids[answer]
        r.loss_mask += [False] * len(ids[answer])
    r.vllm_logps = [0.0] * len(r.completion)
    r.advantages = [0.0] * len(r.completion)
    return r


def main(argv=None):
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", default="runs/guess")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(WORDS)
    ids = {}
    for guess in range(1, MOST + 1):
        ids[guess] = tokenizer(f"{guess:02}<|endoftext|>")["input_ids"]
    for word in WORDS:
        ids[word] = message_ids(tokenizer, word, tokenizer.eos_token_id)
    rows = list(games("train", 8192, args.seed))
    for row in rows:
        row["prompt_ids"] = data.encode(row, tokenizer, "chat")

    def sample(rng):
        return demonstration(rng.choice(rows), rng, ids)

    model = new_model(tokenizer, args.seed, args.layers)
    cold_start(model, sample, args.steps, args.batch, args.lr, args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
