"""The exercises of docs/exercises.md: what each function has to do, with numbers derived by hand.

`python docs/exercise.py 3` makes a copy in which the functions of exercise 3 are empty. There its test
fails until they are written: `pytest -m exercise_3`. Here all pass. `make exercises` proves both.
"""
import math
from types import SimpleNamespace

import pytest
import torch
from test_checksum import Fused

import data
import nano_rlvr as nr
import rewards
import runtime.batch
import runtime.model
import runtime.sampler
from conftest import EPS, make_config
from runtime import stats
from runtime.batch import pack
from runtime.model import HeadLogps

LOG_2, LOG_3 = math.log(2), math.log(3)


def check(yours, wanted, hint, bound=1e-9):
    """Compares numbers, lists or tensors; `hint` says what the wanted numbers are."""
    yours, wanted = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (yours, wanted))
    same = yours.shape == wanted.shape and torch.allclose(yours, wanted, rtol=0, atol=bound)
    assert same, f"{hint}\nyours  {yours.tolist()}\nwanted {wanted.tolist()}"


def tensor(*values, **options):
    return torch.tensor(values, dtype=torch.float64, **options)


def completion(tokens=1, prompt=(0,), reward=None, steps=(), **fields):
    tokens = [1] * tokens if isinstance(tokens, int) else tokens
    return nr.Rollout(list(prompt), tokens, "", False, [0.0] * len(tokens), reward=reward,
                      steps=list(steps), **fields)


@pytest.mark.exercise_1
def test_k3_is_never_negative_and_its_mean_is_the_kl():
    """pi = (3/4, 1/4), ref = (1/2, 1/2): d = log 2/3 and log 2, k3 = 2/3 - log 2/3 - 1 and 1 - log 2."""
    pi, ref = tensor(3 / 4, 1 / 4), tensor(1 / 2, 1 / 2)
    values = nr.k3(pi.log(), ref.log())
    check(values, [math.log(3 / 2) - 1 / 3, 1 - LOG_2], "exp(d) - d - 1 with d = log ref - log pi")
    exact = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)
    check((pi * values).sum(), exact, "the mean over tokens that pi samples is KL(pi || ref)")
    logp = tensor(-1.0, -1.0, requires_grad=True)
    nr.k3(logp, tensor(-1.0 + LOG_2, -1.0 - LOG_2)).sum().backward()
    check(logp.grad, [-1, 1 / 2], "the gradient is 1 - exp(d): where ref is higher, log pi has to rise")
    logits = pi.log().requires_grad_()
    (pi * nr.k3(logits.log_softmax(0), ref.log())).sum().backward()  # pi, the sampler, has no gradient
    check(logits.grad, pi - ref, "the mean gradient over tokens that pi samples is that of KL(ref || pi)")


@pytest.mark.exercise_2
def test_an_advantage_is_a_z_score_within_the_group():
    """Rewards 1, 0, 0, 1: mean 1/2, deviation 1/2. 3, 0, 0, 0: mean 3/4, variance 27/16."""
    groups = tensor([1, 0, 0, 1], [3, 0, 0, 0], [1, 1, 1, 1])
    wanted = [[1, -1, -1, 1], [3**0.5, *[-(3**-0.5)] * 3], [0] * 4]
    check(nr.group_advantages(groups, eps=1e-12), wanted,
          "(r - mean) / (std + eps) per row; std divides by n, not n - 1; a flat group gets 0", 1e-6)
    check(nr.group_advantages(groups[:1], eps=0.5)[0], [0.5, -0.5, -0.5, 0.5], "eps is added to the std")
    check(nr.group_advantages(tensor([1, 0, math.nan, math.nan]), eps=1e-12), [[1, -1, 0, 0]],
          "NaN is no verdict: it is left out of mean and std, and its advantage is 0", 1e-6)
    check(nr.group_advantages(groups[:1], "leave_one_out", "none"),
          [[2 / 3, -2 / 3, -2 / 3, 2 / 3]], "leave_one_out: the mean of the other three is 1/3 or 2/3")
    check(nr.group_advantages(groups[:2], "batch", "none"), (groups[:2] - 5 / 8).tolist(),
          "batch: one mean over all groups, 5/8")


