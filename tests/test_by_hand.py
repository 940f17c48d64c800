"""Cases by hand: which groups are trained, what a length is, when a run stops, prompts, plan, report."""
import base64
import dataclasses
import gzip
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from tokenizers import processors

import data
import nano_rlvr as nr
import runtime.shape
import test_wiring
from conftest import EXACT, ROOT, close, judged_by, make_config
from runtime import dist, evaluation, guard, log, memory, report, stats
from runtime.dist import RunError

NAN = math.nan


# ---- which groups are trained, and when drawing ends


class Draws:
    """In place of rollout(): the k-th call of a step gives its prompts these rewards."""

    def __init__(self, monkeypatch, *rewards):
        self.rewards, self.calls = rewards, 0
        monkeypatch.setattr(nr, "rollout", self.sample)

    def sample(self, llm, prompts, n, *_, **__):
        self.calls += 1
        return [nr.Rollout(p, [1], "", False, [0.0]) for p in prompts for _ in range(n)]

    def judge(self):
        @judged_by("x")
        def verify(texts, **columns):
            values = [x for pair in self.rewards[self.calls - 1] for x in pair]
            return values, {"x": values}, {}
        return verify


EXAMPLES = [{"question": str(i), "prompt_ids": [i]} for i in range(100)]
FLAT, HALF, NONE, ONE = (1.0, 1.0), (1.0, 0.0), (None, None), (None, 1.0)


def collected(monkeypatch, draws, **changes):
    """(rewards of the groups that are trained, number of groups sampled, draws)."""
    fake, metrics = Draws(monkeypatch, *draws), {}
    cfg = make_config(prompts=3, samples=2, **changes)
    [groups], sampled = nr.collect_rollouts(cfg, None, EXAMPLES, fake.judge(), 0, metrics)
    assert metrics["draws"] == fake.calls and len({str(g[0].prompt) for g in sampled}) == len(sampled)
    return [tuple(r.reward for r in g) for g in groups], len(sampled), fake.calls


def test_a_step_draws_again_until_it_has_as_many_groups_as_prompts_and_keeps_the_first(monkeypatch):
    drop = dict(drop_flat_groups=True, resample=3)
    a, b, c, d = (5.0, 0.0), (6.0, 0.0), (7.0, 0.0), (8.0, 0.0)
    assert collected(monkeypatch, [[a, b, c]], **drop) == ([a, b, c], 3, 1)  # enough at once
    three = [[a, FLAT, NONE], [ONE, b, FLAT], [c, d, HALF]]
    assert collected(monkeypatch, three, **drop) == ([a, b, c], 9, 3)
    few = [[a, FLAT, FLAT], [b, FLAT, FLAT], [FLAT, NONE, ONE], [FLAT] * 3]
    assert collected(monkeypatch, few, **drop) == ([a, b], 12, 4)  # not enough, and no more draws
    assert collected(monkeypatch, [[a, FLAT, NONE]]) == ([a, FLAT, NONE], 3, 1)  # nothing is dropped
    assert collected(monkeypatch, [[a, FLAT, NONE]], drop_flat_groups=True) == ([a], 3, 1)


def test_drawing_goes_on_until_the_ranks_together_have_enough_and_surplus_of_one_helps_the_other(monkeypatch):
    """Two ranks of 2 prompts. This one keeps 2 groups of the first draw; the other 0, then 1, then 1."""
    fake, metrics = Draws(monkeypatch, [HALF, HALF], [HALF, HALF], [HALF, HALF]), {}
    others = {1: [], 2: [6], 3: [6]}  # numbers of its groups, of 4 prompts per draw

    def all_gather(items, group=None):
        return [*items, *others[fake.calls]]

    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_sum", lambda *values: [2.0 * x for x in values])
    monkeypatch.setattr(dist, "all_gather", all_gather)
    cfg = dataclasses.replace(make_config(samples=2, drop_flat_groups=True, resample=2), prompts=4)
    [groups], sampled = nr.collect_rollouts(cfg, None, EXAMPLES, fake.judge(), 0, metrics)
    assert (fake.calls, len(groups), len(sampled)) == (2, 4, 4)  # 0, 1, 4, 5: they come before the other's 6


def test_a_step_without_any_verdict_ends_the_run_also_after_several_draws(monkeypatch):
    with pytest.raises(RunError, match="none of 12 completions got a verdict"):
        collected(monkeypatch, [[NONE] * 3] * 2, drop_flat_groups=True, resample=1)


# ---- what counts as length with a tool: sampled tokens only


