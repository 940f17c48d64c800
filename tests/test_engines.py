"""The real vLLM and the real DeepSpeed: rollouts, equal log-probs, damaged syncs, files of a run."""
import contextlib
import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import data
import nano_rlvr as nr
import rewards
from conftest import (
    ENV,
    EPS,
    EXACT,
    ROOT,
    close,
    fixed_rollouts,
    float64,
    make_checkpoints,
    make_config,
    within,
)
import runtime.flags
import runtime.model
import runtime.trainer
from runtime import dist
from runtime.checkpoint import Checkpoints
from runtime.dist import RunError
from runtime.log import Log

PROMPTS = 8
# Log-probs of one model from two implementations in float32. The logits here reach 40, where neighbouring
# float32 are 32 EPS apart. A log-prob sums some ten such roundings: 20 to 200 EPS. With other weights, or
# another temperature, the difference is a hundred times the bound.
PARITY = 10_000 * EPS


def prompts_of(tokenizer, n=PROMPTS):
    return [data.encode(e, tokenizer, "chat") for e in data.load("arithmetic", "train", size=n)]


def seeds(n, step=0):
    return [data.request_seed(0, step, i) for i in range(n)]


def sample(llm, tokenizer, step=0, n=4, max_tokens=64):
    rollouts = nr.rollout(llm, prompts_of(tokenizer), n, 1.0, max_tokens, seeds(PROMPTS, step))
    for r in rollouts:
        r.reward, r.weight = 0.0, 1e-3
    return rollouts


def largest_mismatch(engine, rollouts):
    """Largest |log-prob of vLLM - log-prob of the trainer| over all sampled tokens."""
    batch = nr.collate(rollouts)
    with torch.no_grad():
        return (engine(batch)[0] - batch.vllm_logps).abs().max().item()


def moved_policy(tokenizer, lr=1e-2):
    """An engine one AdamW step away from the bundled weights (each weight moves by about lr)."""
    engine = nr.make_policy(make_config(lr=lr))
    nr.update(engine, [nr.collate(fixed_rollouts(tokenizer))], make_config(mismatch_bound=1e9, kl_coef=0.0))
    return engine


def weights_of(engine):
    return {name: w.clone() for name, w in runtime.trainer.named_weights(engine)}


def test_rollouts_of_a_prompt_are_adjacent_and_end_with_eos(llm, tokenizer):
    prompts, rollouts = prompts_of(tokenizer), sample(llm, tokenizer)
    assert [r.prompt for r in rollouts] == [p for p in prompts for _ in range(4)]
    for r in rollouts:
        assert len(r.vllm_logps) == len(r.completion) and max(r.vllm_logps) <= 0
        assert r.truncated == (r.completion[-1] != tokenizer.eos_token_id)
        assert r.text == tokenizer.decode(r.completion, skip_special_tokens=True)
    short = sample(llm, tokenizer, max_tokens=5)
    for r in short:
        assert r.truncated == (len(r.completion) == 5 and r.completion[-1] != tokenizer.eos_token_id)
    assert any(r.truncated for r in short)


def test_samples_are_a_function_of_seed_step_and_index_of_the_prompt(llm, tokenizer):
    tokens = [r.completion for r in sample(llm, tokenizer, step=3)]
    assert tokens == [r.completion for r in sample(llm, tokenizer, step=3)]
    assert tokens != [r.completion for r in sample(llm, tokenizer, step=4)]
    twice = prompts_of(tokenizer, 1) * 2  # the same prompt twice in a batch: other noise
    a, b = (r.completion for r in nr.rollout(llm, twice, 1, 2.0, 20, seeds(2)))
    assert a != b


@pytest.mark.numeric
def test_vllm_and_trainer_agree_before_and_after_a_sync_and_only_then(fresh_llm, tokenizer):
    llm = fresh_llm
    within(largest_mismatch(nr.make_policy(make_config()), sample(llm, tokenizer)), PARITY)
    engine = moved_policy(tokenizer)
    assert largest_mismatch(engine, sample(llm, tokenizer)) > 100 * PARITY  # other weights
    nr.sync_weights(engine, llm)
    within(largest_mismatch(engine, sample(llm, tokenizer, step=1)), PARITY)


