"""A process reward model (PRM), learned from outcomes, gives the reward of each step.

    python -m examples.process_model --steps 30    sums such as 14+2+9; flags of nano_rlvr.py work

Marks for steps are dear. Math-Shepherd (arXiv:2312.08935) needs no people: the policy continues
--continuations times after a step, whose label is the share that ends right. So the verifier of the
outcome is enough. The starting model answers --questions training questions; the PRM, a copy of it
with one output, learns the labels, and its values are the step rewards of process_rewards.py.
A program (steps_reward) says where steps end and which are right: prm/agrees is the share of the
current samples' steps on which both agree. It falls as the policy leaves what the PRM has seen.
One process; neither the memory plan nor the checkpoints know the PRM.
"""
import argparse
from statistics import fmean

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import nano_rlvr as nr
from data import request_seed
from examples import process_rewards
from examples.ppo import Critic
from runtime import stats

EPOCHS = 4  # passes over the labelled answers
BATCH = 32  # answers per step


def find_steps(rollouts, examples, tokenizer):
    """Fills r.steps: (end in tokens, 1.0 or 0.0 by the program) of each step. One question each."""
    texts = [r.text for r in rollouts]
    questions = [example["question"] for example in examples]
    for r, steps in zip(rollouts, process_rewards.steps_reward(texts, questions)):
        r.steps = [(len(r.completion), 0.0)]  # of an empty text
        if steps:
            r.steps = process_rewards.in_tokens(steps, r, tokenizer)


def sample(run, prompts, n, name):
    """n completions of each prompt. name: of their seeds."""
    cfg = run.cfg
    numbers = range(len(prompts))
    seeds = [request_seed(cfg.seed, name, number) for number in numbers]
    return nr.rollout(run.llm, prompts, n, cfg.temperature, cfg.max_tokens, seeds)


def label_steps(run, rollouts, examples, continuations):
    """-> per rollout, a label for each of its steps: the share of continuations that are right. The
    last step is the answer, whose label is the outcome."""
    prompts = []
    asked = []
    for r, example in zip(rollouts, examples):
        for end, _ in r.steps[:-1]:
            prompts.append(r.prompt + r.completion[:end])
            asked.append(example)
    found = sample(run, prompts, continuations, "labels")
    nr.score(found, asked, run.verifier)
    groups = nr.in_groups(found, continuations)
    shares = iter([fmean(map(stats.is_right, group)) for group in groups])
    labels = []
    for r in rollouts:
        of_steps = [next(shares) for _ in r.steps[:-1]]
        labels.append([*of_steps, float(stats.is_right(r))])
    return labels


def step_logits(model, rollouts):
    """(S,) the output of a Critic that has read each step up to its end; of the last step, up to
    the token that ends the text."""
    pack = nr.collate(rollouts)
    places = []
    start = 0
    for r in rollouts:
        last = r.length - 1
        places += [start + min(end, last) for end, _ in r.steps]
        start += r.length
    return model(pack)[places]  # (S,)


def agreement(logits, rollouts):
    """The share of steps on which the PRM, which accepts above 1/2, and the program agree."""
    steps = nr.flatten(r.steps for r in rollouts)
    exact = [value for _, value in steps]
    accepted = logits > 0  # (S,)
    agrees = accepted == torch.tensor(exact).bool()  # (S,)
    return agrees.float().mean().item()


def fit(model, rollouts, labels):
    """Trains the PRM in place. Returns its agreement with the program on the last quarter of the
    rollouts, which it has not seen."""
    most = len(rollouts) * 3 // 4
    for start in [*range(0, most, BATCH)] * EPOCHS:
        part = slice(start, min(start + BATCH, most))
        wanted = torch.tensor(nr.flatten(labels[part]))  # (S,)
        logits = step_logits(model, rollouts[part])  # (S,)
        loss = binary_cross_entropy_with_logits(logits, wanted)
        model.adam.zero_grad()
        loss.backward()
        model.adam.step()
    unseen = rollouts[most:]
    with torch.no_grad():
        logits = step_logits(model, unseen)  # (S,)
    return agreement(logits, unseen)


def learn(run, own):
    """A PRM that has learned from labelled answers of the starting model."""
    examples = run.train_set[:own.questions]
    prompts = [example["prompt_ids"] for example in examples]
    nr.sync_weights(run.policy, run.llm)  # wakes vLLM
    rollouts = sample(run, prompts, 1, "steps")
    nr.score(rollouts, examples, run.verifier)
    find_steps(rollouts, examples, run.llm.get_tokenizer())
    labels = label_steps(run, rollouts, examples, own.continuations)
    run.llm.sleep()
    model = Critic(run.cfg, lr=3e-4)
    share = fit(model, rollouts, labels)
    run.log.say(f"PRM: it agrees with the program on {share:.0%} of the steps of answers that it "
                "has not seen")
    return model


def train(run, own):
    """nano_rlvr's loop with the PRM's values as step rewards."""
    model = learn(run, own)
    asked = {tuple(example["prompt_ids"]): example for example in run.train_set}

    @torch.no_grad()
    def assign_advantages(groups, cfg, running_mean):
        rollouts = nr.flatten(groups)
        examples = [asked[tuple(r.prompt)] for r in rollouts]
        find_steps(rollouts, examples, run.llm.get_tokenizer())
        logits = step_logits(model, rollouts)  # (S,)
        run.metrics["prm/agrees"] = agreement(logits, rollouts)
        values = iter(torch.sigmoid(logits).tolist())
        for r in rollouts:
            r.steps = [(end, next(values)) for end, _ in r.steps]
        return process_rewards.assign_advantages(groups, cfg, running_mean)

    nr.train(run, assign_advantages=assign_advantages)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--continuations", type=int, default=4)
    own, argv = parser.parse_known_args()
    nr.main(argv, lambda run: train(run, own))
