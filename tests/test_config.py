"""The command line: presets, help, and one-line errors for bad input before any model is loaded."""
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import typing

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import data
import nano_rlvr as nr
import runtime.engine
import runtime.flags
import runtime.memory
import runtime.messages
import runtime.stats
from conftest import ENV, ROOT, close, fixed_rollouts, make_config

HINTS = typing.get_type_hints(nr.Config)


def test_every_numeric_flag_has_one_range_with_its_default_and_no_value_beyond_it():
    listed = [name for names, *_ in runtime.flags.RANGES for name in names.split()]
    assert sorted(listed) == sorted(name for name, hint in HINTS.items() if hint in (int, float))
    alone = dict(baseline="none", scale="none", correction="none")
    for names, low, high in runtime.flags.RANGES:
        for name in names.split():
            for value in (low, high, getattr(nr.Config, name)):
                if name != "minibatches":  # it depends on the prompts
                    make_config(**alone | {"filter_groups": name == "resample", name: value})
            below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
            for value in (below, above, math.nan, math.inf, -math.inf):
                with pytest.raises(ValueError, match=f"^--{name} {re.escape(str(value))}: must be"):
                    make_config(**{name: value})


def test_an_unknown_flag_a_missing_value_and_a_word_of_another_type_are_wrong_usage():
    typed = [f"--{name}=x" for name, hint in HINTS.items() if hint is not str]
    for argv in (*typed, "--learning_rate 1", "--steps", "train"):
        with pytest.raises(SystemExit) as e:
            nr.parse_config(argv.split())
        assert e.value.code == 2, argv


def test_needs_names_flags_that_exist_and_the_surrogates_on_which_they_act():
    for names, has_effect, needed in runtime.flags.NEEDS:
        flags = {*names.split(), *re.findall(r"--(\w+)", needed)}
        assert flags <= nr.Config.__dataclass_fields__.keys(), flags
        if needed.startswith("--surrogate "):
            listed = set(re.findall(r"\w+", needed)) - {"surrogate", "or"}
            surrogates = typing.get_args(HINTS["surrogate"])
            assert listed == {s for s in surrogates if has_effect(nr.Config(surrogate=s))}, names


@pytest.mark.parametrize("argv, flags", [
    *((f"--minibatches 2 --algo {algo}", "") for algo in nr.ALGOS),
    # one that has no effect, one that has
    ("--question_key q", "question_key"), ("--question_key q --data f.jsonl", ""),
    ("--minibatches 2 --delta 2 --surrogate sapo", "delta"), ("--epochs 2 --delta 2", ""),
    ("--minibatches 2 --clip_high 0.1 --surrogate sapo", "clip_high"),
    ("--minibatches 2 --tau 2 --surrogate sapo", ""), ("--correction_cap 3", ""),
    ("--warmup 9 --steps 8", "warmup"), ("--eval_top_p 0.5", "eval_top_p"),
    # on-policy
    ("--algo cispo", ""), ("--algo dapo", ""), ("--algo sapo --tau_neg 3", "tau_neg"),
    ("--delta 3 --clip_low 0 --clip_high 0", "clip_low clip_high delta")])
