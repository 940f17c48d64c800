"""Credit per token: step rewards, tokens that were not sampled, and the rows of ALGOS that came with them."""
import math
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
import runtime.batch
import runtime.trainer
from conftest import EXACT, close, make_config, within
from runtime import stats


def completion(tokens, reward=None, steps=(), sampled=None):
    return nr.Rollout([0], [1] * tokens, "", False, [0.0] * tokens, sampled, reward, steps=list(steps))


def assigned(groups, **flags):
    """The advantages of each token of each rollout, after assign_advantages."""
    nr.assign_advantages(groups, make_config(samples=len(groups[0]), **flags), math.nan)
    return [[r.advantages for r in group] for group in groups]


pytestmark = pytest.mark.usefixtures("in_float64")

# ---- step rewards


def test_a_token_gets_the_normalised_rewards_of_the_steps_that_end_at_it_or_later(group):
    """By hand: rewards 1, 0 and 1, 0 of four steps have mean 1/2 and deviation 1/2, so they become +1, -1."""
    a = completion(5, 1.0, [(2, 1.0), (4, 0.0)])
    b = completion(3, 1.0, [(1, 1.0), (3, 0.0)])
    [[of_a, of_b]] = assigned([[a, b]], eps=1e-15)
    close(of_a, [0, 0, -1, -1, 0])  # 1 - 1 before the first end; -1 up to the second; nothing after it
    close(of_b, [0, -1, -1])


def test_steps_of_unequal_number_are_normalised_over_all_steps_of_the_group(group):
    """By hand: 1, 1, 0 and 0 of three completions: mean 1/2. The third completion has no verdict."""
    a, b, none = completion(4, 2.0, [(2, 1.0), (3, 1.0), (4, 0.0)]), completion(2, 0.0), completion(2)
    [[of_a, of_b, of_none]] = assigned([[a, b, none]], eps=1e-15)
    close(of_a, [1, 1, 0, -1])
    close(of_b, [-1, -1])
    close(of_none, [0, 0])


def test_an_outcome_reward_is_one_step_at_the_last_token(group):
    rewards = [1.0, 0.25, 0.0, 0.5]
    outcome = [completion(n, r) for n, r in zip((3, 1, 2, 5), rewards)]
    one_step = [completion(n, r, [(n, r)]) for n, r in zip((3, 1, 2, 5), rewards)]
    assert assigned([outcome]) == assigned([one_step])
    wanted = nr.group_advantages(torch.tensor([rewards]))[0].tolist()
    assert [r.advantages for r in outcome] == [[a] * n for a, n in zip(wanted, (3, 1, 2, 5))]


def test_two_steps_that_end_in_the_same_token_both_count(group):
    a, b = completion(2, 2.0, [(1, 1.0), (1, 1.0)]), completion(2, 0.0, [(1, 0.0), (2, 0.0)])
    [[of_a, of_b]] = assigned([[a, b]], eps=1e-15)
    close(of_a, [2, 0])
    close(of_b, [-2, -1])


def test_a_group_is_flat_if_all_steps_have_the_same_reward():
    assert stats.is_flat([completion(2, 1.0), completion(3, 1.0), completion(3)])
    assert stats.is_flat([completion(2, 2.0, [(1, 1.0), (2, 1.0)]), completion(2, 1.0, [(2, 1.0)])])
    a, b = [(1, 1.0), (2, 0.0)], [(1, 0.0), (2, 1.0)]
    assert not stats.is_flat([completion(2, 1.0, a), completion(2, 1.0, b)])


def test_a_step_ends_with_the_token_that_completes_its_last_character(tokenizer):
    """The bundled tokenizer has a token per byte: é has two, € three. The sequence's end has no text."""
    text = "é+€=1\n"
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert len(ids) == 2 + 1 + 3 + 1 + 1 + 1 + 1
    r = nr.Rollout([0], ids, tokenizer.decode(ids, skip_special_tokens=True), False, [0.0] * len(ids))
    assert r.text == text
    r.steps = [(1, 0.1), (2, 0.2), (3, 0.3), (5, 0.5), (6, 0.6)]
    runtime.batch.ends_in_tokens([r], SimpleNamespace(get_tokenizer=lambda: tokenizer))
    assert r.steps == [(2, 0.1), (3, 0.2), (6, 0.3), (8, 0.5), (len(ids), 0.6)]


