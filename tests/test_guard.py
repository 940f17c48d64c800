"""No silent wrong number: overflow, skipped steps, weights that are not finite, and a full GPU."""
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
from conftest import ENV, ROOT, fixed_rollouts, judged_by, make_checkpoints, make_config
import runtime.sampler
import runtime.trainer
from runtime import dist, guard, memory
from runtime.dist import RunError
from runtime.shape import ModelShape

# ---- overflow


def single_tokens(advantage, logps):
    """A batch in which every token is a sequence of weight 1."""
    n = len(logps)
    return SimpleNamespace(
        lengths=torch.ones(n), sequence_ids=torch.arange(n), weight=torch.ones(n),
        advantage=torch.full((n,), advantage), vllm_logps=torch.zeros(n))


def test_token_mask_is_0_where_the_importance_ratio_overflows():
    cfg = make_config(correction="token_mask")
    weights = nr.importance(torch.tensor([100.0, math.inf, 0.0, -math.inf]), None, cfg)
    assert weights.tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("gate", ["clip", "detach", "soft"])
@pytest.mark.parametrize("ratio", ["token", "sequence", "product"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_loss_and_gradient_are_finite_at_any_log_ratio(gate, ratio, advantage):
    far = [-1e4, -100.0, -30.0, 30.0, 88.0, 89.0, 1e4]
    logp = torch.tensor(far, requires_grad=True)
    batch = single_tokens(advantage, far)
    cfg = make_config(gate=gate, ratio=ratio, correction="none", kl_coef=0.0)
    loss, _ = nr.policy_loss(logp, torch.zeros(len(far)), None, batch, cfg)
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all()


@pytest.mark.numeric
def test_the_bound_on_the_log_ratio_changes_nothing_below_20():
    logp = torch.tensor([-19.9, -1.0, 0.0, 1.0, 19.9], dtype=torch.float64, requires_grad=True)
    cfg = make_config(clip_high=1e9, clip_low=1.0, correction="none", kl_coef=0.0)
    loss, _ = nr.policy_loss(logp, torch.zeros(5), None, single_tokens(-1.0, logp), cfg)
    loss.backward()
    torch.testing.assert_close(logp.grad, logp.detach().exp(), rtol=1e-9, atol=0)


# ---- steps that DeepSpeed skips


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_step_with_a_gradient_that_is_not_finite_is_reported_and_moves_no_weight(
        group, tokenizer, zero_stage):
    cfg = make_config(kl_coef=0.0, mismatch_bound=1e9, lr=1e-3, zero_stage=zero_stage)
    policy, batch = nr.make_policy(cfg), nr.collate(fixed_rollouts(tokenizer))
    before = {name: w.clone() for name, w in runtime.trainer.named_weights(policy)}
    handle = policy.module.model.model.norm.weight.register_hook(lambda grad: grad * math.inf)
    assert nr.update(policy, [batch], cfg)["skipped"] == 1
    assert all(torch.equal(w, before[name]) for name, w in runtime.trainer.named_weights(policy))
    handle.remove()
    assert nr.update(policy, [batch], cfg)["skipped"] == 0
    assert not all(torch.equal(w, before[name]) for name, w in runtime.trainer.named_weights(policy))


def test_the_batch_of_a_skipped_step_is_kept_and_three_in_a_row_end_the_run(tokenizer, tmp_path, capsys):
    rollouts = fixed_rollouts(tokenizer)
    groups = [rollouts[i:i + 4] for i in range(0, len(rollouts), 4)]
    taken, skipped = {"skipped": 0.0}, {"skipped": 1.0}
    assert guard.count_skipped(0, 0, [taken], groups, tmp_path) == 0
    assert not (tmp_path / "quarantine").exists()
    assert guard.count_skipped(0, 1, [skipped, skipped], groups, tmp_path) == 2
    rows = [json.loads(line) for line in open(tmp_path / "quarantine/step-1-rank-0.jsonl")]
    assert [row["completion"] for row in rows] == [r.completion for r in rollouts]
    assert "step 1 has a gradient that is not finite" in capsys.readouterr().out
    assert guard.count_skipped(2, 2, [taken, skipped], groups, tmp_path) == 1
    with pytest.raises(RunError, match="3 optimizer steps in a row .* Likely causes: --lr too high"):
        guard.count_skipped(2, 4, [skipped], groups, tmp_path)


# ---- batches without a verdict


def verifier_of(*values, timeouts=0, crashes=0, lines=()):
    """A stand-in for a Verifier: gives these values to the first function, 0.5 to the second."""
    @judged_by("first", "second")
    def verify(texts, **columns):
        parts = {"first": list(values), "second": [0.5] * len(texts)}
        counts = {"reward/timeouts": float(timeouts), "reward/crashes": float(crashes)}
        return list(values), parts, counts
    verify.crashes = dict(enumerate(lines))
    return verify


@pytest.fixture
def sampled(monkeypatch, tokenizer):
    """Makes rollout() return fixed rollouts: 4 prompts, n of each."""
    monkeypatch.setattr(nr, "rollout", lambda llm, prompts, n, *_, **__: fixed_rollouts(
        tokenizer, groups=len(prompts), n=n))


EXAMPLES = [{"question": str(i), "answer": str(i), "prompt_ids": [i]} for i in range(4)]


def test_a_step_without_any_verdict_ends_the_run_with_the_counts_and_the_first_crash(group, sampled):
    cfg = make_config(prompts=4, samples=2)
    none = verifier_of(*[None] * 8, timeouts=3, crashes=4, lines=["mine: KeyError: 'gold'", "other: x"])
    with pytest.raises(RunError) as caught:
        nr.collect_rollouts(cfg, None, EXAMPLES, none, 0, {"eval/crashes": 99})
    assert str(caught.value) == (
        "none of 8 completions got a verdict (reward/timeouts 3, reward/crashes 4, the others None); first "
        "crash: mine: KeyError: 'gold'. Check the reward function and the columns of the data; "
        "--reward_timeout is its time limit.")
    nr.collect_rollouts(cfg, None, EXAMPLES, verifier_of(*[None] * 7, 0.0), 0, {})


def test_an_evaluation_without_a_verdict_of_the_first_reward_ends_the_run(group, sampled):
    with pytest.raises(RunError, match="none of 4 .*eval/timeouts 4, eval/crashes 0, .* None.. Check"):
        nr.evaluate(None, EXAMPLES, verifier_of(*[None] * 4, timeouts=4), make_config())


def test_an_evaluation_reports_the_share_without_a_verdict_which_counts_as_wrong(group, sampled):
    cfg = make_config(samples=2)
    metrics, _ = nr.evaluate(None, EXAMPLES, verifier_of(1.0, None, 0.0, 1.0, timeouts=1), cfg)
    assert metrics["eval/accuracy"] == 0.5 and metrics["eval/no_verdict"] == 0.25
    assert (metrics["eval/timeouts"], metrics["eval/crashes"], metrics["eval/n"]) == (1, 0, 4)


def test_the_verdicts_of_all_ranks_count(monkeypatch):
    monkeypatch.setattr(dist, "all_sum", lambda total, verdicts: [2 * total, verdicts + 1])
    guard.check_verdicts("reward", [None, None], {}, None)  # the other rank has one


def test_every_row_keeps_its_columns_whatever_row_is_first(tokenizer):
    examples = [{"question": "a", "prompt_ids": [1]}, {"question": "b", "rubric": "r", "prompt_ids": [1]},
                {"question": "c", "tests": [1], "prompt_ids": [1], "completions": "x"}]
    seen = {}

    @judged_by("x")
    def verify(texts, **columns):
        seen.update(columns)
        return [1.0] * len(texts), {"x": [1.0] * len(texts)}, {}

    nr.score(fixed_rollouts(tokenizer, groups=3, n=2), examples, verify, step=7)
    del seen["completion_ids"]
    assert seen == {"question": list("aabbcc"), "prompts": list("aabbcc"), "step": 7,
                    "sample_index": [0, 1] * 3, "rubric": [None, None, "r", "r", None, None],
                    "tests": [None] * 4 + [[1]] * 2}


def test_weights_that_are_not_finite_are_named_before_anything_is_saved(group, tmp_path):
    policy = nr.make_policy(make_config())
    checkpoints = make_checkpoints(policy, out=str(tmp_path), name="x")
    policy.module.model.model.norm.weight.data[3] = math.nan
    checkpoints.progress.step = 1
    with pytest.raises(RunError, match="weights of model.norm.weight are not finite"):
        checkpoints.save()
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["config.json"]


# ---- a full GPU


@pytest.mark.parametrize("error, advised", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
    (RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62"), True),  # vLLM's wake_up
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
])
def test_a_full_gpu_ends_in_advice_and_another_error_does_not(monkeypatch, tmp_path, error, advised):
    def fail(cfg):
        raise error
    monkeypatch.setattr(nr, "make_llm", fail)
    with pytest.raises(SystemExit if advised else RuntimeError) as e:
        nr.main(["--steps", "1", "--out", str(tmp_path)])
    assert ("To use less memory: --pack_tokens" in str(e.value)) == advised


@pytest.fixture
def gpu(monkeypatch):
    """gpu(gib): a simulated GPU, on which Qwen2.5-1.5B is planned."""
    shape = ModelShape(parameters=1_543_714_304, kv_heads=2, hidden=1536, layers=28, attention=1536, mlp=8960,
                       vocab=151936, kv_cache=2 * 28 * 2 * 128, qk_norms=False)

    def simulate(gib):
        monkeypatch.setattr(ModelShape, "of", lambda model: shape)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib * memory.GIB, gib * memory.GIB))
        return shape
    return simulate