def with_tool(sampled, output, reward=0.0, **fields):
    """A completion of `sampled` tokens, a tool's output of `output` tokens, and one more sampled token."""
    marks = [True] * sampled + [False] * output + [True]
    logps = [-0.5 * x for x in marks]
    return nr.Rollout([0], [1] * len(marks), "", False, logps, marks, reward=reward, **fields)


def test_a_tools_output_is_in_no_length(group):
    short, long = with_tool(1, 6, reward=1.0, parts={"x": 1.0}), with_tool(3, 0, parts={"x": 0.0})  # 2 and 4
    cfg = make_config(samples=2, max_tokens=8, scale="none")
    for aggregate, weights in (
            ("sequence", [1 / 4, 1 / 8]), ("token", [1 / 6] * 2), ("constant", [1 / 16] * 2)):
        assert nr.assign_token_weights([short, long], dataclasses.replace(cfg, aggregate=aggregate))
        close([short.weight, long.weight], weights)
    seconds = {"seconds/rollout": 1.0, "seconds/update": 1.0}
    metrics = log.summary(cfg, [[short, long]], [[short, long]], seconds)
    assert (metrics["completion/length"], metrics["tokens"], metrics["tokens_per_second"]) == (3, 6, 3)
    assert [stats.greedy_values(r)["length"] for r in (short, long)] == [2, 4]
    batch = nr.collate([short, long])
    assert batch.lengths.tolist() == [2, 4] and len(batch.targets) == 6


def test_an_advantage_is_made_independent_of_the_number_of_sampled_tokens(group):
    """Lengths 2, 3, 4 with a tool's output of 5, 0, 0: the rewards 0, 0, 1 have the slope 1/2."""
    group = [with_tool(1, 5), with_tool(2, 0), with_tool(3, 0, reward=1.0)]
    cfg = make_config(samples=3, scale="none", decorrelate_length=True)
    nr.assign_advantages([group], cfg, 0.0)
    close([r.advantages[0] for r in group], [1 / 6, -1 / 3, 1 / 6], 1e-6)


def test_the_ratio_of_a_sequence_is_a_mean_over_its_sampled_tokens():
    batch = nr.collate([with_tool(1, 6, advantages=[1.0] * 8, weight=1.0)])
    cfg = dataclasses.replace(make_config(), ratio="sequence", correction="none", clip_high=9.0)
    loss, sums = nr.policy_loss(torch.tensor([0.2, 0.4]), torch.zeros(2), None, batch, cfg)
    close([loss, sums["tokens"]], [-2 * math.exp(0.3), 2], 1e-6)


def test_rewards_get_all_tokens_of_a_completion_as_in_trl(monkeypatch):
    """completion_ids of a reward has a tool's output too: --overlong_buffer is a part of --max_tokens, which
    counts both."""
    seen = {}

    @judged_by("x")
    def verify(texts, **columns):
        seen.update(columns)
        return [0.0], {"x": [0.0]}, {}
    nr.score([with_tool(1, 6)], [{"question": "q", "prompt_ids": [0]}], verify, step=4)
    assert [len(ids) for ids in seen["completion_ids"]] == [8] and seen["step"] == 4
    assert seen["prompts"] == seen["question"] == ["q"] and "prompt_ids" not in seen


# ---- guards


def step(**changes):
    return {"mismatch/mean_abs": 0.01, "loss": 0.5} | changes


@pytest.mark.parametrize("metrics, says", [
    (step(), None), ({**step(), "mismatch/mean_abs": 0.1}, None),
    ({**step(), "mismatch/mean_abs": 0.11}, "disagree"), ({**step(), "mismatch/mean_abs": NAN}, "disagree"),
    ({**step(), "mismatch/mean_abs": math.inf}, "disagree"), (step(loss=NAN), "the loss is nan"),
    (step(loss=math.inf), "the loss is inf"), (step(loss=-math.inf), "the loss is -inf")])
def test_a_mismatch_above_the_bound_or_nan_and_a_loss_that_is_not_finite_refuse_a_step(metrics, says):
    if says is None:
        guard.check_step(metrics, 0.1)
    else:
        with pytest.raises(RunError, match=says):
            guard.check_step(metrics, 0.1)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_stops_the_run_before_the_step(bad):
    taken = []
    batch = nr.collate([nr.Rollout([0], [1, 1], "", False, [0.0, bad], reward=1.0, weight=1.0,
                                   advantages=[1.0] * 2)])
    cfg = dataclasses.replace(make_config(kl_coef=0.0), correction="none", mismatch_bound=0.1)
    with pytest.raises(RunError, match="disagree"):
        nr.update(test_wiring.Trainer(taken), [batch], cfg)
    assert not taken


