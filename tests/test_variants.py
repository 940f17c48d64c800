"""The family's parts that TRL has no counterpart for, or that deserve a case by hand, in float64 (conftest).
The rest of it: test_math, test_trl."""
import dataclasses
import math
import random
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from conftest import EXACT, close, make_config, within

import data
import nano_rlvr as nr

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("in_float64")]
NAN = math.nan
EOS = 256


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# ---- advantages


def test_batch_baseline_subtracts_the_mean_of_all_verdicts():
    r = tensor([1.0, 0.0, 0.0], [1.0, 1.0, NAN])  # five verdicts, mean 3/5, variance 3/5 * 2/5
    close(nr.group_advantages(r, "batch", "none"), [[0.4, -0.6, -0.6], [0.4, 0.4, 0.0]])
    close(nr.group_advantages(r, "batch", "batch", eps=0.0)[0, 0], 0.4 / math.sqrt(6 / 25))


def test_running_baseline_subtracts_the_number_it_is_given():
    close(nr.group_advantages(tensor([1.0, 0.0], [NAN, 0.5]), "running", "none", running=0.3), [[0.7, -0.3], [0.0, 0.2]])


def test_no_baseline_and_no_scale_is_the_reward():
    close(nr.group_advantages(tensor([1.0, 0.0], [NAN, 1.0]), "none", "none"), [[1.0, 0.0], [0.0, 1.0]])


def test_decorrelated_advantage_of_a_case_by_hand():
    """Advantages (-1/3, -1/3, 2/3), centred lengths (-1, 0, 1): the projection is 1/2 of the lengths. Equal lengths take nothing."""
    r = tensor([0.0, 0.0, 1.0], [0.0, 0.0, 1.0])
    a = nr.group_advantages(r, "group", "none", lengths=torch.tensor([[1, 2, 3], [7, 7, 7]]))
    close(a, [[1 / 6, -1 / 3, 1 / 6], [-1 / 3, -1 / 3, 2 / 3]])


def test_decorrelated_advantages_are_orthogonal_to_length_and_still_sum_to_0():
    torch.manual_seed(0)
    r, lengths = torch.randn(6, 8, dtype=torch.float64), torch.randint(1, 3000, (6, 8))
    r[2, 3] = r[4, :6] = NAN
    plain, a = (nr.group_advantages(r, lengths=x) for x in (None, lengths))
    known = (~r.isnan()).double()
    x = (lengths - (lengths * known).sum(1, keepdim=True) / known.sum(1, keepdim=True)) * known
    assert ((plain * x).sum(1).abs() > 1e-2 * x.norm(dim=1)).all()  # there was something to take away
    within(((a * x).sum(1).abs() / x.norm(dim=1)).max(), EXACT)
    within(a.sum(1).abs().max(), EXACT)
    assert a[r.isnan()].eq(0).all()


# ---- the ratio, its gate and the correction: one sequence of two tokens and one of three


def hand(old, vllm=(0.0,) * 5, advantage=(1.0,) * 5, sizes=(2, 3)):
    sizes = torch.tensor(sizes)
    return SimpleNamespace(completion_lengths=sizes, sequence_ids=torch.arange(len(sizes)).repeat_interleave(sizes),
                           weight=tensor(0.1, 0.2, 0.3, 0.4, 0.5), advantage=tensor(*advantage), old=tensor(*old),
                           vllm_logps=tensor(*vllm))


def single(old, advantage):
    """Every token its own sequence, of weight 1."""
    n = len(old)
    return SimpleNamespace(completion_lengths=torch.ones(n), sequence_ids=torch.arange(n), weight=tensor(*[1.0] * n),
                           advantage=tensor(*advantage), old=tensor(*old))


