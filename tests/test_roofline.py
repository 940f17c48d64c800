"""The roofline model of bench/roofline.py against figures derived by hand, and bench/step.py's use of it."""
import dataclasses
import json
import math
import sys

import pytest

import nano_rlvr as nr
from bench import roofline, step
from bench.plan import SHAPES
from runtime.shape import ModelShape

SMALL = SHAPES["Qwen2.5-1.5B"]  # tied embeddings
WEIGHTS = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)  # q and o, k and v, the MLP
HEAD = 151936 * 1536
H200 = roofline.DEVICES[0]
CPU = roofline.Device("CPU", 1e11, 1e10, math.inf, 2**34, 1e-5)
BF16 = nr.Config(dtype="bfloat16", kl_coef=0.0, checkpointing="off", pack_tokens=32768)
GROUPS = [(100, [700] * 8) for _ in range(64)]
TOKENS, COMPLETION_TOKENS = 64 * (100 + 8 * 700), 64 * 8 * 700


def parts(cfg=BF16, groups=GROUPS, device=H200, shape=SMALL):
    stages = roofline.stages(cfg, shape, groups, device)
    return stages["rollout"] | stages["update"] | stages["sync"]


def flops(ops):
    return sum(op.flops for op in ops)


def test_the_matrices_and_the_lm_head_are_all_parameters_but_norms_and_biases():
    assert roofline.body_weights(SMALL) == WEIGHTS
    assert SMALL.parameters - WEIGHTS - HEAD == 28 * (2 * 1536 + 1536 + 512) + 1536


def test_decoding_one_sequence_reads_all_weights_per_token():
    products = parts(groups=[(100, [700])])["decode"][:700]
    assert {op.seconds(H200) for op in products} == {2 * (WEIGHTS + HEAD) / 4.8e12}
    assert products[0].seconds(H200) == pytest.approx(3.09e9 / 4.8e12, rel=2e-3)


def test_decoding_many_sequences_is_bound_by_the_products():
    op = parts()["decode"][0]
    assert op.seconds(H200) == 2 * (WEIGHTS + HEAD) * 512 / 989e12 > op.bytes / 4.8e12


def test_each_new_token_reads_the_keys_and_values_before_it():
    attention = parts(groups=[(100, [3])])["decode"][3]
    assert attention.bytes == (101 + 102 + 103) * 2 * 28 * 2 * 128 * 2


def test_less_memory_for_the_kv_cache_means_more_token_steps():
    context = 512 * (100 * 700 + 700 * 701 / 2) * 28672  # bytes, summed over the token steps
    room = 2 * (WEIGHTS + HEAD) + context / 2000
    decode = parts(device=H200._replace(size=room))["decode"]
    products = decode[:-2]
    assert len(products) == pytest.approx(2000, abs=1)
    assert flops(products) == pytest.approx(flops(parts()["decode"][:-2]))


def test_an_update_is_six_flops_per_weight_and_token_and_attention():
    p = parts()
    attention = 3.5 * 4 * 28 * 1536 * (64 * 100 * 101 / 2 + 512 * (100 * 700 + 700 * 701 / 2))
    head = 8 * HEAD * COMPLETION_TOKENS  # 6, and the logits once more
    assert flops(p["forward"] + p["backward"]) == pytest.approx(6 * WEIGHTS * TOKENS + head + attention)


def test_a_forward_pass_has_the_flops_that_the_mfu_counts():
    rollouts = [nr.Rollout([g] * 100, [0] * 700, "", False, []) for g in range(64) for _ in range(8)]
    mfu = SMALL.forward_flops(rollouts)
    assert flops(parts()["forward"]) == pytest.approx(mfu, rel=1e-3)


