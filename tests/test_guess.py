"""examples/guess.py: binary search, against the rules of the game and in a real run."""
import random
import subprocess
import sys
from statistics import fmean

import pytest

from bench.guess import cost
from conftest import ENV, ROOT, close, make_config, read_rows
from examples import guess, guess_model
from examples.turn_credit import turn_starts

TOKENIZER = guess_model.make_tokenizer()
EOS = TOKENIZER.eos_token_id


def turn(text):
    return TOKENIZER(f"{text}<|endoftext|>")["input_ids"]


def reply(text):
    return guess_model.message_ids(TOKENIZER, text, EOS)


def test_the_numbers_that_are_possible_before_each_guess():
    """An answer that says nothing new changes nothing, and so does a turn that is no number."""
    text = ("20<|user|>higher than 20<|assistant|>47<|user|>lower than 47<|assistant|>"
            "10<|user|>higher than 10<|assistant|>x<|user|>higher than 00<|assistant|>31")
    assert guess.guesses(text) == [
        ("20", 1, 64), ("47", 21, 64), ("10", 21, 46), ("x", 21, 46), ("31", 21, 46)]
    assert guess.guesses("") == [("", 1, 64)]


@pytest.mark.parametrize("size, binary, coin", [(1, 1, 1), (2, 1.5, 1.5), (3, 5 / 3, 17 / 9)])
def test_the_cost_of_a_few_numbers(size, binary, coin):
    close([cost(size, True), cost(size, False)], [binary, coin], 1e-12)


def test_each_turn_is_compared_with_the_turns_that_have_as_many_numbers():
    """From the definition: the mean of what these turns pay from there on."""
    rng = random.Random(0)
    rows = [{"question": "q", "answer": f"{n:02}", "prompt_ids": [n]} for n in (3, 30, 31, 64)]
    groups = [[guess_model.demonstration(row, rng, turn, reply) for _ in range(8)] for row in rows]
    rollouts = [r for group in groups for r in group]
    for r in rollouts:
        r.reward = 0.0  # the game's; a turn has its own
        r.text = TOKENIZER.decode([t for t in r.completion if t != EOS])
        r.extra["reward"] = [-0.1 if t == EOS else 0.0 for t in r.completion]
        r.extra["reward"][-1] = 0.0  # a hit
    rollouts[0].reward = None  # its environment failed
    guess.assign_advantages(groups, make_config(baseline="group", scale="none"), 0.0)
    seen = {}
    for i, r in enumerate(rollouts):
        found = guess.guesses(r.text)
        for number, (_, low, high) in enumerate(found):
            paid = None if r.reward is None else -0.1 * (len(found) - 1 - number)
            seen.setdefault(high - low, []).append((i, number, paid))
    assert len(seen[63]) >= len(rollouts) and len(seen) > 20
    ours = []
    wanted = []
    for turns in seen.values():
        mean = fmean([paid for *_, paid in turns if paid is not None] or [0])
        for i, number, paid in turns:
            start = turn_starts(rollouts[i])[number]
            ours += rollouts[i].advantages[start:start + 2]  # the number and the end of the turn
            wanted += [0.0 if paid is None else paid - mean] * 2
    close(ours, wanted, 1e-5)


def test_two_steps_of_a_real_run_count_guesses_and_evaluate_every_number(tmp_path):
    model = str(tmp_path / "model")
    guess_model.main(["--out", model, "--steps", "60", "--batch", "16", "--layers", "1"])
    flags = (f"--model {model} --steps 2 --prompts 4 --samples 4 --save_every 0 --lr 1e-3 "
             f"--out {tmp_path} --name run")
    done = subprocess.run([sys.executable, "-m", "examples.guess", *flags.split()], cwd=ROOT,
                          env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert rows[0]["eval/n"] == 64 and rows[0]["grad_norm"] > 0
    games = [row for row in read_rows(tmp_path / "run/eval.jsonl") if row["step"] == 0]
    assert sorted(game["answer"] for game in games) == guess_model.NUMBERS
    for game in games:
        turns = guess.guesses(game["completion"])
        is_won = turns[-1][0] == game["answer"]
        wanted = len(turns) if is_won else guess_model.TURNS + 1
        assert game["parts"]["won"] == is_won and game["parts"]["guesses"] == wanted
