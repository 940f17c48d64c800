"""Averages over the tokens of a step, votes of an evaluation, and metrics of a step's rewards."""
import dataclasses
import math
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


def metrics_of(steps=STEPS, epochs=1, ref=None, vllm=(0.0, 0.0), **changes):
    """Metrics of these optimizer steps, lists of packs of completions, whose advantage is 1.

    log pi_ref is log pi before the steps plus `ref`; vLLM's log-prob of the first token of each
    completion is log pi plus vllm[number of the optimizer step].
    """
    cfg = make_config(correction="none", mismatch_bound=1e9, kl_coef=0.1 * (ref is not None))
    cfg = dataclasses.replace(cfg, **changes)
    policy, packed = Given(), []
    for packs, shift in zip(steps, vllm):
        tokens, packed_step = sum(len(ids) for pack in packs for ids in pack), []
        for pack in packs:
            batch = nr.collate([nr.Rollout([i], ids, "", False,
                                           [-t / 8 + shift * (k == 0) for k, t in enumerate(ids)],
                                           advantages=[1.0] * len(ids), weight=1 / tokens)
                                for i, ids in enumerate(pack)])
            batch.old = -batch.targets / 8
            batch.ref = None if ref is None else batch.old + ref
            packed_step.append(batch)
        packed.append(packed_step)
    return stats.step_means([nr.update(policy, batches, cfg)
                             for _ in range(epochs) for batches in packed])


@pytest.mark.parametrize("epochs", [1, 2])
def test_metrics_are_means_over_the_tokens_of_all_optimizer_steps(group, epochs):
    """Entropies: 8 + 16 = 24 of 2 tokens, 24 + 72 = 96 of 6: 120 / 8 = 15; of the means 14."""
    m = metrics_of(epochs=epochs, ref=0.5)
    tokens, moved = [2, 6] * epochs, [x / 4 for x in range(2 * epochs)]  # log pi - log pi_old

    def mean(values):
        return sum(n * x for n, x in zip(tokens, values)) / sum(tokens)

    close(m["entropy"], 15, 1e-6)
    close(m["ratio"], mean([math.exp(x) for x in moved]), 1e-6)
    close(m["kl"], mean([math.exp(0.5 - x) - (0.5 - x) - 1 for x in moved]), 1e-6)
    close(m["clipped"], mean([math.exp(x) > 1.2 for x in moved]), 1e-6)
    close(m["grad_norm"], sum(2.0 ** k for k in range(1, 2 * epochs + 1)) / (2 * epochs))
    close(m["skipped"], 1 / (2 * epochs))
    assert "tokens" not in m and stats.step_means([]) == {}


@pytest.mark.parametrize("vllm", [(0.75, 0.25), (0.25, 0.75)])
def test_the_largest_mismatch_is_that_of_all_optimizer_steps_whichever_has_it(group, vllm):
    """vLLM's log-prob differs in the first token of each completion: two per optimizer step."""
    m = metrics_of([STEPS[0], [[[8, 8, 8]], [[24, 24, 24]]]], vllm=vllm)
    shifted = (2 * 0.25 + 2 * 0.75) / 8
    close([m["mismatch/max"], m["mismatch/mean_abs"]], [0.75, shifted], 1e-6)


def test_the_effective_sample_size_is_that_of_all_tokens(group):
    """Weights e^-0.5 for the first token of each completion, 1 for the others: 4 of 8 tokens."""
    m = metrics_of(vllm=(0.5, 0.5), correction="token_truncate", correction_cap=10.0)
    w = [math.exp(-0.5)] * 4 + [1.0] * 4
    close(m["correction/w"], sum(w) / 8, 1e-6)
    close(m["correction/ess"], sum(w) ** 2 / (8 * sum(x * x for x in w)), 1e-6)


@pytest.mark.parametrize("gate", ["clip", "soft", "squared"])
def test_clipped_counts_the_tokens_without_a_gradient(gate):
    points = [(r, a) for r in (0.5, 1.0, 2.0, 1e-10, 1e10) for a in (1.0, -1.0)]  # 1e10 > e^20
    ratio, advantage = torch.tensor(points, dtype=torch.float64).T  # (R,), (R,)
    batch = SimpleNamespace(lengths=torch.ones(len(points)), sequence_ids=torch.arange(len(points)),
                            advantage=advantage, weight=torch.ones_like(ratio), vllm_logps=0.0)
    cfg = dataclasses.replace(make_config(), gate=gate, correction="none")
    logp = ratio.log().requires_grad_()  # (R,)
    loss, terms = nr.policy_loss(logp, torch.zeros_like(ratio), None, batch, cfg)
    [gradient] = torch.autograd.grad(loss, logp)
    assert terms["clipped"].tolist() == (gradient == 0).tolist()
    assert gate != "squared" or not terms["clipped"].any()  # its penalty holds the ratio everywhere


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
