"""The roofline model of bench/roofline.py against figures by hand, and bench/step.py."""
import dataclasses
import json
import math

import pytest

import nano_rlvr as nr
import plan
import roofline
import step
from runtime.shape import ModelShape

SMALL = plan.SHAPES["Qwen2.5-1.5B"]  # tied embeddings
WEIGHTS = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)  # q and o, k and v, the MLP
HEAD = 151936 * 1536
H200 = roofline.DEVICES[0]
CPU = roofline.Device("CPU", 1e11, 1e10, math.inf, 2**34, 1e-5)
BF16 = nr.Config(dtype="bfloat16", kl_coef=0.0, checkpointing="off", pack_tokens=32768)
GROUPS = [(100, [700] * 8) for _ in range(64)]
TOKENS, COMPLETION_TOKENS = 64 * (100 + 8 * 700), 64 * 8 * 700


def parts(groups=GROUPS, device=H200, **flags):
    stages = roofline.stages(dataclasses.replace(BF16, **flags), SMALL, groups, device)
    return stages["rollout"] | stages["update"] | stages["sync"]


def flops(ops):
    return sum(op.flops for op in ops)


def test_decoding_reads_all_weights_per_token_step_and_multiplies_per_sequence():
    assert SMALL.parameters - WEIGHTS - HEAD == 28 * (2 * 1536 + 1536 + 512) + 1536  # norms, biases
    one, many = parts(groups=[(100, [700])])["decode"][0], parts()["decode"][0]
    assert one.seconds(H200) == 2 * (WEIGHTS + HEAD) / 4.8e12
    assert many.seconds(H200) == 2 * (WEIGHTS + HEAD) * 512 / 989e12 > many.bytes / 4.8e12
    attention = parts(groups=[(100, [3])])["decode"][3]  # keys and values before each token
    assert attention.bytes == (101 + 102 + 103) * 2 * 28 * 2 * 128 * 2


def test_an_update_is_six_flops_per_weight_and_token_and_attention():
    p = parts()
    attention = 3.5 * 4 * 28 * 1536 * (64 * 100 * 101 / 2 + 512 * (100 * 700 + 700 * 701 / 2))
    head = 8 * HEAD * COMPLETION_TOKENS  # 6, and the logits once more
    wanted = 6 * WEIGHTS * TOKENS + head + attention
    assert flops(p["forward"] + p["backward"]) == pytest.approx(wanted)
    rollouts = [nr.Rollout([i // 8] * 100, [0] * 700, "", False, []) for i in range(512)]
    assert flops(p["forward"]) == pytest.approx(SMALL.forward_flops(rollouts), rel=1e-3)  # MFU


def test_attention_reads_a_shared_prompt_once_for_its_own_queries_and_once_per_completion():
    """Twice the pairs of query and key: counted one by one."""
    rollouts = [nr.Rollout([1] * p, [0] * n, "", False, []) for p, n in ((5, 3), (5, 7), (6, 2))]
    pairs = 5 * 5 + 6 * 6 + sum(2 * (len(r.prompt) + i) + 1 for r in rollouts
                                for i in range(len(r.completion)))
    without = dataclasses.replace(SMALL, attention=0).forward_flops(rollouts)
    assert SMALL.forward_flops(rollouts) - without == 2 * SMALL.layers * SMALL.attention * pairs


def test_what_is_switched_off_costs_nothing_and_what_is_on_a_pass():
    off, on = parts(), parts(kl_coef=1e-3, checkpointing="on", minibatches=2)
    assert not any(off[name] for name in ("reference", "old log-probs", "recomputation"))
    assert flops(on["reference"]) == flops(on["old log-probs"]) == flops(on["forward"])
    head = 2 * HEAD * COMPLETION_TOKENS
    assert flops(on["recomputation"]) == pytest.approx(flops(on["forward"]) - head)
    [adamw], [sleep] = (parts(offload="optimizer")[name] for name in ("optimizer", "sleep, wake"))
    assert adamw.seconds(H200) == 6 * SMALL.parameters / 64e9
    assert sleep.seconds(H200) == 2 * 2 * SMALL.parameters / 64e9
    lora = parts(lora_rank=32)  # no gradients of the frozen weights
    saved = flops(off["backward"]) - flops(lora["backward"])
    assert saved == pytest.approx(2 * WEIGHTS * TOKENS + head)


def test_a_gpu_waits_for_the_engines_python_only_as_far_as_decoding_is_shorter():
    python = 20 * (WEIGHTS + HEAD) / 989e12  # ten times the products of a token, 512 at once
    waiting = python * COMPLETION_TOKENS - roofline.seconds(parts()["decode"], H200)
    for device, wanted in ((H200._replace(python=python / 20), 0), (CPU, 1e-5 * COMPLETION_TOKENS),
                           (H200._replace(python=python), waiting)):
        [op] = parts(device=device)["engine's Python"]
        assert op.seconds(device) == pytest.approx(wanted)


def test_the_tables_on_paper_have_a_row_per_device_and_model_and_their_columns_add_up(capsys):
    roofline.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if "Qwen2.5-" in line]
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert len(rows) == 16 and len({(row[0], row[1]) for row in rows}) == 8
    for row in rows:
        rollout, _, _, update, _, *sums = map(float, row[2:12])
        assert sums[2] == pytest.approx(rollout + update + sum(sums[:2]), abs=0.05)  # rounded


def test_a_run_is_compared_with_the_bound_of_its_own_lengths(tmp_path, monkeypatch):
    """1 prompt with 2 completions of 3 and 5 tokens in step 1."""
    cfg = nr.Config(model="models/tiny", dtype="float32", checkpointing="off", samples=2,
                    pack_tokens=4096)
    metrics = {"seconds/rollout": 2.0, "seconds/reward": 0.5, "seconds/update": 1.0, "mfu": 0.5,
               "seconds/sync": 0.1, "tokens": 8, "tokens_per_second": 2.0, "memory/update": 1.0,
               "completion/length": 4}
    about = {"config": dataclasses.asdict(cfg), "world": 1}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1} | metrics))
    rollouts = ['{"step": 1, "prompt_tokens": 7, "tokens": %d}\n' % n for n in (3, 5)]
    (tmp_path / "rollouts.jsonl").write_text("".join(rollouts))
    monkeypatch.setattr(step.common, "run_apart", lambda *_: CPU)
    step.main([str(tmp_path), "--out", str(tmp_path / "out")])
    parts = roofline.bounds(cfg, ModelShape.of("models/tiny"), [(7, [3, 5])], CPU)
    bound = sum(sum(stage.values()) for stage in parts.values())
    page = (tmp_path / "out.md").read_text()
    assert f"| **step** | 3.600 | {bound:.3f} | {bound / 3.6:.0%} |" in page
    (tmp_path / "rollouts.jsonl").write_text(rollouts[0])
    with pytest.raises(ValueError, match="--keep_rollouts"):
        step.analyse(tmp_path, CPU)