def loss_and_gradient(batch, logp, **changes):
    cfg = dataclasses.replace(nr.Config(), **({"correction": "none", "clip_low": 0.2, "clip_high": 0.28} | changes))
    logp = tensor(*logp).requires_grad_()
    loss, sums = nr.policy_loss(logp, batch.old, None, batch, cfg)
    loss.backward()
    return loss.item(), logp.grad.tolist(), sums


@pytest.mark.parametrize("level, ratios", [("token", [math.exp(x) for x in (0.1, -0.05, 0.02, 0.03, 0.1)]),
                                           ("sequence", [math.exp(0.025)] * 2 + [math.exp(0.05)] * 3),
                                           ("product", [math.exp(0.05)] * 2 + [math.exp(0.15)] * 3)])
def test_ratio_of_a_token_a_sequences_mean_and_its_product(level, ratios):
    batch = hand(old=[-1.0, -2.0, -3.0, -1.0, -2.0])
    loss, gradient, sums = loss_and_gradient(batch, [-0.9, -2.05, -2.98, -0.97, -1.9], ratio=level)
    w = batch.weight.tolist()
    close([loss, sums["ratio"]], [-sum(a * b for a, b in zip(w, ratios)), sum(ratios)])
    share = {"token": None, "sequence": (1 / 2, 1 / 3), "product": (1, 1)}[level]  # what a log-prob does to its sequence's log-ratio
    wanted = ([-a * b for a, b in zip(w, ratios)] if level == "token" else
              [-share[0] * ratios[0] * (w[0] + w[1])] * 2 + [-share[1] * ratios[2] * (w[2] + w[3] + w[4])] * 3)
    close(gradient, wanted)


@pytest.mark.parametrize("ratio, advantage, loss, gradient", [
    (1.4, -1.0, 1.4, 1.4),  # beyond clip_high, below delta: pulled back as by PPO
    (5.0, -1.0, 3.0, 0.0),  # beyond delta: its weight in the loss is bounded, and it has no gradient
    (5.0, +1.0, -1.28, 0.0),  # clip_high is the tighter bound
    (0.5, -1.0, 0.8, 0.0), (0.9, -1.0, 0.9, 0.9),  # delta is nothing to these
])
def test_delta_bounds_the_ratio_of_negative_advantages(ratio, advantage, loss, gradient):
    got, grad, sums = loss_and_gradient(single([0.0], [advantage]), [math.log(ratio)], delta=3.0)
    close([got, grad[0]], [loss, gradient])
    assert int(sums["clipped"]) == (loss != -ratio * advantage)


def test_detached_ratio_weighs_the_log_prob_and_is_bounded_from_above_only():
    logp = [math.log(0.01), math.log(5.0) - 1, math.log(1.1) - 1]
    loss, gradient, sums = loss_and_gradient(single([0.0, -1.0, -1.0], [1.0, 1.0, -2.0]), logp, gate="detach", clip_high=3.0)
    close(gradient, [-0.01, -4.0, 2.2])  # 5 is bounded to 1 + 3; nothing is ever without a gradient
    close(loss, sum(g * x for g, x in zip(gradient, logp)))
    assert int(sums["clipped"]) == 1


def test_soft_gate_is_sapo():
    """f(r) = 4/tau sigmoid(tau (r - 1)) A with tau 1 above 0 and 1.05 below; f'(1) = A, as without a gate, and it fades on both
    sides like 4 s (1 - s), faster for tokens that are pushed down."""
    ratios = (1.0, 1.0, 2.5, 2.5, 0.2)
    advantage = (1.0, -1.0, 1.0, -1.0, 1.0)
    loss, gradient, _ = loss_and_gradient(single([0.0] * 5, advantage), [math.log(r) for r in ratios], gate="soft")
    tau = [1.0 if a > 0 else 1.05 for a in advantage]
    s = [1 / (1 + math.exp(-t * (r - 1))) for t, r in zip(tau, ratios)]
    close(loss, -sum(4 / t * x * a for t, x, a in zip(tau, s, advantage)))
    close(gradient, [-a * 4 * x * (1 - x) * r for a, x, r in zip(advantage, s, ratios)])
    close(gradient[:2], [-1.0, 1.0])
    assert abs(gradient[3]) < abs(gradient[2]) < 2.5