def test_steps_that_were_skipped_count_across_batches_until_one_is_taken(tmp_path, capsys):
    def after(in_a_row, *skipped):
        return guard.count_skipped(in_a_row, 7, [{"skipped": float(x)} for x in skipped], [], tmp_path)

    assert [after(0, 1), after(1, 1), after(1, 0), after(0, 1, 0, 1)] == [1, 2, 0, 1]
    assert [after(2, 0), after(2), after(0, 1, 1, 0)] == [0, 2, 0]
    for start, skipped in ((2, [1]), (1, [1, 1]), (0, [1, 1, 1])):
        with pytest.raises(RunError, match="3 optimizer steps in a row"):
            after(start, *skipped)


def test_three_batches_in_a_row_whose_step_was_skipped_end_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(test_wiring.Trainer, "was_step_applied", lambda self: False)
    monkeypatch.setattr(test_wiring, "Path", lambda name: tmp_path)
    seen, sync = [], nr.engines.set_lr
    monkeypatch.setattr(nr.engines, "set_lr", lambda policy, lr: seen.append(lr) or sync(policy, lr))
    with pytest.raises(RunError, match="3 optimizer steps in a row"):
        test_wiring.events(make_config(**test_wiring.STEPS))
    assert len(seen) == 3


# ---- prompts


def test_a_chat_template_that_writes_the_beginning_of_sequence_gets_no_second_one(tokenizer):
    """Llama's tokenizer adds the token, and so does its chat template."""
    own = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    bos = own.convert_ids_to_tokens(0)
    own.bos_token = bos
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)])
    assert own("1+1")["input_ids"][:1] == [0]  # it adds the token
    own.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}="
    for template, beginnings in (("chat", 1), ("none", 1)):
        ids = data.encode({"question": "1+1"}, own, template)
        assert ids.count(0) == beginnings and ids[0] == 0, template


def test_an_opener_and_what_follows_a_budget_have_no_beginning_of_sequence(tokenizer):
    own = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    bos = own.convert_ids_to_tokens(0)
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)])
    ids, room = evaluation.answer_opening(make_config(eval_budget="8"), own, "So:")
    assert 0 not in ids and len(ids) == 3 and room == 96 - 8 - 3


# ---- passes, plan


@pytest.mark.parametrize("changes, passes", [
    (dict(kl_coef=0.0), 3), (dict(kl_coef=0.1), 4), (dict(kl_coef=0.0, epochs=2), 7),
    (dict(kl_coef=0.0, minibatches=2), 4), (dict(kl_coef=0.1, epochs=3, minibatches=2), 11)])
def test_mfu_counts_three_passes_per_epoch_one_for_the_reference_and_one_for_the_old_log_probs(
        changes, passes, group, monkeypatch):
    monkeypatch.setattr(log, "peak_flops", lambda dtype: 1e9)
    cfg = make_config(**changes)
    trained, left = (nr.Rollout([0, i], [1] * 9, "", False, [0.0] * 9, reward=1.0, weight=w, parts={"x": 1.0})
                     for i, w in ((1, 0.1), (2, 0.0)))  # the second one had no gradient
    seconds = {"seconds/rollout": 1.0, "seconds/update": 2.0}
    metrics = log.summary(cfg, [[trained, left]], [[trained, left]], seconds)
    one = runtime.shape.ModelShape.of(cfg.model).forward_flops([trained])
    close(metrics["mfu"], passes * one / (2.0 * 1e9), EXACT)


SHAPE = runtime.shape.ModelShape(parameters=1000, hidden=10, layers=2, attention=10, mlp=30, vocab=50, kv_cache=40,
                         kv_heads=1, qk_norms=False)


def planned(part, phase="update", gpu=True, **changes):
    cfg = dataclasses.replace(nr.Config(dtype="bfloat16"), **changes)
    return getattr(memory.step_bytes(cfg, SHAPE, gpu)[part], phase)


