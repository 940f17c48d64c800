"""The roofline model of bench/roofline.py against figures by hand, and bench/step.py."""
import dataclasses
import json
import math

import pytest

import nano_rlvr as nr
from bench import plan, roofline, step
from runtime.memory import ModelShape
from runtime.stats import forward_flops

SMALL = plan.SHAPES["Qwen2.5-1.5B"]  # tied embeddings
WEIGHTS = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)  # q and o, k and v, the MLP
HEAD = 151936 * 1536
H200 = roofline.DEVICES[0]
CPU = roofline.Device("CPU", 1e11, 1e10, math.inf, 2**34, 1e-5)
BF16 = nr.Config(dtype="bfloat16", kl_coef=0.0, gradient_checkpointing="off", pack_tokens=32768)
GROUPS = [(100, [700] * 8) for _ in range(64)]
TOKENS, COMPLETION_TOKENS = 64 * (100 + 8 * 700), 64 * 8 * 700


def parts(groups=GROUPS, device=H200, **flags):
    stages = roofline.stages(dataclasses.replace(BF16, **flags), SMALL, groups, device)
    return stages["rollout"] | stages["update"] | stages["sync"]


def flops(ops):
    return sum(op.flops for op in ops)


def test_decoding_reads_all_weights_per_token_step_and_multiplies_per_sequence():
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
    assert flops(p["forward"]) == pytest.approx(forward_flops(SMALL, rollouts), rel=1e-3)  # MFU


def test_attention_reads_a_shared_prompt_once_for_its_own_queries_and_once_per_completion():
    rollouts = [nr.Rollout([1] * p, [0] * n, "", False, []) for p, n in ((5, 3), (5, 7), (6, 2))]
    pairs = 5 * 5 + 6 * 6 + sum(2 * (len(r.prompt) + i) + 1 for r in rollouts
                                for i in range(len(r.completion)))
    without = forward_flops(dataclasses.replace(SMALL, attention=0), rollouts)
    assert forward_flops(SMALL, rollouts) - without == 2 * SMALL.layers * SMALL.attention * pairs


def test_a_run_is_compared_with_the_bound_of_its_own_lengths(tmp_path, monkeypatch):
    cfg = nr.Config(model="models/tiny", dtype="float32", gradient_checkpointing="off", samples=2,
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
