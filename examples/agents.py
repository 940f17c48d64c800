"""Two agents in one run: a writer answers, a checker looks at the answer, each has its own reward.

    python -m examples.agents --steps 20     the bundled model is both; flags of nano_rlvr.py work

A completion has two turns of the model. What stands in brackets is not sampled:

    <think></think><answer>27</answer>[question again]<think>14+2=16 ...</think><answer>25</answer>

The writer is rewarded if its answer is right. The checker answers as well and so gives a verdict:
it accepts the writer's answer if its own is the same. It is rewarded if the verdict is true. The
advantages of the two are computed apart, each in its group, and a token gets that of its agent.
So a checker learns from a writer who errs, although both are one model. Metrics: reward/writer,
reward/checker. The evaluation counts the writer. Several ranks: --baseline group only.
"""
import sys
from functools import partial

import torch

import nano_rlvr as nr
from data import completion_texts, request_seed
from rewards import each, final_number

AGENTS = ("writer", "checker")


def two_turns(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling):
    """As nano_rlvr.rollout, with the checker's turn after the writer's. Each has half of the
    tokens. extra["checker"] is 1.0 at the checker's tokens."""
    tokenizer = llm.get_tokenizer()
    longest = max(map(len, prompts))
    half = (max_tokens - longest) // 2
    written = nr.rollout(llm, prompts, n, temperature, half, seeds, **sampling)
    contexts = []
    turn_seeds = [] if seeds else None
    for i, r in enumerate(written):
        contexts.append(r.prompt + r.completion + r.prompt)
        if seeds:
            turn_seeds.append(request_seed(seeds[i // n], i % n))
    checked = nr.rollout(llm, contexts, 1, temperature, half, turn_seeds, **sampling)
    rollouts = []
    for first, second in zip(written, checked):
        between = first.prompt
        gap = len(between)
        ids = first.completion + between + second.completion
        logps = first.vllm_logps + [0.0] * gap + second.vllm_logps
        sampled = first.loss_mask + [False] * gap + second.loss_mask
        last = len(second.completion)
        of_checker = [0.0] * (len(ids) - last) + [1.0] * last
        r = nr.Rollout(between, ids, "", second.truncated, logps, sampled)
        r.extra["checker"] = of_checker
        rollouts.append(r)
    for r, text in zip(rollouts, completion_texts(rollouts, tokenizer)):
        r.text = text
    return rollouts


def answers(text, question):
    """(The writer's answer, the checker's): numbers, or None where there is none."""
    first, _, second = text.partition(question)
    return final_number(first), final_number(second)


@each
def writer(text, question, answer):
    """1.0 if the writer's answer is right."""
    of_writer, _ = answers(text, question)
    return float(of_writer == int(answer))


@each
def checker(text, question, answer):
    """1.0 if the checker accepts a right answer or rejects a wrong one. No answer: no verdict."""
    of_writer, of_checker = answers(text, question)
    if of_checker is None:
        return 0.0
    accepts = of_writer == of_checker
    return float(accepts == (of_writer == int(answer)))


def assign_advantages(groups, cfg, running_mean):
    """A token gets the advantage of its agent, from the rewards of this agent in the group."""
    for group in groups:
        rewards = []
        for agent in AGENTS:
            rewards.append([r.parts[agent] for r in group])
        rewards = torch.tensor(rewards)  # (2, G)
        advantages = nr.group_advantages(rewards, cfg.baseline, cfg.scale)  # (2, G)
        for r, of_agents in zip(group, advantages.T.tolist()):
            r.advantages = [of_agents[int(agent)] for agent in r.extra["checker"]]
    return running_mean


if __name__ == "__main__":
    fixed = [
        "--rollout", f"{__file__}:two_turns",
        "--max_tokens", "200",
        "--rewards", f"{__file__}:writer,{__file__}:checker",
    ]
    train = partial(nr.train, assign_advantages=assign_advantages)
    nr.main([*fixed, *sys.argv[1:]], train)