@pytest.mark.numeric
def test_log_probs_agree_at_another_temperature(llm, tokenizer):
    hot = nr.rollout(llm, prompts_of(tokenizer), 4, 1.7, 32, seeds(PROMPTS))
    model = runtime.model.load_model(make_config())
    within(largest_mismatch(nr.TokenLogps(model, 1.7), hot), PARITY)
    assert largest_mismatch(nr.TokenLogps(model, 1.0), hot) > 100 * PARITY


@pytest.mark.numeric
@pytest.mark.parametrize("left_out", [
    "model.layers.2.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_sync_that_leaves_one_tensor_out_stops_the_run(fresh_llm, tokenizer, monkeypatch, left_out):
    """Each of them alone changes the log-probs of the 2,048 sampled tokens by 0.009 to 0.02 on average: nine
    times --mismatch_bound and more. Between sets of samples this varies by a tenth."""
    engine, named_weights = moved_policy(tokenizer, lr=0.05), runtime.trainer.named_weights
    old = dict(runtime.model.load_model(make_config()).state_dict())

    def skips_one(engine):  # vLLM then has the new weights and one old one
        return ((name, old[name] if name == left_out else w) for name, w in named_weights(engine))

    monkeypatch.setattr(nr, "named_weights", skips_one)
    nr.sync_weights(engine, fresh_llm)
    before = engine.module.model.model.norm.weight.detach().clone()
    with pytest.raises(RuntimeError, match="vLLM and the trainer disagree"):
        nr.update(engine, [nr.collate(sample(fresh_llm, tokenizer))], make_config(kl_coef=0.0))
    assert torch.equal(engine.module.model.model.norm.weight, before)  # the step was not taken


def test_a_sync_with_a_damaged_iterator_stops_the_run(fresh_llm, tokenizer, monkeypatch):
    engine, named_weights = moved_policy(tokenizer), runtime.trainer.named_weights

    def without_a_layer(engine):
        return ((name, w) for name, w in named_weights(engine) if "layers.1" not in name)

    monkeypatch.setattr(nr, "named_weights", without_a_layer)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):  # vLLM itself may object
        nr.sync_weights(engine, fresh_llm)
        nr.update(engine, [nr.collate(sample(fresh_llm, tokenizer))], make_config(kl_coef=0.0))


@pytest.mark.numeric
@pytest.mark.parametrize("engine_flags", [
    {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"offload": "optimizer"},
    {"checkpointing": "on"}], ids=str)
def test_every_engine_takes_the_step_of_plain_adamw_also_after_a_rehearsal(group, tokenizer, engine_flags):
    """In float64, but DeepSpeed's AdamW in host memory supports float32 only.

    In float32 AdamW's usual epsilon of 1e-8 would not do: a gradient that is only rounding would move its
    weight by lr. There it is 1e-5 on both sides: a thousand times the rounding of these gradients and a
    quarter of their root mean square, so that no step is larger than 1e5 * lr * gradient.
    """
    offload = "offload" in engine_flags
    eps, bound = (1e-5, 10_000 * EPS) if offload else (1e-8, EXACT)
    with contextlib.nullcontext() if offload else float64():
        cfg = make_config(lr=1e-3, kl_coef=0.0, mismatch_bound=1e9, weight_decay=0.1, **engine_flags)
        rollouts = fixed_rollouts(tokenizer)
        engine = nr.make_policy(cfg)
        start = weights_of(engine)
        runtime.guard.rehearse(engine, None, dataclasses.replace(cfg, pack_tokens=500))
        assert all(torch.equal(w, start[n]) for n, w in runtime.trainer.named_weights(engine))
        for _ in range(2):
            for parameters in engine.optimizer.param_groups:  # as train() does at each step
                parameters |= dict(lr=cfg.lr, eps=eps)
            metrics = nr.update(engine, [nr.collate(p) for p in nr.pack(rollouts, 150)], cfg)
        ours = weights_of(engine)

        plain = nr.TokenLogps(runtime.model.load_model(cfg))
        adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, eps=eps)
        for _ in range(2):
            batch = nr.collate(rollouts)
            nr.policy_loss(plain(batch)[0], None, None, batch, cfg)[0].backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), cfg.max_grad_norm)
            adam.step()
            adam.zero_grad()
        close(metrics["grad_norm"], norm, bound)
        wanted = plain.model.state_dict()
        difference, distance = (torch.cat([(x[n] - w).flatten() for n, w in wanted.items()]).norm()
                                for x in (ours, start))
        within(difference, bound * distance)


