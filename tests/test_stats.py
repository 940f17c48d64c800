"""Numbers of a step and of an evaluation by hand: votes, credit, means, lengths, plan, report."""
import base64
import dataclasses
import gzip
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
from conftest import close, make_config, write_rows
from runtime import evaluation, memory, stats, stop
from runtime.messages import RunError
from runtime.report import page

pytestmark = pytest.mark.usefixtures("in_float64")
SECONDS = {"seconds/rollout": 1.0, "seconds/update": 2.0}


def completion(text="", tokens=1, truncated=False, **fields):
    return nr.Rollout([0], [1] * tokens, text, truncated, [-0.5] * tokens, **fields)


@pytest.mark.exercise_13
@pytest.mark.parametrize("answers, index", [
    (["4", "5", "5", "4"], 0),  # a tie: the answer seen first
    ([None, None, None, "7", "8", "8"], 4),  # None is no vote, however often it occurs
    ([None, None], None)])
def test_the_most_frequent_answer_wins_and_none_does_not_vote(answers, index):
    found = stats.majority_vote(answers)
    assert found == index, f"{answers}: yours {found}, wanted {index}"


def votes(*texts, truncated=False):
    return {evaluation.vote_of(completion(text, truncated=truncated)) for text in texts}


def test_equal_answers_in_another_form_are_one_vote_and_different_ones_are_not():
    for texts in (("<answer>72</answer>", r"\boxed{72.0}", "The answer is $72$.", r"\boxed{\$72}",
                   "#### 72", r"\boxed{\(72\)}", r"\boxed{72\%}"),
                  (r"\boxed{1,000}", r"\boxed{1000}", r"\boxed{1{,}000}", r"\boxed{1\,000}"),
                  (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{\dfrac12}", r"\boxed{$.5$}"),
                  (r"\boxed{(1, 2)}", r"\boxed{$(1,2)$}")):
        assert len(votes(*texts)) == 1 and None not in votes(*texts)
    answers = ["72", "-72", "72.5", "1,2", "2,1", "12", "(1,2)", "[1,2]", "72x", "7/2", "x=72"]
    assert len(votes(*(rf"\boxed{{{a}}}" for a in answers))) == len(answers)


def test_a_truncated_completion_votes_only_with_a_complete_answer():
    """<answer>7 may be the start of <answer>72."""
    cut_off = r"\boxed{1} and \boxed{7", "<answer>7", "#### 7", "The answer is 7", "<answer>7</answ"
    complete = r"\boxed{7}. Let me check: 8", "<answer>7</answer> as 3 + 4", "#### 7\nI"
    assert votes(*cut_off, truncated=True) == {None} and votes(*complete, truncated=True) == {7}


def test_values_of_samples_by_hand():
    """Cut-off answers do not outvote a complete one; equal answers are counted together."""
    forms = ("5", "5", "72", "72.0", "$72$")
    group = [completion(rf"\boxed{{{a}}}", parts={"x": 0.5 + 0.5 * (a != "5")}) for a in forms]
    cut = [completion("<answer>5", truncated=True, parts={"x": 0.75}) for _ in range(4)]
    assert not evaluation.sample_values(group[:2])["maj@2"]  # a part of the reward is not right
    values = evaluation.sample_values(group + cut)  # 3 of 9 are right
    assert values.pop("maj@9") 
    wanted = {f"pass@{k}": 1 - math.comb(6, k) / math.comb(9, k) for k in (2, 4, 8, 9)}
    assert values.keys() == wanted.keys() | {"mean@9"}
    close([values[name] for name in wanted], list(wanted.values()))
    close(values["mean@9"], 1 / 3)


def test_a_group_has_zero_std_if_all_rewards_that_it_has_are_equal():
    for rewards, wanted in (((1.0, None, 1.0), True), ((None, None), True), ((1.0, 0.0), False)):
        assert stats.has_zero_std([completion(reward=x) for x in rewards]) == wanted
    for dtype, wanted in ((torch.float32, True), (torch.float64, False)):  # of the advantages
        torch.set_default_dtype(dtype)
        assert stats.has_zero_std([completion(reward=x) for x in (0.1 + 0.2, 0.3)]) == wanted


def test_metrics_are_means_over_the_tokens_of_all_optimizer_steps(group):
    """Not means of the means of packs or steps, which have other numbers of tokens."""
    cfg, history, tokens = make_config(correction_cap=2.0), [], []
    for step, sizes in enumerate([(1, 1), (9, 7), (3, 5), (2, 4)]):
        sums = []
        for R in sizes:
            tokens.append(torch.randn(4, R) + step % 2)
            ratio, kl, entropy, mismatch = tokens[-1]  # (R,) each
            terms = {"ratio": ratio, "kl": kl, "mismatch": mismatch,
                     "correction": nr.importance_weight(mismatch, None, cfg)}
            pack = SimpleNamespace(entropy=entropy, weight=torch.ones(R))
            sums.append(stats.pack_sums(torch.tensor(1.0), terms, pack, cfg))
        once = {"grad_norm": 2.0**step, "skipped": float(step == 2)}  # per step
        history.append(stats.token_means(sums) | once)
    ratio, kl, entropy, mismatch = torch.cat(tokens, 1)  # (tokens,) each
    w = mismatch.exp().clamp(max=2.0)
    wanted = {
        "ratio": ratio.mean(), "kl": kl.mean(), "entropy": entropy.mean(), "loss": 2.0,
        "mismatch/max": mismatch.abs().max(), "mismatch/mean_abs": mismatch.abs().mean(),
        "mismatch/k3": (mismatch.exp() - 1 - mismatch).mean(),
        "correction/w": w.mean(), "correction/ess": w.mean()**2 / w.square().mean(),
        "correction/share": (w == 2.0).double().mean(), "grad_norm": 15 / 4, "skipped": 1 / 4}
    found = stats.step_means(history)
    assert found.keys() == wanted.keys() and stats.step_means([]) == {}
    for name, x in wanted.items():
        close(found[name], x)


@pytest.mark.parametrize("surrogate", ["ppo", "cispo", "sapo", "kimi"])
def test_the_gradient_is_finite_at_any_log_ratio_and_clipped_counts_the_tokens_without_one(
        surrogate):
    points = [(x, a) for x in (-1e4, -30, -0.7, 0, 0.7, 30, 1e4) for a in (1.0, -1.0)]
    logp, advantage = torch.tensor(points, requires_grad=True).T  # (R,), (R,)
    pack = SimpleNamespace(weight=torch.ones(len(points)), advantage=advantage, vllm_logps=0.0)
    cfg = dataclasses.replace(make_config(), surrogate=surrogate, correction="none")
    loss, terms = nr.policy_loss(logp, torch.zeros(len(points)), None, pack, cfg)
    [gradient] = torch.autograd.grad(loss, logp)
    assert loss.isfinite() and gradient.isfinite().all()
    if surrogate == "ppo":  # the others bound it otherwise; beyond e^20 the ratio is constant
        bounded = abs(logp.detach()) < 20
        assert terms["clip_ratio"][bounded].tolist() == (gradient == 0)[bounded].tolist()
    assert terms["clip_ratio"].any() == (surrogate == "ppo")


def test_the_rewards_of_a_step_by_hand(group):
    """None, "no reward", enters no mean; a reward that nothing in the step has is absent."""
    values = [(1.0, None), (0.0, None), (None, None), (None, 2.0)]  # of the functions a and b
    parts = [{"a": a, "b": b, "judge": None} for a, b in values]
    rollouts = [completion(reward=x, parts=own) for x, own in zip((1.0, 0.0, None, 2.0), parts)]
    m = stats.step_summary(make_config(), [], [rollouts], SECONDS)
    assert (m["reward/a"], m["reward/b"], m["reward/mean"]) == (0.5, 2.0, 1.0)
    assert "reward/judge" not in m and m["reward/unscored"] == 1 / 4 and m["group/zero_std"] == 0
    close(m["reward/std"], math.sqrt(2 / 3))  # of the population


def test_a_tools_output_is_in_no_length(group):
    """--overlong_buffer is a part of --max_tokens, which counts both."""
    rollouts = [completion(tokens=len(sampled), loss_mask=sampled, reward=1.0, parts={"x": 1.0})
                for sampled in ([True] + [False] * 6 + [True], [True] * 4)]
    metrics = stats.step_summary(make_config(samples=2), [rollouts], [rollouts], SECONDS)
    found = [metrics[name] for name in ("completion/length", "tokens", "tokens_per_second")]
    assert found == [3, 6, 2]
    found, _ = evaluation.summary([{"question": "q"}] * 2, [0, 1], rollouts, [], make_config())
    assert found["eval/length"] == 3


def test_a_mismatch_above_the_bound_or_nan_and_a_loss_that_is_not_finite_refuse_a_step():
    stop.check_step({"mismatch/mean_abs": 0.1, "loss": 0.5}, 0.1)
    for mismatch, loss, says in ((0.11, 0.5, "disagree"), (math.nan, 0.5, "disagree"),
                                 (0.01, math.nan, "loss"), (0.01, -math.inf, "loss")):
        with pytest.raises(RunError, match=says):
            stop.check_step({"mismatch/mean_abs": mismatch, "loss": loss}, 0.1)


@pytest.mark.parametrize("changes, passes", [
    (dict(kl_coef=0.0), 3), (dict(kl_coef=0.0, minibatches=2), 4),
    (dict(kl_coef=0.1, epochs=3), 11), (dict(kl_coef=0.1, lora_rank=4), 3)])
def test_mfu_counts_three_passes_per_epoch_one_for_the_reference_and_one_for_the_old_log_probs(
        changes, passes, group, monkeypatch):
    monkeypatch.setattr(stats, "peak_flops", lambda dtype: 1e9)
    cfg = make_config(**changes)
    rollouts = [nr.Rollout([0, i], [1] * 9, "", False, [0.0] * 9, reward=1.0, weight=weight,
                           parts={"x": 1.0})
                for i, weight in ((1, 0.1), (2, 0.0))]  # the second one had no gradient
    metrics = stats.step_summary(cfg, [rollouts], [rollouts], SECONDS)
    one = stats.forward_flops(memory.ModelShape.of(cfg.model), rollouts[:1])
    close(metrics["mfu"], passes * one / (2.0 * 1e9))


def test_the_plan_by_hand():
    """1,000 parameters in bfloat16."""
    sizes = memory.ModelShape(parameters=1000, hidden=10, layers=2, attention=10,
                               head_size=5, mlp=30, vocab=50, kv_cache=40, qk_norms=False)
    parts = memory.step_bytes(nr.Config(dtype="bfloat16", offload="optimizer"), sizes, True)
    buffers = 1.5 * 2**30 + (2 + 4 + 2) * 1000  # a bucket in bf16 and in fp32, one for offload
    assert parts["CUDA, kernels, buffers"] == [buffers, buffers, 0]


def test_the_report_compares_the_first_evaluation_with_the_last(tmp_path):
    """Not with the best one: the best of many is too high."""
    config = {"config": {"seed": 0, "samples": 1, "steps": 2, "name": "run"}, "command": "c"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_rows(tmp_path / "metrics.jsonl", [
        {"step": i, "eval/accuracy": a, "eval/low": a - 0.1, "eval/high": a + 0.1}
        for i, a in enumerate((0.25, 0.75, 0.5))])
    write_rows(tmp_path / "eval.jsonl", [
        {"step": i, "question": f"q{j}", "answer": "1", "right": right, "finish": "stop",
         "completion": f"step {i}, {j}"}
        for i, step in enumerate([[True, False], [True, True], [False, True]])
        for j, right in enumerate(step)])
    page.write([tmp_path], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    table = text[text.index("<table class=\"summary\">"):text.index("</table>")]
    assert re.findall(r"[\d.]+%", table) == ["25.0%", "50.0%"]
    packed = re.search(r'const PACKED = "(.*?)"', text)[1]
    [run] = json.loads(gzip.decompress(base64.b64decode(packed)))["runs"]
    assert run["questions"] == [
        ["q0", "1", [True, "step 0, 0", "stop"], [False, "step 2, 0", "stop"], [True, True, False]],
        ["q1", "1", [False, "step 0, 1", "stop"], [True, "step 2, 1", "stop"], [False, True, True]]]
