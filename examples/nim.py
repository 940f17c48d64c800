"""Two players: one small model plays Nim against itself and trains both sides in one step.

    python -m examples.nim_model --out runs/nim      the game, and a model that plays at random
    python -m examples.nim --model runs/nim ...      self-play; flags of nano_rlvr.py work

A game is one sequence, with the turns of both players. What stands in brackets is not sampled: the
stones of the heap, as the next player sees them.

    <|user|>07 480213<|assistant|>2[<|user|>05<|assistant|>]1[<|user|>04<|assistant|>]3 ...

A turn is rewarded with 1 if its player wins, else with 0. Its group are the turns with the same
heap, of all games of a step and of both players, because the start of a game says little about its
later positions. With several ranks, each has its own groups.

Rewards: `outcome`, 1 if the first player wins; `optimal`, the share of best moves where there is
one. The evaluation plays against a random and against an optimal player. The model begins, with
heaps from which it can win.
"""
import re
import sys
from collections import defaultdict
from functools import partial

import nano_rlvr as nr
from examples.environment import player
from examples.nim_model import MOST, Nim
from examples.turn_credit import compare_turns, turn_starts
from rewards import each
from runtime.batch import flatten

REPLY = r"<\|user\|>(\d\d)<\|assistant\|>"
GAME = "examples/nim_model.py"


def moves(text, heap):
    """[(the heap, the move as text)] of the model's turns in a text. heap: at the start."""
    heaps = [int(heap)]
    heaps += map(int, re.findall(REPLY, text))
    texts = re.sub(REPLY, " ", text).split(" ")
    return list(zip(heaps, texts))


@each
def optimal(text, answer):
    """The share of best moves where there is one. None if there is none."""
    best = []
    for heap, move in moves(text, answer):
        if heap % 4:
            best.append(move == str(heap % 4))
    return sum(best) / len(best) if best else None


def play(llm, prompts, n, *args, examples=(), **sampling):
    """A function for --rollout. extra["heap"] has the heap from the first token of a turn on."""
    rollouts = player(Nim, MOST)(llm, prompts, n, *args, examples=examples, **sampling)
    for i, r in enumerate(rollouts):
        row = examples[i // n]
        starts = turn_starts(r)
        is_self_play = not row.get("opponent")
        if r.truncated and is_self_play and r.outcome is not None:
            r.outcome = float(len(starts) % 2 == 0)  # who does not end a turn loses
        r.extra["heap"] = [0.0] * len(r.completion)
        for start, (heap, _) in zip(starts, moves(r.text, row["answer"])):
            after = len(r.completion) - start
            r.extra["heap"][start:] = [float(heap)] * after
    return rollouts


def turns_by_heap(rollouts):
    """{heap: [(rollout, position of the first token of a turn, reward of the turn's player)]}."""
    turns = defaultdict(list)
    for r in rollouts:
        if r.reward is None:
            continue
        for turn, start in enumerate(turn_starts(r)):
            reward = 1 - r.reward if turn % 2 else r.reward
            heap = r.extra["heap"][start]
            turns[heap].append((r, start, reward))
    return turns


def assign_advantages(groups, cfg, running_mean):
    """A turn gets the reward of its player, compared with the turns that have the same heap."""
    turns = turns_by_heap(flatten(groups))
    heaps = sorted(turns, reverse=True)  # heaps only shrink: a later turn comes later
    compare_turns([turns[heap] for heap in heaps], cfg)
    return running_mean


if __name__ == "__main__":
    fixed = [
        "--data", f"{GAME}:games",
        "--eval_data", f"{GAME}:against_random,{GAME}:against_optimal",
        "--rollout", f"{__file__}:play",
        "--rewards", f"examples/environment.py:outcome,{__file__}:optimal:0",
        *"--template chat --max_prompt 16 --max_tokens 96 --kl_coef 0".split(),
    ]
    train = partial(nr.train, assign_advantages=assign_advantages)
    nr.main([*fixed, *sys.argv[1:]], train)