@pytest.mark.numeric
def test_float32_differs_from_float64_by_rounding_only(group, tokenizer):
    """Therefore the tests in float64 hold for float32 too. Log-probs: see PARITY. Their error, some 100 EPS,
    is also that of the gradient."""
    results, rollouts = [], fixed_rollouts(tokenizer)
    for precision in (contextlib.nullcontext(), float64()):
        with precision:
            cfg = make_config(correction="none")
            policy, batch = nr.TokenLogps(runtime.model.load_model(cfg), 0.9), nr.collate(rollouts)
            logp, entropy = policy(batch)
            nr.policy_loss(logp, None, None, batch, cfg)[0].backward()
            gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
            results.append([x.detach().double() for x in (logp, entropy, gradient)])
    (logp, entropy, gradient), wanted = results
    within((logp - wanted[0]).abs().max(), PARITY)
    within((entropy - wanted[1]).abs().max(), PARITY)
    within((gradient - wanted[2]).norm(), 1000 * EPS * wanted[2].norm())


def test_fp32_master_weights_keep_a_step_that_bf16_weights_cannot_hold(group, tokenizer):
    from deepspeed.utils import safe_get_full_fp32_param
    cfg = make_config(dtype="bfloat16", lr=1e-6, kl_coef=0.0, mismatch_bound=1e9)
    engine, start = nr.make_policy(cfg), runtime.model.load_model(cfg).state_dict()
    nr.update(engine, [nr.collate(fixed_rollouts(tokenizer))], cfg)
    weight = engine.module.model.model.layers[0].mlp.up_proj.weight
    before = start["model.layers.0.mlp.up_proj.weight"]
    # a step of 1e-6 is below the last bit of every bf16 weight above 5e-4: 99 % of them
    assert (weight == before).float().mean() > 0.9
    assert (safe_get_full_fp32_param(weight) != before.float()).float().mean() > 0.9


@pytest.mark.numeric
def test_only_adapters_are_trained_and_vllm_gets_them_merged(fresh_llm, tokenizer, tmp_path):
    cfg = make_config(lora_rank=4, lr=1e-2, kl_coef=0.1, mismatch_bound=1e9)
    engine, plain = nr.make_policy(cfg), nr.TokenLogps(runtime.model.load_model(make_config()))
    ref, rollouts = nr.make_reference(cfg, engine), fixed_rollouts(tokenizer)
    base = plain.model.state_dict()
    start = weights_of(engine)
    assert start.keys() == base.keys()
    assert all(torch.equal(w, base[n]) for n, w in start.items())  # adapters are 0 at the start
    runtime.guard.rehearse(engine, ref, dataclasses.replace(cfg, pack_tokens=500))
    for parameters in engine.optimizer.param_groups:
        parameters["lr"] = cfg.lr
    batch = nr.collate(rollouts)
    for _ in range(3):
        nr.store_fixed_logps(engine, ref, [batch], cfg)
        metrics = nr.update(engine, [batch], cfg)
    assert metrics["kl"] > 1e-3  # the policy is not the reference any more
    with torch.no_grad():
        within((batch.ref - plain(batch)[0]).abs().max(), PARITY)  # the reference is still the base model
    moved = {n for n, w in runtime.trainer.named_weights(engine) if not torch.equal(w, base[n])}
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert moved == {n for n in base if n.endswith(tuple(f"{part}.weight" for part in linear))}
    frozen = {n.replace(".base_layer", ""): p for n, p in engine.module.model.named_parameters()
              if not p.requires_grad}
    assert all(torch.equal(p, base[n]) for n, p in frozen.items()) and moved <= frozen.keys()
    assert largest_mismatch(engine, sample(fresh_llm, tokenizer)) > 100 * PARITY
    nr.sync_weights(engine, fresh_llm)
    within(largest_mismatch(engine, sample(fresh_llm, tokenizer)), PARITY)
    checkpoints = make_checkpoints(engine, out=str(tmp_path), name="lora", lora_rank=4)
    checkpoints.progress.step = 1
    checkpoints.save(final=True)
    checkpoints.wait()
    again = nr.TokenLogps(runtime.model.load_model(make_config(model=str(tmp_path / "lora/final"))))
    with torch.no_grad():
        within((again(batch)[0] - engine(batch)[0]).abs().max(), PARITY)