def test_zero_1_in_bf16_is_planned_with_fp32_gradients_of_all_weights_in_every_phase(gpu, monkeypatch):
    shape = gpu(80)
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    flags = dict(dtype="bfloat16", checkpointing="on", offload="none", pack_tokens=4096)
    gradients = {stage: memory.step_bytes(nr.Config(zero_stage=stage, **flags), shape, gpu=True)
                 ["gradients"] for stage in (1, 2)}
    fp32 = 4 * shape.parameters  # 5.75 GiB
    assert gradients[1] == (fp32, fp32, fp32 + 2 * shape.parameters)  # until the step also in bf16
    assert gradients[2] == (0, 0, 2 * shape.parameters)


def test_the_kv_cache_is_what_the_share_leaves_and_no_more_than_a_step_needs(gpu):
    shape = gpu(24)
    cfg = nr.Config(dtype="bfloat16", vllm_memory=0.5)
    left = 12 * memory.GIB - memory.vllm_weights(cfg, shape) - memory.VLLM_ACTIVATIONS
    assert memory.kv_cache_bytes(cfg) == int(left)
    gpu(1000)
    sequences = cfg.prompts * cfg.samples + 1
    assert memory.kv_cache_bytes(cfg) == sequences * (cfg.max_prompt + cfg.max_tokens) * 2 * shape.kv_cache
    gpu(8)
    with pytest.raises(ValueError, match="--vllm_memory 0.5 has no room"):
        memory.kv_cache_bytes(cfg)


def test_the_kv_cache_is_mapped_after_pytorch_has_freed_what_the_sync_left(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    runtime.sampler.wake_kv_cache(SimpleNamespace(wake_up=lambda tags: calls.append(tags)))
    assert calls == ["empty_cache", ["kv_cache"], "reset_peak_memory_stats"]


def test_processes_of_one_machine_share_its_cores_whatever_torchrun_sets():
    code = ("import nano_rlvr, os; from runtime import dist; "
            "print(dist.CORES, os.environ['PYTORCH_CUDA_ALLOC_CONF'])")
    env = ENV | {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}
    alone = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    cores, allocator = alone.stdout.split()
    assert int(cores) == dist.CORES and allocator == "expandable_segments:True"
    env["LOCAL_WORLD_SIZE"] = str(2 * dist.CORES)
    many = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert many.stdout.split()[0] == "1"