def test_attention_reads_a_shared_prompt_once_for_its_own_queries_and_once_per_completion():
    """Twice the pairs of query and key: counted one by one."""
    rollouts = [nr.Rollout([1] * p, [0] * n, "", False, []) for p, lengths in ((5, (3, 7)), (6, (2,)))
                for n in lengths]
    pairs = sum(p * p for p in (5, 6))
    for r in rollouts:
        pairs += sum(2 * (len(r.prompt) + i) + 1 for i in range(len(r.completion)))  # keys: all up to itself
    without = dataclasses.replace(SMALL, attention=0).forward_flops(rollouts)
    assert SMALL.forward_flops(rollouts) - without == 2 * SMALL.layers * SMALL.attention * pairs


def test_what_is_switched_off_costs_nothing_and_what_is_on_a_pass():
    off = parts()
    on = parts(dataclasses.replace(BF16, kl_coef=1e-3, checkpointing="on", minibatches=2))
    assert not any(off[name] for name in ("reference", "old log-probs", "recomputation"))
    assert flops(on["reference"]) == flops(on["old log-probs"]) == flops(on["forward"])
    assert flops(on["recomputation"]) == pytest.approx(flops(on["forward"]) - 2 * HEAD * COMPLETION_TOKENS)
    assert len(on["optimizer"]) == 2


def test_offloaded_adamw_and_sleep_cost_the_link_only():
    offloaded = parts(dataclasses.replace(BF16, offload="optimizer"))
    [adamw], [sleep] = offloaded["optimizer"], offloaded["sleep, wake"]
    assert adamw.seconds(H200) == 6 * SMALL.parameters / 64e9
    assert sleep.seconds(H200) == 2 * 2 * SMALL.parameters / 64e9
    assert not any(parts(device=H200._replace(link=math.inf))["sleep, wake"][0])  # a CPU


def test_adapters_need_no_gradients_of_the_frozen_weights():
    full, lora = parts(), parts(dataclasses.replace(BF16, lora_rank=32))
    saved = flops(full["backward"]) - flops(lora["backward"])
    assert saved == pytest.approx(2 * WEIGHTS * TOKENS + 2 * HEAD * COMPLETION_TOKENS)
    assert lora["optimizer"][0].bytes < full["optimizer"][0].bytes / 30


def test_geometric_lengths_have_the_mean_and_end_at_the_limit():
    lengths = roofline.geometric(512, 700)
    mean = 700 * (1 - math.exp(-3000 / 700))
    assert max(lengths) == 3000 and sum(lengths) / 512 == pytest.approx(mean, rel=0.01)


def test_the_measured_rates_of_this_machine_are_positive_and_a_cpu_has_no_link():
    device = roofline.measure_device()
    assert device.matmul > 1e9 and device.memory > 1e8 and device.size > 2**30
    assert (device.link == math.inf) == device.name.startswith("CPU")


def test_the_bundled_model_has_no_part_that_takes_no_time():
    shape = ModelShape.of("models/tiny")
    cfg = nr.Config(dtype="float32", checkpointing="off", pack_tokens=4096)
    bounds = roofline.bounds(cfg, shape, [(20, [16] * 16)] * 32, CPU)
    times = {part: x for stage in bounds.values() for part, x in stage.items()}
    assert "sleep, wake" not in times and "optimizer" in times and min(times.values()) > 0
    assert roofline.total(bounds) == pytest.approx(sum(times.values()))


