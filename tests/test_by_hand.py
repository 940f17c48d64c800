"""Cases by hand: what a length is, when a run stops, prompts, passes, plan, report."""
import base64
import gzip
import json
import math
import re

import pytest
from tokenizers import processors

import data
import nano_rlvr as nr
from conftest import close, judged, make_config, write_rows
from runtime import evaluation, guard, log, memory, report, shape
from runtime.dist import RunError

NAN, INF = math.nan, math.inf


# ---- what counts as length with a tool: sampled tokens only


def with_tool(sampled, output, reward=0.0, **fields):
    """A completion of `sampled` tokens, a tool's output of `output` tokens, and a sampled one."""
    marks = [True] * sampled + [False] * output + [True]
    logps = [-0.5 * x for x in marks]
    return nr.Rollout([0], [1] * len(marks), "", False, logps, marks, reward=reward, **fields)


def test_a_tools_output_is_in_no_length_but_rewards_get_its_tokens_as_in_trl(group):
    """--overlong_buffer is a part of --max_tokens, which counts both."""
    short = with_tool(1, 6, reward=1.0, parts={"x": 1.0})  # 2 sampled tokens
    long = with_tool(3, 0, parts={"x": 0.0})  # 4
    seconds = {"seconds/rollout": 1.0, "seconds/update": 1.0}
    metrics = log.summary(make_config(samples=2), [[short, long]], [[short, long]], seconds)
    found = [metrics[name] for name in ("completion/length", "tokens", "tokens_per_second")]
    assert found == [3, 6, 3]
    found, _ = evaluation.summary([{"question": "q"}] * 2, [0, 1], [short, long], [], make_config())
    assert found["eval/length"] == 3
    seen = {}
    verify = judged(lambda texts, columns: seen.update(columns) or [0.0])
    nr.score([short], [{"question": "q", "prompt_ids": [0]}], verify, step=4)
    assert [len(ids) for ids in seen["completion_ids"]] == [8] and seen["step"] == 4
    assert seen["prompts"] == seen["question"] == ["q"] and "prompt_ids" not in seen


# ---- when a run stops


def test_a_mismatch_above_the_bound_or_nan_and_a_loss_that_is_not_finite_refuse_a_step():
    guard.check_step({"mismatch/mean_abs": 0.1, "loss": 0.5}, 0.1)
    for mismatch, loss, says in ((0.11, 0.5, "disagree"), (NAN, 0.5, "disagree"),
                                 (0.01, NAN, "loss is nan"), (0.01, -INF, "loss is -inf")):
        with pytest.raises(RunError, match=says):
            guard.check_step({"mismatch/mean_abs": mismatch, "loss": loss}, 0.1)


def test_steps_that_were_skipped_count_across_batches_until_one_is_taken(tmp_path):
    def after(in_a_row, *skipped):
        history = [{"skipped": float(x)} for x in skipped]
        return guard.count_skipped(in_a_row, 7, history, [], tmp_path)

    assert [after(1, 1), after(2), after(2, 0), after(0, 1, 0, 1)] == [2, 2, 0, 1]
    for start, skipped in ((2, [1]), (0, [1, 1, 1])):
        with pytest.raises(RunError, match="3 optimizer steps in a row"):
            after(start, *skipped)


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
    for template in ("chat", "none"):
        ids = data.encode({"question": "1+1"}, own, template)
        assert ids.count(0) == 1 and ids[0] == 0, template


# ---- passes, plan


@pytest.mark.parametrize("changes, passes", [
    (dict(kl_coef=0.0), 3), (dict(kl_coef=0.0, minibatches=2), 4),
    (dict(kl_coef=0.1, epochs=3), 11)])
def test_mfu_counts_three_passes_per_epoch_one_for_the_reference_and_one_for_the_old_log_probs(
        changes, passes, group, monkeypatch):
    monkeypatch.setattr(log, "peak_flops", lambda dtype: 1e9)
    cfg = make_config(**changes)
    trained, left = (nr.Rollout([0, i], [1] * 9, "", False, [0.0] * 9, reward=1.0, weight=w,
                                parts={"x": 1.0})
                     for i, w in ((1, 0.1), (2, 0.0)))  # the second one had no gradient
    seconds = {"seconds/rollout": 1.0, "seconds/update": 2.0}
    metrics = log.summary(cfg, [[trained, left]], [[trained, left]], seconds)
    one = shape.ModelShape.of(cfg.model).forward_flops([trained])
    close(metrics["mfu"], passes * one / (2.0 * 1e9))


def test_the_plan_by_hand():
    """1,000 parameters in bfloat16."""
    sizes = shape.ModelShape(parameters=1000, hidden=10, layers=2, attention=10, mlp=30, vocab=50,
                             kv_cache=40, kv_heads=1, qk_norms=False)
    parts = memory.step_bytes(nr.Config(dtype="bfloat16", offload="optimizer"), sizes, True)
    bucket = 2**26  # numbers: in bf16, in fp32, and in bf16 again for offload
    assert parts["CUDA, kernels, buffers"] == 2 * [1.5 * 2**30 + (2 + 4 + 2) * bucket] + [0]


# ---- the report, without a browser


def test_the_report_compares_the_first_evaluation_with_the_last(tmp_path):
    """Not with the best one: the best of many is too high. Each question has the answer before and
    then the one after."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = {"seed": 0, "samples": 1, "steps": 2, "name": "run"}
    (folder / "config.json").write_text(json.dumps({"config": config, "command": "c"}))
    rows = [{"step": i, "eval/accuracy": a, "eval/low": a - 0.1, "eval/high": a + 0.1}
            for i, a in enumerate((0.25, 0.75, 0.5))]
    answers = [{"step": i, "question": f"q{j}", "answer": "1", "right": right,
                "completion": f"step {i}, {j}", "finish": "length" if i else "stop"}
               for i, step in enumerate([[True, False], [True, True], [False, True]])
               for j, right in enumerate(step)]
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "eval.jsonl", answers)
    report.write([folder], folder / "report.html")
    text = (folder / "report.html").read_text()
    table = text[text.index("<table class=\"summary\">"):text.index("</table>")]
    table = re.sub("<[^>]*>", "|", table)
    assert "run|accuracy before|after|steps|time" in table and "|2 of 2|" in table
    assert re.findall(r"[\d.]+%", table) == ["25.0%", "50.0%"]
    packed = re.search(r'const PACKED = "(.*?)"', text)[1]
    [run] = json.loads(gzip.decompress(base64.b64decode(packed)))["runs"]
    assert run["steps"] == [0, 2]
    assert run["questions"] == [
        ["q0", "1", [True, "step 0, 0", "stop"], [False, "step 2, 0", "length"]],
        ["q1", "1", [False, "step 0, 1", "stop"], [True, "step 2, 1", "length"]]]