QUADRANTS = [  # ratio, advantage, objective, gradient with --clip_low 0.2 --clip_high 0.28
    (1.5, +1, 1.28, 0.0),  # has risen far enough: no gradient
    (0.5, +1, 0.50, 1.0),  # has fallen although it was good: full gradient
    (1.5, -1, -1.5, -1.),  # has risen although it was bad: full gradient
    (0.5, -1, -0.8, 0.0),  # has fallen far enough: no gradient
    (1.1, +1, 1.10, 1.0), (0.9, -1, -0.9, -1.),  # inside of [0.8, 1.28] nothing is bounded
]


@pytest.mark.exercise_3
@pytest.mark.parametrize("ratio, advantage, objective, gradient", QUADRANTS)
def test_the_clip_stops_a_token_that_has_moved_far_enough_and_never_one_that_must_come_back(
        ratio, advantage, objective, gradient):
    cfg = nr.Config(clip_low=0.2, clip_high=0.28)
    x = tensor(ratio, requires_grad=True)
    value, bounded = nr.gated_objective(x, x.log(), x.log(), tensor(advantage), cfg)
    check(value, [objective], f"ratio {ratio}, advantage {advantage}: min(ratio * A, clip(ratio) * A)")
    [slope] = torch.autograd.grad(value.sum(), x, allow_unused=True)
    check([0.0] if slope is None else slope, [gradient], f"ratio {ratio}, advantage {advantage}: gradient")
    assert bool(bounded) == (gradient == 0), "the second value says whether the bound is active"


def test_the_clip_of_the_ppo_paper_and_nothing_else_solves_exercise_3(monkeypatch):
    def ppo_clip(ratio, log_ratio, logp, advantage, cfg):  # arXiv:1707.06347, eq. 7
        clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantage
        return torch.minimum(ratio * advantage, clipped), clipped < ratio * advantage

    monkeypatch.setattr(nr, "gated_objective", ppo_clip)
    for case in QUADRANTS:
        test_the_clip_stops_a_token_that_has_moved_far_enough_and_never_one_that_must_come_back(*case)


@pytest.mark.exercise_4
def test_the_weight_of_a_token_makes_a_weighted_sum_a_mean():
    """Two sequences of 1 and 3 tokens. Then the same, of which a third (length 0) is masked."""
    for aggregate, plain, masked in (("sequence", [1 / 2, 1 / 6], [1 / 3, 1 / 9, 0]),
                                     ("token", [1 / 4, 1 / 4], [1 / 4, 1 / 4, 0]),
                                     ("constant", [1 / 16, 1 / 16], [1 / 24, 1 / 24, 0])):
        check(nr.token_weights([1, 3], aggregate, max_tokens=8), plain, f"{aggregate}, lengths 1 and 3")
        weights = nr.token_weights([1, 3, 0], aggregate, 8)
        check(weights, masked, f"{aggregate}: length 0 counts as a sequence")
        halves = [nr.token_weights([n], aggregate, 8, sequences=2, tokens=4)[0] for n in (1, 3)]
        check(halves, plain, f"{aggregate}: one sequence per rank, with the counts of both ranks")