def test_corrections_of_a_case_by_hand():
    """Ratios pi_trainer / pi_vllm of (1/4, 2) and (1, 3, 9) with a cap of 2; their geometric means are 0.71 and 3."""
    gap = [math.log(x) for x in (1 / 4, 2, 1, 3, 9)]
    wanted = {"none": [1, 1, 1, 1, 1], "token_truncate": [1 / 4, 2, 1, 2, 2], "token_mask": [1 / 4, 2, 1, 0, 0],
              "sequence_mask": [1, 1, 0, 0, 0]}
    batch = hand(old=gap)  # vLLM's log-probs are 0
    for correction, weights in wanted.items():
        loss, gradient, _ = loss_and_gradient(batch, gap, correction=correction)  # on-policy
        close(gradient, [-w * x for w, x in zip(weights, batch.weight.tolist())])
        close(loss, sum(gradient))
    assert loss_and_gradient(hand(old=gap), gap, correction="sequence_mask", correction_cap=3.5)[1][-1] < 0  # 3 is inside now
    less = [-x for x in gap]  # the second mean is 1/3, below 1/2
    assert loss_and_gradient(hand(old=less), less, correction="sequence_mask")[1][2:] == [0, 0, 0]


def test_sequence_mask_equals_a_loop_over_sequences():
    torch.manual_seed(0)
    sizes = torch.randint(1, 30, (50,))
    batch = SimpleNamespace(completion_lengths=sizes, sequence_ids=torch.arange(50).repeat_interleave(sizes))
    gap = torch.randn(int(sizes.sum()), dtype=torch.float64) + torch.randn(50, dtype=torch.float64)[batch.sequence_ids]
    wanted = []
    for part in gap.split(sizes.tolist()):
        mean = math.prod(math.exp(x) for x in part.tolist()) ** (1 / len(part))
        wanted += [float(0.5 <= mean <= 2.0)] * len(part)
    got = nr.importance(gap, batch, make_config(correction="sequence_mask"))
    assert got.tolist() == wanted and 0 < sum(wanted) < len(wanted)


class Policy:
    """Duck-typed engine of update(): log-probs that were given, and a record of what was asked of it."""

    def __init__(self, *logps):
        self.logps, self.steps, self.grads = [tensor(*x).requires_grad_() for x in logps], 0, []

    def __call__(self, batch):
        logp = self.logps[len(self.grads)]
        return logp, torch.zeros_like(logp)

    def backward(self, loss):
        self.grads += torch.autograd.grad(loss, self.logps[len(self.grads)])

    def step(self):
        self.steps += 1

    def get_global_grad_norm(self):
        return 1.0


def test_update_reports_correction_over_all_packs():
    """Effective sample size as a share of T tokens: (sum w)^2 / (T sum w^2). Here over two packs, five tokens."""
    packs = [[nr.Rollout([0], [1] * n, "", False, [0.0] * n, advantage=1.0, weight=0.1)] for n in (2, 3)]
    gap = [math.log(x) for x in (1 / 4, 2, 1, 3, 9)]
    cfg = make_config(kl_coef=0.0, mismatch_bound=1e9, correction="token_mask")
    engine = Policy(gap[:2], gap[2:])
    metrics = nr.update(engine, packs, cfg)
    w = [1 / 4, 2, 1, 0, 0]
    close(metrics["correction/ess"], sum(w) ** 2 / (5 * sum(x * x for x in w)))
    close([metrics["correction/share"], metrics["correction/w"]], [2 / 5, sum(w) / 5])
    close(torch.cat(engine.grads), [-0.1 * x for x in w])
    assert engine.steps == 1
    even = nr.update(Policy([0.0] * 2, [0.0] * 3), packs, cfg)
    close(even["correction/ess"], 1)
    assert even["correction/share"] == 0
    without = nr.update(Policy([0.0] * 2, [0.0] * 3), packs, dataclasses.replace(cfg, correction="none"))
    assert not [name for name in without if "correction" in name]