def test_the_ends_are_those_that_each_prefix_gives_also_where_a_token_has_a_part_of_a_character(tokenizer):
    # exact pieces; characters of two and four tokens
    for text in ("12+3=15\n", "1×2=2, 3÷3=1 \U0001f600."):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        prefixes = [tokenizer.decode(ids[:k], skip_special_tokens=True) for k in range(len(ids) + 1)]
        ends = range(1, len(text) + 1)
        wanted = [next(k for k, x in enumerate(prefixes) if x[:end] == text[:end]) for end in ends]
        r = nr.Rollout([0], ids, text, False, [0.0] * len(ids), steps=[(end, 1.0) for end in ends])
        runtime.batch.ends_in_tokens([r], SimpleNamespace(get_tokenizer=lambda: tokenizer))
        assert [end for end, _ in r.steps] == [*wanted[:-1], len(ids)]


def test_prefixes_are_decoded_only_where_a_token_has_a_part_of_a_character(tokenizer, monkeypatch):
    """A prefix per step and bisection: for a long completion with many steps that takes seconds."""
    ids = tokenizer("1+1=2\n" * 50, add_special_tokens=False)["input_ids"]
    r = nr.Rollout([0], ids, tokenizer.decode(ids), False, [0.0] * len(ids), steps=[(6, 1.0), (12, 1.0)])
    calls, decode = [], type(tokenizer).decode
    monkeypatch.setattr(type(tokenizer), "decode", lambda *args, **kw: calls.append(1) or decode(*args, **kw))
    runtime.batch.ends_in_tokens([r], SimpleNamespace(get_tokenizer=lambda: tokenizer))
    assert r.steps == [(6, 1.0), (12, 1.0)] and len(calls) <= 1


def test_score_sums_the_rewards_of_the_steps(tokenizer):
    def verify(texts, **columns):
        return [[(1, 0.5), (2, -0.25)], None, 0.75], {"a": [0.25, None, 0.75]}, {}
    verify.weights_of = lambda spec: {"a": 1.0}
    rollouts = [completion(2) for _ in range(3)]
    nr.score(rollouts, [{"question": "q"}], verify)
    assert [(r.reward, r.steps) for r in rollouts] == [(0.25, [(1, 0.5), (2, -0.25)]), (None, []), (0.75, [])]


# ---- tokens that the policy did not sample


def test_tokens_that_were_not_sampled_are_read_but_not_trained():
    a = nr.Rollout([10, 11], [12, 13, 14, 15], "", False, [-1.0, 0.0, 0.0, -4.0], [True, False, False, True],
                   advantages=[1.0, 2.0, 3.0, 4.0], weight=0.5)
    b = nr.Rollout([10, 11], [16], "", False, [-5.0], advantages=[-1.0], weight=0.25)
    batch = nr.collate([a, b])
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 15, 16]]
    assert batch.kv_index.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6]
    assert batch.targets.tolist() == [12, 15, 16]
    assert batch.predictors.tolist() == [1, 4, 1]  # 15 is predicted from 14, the tool's last token
    assert batch.vllm_logps.tolist() == [-1, -4, -5] and batch.advantage.tolist() == [1, 4, -1]
    assert batch.lengths.tolist() == [2, 1] and a.length == 2 and len(a) == 6
    assert batch.weight.tolist() == [0.5, 0.5, 0.25] and batch.sequence_ids.tolist() == [0, 0, 1]


def test_tokens_that_were_not_sampled_do_not_count_in_the_weights(group):
    a = completion(4, 1.0, sampled=[True, False, False, True])
    b = completion(6, 0.0)
    for aggregate, wanted in (("sequence", (1 / 4, 1 / 12)), ("token", (1 / 8, 1 / 8))):
        nr.assign_token_weights([a, b], make_config(aggregate=aggregate))
        close([a.weight, b.weight], wanted)


# ---- rows and values