@pytest.mark.exercise_5
def test_the_loss_is_0_while_the_gradient_is_not():
    """A pack with 2 of the step's 4 sequences, of 2 and 1 tokens with advantages +1 and -1: w A sums to 0."""
    batch = SimpleNamespace(lengths=torch.tensor([2, 1]), sequence_ids=torch.tensor([0, 0, 1]),
                            weight=tensor(1 / 8, 1 / 8, 1 / 4), advantage=tensor(1, 1, -1))

    def loss_and_gradient(logp, old, ref=None, **flags):
        logp = tensor(*logp, requires_grad=True)
        loss, sums = nr.policy_loss(logp, old, ref, batch, nr.Config(correction="none", **flags))
        loss.backward()
        return loss, logp.grad, sums

    on_policy = [-1 / 8, -1 / 8, 1 / 4]
    for flags in ({"ratio": "token"}, {"ratio": "sequence"}, {"gate": "soft"}, {"gate": "detach"}):
        loss, gradient, sums = loss_and_gradient([-1, -2, -3], None, **flags)
        check(gradient, on_policy, f"{flags}, on-policy: -w A; a ratio of 1 has a gradient")
        if "ratio" in flags:
            check(loss, 0, f"{flags}, on-policy: old None means old = logp, every ratio is 1")
    _, gradient, _ = loss_and_gradient([-1, -2, -3], None, ratio="product")
    check(gradient, [-1 / 4, -1 / 4, 1 / 4], "product: a token moves the ratio of its sequence")
    assert sums["tokens"] == 3 and {"ratio", "clipped", "loss"} <= sums.keys(), "sums for the metrics"

    doubled = [-1 + LOG_2, -2, -3 + LOG_2]  # the first and the last token are twice as likely as before
    loss, gradient, _ = loss_and_gradient(doubled, tensor(-1, -2, -3))
    check(loss, -1.2 / 8 - 1 / 8 + 2 / 4, "ratios 2, 1, 2: only the first is clipped, to 1.2")
    check(gradient, [0, -1 / 8, 2 / 4], "clipped: no gradient; else -w A ratio")
    loss, gradient, _ = loss_and_gradient([-1, -2, -3], None, tensor(-1 + LOG_2, -2, -3), kl_coef=0.1)
    check(loss, 0.1 / 8 * (1 - LOG_2), "kl_coef * k3 is added per token, with the weight of the token")
    check(gradient, [-1 / 8 - 0.1 / 8, -1 / 8, 1 / 4], "the KL raises the first token to the reference")


@pytest.mark.exercise_6
def test_the_importance_weight_corrects_for_vllms_numerics():
    """pi_trainer / pi_vllm = 3, 1/2 and 1/3. Geometric means of the two sequences: sqrt(3/2) and 1/3."""
    batch = SimpleNamespace(lengths=torch.tensor([2, 1]), sequence_ids=torch.tensor([0, 0, 1]))
    mismatch = tensor(LOG_3, -LOG_2, -LOG_3)
    for correction, wanted in (("token_truncate", [2, 1 / 2, 1 / 3]), ("token_mask", [0, 1 / 2, 1 / 3]),
                               ("sequence_mask", [1, 1, 0])):
        cfg = nr.Config(correction=correction, correction_cap=2.0)
        check(nr.importance(mismatch, batch, cfg), wanted, f"--correction {correction}, cap 2")
        far = nr.importance(mismatch + 1000, batch, cfg)
        assert far.isfinite().all(), f"--correction {correction}: exp(1000) is inf, and 0 * inf is NaN"


@pytest.mark.exercise_7
def test_packs_are_filled_first_fit_with_the_largest_group_first():
    """Budget 8. Groups: prompt 2 has 9 + 3 tokens, prompt 0 has 6 + 4, prompt 1 has 5. The 9 goes alone."""
    rollouts = [completion(n - 1, prompt=[p]) for p, n in ((0, 6), (0, 4), (1, 5), (2, 3), (2, 9))]
    packs = [[(r.prompt[0], len(r)) for r in members] for members in pack(rollouts, 8)]
    assert packs == [[(2, 9)], [(0, 4), (2, 3)], [(0, 6)], [(1, 5)]], (
        "largest group first, in it the longest first; each into the first pack with room, else a new one; "
        f"a pack lists its longest first. (prompt, length) of yours: {packs}")


