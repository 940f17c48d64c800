"""Averages over the tokens of a step, votes of an evaluation, and metrics of a step's rewards."""
import dataclasses
import math
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
from conftest import close, make_config
from runtime import evaluation, log, stats


def completion(text="", truncated=False, **fields):
    return nr.Rollout([0], [0], text, truncated, [0.0], **fields)


# ---- votes and pass@k

@pytest.mark.exercise_13
@pytest.mark.parametrize("answers, index", [
    (["4", "5", "5"], 1),
    (["4", "5", "5", "4"], 0),  # a tie: the answer seen first
    ([None, None, None, "7", "8", "8"], 4),  # None is no vote, however often it occurs
    ([None, None], None)])
def test_the_most_frequent_answer_wins_the_first_seen_wins_a_tie_and_none_does_not_vote(
        answers, index):
    assert stats.majority_vote(answers) == index


def votes(*texts, truncated=False):
    return {evaluation.vote_of(completion(text, truncated)) for text in texts}


@pytest.mark.parametrize("texts", [
    ("<answer>72</answer>", "<answer>72", r"\boxed{72.0}", "The answer is $72$.", r"\boxed{\$72}",
     "#### 72", r"\boxed{\(72\)}", r"\boxed{72\%}"),
    (r"\boxed{1,000}", r"\boxed{1000}", r"\boxed{1{,}000}", r"\boxed{1\,000}"),
    (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{\dfrac12}", r"\boxed{$.5$}"),
    (r"\boxed{(1, 2)}", r"\boxed{$(1,2)$}")])
def test_equal_answers_in_another_form_are_one_vote(texts):
    assert len(votes(*texts)) == 1 and None not in votes(*texts)


def test_different_answers_are_different_votes():
    answers = ["72", "-72", "72.5", "1,2", "2,1", "12", "(1,2)", "[1,2]", "72x", "7/2", "2/7",
               "x=72", "72^2", "A", "f(72)", r"\sqrt{72}", "1/0", "2/0"]
    assert len(votes(*(rf"\boxed{{{a}}}" for a in answers))) == len(answers)


def test_a_truncated_completion_votes_only_with_a_complete_answer():
    """<answer>7 may be the start of <answer>72."""
    cut_off = [r"\boxed{7", r"\boxed{1} and \boxed{7", "<answer>7", "#### 7", "The answer is 7",
               "<answer>7</answ", "<think>\\boxed{7}", ""]
    complete = [r"so \boxed{7}", r"\boxed{7}. Let me check: 8", "<answer>7</answer> as 3 + 4",
                "#### 7\nI", "The answer is 7.\nNow"]
    assert votes(*cut_off, truncated=True) == {None} and votes(*complete, truncated=True) == {7}


def test_values_of_samples_by_hand():
    """Cut-off answers do not outvote a complete one; equal answers are counted together."""
    forms = ("5", "5", "72", "72.0", "$72$")
    group = [completion(rf"\boxed{{{a}}}", parts={"x": float(a != "5")}) for a in forms]
    cut = [completion("<answer>5", True, parts={"x": 0.0}) for _ in range(4)]
    values = evaluation.sample_values(group + cut)  # 3 of 9 are right
    assert values.pop("maj@9") and not values.pop("best@9/logprob")  # equal log-probs: the first
    wanted = {f"pass@{k}": 1 - math.comb(6, k) / math.comb(9, k) for k in (2, 4, 8, 9)}
    assert values.keys() == wanted.keys() | {"mean@9"}
    close([values[name] for name in wanted], list(wanted.values()))
    close(values["mean@9"], 1 / 3)
    assert [name for name in evaluation.sample_values(group[:1]) if "pass" in name] == ["pass@1"]


def test_the_sample_with_the_highest_mean_log_prob_of_its_sampled_tokens_is_chosen():
    def best(*group):
        rollouts = [nr.Rollout([0], [0] * len(logps), "", False, logps, sampled,
                               parts={"x": float(right)}) for right, logps, sampled in group]
        return evaluation.sample_values(rollouts)[f"best@{len(group)}/logprob"]

    short = [-1.0, -1.0], [-0.5, -1.0, -0.75]
    assert best((0, short[0], None), (1, short[1], None))  # the sum would choose the first
    tool = [-3.0, 0.0, 0.0, 0.0], [True, False, False, False]  # three tokens of a tool's output
    assert best((1, [-1.0] * 4, None), (0, *tool))
    group = [completion(parts={"x": x}) for x in (0.0, 1.0, 1.0)]
    assert not evaluation.best_is_right(group, [0.5, 0.5, 0.1])  # the first of equals
    assert evaluation.best_is_right(group, [None, -2.0, -3.0])  # None is no value


# ---- metrics of several optimizer steps: means over all their tokens, not means of means

class Given:
    """A policy of one number: its log-prob of token t is -t/8, plus 1/4 per optimizer step that was
    taken; its entropy of token t is t."""
    taken = 0

    def __call__(self, batch):
        return (-batch.targets / 8 + self.taken / 4).requires_grad_(), batch.targets.float()

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.taken += 1

    def get_global_grad_norm(self):
        return 2.0 ** self.taken

    def was_step_applied(self):
        return self.taken != 2


# one optimizer step with 1 + 1 tokens, in two packs, and one with 3 + 3
STEPS = [[[[8]], [[16]]], [[[8, 8, 8], [24, 24, 24]]]]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("vllm", [(0.75, 0.25), (0.25, 0.75)])  # the larger comes first, or last
def test_metrics_are_means_over_the_tokens_of_all_optimizer_steps(group, epochs, vllm):
    """Against a list of all tokens of all optimizer steps.

    log pi_ref is log pi_old + 0.5. vLLM's log-prob of the first token of each completion is
    log pi_old + vllm[number of the optimizer step].
    """
    cfg = make_config(correction="token_truncate", correction_cap=10.0, mismatch_bound=1e9)
    policy, history, tokens = Given(), [], []
    for k in range(2 * epochs):
        batches = []
        for pack in STEPS[k % 2]:
            rollouts = []
            for i, ids in enumerate(pack):
                shifts = [vllm[k % 2], 0.0, 0.0][:len(ids)]
                tokens += [(t, k / 4, shift) for t, shift in zip(ids, shifts)]
                logps = [shift - t / 8 for t, shift in zip(ids, shifts)]
                rollouts.append(nr.Rollout([i], ids, "", False, logps, weight=0.1,
                                           advantages=[1.0] * len(ids)))
            batches.append(nr.collate(rollouts))
            batches[-1].old = -batches[-1].targets / 8
            batches[-1].ref = batches[-1].old + 0.5
        history.append(nr.update(policy, batches, cfg))
    found = stats.step_means(history)

    entropies, moved, shifts = zip(*tokens)  # moved: log pi - log pi_old
    w = [math.exp(-shift) for shift in shifts]
    wanted = {
        "entropy": fmean(entropies), "ratio": fmean(map(math.exp, moved)),
        "kl": fmean(math.exp(0.5 - x) - (0.5 - x) - 1 for x in moved),
        "clipped": fmean(math.exp(x) > 1.2 for x in moved),
        "mismatch/max": 0.75, "mismatch/mean_abs": fmean(shifts), "correction/w": fmean(w),
        "correction/ess": fmean(w) ** 2 / fmean(x * x for x in w),
        "grad_norm": fmean(2.0 ** k for k in range(1, 2 * epochs + 1)),
        "skipped": 1 / (2 * epochs)}
    for name, x in wanted.items():
        close(found[name], x, 1e-6)
    assert "tokens" not in found and stats.step_means([]) == {}


@pytest.mark.parametrize("gate", ["clip", "detach", "soft", "squared"])
@pytest.mark.parametrize("ratio", ["token", "sequence", "product"])
def test_the_gradient_is_finite_at_any_log_ratio_and_clipped_counts_the_tokens_without_one(
        gate, ratio):
    points = [(x, a) for x in (-1e4, -30, -0.7, 0, 0.7, 30, 1e4) for a in (1.0, -1.0)]
    logp, advantage = torch.tensor(points).T  # (R,), (R,) each token is a sequence
    ones, logp = torch.ones(len(points)), logp.clone().requires_grad_()
    batch = SimpleNamespace(lengths=ones, sequence_ids=torch.arange(len(points)), weight=ones,
                            advantage=advantage, vllm_logps=0.0)
    cfg = dataclasses.replace(make_config(), gate=gate, ratio=ratio, correction="none")
    loss, terms = nr.policy_loss(logp, torch.zeros(len(points)), None, batch, cfg)
    [gradient] = torch.autograd.grad(loss, logp)
    assert loss.isfinite() and gradient.isfinite().all()
    assert terms["clipped"].tolist() == (gradient == 0).tolist()
    assert (gate in ("clip", "soft")) == terms["clipped"].any()  # the others bound it otherwise


# ---- metrics of the rewards of a step

def test_the_rewards_of_a_step_by_hand(group):
    """None, "no verdict", enters no mean; a reward without any verdict in the step is absent."""
    parts = [{"a": 1.0, "judge": None}, {"a": 0.0, "judge": None}, {"a": None}, {"b": 2.0}]
    rollouts = [completion(reward=x, parts=own) for x, own in zip((1.0, 0.0, None, 2.0), parts)]
    seconds = {"seconds/rollout": 1.0, "seconds/update": 1.0}
    m = log.summary(make_config(), [], [rollouts], seconds)
    assert (m["reward/a"], m["reward/b"], m["reward/mean"]) == (0.5, 2.0, 1.0)
    assert "reward/judge" not in m and m["reward/no_verdict"] == 1 / 4 and m["group/flat"] == 0
    close(m["reward/std"], math.sqrt(2 / 3))  # of the population