@pytest.mark.numeric
def test_minibatches_and_epochs_use_the_log_probs_of_the_policy_that_sampled(group, tokenizer):
    with float64():
        cfg = make_config(kl_coef=0.0, mismatch_bound=1e9, lr=1e-3, epochs=2)
        engine, batch = nr.make_policy(cfg), nr.collate(fixed_rollouts(tokenizer))
        nr.store_fixed_logps(engine, None, [batch], cfg)
        first, second = nr.update(engine, [batch], cfg), nr.update(engine, [batch], cfg)
    close(first["ratio"], 1)
    assert abs(second["ratio"] - 1) > 1e-3


@pytest.fixture(scope="module")
def run(tmp_path_factory, llm, tokenizer):
    """The folder of a run of two real steps."""
    cfg = make_config(out=str(tmp_path_factory.mktemp("runs")), name="two", eval_n=4, prompts=8, samples=4,
                      eval_size=16, eval_every=2, save_every=1, profile=True)
    log, verifier = Log(cfg, tokenizer), rewards.Verifier(cfg.rewards, messages=True)
    train_set, eval_set = data.load_splits(cfg, runtime.flags.load_tokenizer(cfg))
    policy, ref = nr.make_policy(cfg), nr.make_reference(cfg)
    nr.train(cfg, llm, policy, ref, train_set, eval_set, verifier, log, Checkpoints(cfg, log))
    verifier.close()
    yield log.folder
    nr.sync_weights(nr.make_policy(cfg), llm)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.numeric
def test_kl_is_zero_at_step_0_and_not_after_it(run):
    """k3 is exp(d) - d - 1: where policy and reference are the same, rounding leaves about EPS of it."""
    steps = [m for m in lines(run / "metrics.jsonl") if "kl" in m]
    within(abs(steps[0]["kl"]), 10 * EPS)
    assert steps[1]["kl"] > 100 * EPS


@pytest.mark.numeric
def test_metrics_hold_every_diagnostic(run):
    first, second, last = lines(run / "metrics.jsonl")
    names = set("""
        reward/mean reward/gsm8k group/flat completion/length completion/truncated loss kl ratio clipped
        entropy grad_norm lr mismatch/mean_abs mismatch/max mismatch/k3 seconds/rollout seconds/reward
        seconds/update seconds/sync tokens_per_second tokens mfu memory/rollout memory/update""".split())
    assert names <= first.keys() and names <= second.keys()
    assert second["tokens"] == 32 * second["completion/length"] and 0 < second["mfu"] < 1
    assert second["memory/update"] > 0.3
    within(second["mismatch/max"], PARITY)
    assert {f"eval/{name}" for name in ("accuracy", "low", "high", "length", "truncated", "mean@4", "pass@2",
                                        "pass@4", "maj@4")} <= last.keys()
    assert first["eval/accuracy"] >= 0 and "eval/accuracy" not in second and last["step"] == 2
    assert last["eval/low"] <= last["eval/accuracy"] <= last["eval/high"]
    assert last["eval/mean@4"] <= last["eval/pass@2"] <= last["eval/pass@4"]


def test_profile_traces_a_step_with_its_update(run):
    names = {event["name"] for event in json.loads((run / "trace.json").read_text())["traceEvents"]}
    assert {"aten::embedding", "aten::_log_softmax", "aten::scaled_dot_product_attention"} <= names


@pytest.mark.numeric
def test_rollouts_file_has_one_line_per_sample(run):
    rows = lines(run / "rollouts.jsonl")
    assert len(rows) == 2 * 32
    for group in (rows[i:i + 4] for i in range(0, len(rows), 4)):
        assert len({r["prompt"] for r in group}) == 1
        within(abs(sum(r["advantage"] for r in group)), 100 * EPS)
    for r in rows:
        assert r["prompt"].startswith("<|user|>") and r["finish"] in ("stop", "length")
        assert r["reward"] == r["parts"]["gsm8k"]


def test_config_file_has_values_commit_and_versions(run):
    about = json.loads((run / "config.json").read_text())
    assert about["config"]["lr"] == nr.MODELS["models/tiny"]["lr"]
    assert {"torch", "deepspeed", "transformers", "python"} <= about["versions"].keys()
    assert "commit" in about and (run / "curve.png").stat().st_size > 5000


