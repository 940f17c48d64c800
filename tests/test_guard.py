"""No silent wrong number: overflow, skipped steps, missing verdicts, infinite weights."""
import math
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
from conftest import fixed_rollouts, judged, make_checkpoints, make_config
from runtime import evaluation
from runtime.messages import RunError
from runtime.trainer import named_weights


def test_token_mask_is_0_where_the_importance_ratio_overflows():
    cfg = make_config(correction="token_mask")
    weights = nr.importance_weight(torch.tensor([100.0, math.inf, 0.0, -math.inf]), None, cfg)
    assert weights.tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_step_with_a_gradient_that_is_not_finite_is_reported_and_moves_no_weight(
        group, tokenizer, zero_stage):
    cfg = make_config(kl_coef=0.0, mismatch_bound=1e9, lr=1e-3, zero_stage=zero_stage)
    policy, pack = nr.make_policy(cfg), nr.collate(fixed_rollouts(tokenizer))
    before = {name: w.clone() for name, w in named_weights(policy)}
    handle = policy.module.model.model.norm.weight.register_hook(lambda grad: grad * math.inf)
    for skipped in (1, 0):
        assert nr.update(policy, [pack], cfg)["skipped"] == skipped
        same = all(torch.equal(w, before[name]) for name, w in named_weights(policy))
        assert same == bool(skipped)
        handle.remove()


EXAMPLES = [{"question": str(i), "answer": str(i), "prompt_ids": [i]} for i in range(4)]


@pytest.fixture
def judge(group, tokenizer):
    """judge(*values, **counts) -> a run whose verifier gives these values to fixed rollouts."""
    def sample(llm, prompts, n, *_, **__):
        return fixed_rollouts(tokenizer, groups=len(prompts), n=n)

    def judge(*values, timeouts=0.0, crashes=(), **changes):
        counts = {"reward/timeouts": timeouts, "reward/crashes": float(len(crashes))}
        verify = judged(lambda texts, columns: list(values), **counts)
        verify.crashes = dict(enumerate(crashes))
        return SimpleNamespace(
            cfg=make_config(**changes), train_set=EXAMPLES, eval_set=EXAMPLES, verifier=verify,
            llm=None, rollout=sample, metrics={"eval/crashes": 99})
    return judge


def test_a_step_without_any_verdict_ends_the_run_with_the_counts_and_the_first_crash(judge):
    size = dict(prompts=4, samples=2)
    nr.collect_rollouts(judge(*[None] * 7, 0.0, **size), 0)
    says = r"none of 8 .*\(3 timeouts, 2 crashes, .*\); first crash: mine: KeyError: 'gold'"
    with pytest.raises(RunError, match=says):
        nr.collect_rollouts(judge(
            *[None] * 8, timeouts=3, crashes=["mine: KeyError: 'gold'", "other: x"], **size), 0)


def test_an_evaluation_reports_the_share_without_a_verdict_and_ends_the_run_if_that_is_all(judge):
    run = judge(1.0, None, 0.0, 1.0, timeouts=1)
    metrics, _ = evaluation.evaluate(run, nr.score)
    assert metrics["eval/accuracy"] == 0.5 and metrics["eval/unscored"] == 0.25  # counts as wrong
    with pytest.raises(RunError, match="^eval: none of 4 .*4 timeouts, 0 crashes, the others None"):
        evaluation.evaluate(judge(*[None] * 4, timeouts=4), nr.score)


def test_every_row_keeps_its_columns_whatever_row_is_first_and_all_tokens_are_shown(tokenizer):
    rows = [dict(question="a"), dict(question="b", rubric="r"),
            dict(question="c", tests=[1], completions="x")]
    seen, rollouts = {}, fixed_rollouts(tokenizer, groups=3, n=2)
    rollouts[0].loss_mask[0] = False  # a tool wrote it
    verify = judged(lambda texts, columns: seen.update(columns) or [None, 0.75] * 3)
    nr.score(rollouts, [row | {"prompt_ids": [1]} for row in rows], verify, step=7)
    assert seen == {"question": list("aabbcc"), "prompts": list("aabbcc"), "step": 7,
                    "sample_index": [0, 1] * 3, "rubric": [None, None, "r", "r", None, None],
                    "tests": [None] * 4 + [[1]] * 2,
                    "completion_ids": [r.completion for r in rollouts]}  # as in TRL
    assert [(r.reward, r.parts) for r in rollouts] == [(x, {"x": x}) for x in (None, 0.75)] * 3


def test_weights_that_are_not_finite_are_named_before_anything_is_saved(group, tmp_path):
    policy = nr.make_policy(make_config())
    checkpoints = make_checkpoints(policy, out=str(tmp_path), name="x")
    policy.module.model.model.norm.weight.data[3] = math.nan
    checkpoints.progress.step = 1
    with pytest.raises(RunError, match="weights of model.norm.weight are not finite"):
        checkpoints.save()
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["config.json"]