def test_flags_without_an_effect_are_in_a_note_and_change_no_gradient(
        argv, flags, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(runtime.flags, "check_machine", lambda dtype: None)  # may print a note
    cfg = nr.parse_config(argv.split())
    err = capsys.readouterr().err
    notes = [re.findall(r"--(\w+)", x) for x in re.findall("note: (.*): no effect without", err)]
    assert notes == [flags.split()] * bool(flags)
    cfg = dataclasses.replace(cfg, correction="none")
    plain = dataclasses.replace(cfg, **{flag: getattr(nr.Config, flag) for flag in flags.split()})
    pack = nr.collate(fixed_rollouts(tokenizer))
    on_policy = cfg.epochs * cfg.minibatches == 1
    old = pack.vllm_logps.double() * (1.0 if on_policy else 0.5)  # (R,)
    gradients = []
    for of in (cfg, plain):
        logp = pack.vllm_logps.double().requires_grad_()  # (R,)
        nr.policy_loss(logp, old, None, pack, of)[0].backward()
        gradients.append(logp.grad)
    close(*gradients)
    assert gradients[0].any()


@pytest.mark.parametrize("argv, named", [
    ("--algo dapo", "clip_high"), ("--algo gspo", "clip_low, clip_high"), ("--algo grpo", ""),
    ("--algo kimi", "surrogate, tau"), ("--algo dapo --minibatches 4", ""), ("--algo rloo", "")])
def test_a_preset_whose_clip_cannot_act_says_so(argv, named, capsys, monkeypatch):
    monkeypatch.setattr(runtime.flags, "check_machine", lambda dtype: None)  # may print a note
    nr.parse_config(argv.split())
    algo = argv.split()[1]
    err = capsys.readouterr().err
    if named:
        assert f"--algo {algo}: its {named} can act from the second update" in err
    else:
        assert "second update" not in err


def test_a_trained_model_continues_with_the_settings_of_its_run(tmp_path):
    (trained := tmp_path / "final").mkdir()
    config = dict(task="countdown", template="r1", lr=3e-5, kl_coef=0.25, epochs=7, old_flag=1)
    (trained / runtime.flags.RECORD).write_text(json.dumps({"config": config}))
    cfg = nr.parse_config(argv := ["--model", str(trained)])
    assert (cfg.task, cfg.template, cfg.lr, cfg.kl_coef) == ("countdown", "r1", 3e-5, 0.25)
    assert cfg.epochs == 1  # it is not in SUITS
    assert nr.parse_config([*argv, "--algo", "dapo"]).kl_coef == 0  # the preset comes later
    assert nr.parse_config([*argv, "--template", "none"]).template == "none"


def test_the_file_of_a_run_repeats_it_and_any_flag_overrides_it(tmp_path):
    first = nr.parse_config("--algo dapo --lr 3e-5 --eval_n 4 --name a --pack_tokens 64".split())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"config": vars(first), "memory plan": {"pack_tokens": 64}}))
    again = nr.parse_config(["--config", str(path), "--name", "b"])
    # the folder is new, and what the plan decided is decided again
    own = dict(name="b", config=str(path), pack_tokens=nr.Config.pack_tokens)
    assert vars(again) == vars(first) | own
    other = nr.parse_config(["--config", str(path), "--seed", "1", "--algo", "rloo"])
    assert (other.seed, other.lr, other.ratio, other.resample) == (1, 3e-5, "product", 0)
    path.write_text(json.dumps({"config": {"algo": "dapo", "lr": 2e-5}}))  # written by hand
    short = nr.parse_config(["--config", str(path)])
    assert (short.lr, short.clip_high, short.task) == (2e-5, 0.28, "arithmetic")
    for text in '{"lr": 1}', "[1]", "{", "":
        path.write_text(text)
        with pytest.raises(ValueError, match="config.json is damaged"):
            nr.parse_config(["--config", str(path)])
    with pytest.raises(ValueError, match="nowhere.json is damaged .FileNotFoundError"):
        nr.parse_config(["--config", "nowhere.json"])


def test_a_run_is_resumed_with_as_many_steps_as_its_checkpoint_has_but_not_with_fewer(tmp_path):
    (tmp_path / "run/step-60").mkdir(parents=True)
    (tmp_path / "run/step-61.damaged").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps({"config": vars(nr.Config())}))
    argv = ["--resume", str(tmp_path / "run"), "--resume_force", "--steps"]
    assert nr.parse_config([*argv, "60"]).steps == 60  # evaluates, as a run that is done
    with pytest.raises(ValueError, match="--steps 59: the run .*run has a checkpoint of step 60;"):
        nr.parse_config([*argv, "59"])
    (tmp_path / "other.json").write_text('{"config": {"samples": 2}}')
    cfg = nr.parse_config([*argv, "60", "--config", str(tmp_path / "other.json")])
    assert cfg.samples == nr.Config.samples  # a run goes on with its own file


def test_too_little_memory_for_vllm_is_out_of_memory_with_vllms_own_reason(group, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "5000")
    with pytest.raises(torch.OutOfMemoryError, match="less than requested memory for kv"):
        runtime.engine.start_vllm(seed=0, model=str(ROOT / "models/tiny"), dtype="float32",
                                   max_num_seqs=8, max_model_len=128, cuda_args={})


def test_without_the_hub_its_libraries_are_told_at_once_that_they_are_offline(monkeypatch):
    from huggingface_hub import constants
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not runtime.messages.hub_answers.__wrapped__()  # without its cache
    assert constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.fixture
def help_groups(capsys):
    """{title: text} of the boxes of --help --algo dr_grpo."""
    with pytest.raises(SystemExit) as e:
        nr.main(["--algo", "dr_grpo", "--help"])
    assert e.value.code == 0
    text = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", capsys.readouterr().out)
    _, *parts = re.split(r"\n +([\w ]+?) options *\n", text)
    return {title: " ".join(box.split()) for title, box in zip(parts[::2], parts[1::2])}