@pytest.mark.exercise_8
def test_a_row_holds_each_prompt_once_and_no_padding():
    """Prompt 5 6 with completions 7 and 8 9, prompt 3 with 4: 5 6 7 8 9 3 4. A tool wrote the 9."""
    a = completion([7], prompt=[5, 6], advantages=[1.0], weight=2.0)
    b = completion([8, 9], prompt=[5, 6], sampled=[True, False], advantages=[-1.0, 0.0], weight=3.0)
    b.vllm_logps = [-0.5, 0.0]
    batch = nr.collate([a, b, completion([4], prompt=[3], advantages=[0.5], weight=4.0)])
    for name, wanted, hint in (
            ("input_ids", [[5, 6, 7, 8, 9, 3, 4]], "one row; a prompt stands before its first completion"),
            ("position_ids", [[0, 1, 2, 2, 3, 0, 1]], "8 and 9 do not know that they stand behind 7"),
            ("cu_seqlens_q", [0, 3, 5, 7], "queries: 5 6 7, then 8 9, then 3 4"),
            ("cu_seqlens_k", [0, 3, 7, 9], "keys: 5 6 7, then 5 6 8 9, then 3 4"),
            ("kv_index", [0, 1, 2, 0, 1, 3, 4, 5, 6], "where in the row the keys are"),
            ("predictors", [1, 1, 5], "the place before each sampled token: 6 predicts both 7 and 8"),
            ("targets", [7, 8, 4], "the sampled tokens; what a tool wrote is only read"),
            ("sequence_ids", [0, 1, 2], "the sequence of each target"),
            ("lengths", [1, 1, 1], "targets per sequence"),
            ("advantage", [1, -1, 0.5], "of each target"),
            ("weight", [2, 3, 4], "of each target"),
            ("vllm_logps", [0, -0.5, 0], "of each target"),
            ("max_seqlen", 4, "tokens of the longest sequence")):
        check(getattr(batch, name), wanted, f"{name}: {hint}")
    assert batch.old is None and batch.ref is None, "old and ref are filled later"


@pytest.mark.exercise_9
def test_the_head_computes_its_gradient_without_the_matrix_of_logits():
    """logits = h w / T = log 3 and 0: p = 3/4 and 1/4. d logp / d logits of the first: 1/4 and -1/4."""
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[LOG_3 / 2], [0.0]], requires_grad=True)
    logp, _ = HeadLogps.apply(hidden, weight, torch.tensor([0]), 0.5, 1)  # T = 1/2, chunks of one token
    (2 * logp.sum()).backward()
    check(weight.grad, [[1.0], [-1.0]], "d weight = grad_logp * (onehot - p) * hidden / T", 10 * EPS)
    check(hidden.grad, [[LOG_3 / 2]], "d hidden = grad_logp * (onehot - p) @ weight / T", 10 * EPS)

    def gradients(compute):
        leaves = [torch.linspace(-1, 1, 3 * n).view(n, 3).requires_grad_() for n in (4, 7)]
        (compute(*leaves) * torch.tensor([1.0, -2.0, 0.5, 3.0])).sum().backward()
        return [leaf.grad for leaf in leaves]

    targets = torch.tensor([6, 0, 3, 3])  # a vocabulary of 7 in chunks of 3, 3 and 1
    wanted = gradients(lambda h, w: (h @ w.T / 0.7).log_softmax(-1)[range(4), targets])
    chunked = gradients(lambda h, w: HeadLogps.apply(h, w, targets, 0.7, 3)[0])
    for yours, autograd in zip(chunked, wanted):
        check(yours, autograd, "4 rows, 3 chunks; wanted: autograd on the full matrix", 200 * EPS)


@pytest.mark.exercise_10
@pytest.mark.parametrize("answer, numbers, target, reward", [
    ("(2 + 3) * 4", [2, 3, 4], 20, 1.0),
    ("(2 + 3) \\times 4 = 20", [4, 3, 2], 20, 1.0),  # LaTeX's sign, and what it claims is true
    ("8 / (3 - 8/3)", [3, 3, 8, 8], 24, 1.0),  # exact: in floating point it is 23.99999999999999
    ("2 * 3 * 4 = 20", [2, 3, 4], 20, 0.0),  # it is 24
    ("2 * 3 * 4 = 20", [2, 3, 4], 24, 0.0),  # it claims something else
    ("4 * 5", [2, 3, 4], 20, 0.0),  # other numbers
    ("2 + 2 * 3 * 4 - 2 - 4", [2, 3, 4], 20, 0.0),  # a number twice
    ("23 - 4 + 1", [2, 3, 4, 1], 20, 0.0),  # 23 is not 2 and 3
    ("2 ** 3 * 4", [2, 3, 4], 32, 0.0),  # 9**9**9 would never end
    ("4 / (3 - 3)", [3, 3, 4], 20, 0.0), ("(2 + 3", [2, 3], 5, 0.0), ("", [2, 3], 5, 0.0),
    ("__import__('os').getpid() * 2", [2], 20, 0.0),  # the text comes from a model: never eval() it
])
def test_a_verifier_counts_what_is_right_and_runs_nothing_of_the_model(answer, numbers, target, reward):
    texts = [f"<think>2 + 3 = 5</think><answer>{answer}</answer>"]
    given = rewards.countdown_reward(texts, numbers=[numbers], target=[target])
    assert given == [reward], f"{answer!r} with {numbers} for {target}: {given}, wanted {[reward]}"


