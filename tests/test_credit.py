"""Credit per token: where steps end, and the KL in the reward. test_vectors.py has the formulas."""
import pytest
import torch

import nano_rlvr as nr
from conftest import close, judged, make_config
from runtime import stats
from runtime.batch import step_ends_in_tokens

pytestmark = pytest.mark.usefixtures("in_float64")


def completion(tokens, reward=None, steps=()):
    return nr.Rollout([0], [1] * tokens, "", False, [0.0] * tokens, None, reward, steps=list(steps))


@pytest.mark.parametrize("rewards, flat", [
    ([1, 1, 1], True), ([0, 1, 0], False), ([1, None, 1], True), ([None, None], True),
    ([0, None, 1], False), ([[(1, 1.0), (2, 1.0)], [(2, 1.0)]], True),
    ([[(1, 1.0), (2, 0.0)], [(1, 0.0), (2, 1.0)]], False)])  # the same sums
def test_a_group_is_flat_if_all_verdicts_or_those_of_all_steps_agree(rewards, flat):
    rollouts = [completion(2, sum(x for _, x in value), value) if isinstance(value, list)
                else completion(2, value) for value in rewards]
    assert stats.is_flat(rollouts) == flat


@pytest.mark.parametrize("text", ["12+3=15\n", "1×2=2, 3÷3=1 \U0001f600.", "é+€=1\n"])
def test_a_step_ends_with_the_token_that_completes_its_last_character(tokenizer, text):
    """The bundled tokenizer has a token per byte, so é has two. A step that covers the whole text
    covers the end of the sequence too, which has no text."""
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    prefixes = [tokenizer.decode(ids[:k], skip_special_tokens=True) for k in range(len(ids) + 1)]
    ends = range(1, len(text) + 1)
    wanted = [next(k for k, x in enumerate(prefixes) if x[:end] == text[:end]) for end in ends]
    assert wanted[0] == (2 if text[0] == "é" else 1)
    r = nr.Rollout([0], ids, text, False, [0.0] * len(ids), steps=[(end, end / 8) for end in ends])
    step_ends_in_tokens([r], tokenizer)
    assert r.steps == [(k, end / 8) for k, end in zip([*wanted[:-1], len(ids)], ends)]


def test_score_sums_the_rewards_of_the_steps():
    verify = judged(lambda *_: [[(1, 0.5), (2, -0.25)], None, 0.75])
    rollouts = [completion(2) for _ in range(3)]
    nr.score(rollouts, [{"question": "q"}], verify)
    assert [(r.reward, r.steps) for r in rollouts] == [
        (0.25, [(1, 0.5), (2, -0.25)]), (None, []), (0.75, [])]


@torch.no_grad()
def test_the_kl_in_the_reward_is_that_of_the_sampled_tokens(model):
    policy, ref = nr.TokenLogps(model, 2.0), nr.TokenLogps(model, 1.0)
    a = nr.Rollout([5, 6], [7, 8, 9], "", False, [-1.0, 0.0, -2.0], [True, False, True])
    b = nr.Rollout([5, 6], [10], "", False, [-3.0])
    k1 = policy(nr.collate([a, b]))[0] - ref(nr.collate([a, b]))[0]  # (3,)
    cfg = make_config(pack_tokens=6, kl_in="reward")
    metrics = nr.trainer.store_kl(policy, ref, [[b, a]], a, cfg)
    close([a.kl, b.kl], [k1[:2].sum().item(), k1[2].item()])
    close(metrics["kl"], (a.kl + b.kl) / 3)