@pytest.fixture
def run(tmp_path):
    """The folder of a run of 2 steps of 1 prompt with 2 completions: 3 and 5 tokens in step 1."""
    cfg = nr.Config(model="models/tiny", dtype="float32", checkpointing="off", pack_tokens=4096, prompts=1,
                    samples=2)
    seconds = {"seconds/rollout": 2.0, "seconds/reward": 0.5, "seconds/update": 1.0, "seconds/sync": 0.1}
    metrics = seconds | {"mfu": 0.5, "tokens": 8, "tokens_per_second": 2.0, "memory/update": 1.0,
                         "completion/length": 4}
    about = {"config": dataclasses.asdict(cfg), "world": 1, "commit": "", "versions": {}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": i} | metrics) + "\n" for i in (0, 1)))
    (tmp_path / "rollouts.jsonl").write_text("".join(
        json.dumps({"step": i, "prompt_tokens": 7, "tokens": n}) + "\n" for i, n in ((0, 9), (1, 3), (1, 5))))
    return tmp_path


def test_the_engines_python_is_added_on_a_cpu_and_on_a_gpu_only_as_far_as_decoding_is_shorter():
    per_token = 2 * (WEIGHTS + HEAD) * 512 / 989e12 / 512  # seconds of the products on an H200, 512 at once
    decode = roofline.seconds(parts()["decode"], H200)
    slow = 10 * per_token
    for python, waiting in ((0, 0), (per_token / 2, 0), (slow, slow * COMPLETION_TOKENS - decode)):
        [op] = parts(device=H200._replace(python=python))["engine's Python"]
        assert op.seconds(H200) == pytest.approx(waiting) and not any(op[:3])
    [op] = parts(device=CPU)["engine's Python"]
    assert op.seconds(CPU) == pytest.approx(1e-5 * COMPLETION_TOKENS)


def test_the_engines_python_is_measured_without_the_models_work(llm, monkeypatch):
    """Schedule, update and outputs advance the clock by 2, 3 and 5 s per call, the model by 1000."""
    clock, calls, core = [0.0], [0], llm.llm_engine.engine_core.engine_core

    def slow(owner, name, seconds):
        call = getattr(owner, name)

        def advance(*args, **kwargs):
            clock[0] += seconds
            calls[0] += name == "schedule"
            return call(*args, **kwargs)
        monkeypatch.setattr(owner, name, advance)
        return advance

    monkeypatch.setattr(roofline.time, "thread_time", lambda: clock[0])
    schedule = slow(core.scheduler, "schedule", 2)
    slow(core.scheduler, "update_from_output", 3)
    slow(llm.llm_engine.output_processor, "process_outputs", 5)
    slow(core.model_executor, "execute_model", 1000)
    measured = roofline.measure_python(llm, sequences=32, tokens=4)
    assert calls[0] % 4 == 0  # equal trials
    assert measured == pytest.approx(10 * calls[0] / 4 / (32 * 4))
    assert core.scheduler.schedule is schedule  # the clocks are taken off again


def test_the_tables_on_paper_have_a_row_per_device_and_model_and_their_columns_add_up(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["roofline.py"])
    roofline.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines if not line.startswith("| device")]
    devices = {(row[0], row[1]) for row in rows}
    assert len(rows) == 16 and len(devices) == 8
    for row in rows:
        rollout, python, reference, update, recomputation, adamw, sync, step, *sums = map(float, row[2:12])
        assert 0 <= python < rollout  # each figure is rounded to 0.005
        assert step == pytest.approx(rollout + update + adamw + sync, abs=0.03)
        assert sums == pytest.approx([step + reference, step + reference + recomputation], abs=0.03)
    assert {row[1] for row in rows if row[12].endswith("LoRA 32")} == {"7B"}


def test_a_run_is_compared_with_the_bound_of_its_own_lengths(run):
    result = step.analyse(run, CPU)
    cfg = nr.Config(**result["about"]["config"])
    assert result["steps"] == 1
    assert result["bounds"] == roofline.bounds(cfg, ModelShape.of("models/tiny"), [(7, [3, 5])], CPU)
    [total] = [line for line in step.table(result).splitlines() if line.startswith("| **step**")]
    bound = roofline.total(result["bounds"])
    assert total.split(" | ")[1:4] == ["3.600", f"{bound:.3f}", f"{bound / 3.6:.0%}"]


def test_a_run_without_all_its_rollouts_has_no_bound(run):
    lines = (run / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (run / "rollouts.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match="--keep_rollouts"):
        step.analyse(run, CPU)