@pytest.mark.exercise_11
def test_maxrl_divides_by_the_mean_of_the_group():
    """Rewards 1, 0, 0, 0 have mean 1/4: (1 - 1/4) / (1/4) = 3, and -1. Mean 3/4: 1/3 and -1."""
    hard, easy, none = [1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]
    advantages = nr.group_advantages(tensor(hard, easy, none), scale="mean", eps=0.0)
    check(advantages, [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0, 0, 0, 0]],
          "(r - mean) / (mean + eps); a group without a right answer gets 0, not 0 / 0")
    negative = nr.group_advantages(tensor([-1, 0, -1, 0]), scale="mean", eps=0.0)
    check(negative.flatten(), [0] * 4, "a mean that is not positive would turn the sign: advantage 0")
    scores = tensor(0.3, -1.2, 0.8, 2.0)  # grad log pi of each sample, as one number
    check((advantages[1] * scores).mean(), (0.3 - 1.2 + 0.8) / 3 - (0.3 - 1.2 + 0.8 + 2.0) / 4,
          "its gradient: the mean score of the right samples minus that of all")


@pytest.mark.exercise_12
def test_each_step_is_judged_and_each_token_gets_what_comes_after_it():
    text = "<think>14+2=16\n16+9=26</think><answer>25</answer>"
    [steps] = rewards.steps_reward([text], question="14+2+9")
    assert steps == [(14, 1.0), (22, 0.0), (49, 1.0)], (
        f"16 is right, 26 is not, the answer is right whatever the totals were; yours: {steps}")
    guesses = ["<think></think><answer>25</answer>"] * 2
    [guess, no_sum] = rewards.steps_reward(guesses, question=["14+2+9", "Who?"])
    assert guess == [(34, 1.0)] and no_sum is None, "a guess is one step; no sum, no verdict"
    text = "<think>14+2=16 =16 =25</think><answer>25</answer>"
    [repeated] = rewards.steps_reward([text], question="14+2+9")
    assert [value for _, value in repeated] == [1, 0, 0, 1], "a total that is repeated does not pay"

    # two steps that end with tokens 2 and 4 of 5, advantages 1 and -1; one outcome, advantage 1/2
    stepwise, outcome = completion(5, steps=[(2, 1.0), (4, 0.0)]), completion(3, reward=1.0)
    runtime.batch.set_advantages([[stepwise, outcome]], tensor([1, -1, 0.5, 0]))
    check(stepwise.advantages, [0, 0, -1, -1, 0], "the sum over the steps that end at the token or later")
    check(outcome.advantages, [0.5] * 3, "an outcome is one step that ends with the last token")


@pytest.mark.exercise_13
def test_pass_at_k_is_unbiased_and_the_majority_ignores_those_without_an_answer():
    """n = 4, one right: of the 6 pairs, 3 hold it. 1 - (3/4)^2 = 7/16 is the biased estimate."""
    check([stats.pass_at_k(4, 1, k) for k in (1, 2, 4)], [1 / 4, 1 / 2, 1], "1 - C(n - c, k) / C(n, k)")
    check([stats.pass_at_k(4, 3, 2), stats.pass_at_k(4, 0, 4)], [1, 0], "3 of 4: every pair has one")
    assert stats.majority_vote([None, "4", "5", "5", None, None]) == 2, "None does not vote"
    assert stats.majority_vote(["4", "5", "5", "4"]) == 0, "ties go to the answer that was seen first"
    assert stats.majority_vote([None, None]) is None, "nobody gave an answer"