def test_a_reference_that_is_not_the_starting_model_is_noticed_before_step_0(group):
    cfg = make_config(kl_coef=0.1, pack_tokens=500)
    policy, ref = nr.make_policy(cfg), nr.make_reference(cfg)
    torch.nn.init.normal_(ref.model.model.layers[0].mlp.down_proj.weight)  # as for a missing tensor
    with pytest.raises(RunError, match="policy and reference differ before the first step"):
        runtime.guard.rehearse(policy, ref, cfg)


def test_a_checkpoint_holds_the_weights_of_its_step(run):
    from safetensors.torch import load_file
    base, one, final = (load_file(f"{folder}/model.safetensors")
                        for folder in (make_config().model, run / "step-1", run / "final"))
    first, both = (max((a[name] - base[name]).abs().max().item() for name in base) for a in (one, final))
    # AdamW's first step moves no weight further than lr plus rounding: EPS for weights below 2, 0.001 * lr
    assert 0 < first <= 1.01 * nr.MODELS["models/tiny"]["lr"] < both
    assert not list(run.glob("*.part"))


def test_the_final_folder_is_a_model_that_transformers_and_vllm_load(run):
    """vLLM loads it in a second run, which only evaluates, with the result that the first ended with."""
    from transformers import AutoModelForCausalLM
    assert AutoModelForCausalLM.from_pretrained(run / "final").config.vocab_size == 263
    flags = ("--task arithmetic --template chat --steps 0 --eval_size 16 --max_prompt 64 --max_tokens 96 "
             "--name again").split()
    command = [sys.executable, ROOT / "nano_rlvr.py", "--model", run / "final", "--out", run, *flags]
    subprocess.run(command, check=True, cwd=run, env=ENV)
    again, last = lines(run / "again/metrics.jsonl")[-1], lines(run / "metrics.jsonl")[-1]
    assert again["eval/accuracy"] == last["eval/accuracy"] and again["eval/length"] == last["eval/length"]


def test_vllms_complaint_about_memory_is_an_out_of_memory_error(monkeypatch):
    """main() then prints which flags to change."""
    import vllm

    def fail(**_):
        raise ValueError("No available memory for the cache blocks.")

    monkeypatch.setattr(vllm, "LLM", fail)
    with pytest.raises(torch.OutOfMemoryError, match="No available memory for the cache blocks"):
        nr.Sampler(make_config())


@pytest.fixture
def started_on_a_gpu(monkeypatch, capsys):
    """started_on_a_gpu(**flags) -> the arguments that vllm.LLM gets on a simulated GPU, and the screen."""
    import vllm
    base, arguments = make_config(), {}

    def record(**args):
        arguments.update(args)
        return SimpleNamespace(llm_engine=SimpleNamespace(step=None))

    monkeypatch.setattr(vllm, "LLM", record)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "share_engine", lambda ranks: None)
    monkeypatch.setattr(nr.memory, "kv_cache_bytes", lambda cfg: 2**30)
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER"):
        monkeypatch.setenv(name, "undone after the test")
        monkeypatch.delenv(name)

    def start(**flags):
        nr.Sampler(dataclasses.replace(base, vllm_memory=0.5, **flags))
        return arguments, capsys.readouterr().out
    return start


@pytest.mark.parametrize("tp", [1, 2])
def test_gpus_that_share_an_engine_do_not_use_the_all_reduce_that_ends_the_process(started_on_a_gpu, tp):
    arguments, screen = started_on_a_gpu(tp=tp)
    assert arguments["disable_custom_all_reduce"] is (tp > 1) and arguments["tensor_parallel_size"] == tp
    assert "the first start on a GPU compiles kernels" in screen


def test_no_kernel_of_flashinfer_is_compiled_unless_the_user_asks_for_it(started_on_a_gpu, monkeypatch):
    from vllm import envs
    envs.disable_envs_cache()  # which another engine of this process has filled
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "1")
    started_on_a_gpu(top_p=0.9, correction="none")
    assert envs.VLLM_USE_FLASHINFER_SAMPLER is False and envs.VLLM_ALLREDUCE_USE_FLASHINFER is True
    monkeypatch.delenv("VLLM_ALLREDUCE_USE_FLASHINFER")
    started_on_a_gpu()
    assert envs.VLLM_ALLREDUCE_USE_FLASHINFER is False
