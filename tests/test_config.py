"""The command line: presets, help, and one-line errors for invalid input before any model is loaded."""
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import typing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import bad_inputs
import data
import nano_rlvr as nr
from conftest import ROOT, close, fixed_rollouts, make_config
import runtime.dist
import runtime.flags
import runtime.memory
import runtime.model
import runtime.sampler
import runtime.shape

load_model = runtime.model.load_model  # before no_model replaces it


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    def fail(*_):
        raise AssertionError("a model was loaded")
    for module, name in ((nr, "Sampler"), (nr, "make_policy"), (nr, "load_model")):
        monkeypatch.setattr(module, name, fail)


def one_line(argv, capsys):
    with pytest.raises(SystemExit) as e:
        nr.main(argv)
    message = str(e.value.code)
    assert message.startswith("nano_rlvr: ") and "\n" not in message.strip(), message
    return message


def test_every_bad_input_ends_in_one_clear_line(tmp_path):
    results = list(bad_inputs.run_all(tmp_path))
    assert len({(case.group, case.id) for case, *_ in results}) == len(results) > 500
    assert not [f"{case.group}, {case.id}: {wrong}" for case, wrong, *_ in results if wrong]


def test_every_numeric_flag_has_one_finite_interval_that_has_its_default():
    listed = [name for _, names, _ in runtime.flags.RANGES for name in names.split()]
    assert len(listed) == len(set(listed))
    for f in dataclasses.fields(nr.Config):
        if f.type in (int, float):
            runtime.flags.check_range(f.name, f.default)
            low, high = map(float, runtime.flags.range_of(f.name)[0][1:-1].split(","))
            assert math.isfinite(low) and math.isfinite(high)


@pytest.mark.parametrize("name, inside, outside", [
    ("top_p", 1, 0), ("top_p", 5e-324, -1), ("beta2", 0, 1), ("beta2", 1 - 2**-53, math.nan),
    ("clip_low", 1, 5), ("reward_timeout", 0.1, 0), ("reward_timeout", 5, math.inf),
    ("soft_tau_pos", 1, 0), ("seed", 2**32 - 1, 2**32), ("seed", 0, -5),
    ("steps", 0, None), ("steps", 10**9, "10"),
])
def test_an_interval_has_the_ends_that_it_names(name, inside, outside):
    runtime.flags.check_range(name, inside)
    with pytest.raises(ValueError, match=f"^--{name} {outside}: must be "):
        runtime.flags.check_range(name, outside)


@pytest.mark.parametrize("argv, flag", [
    ("--question_key q", "question_key"), ("--question_key q --data f.jsonl", None),
    ("--answer_key q", "answer_key"), ("--answer_key a --eval_data f.jsonl", None),
    ("--delta 2 --gate soft", "delta"), ("--delta 2", None),
    ("--clip_low 0.1 --gate detach", "clip_low"), ("--clip_low 0.1", None),
    ("--clip_high 0.1 --gate soft", "clip_high"), ("--clip_high 0.1 --gate detach", None),
    ("--rewards gsm8k:0", "rewards"), ("--rewards gsm8k:0,format:1", None),
    ("--rewards gsm8k:0 --overlong_buffer 0.2", None), ("--rewards gsm8k:0 --data f.jsonl", None),
    ("--rewards gsm8k:0 --eval_n 4 --eval_select format", "rewards"),
    ("--max_grad_norm 0", "max_grad_norm"), ("--max_grad_norm 0.5", None),
    ("--warmup 51", "warmup"), ("--warmup 50", None), ("--warmup 51 --steps 0", None),
    ("--soft_tau_pos 2", "soft_tau_pos"), ("--soft_tau_neg 2", "soft_tau_neg"),
    ("--soft_tau_pos 2 --soft_tau_neg 2 --gate soft", None),
    ("--ref_reset_every 5 --kl_coef 0", "ref_reset_every"), ("--ref_reset_every 5", None),
    ("--eps 0.1 --scale none", "eps"), ("--eps 0.1 --scale none --decorrelate_length", None),
    ("--correction_cap 3 --correction none", "correction_cap"), ("--correction_cap 3", None),
    ("--judge_url http://x", "judge_url"), ("--judge_model m", "judge_model"),
    ("--judge_url http://x --judge_model m --rewards judge", None),
    ("--allow_unsafe_code", "allow_unsafe_code"), ("--allow_unsafe_code --rewards code", None),
    *((f"--algo {algo}", None) for algo in nr.ALGOS),
])
def test_a_flag_that_has_no_effect_is_named(argv, flag, capsys, monkeypatch):
    names = notes_of(["--minibatches", "2", *argv.split()], capsys, monkeypatch)
    assert names == [[flag]] * bool(flag)