def test_maxrl_divides_by_the_mean_of_the_group():
    """By hand, eps = 0: mean 1/4 gives (1 - 1/4) / (1/4) = 3 and -1; 0 where the mean is not positive."""
    rewards = torch.tensor([[1.0, 0, 0, 0], [1.0, 1, 1, 1], [0.0, 0, 0, 0], [-1.0, 0, -1, 0]])  # (G, n)
    advantages = nr.group_advantages(rewards, scale="mean", eps=0.0)
    close(advantages, [[3, -1, -1, -1], [0] * 4, [0] * 4, [0] * 4])
    close(nr.group_advantages(rewards, scale="mean", eps=0.25)[0], [1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("n, hits", [(4, 1), (8, 3), (5, 5)])
def test_maxrls_gradient_is_the_mean_over_the_right_samples_minus_the_mean_over_all(n, hits):
    """Tajwar et al.: 1/K sum of the K right samples' scores, with the mean score as control variate."""
    scores = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    rewards = torch.tensor([[1.0] * hits + [0.0] * (n - hits)], dtype=torch.float64)
    advantages = nr.group_advantages(rewards, scale="mean", eps=0.0)[0]
    close((advantages * scores).mean().item(), (scores[:hits].mean() - scores.mean()).item())


def squared_gradient(logp, old, advantage, tau):
    """Gradient of -policy_loss for one sequence of tokens, ratio of the sequence, weights 1/n."""
    n, logp = len(logp), torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    batch = SimpleNamespace(lengths=torch.tensor([n]), sequence_ids=torch.zeros(n, dtype=torch.long),
                            weight=torch.full((n,), 1 / n, dtype=torch.float64),
                            advantage=torch.full((n,), advantage, dtype=torch.float64), vllm_logps=None)
    cfg = make_config(gate="squared", ratio="product", squared_tau=tau, correction="none", kl_coef=0.0)
    loss, _ = nr.policy_loss(logp, torch.tensor(old, dtype=torch.float64), None, batch, cfg)
    loss.backward()
    return (-logp.grad).tolist()


def test_the_squared_gate_is_the_gradient_of_kimis_squared_loss():
    """Eq. 3: (r - mean) grad log pi - tau/2 grad (log pi/pi_old)^2. With log pi/pi_old = 0.3 - 0.1 = 0.2 for
    the sequence, tau = 0.5 and advantage 0.75, the factor of grad log pi is 0.75 - 0.5 * 0.2 = 0.65."""
    within(max(abs(g - 0.65) for g in squared_gradient([-1.0, -2.0], [-1.3, -1.9], 0.75, 0.5)), EXACT)
    within(max(abs(g - 0.75) for g in squared_gradient([-1.0, -2.0], [-1.0, -2.0], 0.75, 0.5)), EXACT)


def test_kl_in_the_reward_is_subtracted_from_the_last_step(group):
    a, b = completion(3, 1.0), completion(3, 1.0, [(1, 1.0), (3, 0.0)])
    a.kl, b.kl = 2.0, -1.0
    assert runtime.batch.step_rewards(a, 0.25) == [0.5] and runtime.batch.step_rewards(b, 0.25) == [1.0, 0.25]
    assert a.reward == 1.0  # what the verifier gave stays what is reported


@torch.no_grad()
def test_store_kl_is_the_sum_of_log_pi_minus_log_ref_over_the_sampled_tokens(model):
    policy, ref, cfg = nr.TokenLogps(model, 2.0), nr.TokenLogps(model, 1.0), make_config(pack_tokens=6)
    a = nr.Rollout([5, 6], [7, 8, 9], "", False, [-1.0, 0.0, -2.0], [True, False, True])
    b = nr.Rollout([5, 6], [10], "", False, [-3.0])
    batch = nr.collate([a, b])
    k1 = policy(batch)[0] - ref(batch)[0]  # (3,)
    metrics = runtime.trainer.store_kl(policy, ref, [[b, a]], a, cfg, nr.collate)
    close(a.kl, k1[:2].sum().item())
    close(b.kl, k1[2].item())
    close(metrics["kl"], (a.kl + b.kl) / 3)


def test_while_policy_and_reference_are_equal_the_kl_in_the_reward_is_0_whatever_vllm_says(model):
    policy = nr.TokenLogps(model, 1.0)
    group = [nr.Rollout([5, 6], [7 + i], "", False, [-1.0 - i], reward=1.0) for i in range(4)]
    cfg = make_config(pack_tokens=6, kl_coef=0.1, kl_in="reward")
    runtime.trainer.store_kl(policy, policy, [group], group[0], cfg, nr.collate)
    nr.assign_advantages([group], cfg, math.nan)
    assert [r.advantages for r in group] == [[0.0]] * 4


def test_the_kl_in_the_reward_is_not_in_the_loss_too(group):
    batch, ref = SimpleNamespace(old=None, ref=None), torch.nn.Identity()
    nr.store_fixed_logps(None, ref, [batch], make_config(kl_coef=0.1, kl_in="reward"))
    assert batch.ref is None