# ---- weights of the sequences that push


def rollouts_of(*lengths, truncated=(), silent=()):
    return [nr.Rollout([0], [1] * n, "", i in truncated, [0.0] * n, reward=None if i in silent else 1.0) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("aggregate, weights", [
    ("sequence", [1 / 6, 0, 1 / 12]), ("token", [1 / 6, 0, 1 / 6]), ("constant", [1 / 24, 0, 1 / 24])])
def test_a_masked_truncated_completion_is_counted_as_a_sequence_but_not_by_its_tokens(aggregate, weights):
    """Lengths 2, 3 (cut off), 4: N = 3, 6 tokens are left, max_tokens = 8. As in TRL: what is masked does not lift the others."""
    cfg = make_config(aggregate=aggregate, mask_truncated=True, max_tokens=8)
    rollouts = rollouts_of(2, 3, 4, truncated={1})
    pushing = nr.assign_token_weights(rollouts, cfg)
    close([r.weight for r in rollouts], weights)
    assert [len(r.completion) for r in pushing] == [2, 4]
    assert len(nr.assign_token_weights(rollouts, dataclasses.replace(cfg, mask_truncated=False))) == 3


def test_weights_come_from_counts_over_all_ranks(monkeypatch):
    """A second rank with 3 sequences of 6 tokens in all."""
    monkeypatch.setattr(nr, "all_sum", lambda *counts: [a + b for a, b in zip(counts, (3, 6))])
    for aggregate, weight in (("sequence", 1 / (5 * 2)), ("token", 1 / 10), ("constant", 1 / (5 * 8))):
        pushing = nr.assign_token_weights(rollouts_of(2, 2), make_config(aggregate=aggregate, max_tokens=8))
        close([r.weight for r in pushing], [weight] * 2)


def test_a_completion_without_verdict_neither_pushes_nor_counts():
    rollouts = rollouts_of(2, 3, 4, silent={1})
    pushing = nr.assign_token_weights(rollouts, make_config(aggregate="sequence"))
    close([r.weight for r in pushing], [1 / 4, 1 / 8])
    assert rollouts[1] not in pushing


# ---- sampling: groups that teach, from an engine and a verifier that are duck-typed


class Sampler:
    """Duck-typed vLLM: completions are a function of prompt and seed; remembers the seeds."""

    def __init__(self, tokenizer=None):
        self.tokenizer, self.seeds, self.synced = tokenizer, [], 0

    def generate(self, prompts, params, use_tqdm):
        return [SimpleNamespace(outputs=[self.sample(p["prompt_token_ids"], s, j) for j in range(s.n)]) for p, s in zip(prompts, params)]

    def sample(self, prompt, params, j):
        self.seeds += [params.seed] * (j == 0)
        rng = random.Random(repr((prompt, params.seed, j)))
        tokens = [rng.randrange(256) for _ in range(rng.randint(1, 9))] + [EOS]
        return SimpleNamespace(token_ids=tokens, finish_reason="stop", logprobs=[{t: SimpleNamespace(logprob=-1.0)} for t in tokens])

    def get_tokenizer(self):
        return self.tokenizer or SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [str(x) for x in ids], get_vocab=dict)

    def collective_rpc(self, name, kwargs):
        self.synced += 1

    def reset_prefix_cache(self):
        pass