def notes_of(argv, capsys, monkeypatch):
    """The flags that each note about a command line names, a list per note."""
    monkeypatch.setattr(runtime.memory, "need_compiler", lambda **_: None)  # it may print a note too
    nr.parse_config(argv)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    return [re.findall(r"--(\w+)", note.partition(" without ")[0].partition(": --lr")[0]) for note in notes]


@pytest.mark.parametrize("argv, flags", [
    ("", []), ("--algo rloo", []), ("--algo dr_grpo", []), ("--algo dapo", [["clip_high"]]),
    ("--algo gspo", [["ratio", "clip_low", "clip_high"]]), ("--algo cispo", [["gate", "clip_high"]]),
    ("--algo sapo --soft_tau_neg 3", [["gate", "soft_tau_neg"]]),
    ("--algo kimi --squared_tau 9", [["gate", "squared_tau"]]),
    ("--delta 3 --clip_low 0 --clip_high 0", [["clip_low", "clip_high", "delta"]]),
    ("--gate soft --delta 3", [["delta"], ["gate"]]), ("--ratio product", []),
    *((f"--algo {algo} {more}", []) for algo in ("gspo", "cispo", "sapo", "kimi")
      for more in ("--epochs 2", "--minibatches 2")),
])
def test_flags_that_change_nothing_on_policy_are_in_one_note_and_change_no_gradient(
        argv, flags, tokenizer, capsys, monkeypatch):
    assert notes_of(argv.split(), capsys, monkeypatch) == flags
    cfg = dataclasses.replace(nr.parse_config(argv.split()), correction="none")
    plain = dataclasses.replace(cfg, **{flag: getattr(nr.Config, flag) for flag in sum(flags, [])})
    batch = nr.collate(fixed_rollouts(tokenizer))
    gradients = []
    for of in (cfg, plain):
        logp = batch.vllm_logps.double().requires_grad_()  # (R,)
        nr.policy_loss(logp, None, None, batch, of)[0].backward()
        gradients.append(logp.grad)
    close(*gradients)
    assert gradients[0].any()


@pytest.fixture
def trained(tmp_path):
    """A copy of the bundled model with the record of a run with other settings."""
    shutil.copytree(ROOT / "models/tiny", tmp_path / "final")
    config = dict(task="countdown", template="r1", lr=3e-5, kl_coef=0.25, epochs=7, from_another_version=1)
    (tmp_path / "final" / runtime.flags.RECORD).write_text(json.dumps({"config": config}))
    return str(tmp_path / "final")


def test_a_trained_model_continues_with_the_settings_of_its_run(trained, capsys):
    cfg = nr.parse_config(["--model", trained])
    assert (cfg.task, cfg.template, cfg.lr, cfg.kl_coef) == ("countdown", "r1", 3e-5, 0.25)
    assert cfg.epochs == 1 and cfg.max_tokens == nr.Config.max_tokens  # no row of MODELS names epochs
    assert "was trained with" not in capsys.readouterr().err
    assert nr.parse_config(["--model", trained, "--algo", "dapo"]).kl_coef == 0  # the preset comes later
    cfg = nr.parse_config(["--model", trained, "--lr", "1e-5", "--template", "none"])
    assert (cfg.lr, cfg.template) == (1e-5, "none")
    note = f"note: --template none, but {trained} was trained with --template r1"
    assert note in capsys.readouterr().err.splitlines()


def test_weights_that_are_not_finite_are_named_when_they_are_loaded(tmp_path):
    def damage(tensors):
        tensors["model.norm.weight"][3] = float("inf")
    shutil.copytree(ROOT / "models/tiny", tmp_path / "model")
    bad_inputs.weights(damage)(tmp_path / "model")
    with pytest.raises(runtime.dist.RunError, match="NaN or infinite values, first in model.norm.weight"):
        load_model(make_config(model=str(tmp_path / "model")))


