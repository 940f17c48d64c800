"""examples/nim.py: two players of one model, against the rules of the game and in a real run."""
import json
import random
import subprocess
import sys
from statistics import fmean, pstdev

import pytest

from conftest import ENV, ROOT, close, make_config, read_rows
from examples import nim, nim_model
from examples.guess_model import make_tokenizer, message_ids

TOKENIZER = make_tokenizer()


def turn(text):
    return TOKENIZER(f"{text}<|endoftext|>")["input_ids"]


def reply(text):
    return message_ids(TOKENIZER, text, TOKENIZER.eos_token_id)


def played(heap, *texts, opponent=None):
    """What the game returns for each turn."""
    game = nim_model.Nim()
    game.reset({"question": "q", "answer": str(heap), "opponent": opponent})
    return [game.step(text) for text in texts]


@pytest.mark.parametrize("texts, reward", [
    ("231", 1.0), ("3111", 0.0),  # who takes the last stone wins
    ("4", 0.0), ("0", 0.0), ("x", 0.0), ("24", 1.0), ("2x", 1.0), ("323", 0.0)])  # illegal: loses
def test_the_rules_of_a_heap_of_six(texts, reward):
    *before, end = played(6, *texts)
    assert end[1:] == (reward, True)
    assert all(found[1:] == (0.0, False) for found in before)


def test_an_optimal_opponent_loses_to_an_optimal_player_and_wins_after_one_mistake():
    (heap, *_), = played(7, "3", opponent="optimal")
    assert heap in ("01", "02", "03")
    assert played(7, "3", str(int(heap)), opponent="optimal")[1] == ("00", 1.0, True)
    assert played(7, "1", opponent="optimal") == [("04", 0.0, False)]
    assert played(5, "2", opponent="optimal") == [("00", 0.0, True)]


def test_each_turn_is_compared_with_the_turns_of_both_players_at_its_heap(monkeypatch):
    """From the definition: mean and deviation of all rewards with this heap."""
    rng = random.Random(0)
    rows = [{"question": "q", "answer": str(heap), "prompt_ids": [heap]} for heap in (5, 6, 7, 9)]
    groups = [[nim_model.demonstration(row, rng, turn, reply) for _ in range(4)] for row in rows]
    rollouts = [r for group in groups for r in group]
    for r in rollouts:
        r.reward = float(rng.random() < 0.5)
        r.text = TOKENIZER.decode([t for t in r.completion if t != TOKENIZER.eos_token_id])
    rollouts[0].reward = None  # its environment failed
    rewards = [r.reward for r in rollouts]
    monkeypatch.setattr(nim, "player", lambda *_: lambda *_, **__: rollouts)
    nim.play(None, rows, 4, examples=rows)
    nim.assign_advantages(groups, make_config(baseline="group", scale="group"), 0.0)
    seen = {}
    for i, r in enumerate(rollouts):
        for number, (heap, _) in enumerate(nim.moves(r.text, rows[i // 4]["answer"])):
            reward = rewards[i]
            if reward is not None and number % 2:
                reward = 1 - reward
            seen.setdefault(heap, []).append((i, number, reward))
    assert len({i for i, *_ in seen[4]}) > 4 and {number % 2 for _, number, _ in seen[4]} == {0, 1}
    for heap, turns in seen.items():
        values = [reward for *_, reward in turns if reward is not None]
        mean, deviation = fmean(values), pstdev(values)
        for i, number, reward in turns:
            start = nim.turn_starts(rollouts[i])[number]
            found = rollouts[i].advantages[start:start + 2]  # the move and the end of the turn
            wanted = 0.0 if reward is None else (reward - mean) / (deviation + 1e-4)
            close(found, [wanted] * 2, 1e-5)


@pytest.mark.parametrize("turns, opponent, outcome, wanted", [
    (1, None, 0.0, 0.0), (2, None, 0.0, 1.0), (3, None, 0.0, 0.0),
    (2, "random", 0.0, 0.0),  # all turns are the model's
    (2, None, None, None)])  # its environment failed
def test_who_does_not_end_a_turn_loses(turns, opponent, outcome, wanted, monkeypatch):
    row = {"question": "q", "answer": "11", "prompt_ids": [11], "opponent": None}
    r = nim_model.demonstration(row, random.Random(0), turn, reply)
    end = nim.turn_starts(r)[turns - 1] + 1
    r.completion = r.completion[:end]
    r.loss_mask = r.loss_mask[:end]
    r.text = TOKENIZER.decode([t for t in r.completion if t != TOKENIZER.eos_token_id])
    r.truncated = True
    r.outcome = outcome
    monkeypatch.setattr(nim, "player", lambda *_: lambda *_, **__: [r])
    nim.play(None, [[11]], 1, examples=[row | {"opponent": opponent}])
    assert r.outcome == wanted


@pytest.mark.parametrize("opponent", ["random", "optimal"])
def test_the_model_can_win_an_evaluation_but_not_with_its_first_move(opponent):
    rows = list(getattr(nim_model, f"against_{opponent}")("test", 100, 0))
    assert {int(row["answer"]) for row in rows} == {5, 6, 7, 9, 10, 11}
    assert {row["opponent"] for row in rows} == {opponent}


def test_the_share_of_best_moves_counts_heaps_that_can_be_won():
    text = "3<|user|>04<|assistant|>1<|user|>03<|assistant|>2<|user|>01<|assistant|>1"
    assert nim.moves(text, "7") == [(7, "3"), (4, "1"), (3, "2"), (1, "1")]
    assert nim.optimal([text, "1", "x"], answer=["7", "4", "5"]) == [2 / 3, None, 0.0]


def test_two_steps_of_self_play_train_both_players(tmp_path):
    """In a real run. Every turn was made at a heap that the rules allow, and both players' turns
    have advantages."""
    model = str(tmp_path / "model")
    nim_model.main(["--out", model, "--steps", "60", "--batch", "16", "--layers", "1"])
    flags = (f"--model {model} --steps 2 --prompts 4 --samples 8 --eval_size 8 --save_every 0 "
             f"--lr 1e-3 --out {tmp_path} --name run")
    done = subprocess.run([sys.executable, "-m", "examples.nim", *flags.split()], cwd=ROOT,
                          env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    for name in "random", "optimal":
        assert rows[0][f"eval/nim_model.py-against_{name}/n"] == 8
    assert rows[0]["grad_norm"] > 0 and rows[0]["mismatch/mean_abs"] < 1e-3
    games = read_rows(tmp_path / "run/rollouts.jsonl")
    config = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert len(games) == 64 and config["rewards"].endswith("nim.py:optimal:0")
    assert {0.0, 1.0} == {game["reward"] for game in games}
    assert max(game["completion"].count("<|user|>") for game in games) > 0