def test_help_has_every_flag_with_its_comment_and_the_values_of_the_preset(help_groups):
    text = " ".join(help_groups.values())
    found = {name: re.search(rf"--{name},? \S+ (.*?)\(default: (.*?)\)", text).groups()
             for name in HINTS}
    assert min(len(comment) for comment, _ in found.values()) > 10
    assert (found["scale"][1], found["aggregate"][1]) == ("none", "constant")


def test_help_begins_with_the_ten_flags_of_a_first_run_and_names_every_task_and_template(
        help_groups):
    assert list(help_groups) == ["first run", *runtime.flags.SECTIONS]
    first = help_groups["first run"]
    assert set(re.findall(r"--(\w+)", first)) == {*runtime.flags.FIRST_RUN}
    assert len(runtime.flags.FIRST_RUN) == 10
    assert f"--task STR {', '.join(data.TASKS)} (default" in first
    *others, last = data.TEMPLATES
    assert f"prompt: {', '.join(others)}, {last} or a file" in first
    for flag, group in (("temperature", "rollout"), ("baseline", "algorithm"),
                        ("weight_decay", "optimizer"), ("zero_stage", "engine and memory"),
                        ("eval_n", "evaluation"), ("resume", "file"), ("seed", "file"),
                        ("eval_data", "model and data")):
        assert f"--{flag}" in help_groups[group]


def test_defaults_follow_the_preset_the_model_and_the_dtype_and_a_flag_overrides_them():
    for argv, name, value in (
            ("--algo dapo", "overlong_buffer", 0.2),
            ("--algo=dr_grpo", "kl_coef", 0), ("--algo dr_grpo --kl_coef 0.5", "kl_coef", 0.5),
            (f"--model {ROOT}/models/tiny", "task", "arithmetic"),
            ("--model Qwen2.5-Math-1.5B", "task", "gsm8k"),
            ("--dtype float32", "mismatch_bound", 1e-3),
            ("--dtype bfloat16", "mismatch_bound", 0.15)):
        assert getattr(nr.parse_config(argv.split()), name) == value, argv


def test_importing_the_script_loads_no_slow_library_and_shares_the_cores_also_on_a_mac():
    slow = "vllm", "deepspeed", "transformers", "wandb", "datasets", "torch._dynamo"
    code = (f"import sys, os, nano_rlvr; print([m for m in {slow} if m in sys.modules]);"
            "print(nano_rlvr.ranks.CORES, os.environ['PYTORCH_CUDA_ALLOC_CONF']);"
            "del os.sched_getaffinity; sys.modules.pop('runtime.verify.pool');"
            "import runtime.verify.pool;"
            "import importlib; importlib.reload(nano_rlvr.ranks)")
    env = ENV | {"LOCAL_WORLD_SIZE": "999"}
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env, text=True)
    assert shown.splitlines() == ["[]", "1 expandable_segments:True"]


def test_a_gpu_that_cannot_be_used_or_has_no_bfloat16_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match="driver 580 .*make clean setup"):
        nr.parse_config([])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match="use --dtype float32"):
        nr.parse_config([])
    nr.parse_config(["--dtype", "float32"])


def test_the_peak_rate_of_a_cpu_in_bfloat16_is_measured_with_few_operations():
    """One product of 2048 x 2048 took 40 s on a CPU without instructions for bfloat16."""
    with FlopCounterMode(display=False) as counter:
        assert runtime.stats.peak_flops.__wrapped__("bfloat16") > 0
    assert 0 < counter.get_total_flops() <= 2 * 2048**3 / 8


def test_a_machine_that_cannot_compile_is_refused_and_one_that_will_says_so(
        monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for compiled, says in (("/elsewhere/torch", True), (torch.__path__[0], False)):
        (tmp_path / "build.ninja").write_text(f"-I{compiled}/include")
        nr.parse_config([])
        assert ("the first start compiles" in capsys.readouterr().out) == says
    assert os.environ["PATH"].startswith(f"{os.path.dirname(sys.executable)}:")  # not another ninja
    monkeypatch.setenv("CC", "gcc -pthread")
    nr.parse_config([])
    monkeypatch.setenv("CC", "missing-cc")
    with pytest.raises(ValueError, match="without missing-cc .*apt-get install"):
        nr.parse_config([])