@pytest.mark.exercise_14
def test_the_batch_of_a_step_needs_no_memory_of_the_steps_before():
    """5 examples in batches of 2: the third batch ends the first epoch and begins the second."""
    steps = [data.batch_at("abcde", step, 2, seed=3) for step in range(5)]
    order = "".join("".join(batch) for batch in steps)
    assert sorted(order[:5]) == sorted(order[5:]) == list("abcde"), f"each epoch has each once: {order}"
    wanted = [data.epoch_order(5, 3, epoch) for epoch in (0, 1)]
    assert order == "".join("abcde"[i] for epoch in wanted for i in epoch), "the order of epoch_order"
    assert data.batch_at("abcde", 4, 2, seed=3) == steps[4], "a step has one batch: --resume"
    for step in range(5):
        parts = [data.batch_at("abcdefgh", step, 4, seed=1, rank=rank, world=2) for rank in (0, 1)]
        whole = data.batch_at("abcdefgh", step, 4, seed=1)
        assert parts[0] + parts[1] == whole, "two ranks share the batch of one"


@pytest.mark.exercise_15
def test_a_checksum_sees_one_bit_and_two_values_that_are_swapped():
    """The bits of 1.0 and -2.0 as int32 are 0x3f800000 = 1065353216 and 0xc0000000 = -2^30."""
    f = runtime.sampler.factors(torch.device("cpu")).tolist()
    yours = [value % 2**64 for value in runtime.sampler.checksum(torch.tensor([1.0, -2.0])).tolist()]
    wanted = [(1065353216 * f[0] - 2**30 * f[1]) % 2**64]
    assert yours == wanted, f"sum of bits * factor modulo 2^64: {yours}, wanted {wanted}"
    x = torch.arange(2.0 * runtime.sampler.CHUNK + 3).view(-1, 1)
    assert runtime.sampler.checksum(x).shape == (3,), "one sum per CHUNK values, and one for the rest"
    for what, i, j in (("values", 0, 1), ("chunks", 5, 5 + runtime.sampler.CHUNK), ("the last", -1, -2)):
        y = x.clone()
        y[[i, j]] = x[[j, i]]
        assert not torch.equal(runtime.sampler.checksum(x), runtime.sampler.checksum(y)), f"{what} swapped: not seen"
    zeros = torch.zeros(3, dtype=torch.bfloat16)
    same = torch.equal(runtime.sampler.checksum(zeros), runtime.sampler.checksum(-zeros))
    assert not same, "0.0 and -0.0 differ in one bit"


class FakeVllm:
    """Holds the weights of the bundled model as vLLM does, and loads others as vLLM does.

    forgets: name of a tensor that a broken version does not load.
    """

    def __init__(self, weights, forgets=""):
        self.model, self.forgets, self.cache_is_stale = Fused(weights), forgets, True
        self.on_disk = {name: w.clone() for name, w in weights.items()}

    def collective_rpc(self, name, kwargs=None):
        assert name == "reload_weights", name
        # without an iterator, the old checkpoint is read again
        weights = dict((kwargs or {}).get("weights_iterator") or self.on_disk)
        shards, _ = runtime.sampler.by_checkpoint_name(self.model, {n: w.shape for n, w in weights.items()})
        for name in shards.keys() - {self.forgets}:
            shards[name].tensor.copy_(weights[name])

    def apply_model(self, function):
        return [function(self.model)]

    def reset_prefix_cache(self):
        self.cache_is_stale = False


@pytest.mark.exercise_16
def test_after_a_sync_vllm_has_the_new_weights_and_a_broken_sync_stops_the_run(group):
    policy = SimpleNamespace(module=SimpleNamespace(model=runtime.model.load_model(make_config())))
    llm = FakeVllm(policy.module.model.state_dict())
    broken = FakeVllm(policy.module.model.state_dict(), forgets="model.layers.2.mlp.down_proj.weight")
    with torch.no_grad():  # a step of training
        for p in policy.module.model.parameters():
            p += 1e-3
    nr.sync_weights(policy, llm)
    norm = llm.model.get_submodule("model.norm").weight
    assert torch.equal(norm, policy.module.model.model.norm.weight), (
        "vLLM has the old weights: without weights_iterator, reload_weights reads the old checkpoint")
    assert not llm.cache_is_stale, "cached keys belong to the old weights: sleep.wake_kv_cache"
    with pytest.raises(RuntimeError) as error:
        nr.sync_weights(policy, broken)
    assert "layers.2.mlp.down_proj.weight" in str(error.value), "the error names the tensor"