def test_the_plans_buffers_by_hand():
    """1,000 parameters in bfloat16, 500 of them in the embedding."""
    assert planned("gradient buckets") == (2 + 4) * 1000  # a bucket in bf16, and its fp32 copy
    assert planned("gradient buckets", dtype="float32") == (4 + 4) * 1000
    assert planned("gradient buckets", "reference") == planned("gradient buckets", "generate") == 0
    for phase in memory.Phases._fields:
        assert planned("offload buffer", phase, offload="optimizer") == 500 * 2
        assert planned("offload buffer", phase) == planned("offload buffer", phase, gpu=False) == 0
    assert planned("fp32 weights and AdamW") == 12 * 1000
    assert planned("fp32 weights and AdamW", offload="optimizer") == 0
    assert planned("gradients") == planned("gradients", offload="optimizer") == 4 * 1000
    assert planned("reference", "reference") == 2 * 1000 and planned("reference") == 0
    assert planned("reference", "reference", kl_coef=0.0) == 0
    assert planned("reference", gpu=False) == 2 * 1000


def test_a_bucket_holds_the_largest_gradient_or_as_many_numbers_as_deepspeed_is_told():
    shape = dataclasses.replace(SHAPE, parameters=10 * memory.BUCKET, vocab=1000, hidden=1000)
    for vocabulary, numbers in ((1000, memory.BUCKET), (100_000, 10**8)):
        big = dataclasses.replace(shape, vocab=vocabulary)
        parts = memory.step_bytes(nr.Config(dtype="bfloat16"), big, True)
        assert parts["gradient buckets"].update == 6 * numbers


# ---- the report, without a browser


def page(tmp_path, accuracies, right):
    """The page of a run: (rows of its table, data). An evaluation per step."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = {"seed": 0, "samples": 1, "steps": len(accuracies) - 1, "name": "run"}
    (folder / "config.json").write_text(json.dumps({"config": config, "command": "c"}))
    rows = [{"step": i, "eval/accuracy": a, "eval/low": a - 0.1, "eval/high": a + 0.1}
            for i, a in enumerate(accuracies)]
    answers = [{"step": i, "question": f"q{j}", "answer": "1", "right": x, "completion": f"step {i}, {j}",
                "finish": "length" if i else "stop"}
               for i, step in enumerate(right) for j, x in enumerate(step)]
    for name, lines in (("metrics.jsonl", rows), ("eval.jsonl", answers)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.write([folder], folder / "report.html")
    text = (folder / "report.html").read_text()
    packed = re.search(r'const PACKED = "(.*?)"', text)[1]
    table = text[text.index("<table class=\"summary\">"):text.index("</table>")]
    return re.sub("<[^>]*>", "|", table), json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_table_has_the_accuracy_of_the_first_and_of_the_last_evaluation(tmp_path):
    """Not of the best one: the best of many is too high."""
    table, _ = page(tmp_path, [0.25, 0.75, 0.5], [])
    assert "run|accuracy before|after|steps|time" in table
    assert re.findall(r"[\d.]+%", table) == ["25.0%", "50.0%"] and "|2|" in table


def test_a_question_is_shown_with_the_answer_before_and_then_the_one_after(tmp_path):
    _, [run] = page(tmp_path, [0.5, 0.5, 0.5], [[True, False], [True, True], [False, True]])
    assert run["steps"] == [0, 2]
    assert run["questions"] == [
        ["q0", "1", [True, "step 0, 0", "stop"], [False, "step 2, 0", "length"]],
        ["q1", "1", [False, "step 0, 1", "stop"], [True, "step 2, 1", "length"]]]


def test_the_page_calls_the_first_answer_before_and_a_change_from_wrong_to_right_by_its_name():
    text = (ROOT / "runtime/report.html").read_text()
    assert '["01", "wrong → right"], ["10", "right → wrong"]' in text
    assert "`${Number(row[2][0])}${Number(row[3][0])}`" in text  # before, then after


def test_an_evaluation_of_one_step_has_no_before_and_after():
    answers = [{"step": 3, "question": "q", "answer": "1", "right": True, "completion": "", "finish": "stop"}]
    assert report.questions(answers) == {"steps": [], "questions": []}


def test_the_band_of_a_single_run_is_the_interval_of_each_evaluation(tmp_path):
    """Rows without an evaluation have no interval."""
    rows = [{"step": 0, "a": 0.5, "low": 0.4, "high": 0.7}, {"step": 1},
            {"step": 2, "a": 0.6, "low": 0.5, "high": 0.9}]
    drawn = []
    axis = SimpleNamespace(plot=lambda x, y, *_, **__: drawn.append((x, y)),
                           fill_between=lambda x, low, high, **_: drawn.append((low, high)))
    report.draw(axis, {"run": [{"rows": rows}]}, "a", "-", "low", "high")
    assert drawn == [([0, 2], [0.5, 0.6]), ([0.4, 0.5], [0.7, 0.9])]