TRAIN = [{"question": str(i), "answer": str(i), "prompt_ids": [i % 200, i // 200]} for i in range(1000)]


def verifier(texts, question, **columns):
    """Every third question is one that the model gets half right; all others it gets right every time."""
    values = [float(i % 2 == 0 or int(q) % 3 != 0) for i, q in enumerate(question)]
    return values, {"half": values}, {"reward/timeouts": 1}


def questions(groups):
    return ["".join(str(r.prompt) for r in g[:1]) for g in groups]


def drawn_by_hand(cfg, step, draw):
    return [str(e["prompt_ids"]) for e in data.batch_at(TRAIN, step * (1 + cfg.resample) + draw, cfg.prompts, cfg.seed)]


def test_flat_groups_are_left_out_and_new_prompts_drawn_until_the_batch_is_full():
    cfg, metrics, llm = make_config(prompts=4, samples=2, drop_flat_groups=True, resample=9), {}, Sampler()
    groups, drawn = nr.collect_rollouts(cfg, llm, TRAIN, verifier, 5, metrics)
    assert len(groups) == 4 and all({r.reward for r in g} == {0.0, 1.0} for g in groups)
    every = [q for draw in range(metrics["draws"]) for q in drawn_by_hand(cfg, 5, draw)]
    half = {str(e["prompt_ids"]) for e in TRAIN if int(e["question"]) % 3 == 0}
    assert questions(drawn) == every and questions(groups) == [q for q in every if q in half][:4]
    assert 1 < metrics["draws"] < 10 and metrics["reward/timeouts"] == metrics["draws"]  # counts add up over the draws
    full = [len([q for q in every[:4 * n] if q in half]) >= 4 for n in range(1, metrics["draws"] + 1)]
    assert full == [False] * (metrics["draws"] - 1) + [True]  # and no draw too many
    assert len(set(llm.seeds)) == len(llm.seeds) == len(every)  # no two requests share their noise


def test_draws_end_after_resample_rounds_with_what_there_is():
    cfg, metrics = make_config(prompts=4, samples=2, drop_flat_groups=True, resample=2), {}
    flat = lambda texts, **columns: ([1.0] * len(texts), {"x": [1.0] * len(texts)}, {})  # noqa: E731
    groups, drawn = nr.collect_rollouts(cfg, Sampler(), TRAIN, flat, 0, metrics)
    assert groups == [] and len(drawn) == 12 and metrics["draws"] == 3


def test_without_dropping_a_step_is_one_draw_and_keeps_its_flat_groups():
    cfg, metrics = make_config(prompts=4, samples=2), {}
    groups, drawn = nr.collect_rollouts(cfg, Sampler(), TRAIN, verifier, 5, metrics)
    assert groups == drawn and questions(drawn) == drawn_by_hand(cfg, 5, 0) and metrics["draws"] == 1
    assert any(stats.is_flat(g) for g in groups)


def test_the_data_of_a_draw_is_a_function_of_step_and_draw_alone():
    cfg = make_config(prompts=4, samples=2, drop_flat_groups=True, resample=3)

    def tokens(step, judge=verifier):
        return [r.completion for g in nr.collect_rollouts(cfg, Sampler(), TRAIN, judge, step, {})[1] for r in g]

    first = tokens(7)
    tokens(6)  # whatever came before
    assert first == tokens(7) != tokens(8)
    hard = lambda texts, **columns: ([0.0] * len(texts), {"x": [0.0] * len(texts)}, {})  # noqa: E731
    assert tokens(7, hard)[:len(first)] == first  # other rewards: more draws, but the same ones
    prompts = [p for step in range(5) for draw in range(4) for p in drawn_by_hand(cfg, step, draw)]
    assert len(set(prompts)) == len(prompts)  # steps and draws do not overlap: 80 prompts of an epoch of 1,000


def test_a_group_is_flat_when_its_verdicts_agree():
    for rewards, flat in (([1, 1, 1], True), ([0, 1, 0], False), ([1, None, 1], True), ([None, None], True), ([0, None, 1], False)):
        assert stats.is_flat([nr.Rollout([], [], "", False, [], reward=r) for r in rewards]) == flat


# ---- the loop: real DeepSpeed and model, duck-typed sampler and verifier


def loop(tmp_path, tokenizer, judge, **changes):
    """train() -> (metrics, rollouts) of each step."""
    sizes = dict(prompts=4, samples=4, eval_every=100, lr=1e-3, out=str(tmp_path), name="x")
    cfg = make_config(**(sizes | dict(correction="none", mismatch_bound=1e9) | changes))  # the sampler's log-probs are made up
    lines = []
    log = SimpleNamespace(folder=tmp_path, tokenizer=tokenizer, close=lambda: None, trace=lambda step: None,
                          write=lambda step, metrics, groups=(): lines.append((metrics, [r for group in groups for r in group])))
    nr.train(cfg, Sampler(tokenizer), nr.make_policy(cfg), nr.make_reference(cfg), TRAIN[:200], TRAIN[:2], judge, log)
    return lines[:-1]  # the last one is evaluation only


def by_step(texts, step, **columns):
    """Rewards whose mean differs from step to step: sample i gets i % 4 + 8 * step."""
    values = [i % 4 + 8.0 * step for i in range(len(texts))]
    return values, {"x": values}, {}


def test_running_baseline_starts_at_the_first_mean_and_moves_a_tenth_a_step(group, tmp_path, tokenizer):
    """Means 1.5, 9.5, 17.5: the baseline is 1.5 at first, 0.9 * 1.5 + 0.1 * 1.5, then 0.9 * 1.5 + 0.1 * 9.5 = 2.3."""
    steps = loop(tmp_path, tokenizer, by_step, steps=3, baseline="running", scale="none", kl_coef=0.0)
    for (_, rollouts), baseline in zip(steps, (1.5, 1.5, 2.3), strict=True):
        assert len(rollouts) == 16
        close([r.advantage for r in rollouts], [r.reward - baseline for r in rollouts])


def test_a_reference_that_is_reset_is_the_policy_of_that_step(group, tmp_path, tokenizer):
    kl = [m["kl"] for m, _ in loop(tmp_path, tokenizer, by_step, steps=5, ref_reset_every=2, kl_coef=0.01)]
    close(kl[::2], [0, 0, 0])
    kept = [m["kl"] for m, _ in loop(tmp_path, tokenizer, by_step, steps=3, kl_coef=0.01)]
    close(kept[:2], kl[:2])
    assert min(kl[1], kl[3], kept[2]) > 1e-3


def test_epochs_and_minibatches_are_optimizer_steps_against_log_probs_taken_once(group, tmp_path, tokenizer, monkeypatch):
    updates, whole = [], nr.update

    def update(engine, packs, cfg):
        members = [r for p in packs for r in p]
        updates.append(({tuple(r.prompt) for r in members}, [None if r.old is None else r.old.tolist() for r in members],
                        sum(r.weight * len(r.completion) for r in members), whole(engine, packs, cfg)))
        return updates[-1][-1]

    monkeypatch.setattr(nr, "update", update)
    loop(tmp_path, tokenizer, by_step, steps=1, epochs=2, minibatches=2, kl_coef=0.0)
    prompts, old, weight, metrics = zip(*updates)
    assert len(updates) == 4 and prompts[:2] == prompts[2:]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 4
    assert old[:2] == old[2:] and None not in old[0] + old[1]
    close(weight, [1.0] * 4)  # each step is a whole mean over its own minibatch
    close(metrics[0]["ratio"], 1)
    assert all(abs(m["ratio"] - 1) > 1e-3 for m in metrics[1:])
    updates.clear()
    loop(tmp_path, tokenizer, by_step, steps=1, kl_coef=0.0)
    assert len(updates) == 1 and set(updates[0][1]) == {None}  # one step a batch: the policy is the one that sampled


def test_dropped_groups_cost_no_forward_and_change_no_weight(group, tmp_path, tokenizer, monkeypatch):
    """A third of the prompts teach; the others push nothing (advantage 0) but would weigh in the mean if they were kept."""
    seen, whole = [], nr.update
    monkeypatch.setattr(nr, "update", lambda engine, packs, cfg: (seen.append([r for p in packs for r in p]), whole(engine, packs, cfg))[1])
    [(metrics, drawn)] = loop(tmp_path, tokenizer, verifier, steps=1, prompts=8, drop_flat_groups=True, kl_coef=0.0, keep_rollouts=1000)
    useful = [r for i in range(0, len(drawn), 4) for r in drawn[i:i + 4] if not stats.is_flat(drawn[i:i + 4])]
    assert 0 < len(useful) < len(drawn) == 32 and sorted(map(id, seen[0])) == sorted(map(id, useful))
    close([r.weight * len(r.completion) for r in useful], [1 / len(useful)] * len(useful))


# ---- presets


def test_every_preset_is_a_row_of_legal_values_of_configs_fields():
    hints, fields = get_type_hints(nr.Config), {f.name: f.default for f in dataclasses.fields(nr.Config)}
    for name, row in nr.ALGOS.items():
        for flag, value in row.items():
            legal = get_args(hints[flag])
            assert value in legal if legal else type(value) is type(fields[flag]), (name, flag)
            assert value != fields[flag], f"{name}: {flag} is the default"
        assert nr.parse_config(["--algo", name]).algo == name  # check() lets it pass


@pytest.mark.parametrize("algo, baseline, scale, ratio, gate, aggregate", [
    ("grpo", "group", "group", "token", "clip", "sequence"),
    ("dr_grpo", "group", "none", "token", "clip", "constant"),
    ("dapo", "group", "group", "token", "clip", "token"),
    ("bnpo", "group", "group", "token", "clip", "token"),
    ("rloo", "leave_one_out", "none", "product", "clip", "sequence"),
    ("reinforce++", "batch", "batch", "token", "clip", "token"),
    ("gspo", "group", "group", "sequence", "clip", "sequence"),
    ("cispo", "group", "group", "token", "detach", "token"),
    ("sapo", "group", "group", "token", "soft", "sequence"),
    ("rft", "none", "none", "token", "clip", "sequence"),
])
def test_presets_stand_where_their_papers_put_them(algo, baseline, scale, ratio, gate, aggregate):
    cfg = nr.parse_config(["--algo", algo])
    assert (cfg.baseline, cfg.scale, cfg.ratio, cfg.gate, cfg.aggregate) == (baseline, scale, ratio, gate, aggregate)
    assert (cfg.kl_coef == 0) == (algo not in ("grpo", "reinforce++"))


def test_presets_carry_their_papers_numbers():
    row = nr.ALGOS
    assert (row["dapo"]["clip_high"], row["dapo"]["drop_flat_groups"], row["dapo"]["overlong_buffer"]) == (0.28, True, 0.2)  # and 0.2 below
    assert (row["gspo"]["clip_low"], row["gspo"]["clip_high"]) == (3e-4, 4e-4)  # section 5.1
    assert nr.Config().clip_low == nr.Config().clip_high == 0.2 and nr.Config().kl_coef == 0.001


def test_rft_raises_the_likelihood_of_right_samples_only():
    cfg = dataclasses.replace(nr.Config(), **nr.ALGOS["rft"], correction="none")
    a = nr.group_advantages(tensor([1.0, 0.0]), cfg.baseline, cfg.scale)[0].tolist()
    batch = hand(old=[-1.0] * 5, advantage=[a[0]] * 2 + [a[1]] * 3)
    logp = tensor(*[-1.0] * 5).requires_grad_()
    nr.policy_loss(logp, None, None, batch, cfg)[0].backward()
    close(logp.grad, [-0.1, -0.2, 0, 0, 0])  # the gradient of -weight * log-prob