@pytest.mark.parametrize("changes, kv_cache, error, says", [
    (dict(seed=-5), "1", runtime.dist.RunError, r"vLLM does not start: Seed must be between 0 and 2\*\*32 - 1"),
    (dict(max_model_len=5000), "1", runtime.dist.RunError, "is greater than the derived max_model_len"),
    ({}, "5000", torch.OutOfMemoryError, "less than requested memory for kv"),
])
def test_vllm_gives_its_own_reason_and_only_memory_is_out_of_memory(
        changes, kv_cache, error, says, group, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", kv_cache)
    args = dict(seed=0, model=str(ROOT / "models/tiny"), dtype="float32", max_num_seqs=8, max_model_len=128,
                distributed_executor_backend="external_launcher", cuda_args=dict(gpu_memory_utilization=0.01))
    with pytest.raises(error, match=says):
        runtime.sampler.start_vllm(**args | changes)


class Answer(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(404)
        self.end_headers()


def test_without_the_hub_its_libraries_are_told_at_once_that_they_are_offline(monkeypatch):
    from huggingface_hub import constants
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:%d" % server.server_port)
    ask = runtime.shape.hub_answers.__wrapped__  # without its cache
    assert ask() and not constants.HF_HUB_OFFLINE
    server.shutdown()
    server.server_close()
    assert not ask() and constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_batch_that_ranks_cannot_share_evenly_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "--prompts 32 cannot be shared evenly by 3 ranks" in one_line([], capsys)


def test_a_missing_compiler_is_named(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "'g++'" in one_line([], capsys)


def test_the_lock_of_a_killed_compilation_is_named(monkeypatch, tmp_path, capsys):
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (lock := tmp_path / "deepspeed_shm_comm/lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    nr.parse_config([])
    assert f"will wait for {lock} to be removed: delete it" in capsys.readouterr().err


@pytest.mark.parametrize("field, value, says", [
    ("gate", "foo", "--gate foo: choose one of clip, detach, soft, squared"),
    ("baseline", "mean", "--baseline mean: choose one of group, leave_one_out, batch, running, none"),
    ("zero_stage", 4, "--zero_stage 4: choose one of 1, 2, 3"),
    ("correction", None, "--correction None: choose one of none, token_truncate, token_mask, sequence_mask"),
])
def test_an_unknown_choice_is_refused_in_a_config_built_by_hand(field, value, says):
    with pytest.raises(ValueError) as e:
        runtime.flags.check(dataclasses.replace(nr.parse_config([]), **{field: value}))
    assert str(e.value) == says


def test_every_field_with_choices_refuses_an_unknown_one():
    cfg, hints = nr.parse_config([]), typing.get_type_hints(nr.Config)
    fields = [name for name, hint in hints.items() if typing.get_origin(hint) is typing.Literal]
    assert {"baseline", "scale", "ratio", "gate", "aggregate", "correction", "dtype"} <= set(fields)
    for name in fields:
        with pytest.raises(ValueError, match=f"^--{name} unknown: choose one of "):
            runtime.flags.check(dataclasses.replace(cfg, **{name: "unknown"}))


def test_a_run_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/metrics.jsonl").write_text("{}")
    assert "holds a run already" in one_line(["--out", str(tmp_path), "--name", "mine"], capsys)


def test_the_bound_on_the_mismatch_follows_the_dtype():
    assert nr.parse_config(["--dtype", "float32"]).mismatch_bound == 1e-3
    assert nr.parse_config(["--dtype", "bfloat16"]).mismatch_bound == 0.15
    assert nr.parse_config(["--dtype", "bfloat16", "--mismatch_bound", "0.3"]).mismatch_bound == 0.3


def test_an_unknown_flag_is_an_error(capsys):
    with pytest.raises(SystemExit) as e:
        nr.main(["--learning_rate", "1"])
    assert e.value.code == 2 and "learning_rate" in capsys.readouterr().err


def test_every_field_is_in_one_of_six_groups_and_has_a_help_text():
    groups = runtime.flags.fields_by_group(nr.Config)
    assert list(groups) == ["model and data", "rollout", "algorithm", "optimizer", "engines and memory",
                            "evaluation and files"]
    assert [name for fields in groups.values() for name in fields] == [
        f.name for f in dataclasses.fields(nr.Config)]
    assert all(len(text) >= 10 for fields in groups.values() for text in fields.values())


def test_help_shows_the_groups_every_flag_and_the_values_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        nr.main(["--algo", "dr_grpo", "--help"])
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for title in runtime.flags.fields_by_group(nr.Config):
        assert f"{title} options" in out, title
    flat = " ".join(out.replace("│", " ").split())
    for f in dataclasses.fields(nr.Config):
        assert f"--{f.name}" in flat, f.name
    assert "AdamW's learning rate" in flat and "weight of the KL to the starting model" in flat
    assert re.search(r"--scale [^(]*\S.*?\(default: none\)", flat)
    assert re.search(r"--aggregate [^(]*\S.*?\(default: constant\)", flat)


def test_a_flag_overrides_its_preset_and_a_preset_the_model():
    assert nr.parse_config(["--algo", "dr_grpo"]).kl_coef == 0
    assert nr.parse_config(["--algo", "dr_grpo", "--kl_coef", "0.5"]).kl_coef == 0.5
    assert nr.parse_config(["--algo=rloo"]).baseline == "leave_one_out"
    for argv in ([], ["--model", str(ROOT / "models/tiny")]):
        assert nr.parse_config(argv).task == "arithmetic"
    assert nr.parse_config(["--model", "Qwen2.5-Math-1.5B"]).task == "gsm8k"


def test_bare_names_resolve_to_their_organisation_and_a_local_folder_wins(tmp_path, monkeypatch):
    find_model = runtime.flags.find_model
    assert find_model("Qwen2.5-Math-1.5B") == "Qwen/Qwen2.5-Math-1.5B"
    assert find_model("Llama-3.2-1B-Instruct") == "meta-llama/Llama-3.2-1B-Instruct"
    assert find_model("someone/else") == "someone/else"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen2.5-Math-1.5B").mkdir()
    assert find_model("Qwen2.5-Math-1.5B") == "Qwen2.5-Math-1.5B"
    assert find_model("models/tiny").endswith("models/tiny")  # beside the script, from any folder


def test_a_tenth_of_a_file_is_held_out_for_evaluation(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(bad_inputs.LINES)
    cfg = nr.parse_config(["--data", str(tmp_path / "a.jsonl")])
    train_set, eval_set = data.load_splits(cfg, tokenizer)
    assert (len(train_set), len(eval_set)) == (36, 4)
    assert {e["question"] for e in train_set + eval_set} == {row["question"] for row in bad_inputs.ROWS}


def test_importing_the_script_loads_neither_vllm_nor_deepspeed_nor_dynamo():
    slow = "vllm", "deepspeed", "transformers", "wandb", "datasets", "torch._dynamo"
    code = f"import sys, nano_rlvr; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- the machine, simulated


def test_pytorch_for_cuda_without_a_usable_gpu_is_no_run_on_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    message = one_line(["--steps", "1"], capsys)
    assert "built for CUDA 13.0" in message and "driver 580 or newer" in message
    assert "pip install -r requirements-cpu.txt" in message


@pytest.mark.parametrize("capability, dtype, refused", [
    ((7, 5), "auto", True), ((7, 0), "bfloat16", True), ((7, 5), "float32", False), ((8, 0), "auto", False)])
def test_a_gpu_without_bfloat16_is_told_to_use_float32(monkeypatch, capability, dtype, refused):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if refused:
        with pytest.raises(ValueError, match=r"compute capability 8.0 .* has 7\.[05]: use --dtype float32"):
            nr.parse_config(["--dtype", dtype])
    else:
        nr.parse_config(["--dtype", dtype])


@pytest.mark.parametrize("tools, offload, missing", [
    ("gcc", "none", ""), ("clang", "none", ""), ("cc-of-mine", "none", ""), ("", "none", "a C compiler"),
    ("gcc g++ ninja", "optimizer", ""), ("gcc ninja", "optimizer", r"'g\+\+'"),
    ("gcc g++", "optimizer", "'ninja'"), ("g++ ninja", "optimizer", "a C compiler")])
def test_a_gpu_needs_a_c_compiler_and_offload_one_for_cpp(monkeypatch, tools, offload, missing):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(shutil, "which", lambda tool: tool if tool in tools.split() else None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    if tools == "cc-of-mine":
        monkeypatch.setenv("CC", tools)
    if missing:
        with pytest.raises(ValueError, match=f"needs {missing}"):
            nr.parse_config(["--offload", offload])
    else:
        nr.parse_config(["--offload", offload])


@pytest.mark.parametrize("gpu", [True, False])
def test_a_python_without_its_header_cannot_compile(monkeypatch, tmp_path, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ValueError, match="Python.h is missing.*apt-get install python3-dev"):
        nr.parse_config([])
