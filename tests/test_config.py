"""The command line: presets, help, and one-line errors for invalid input before any model is loaded."""
import dataclasses
import json
import re
import subprocess
import sys
import typing

import pytest

import data
import nano_rlvr as nr
from conftest import ROOT
from runtime import cli, engines, preflight

ROWS = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(40)]


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    def fail(*_):
        raise AssertionError("a model was loaded")
    for module, name in ((nr, "make_llm"), (nr, "make_policy"), (engines, "load_model")):
        monkeypatch.setattr(module, name, fail)


@pytest.fixture
def files(tmp_path):
    good = [json.dumps(row) for row in ROWS]
    (tmp_path / "good.jsonl").write_text("\n".join(good))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "hole.jsonl").write_text("\n".join(good[:16] + ['{"question": "1+1"}'] + good[16:]))
    (tmp_path / "broken.jsonl").write_text("\n".join(good[:3] + ['{"question": '] + good[3:]))
    (tmp_path / "list.json").write_text('{"question": "1+1", "answer": "2"}')
    (tmp_path / "wide.csv").write_text("question,answer\n1+1,2,3\n")
    (tmp_path / "data.txt").write_text("1+1=2")
    return tmp_path


def one_line(argv, capsys):
    with pytest.raises(SystemExit) as e:
        nr.main(argv)
    message = str(e.value.code)
    assert message.startswith("nano_rlvr: ") and "\n" not in message.strip(), message
    return message


@pytest.mark.parametrize("argv, says", [
    ("--samples 1", "--samples 1: a group of one has no mean or deviation"),
    ("--samples 0", "--samples must be at least 1"),
    ("--temperature 0", "--temperature must be above 0"),
    ("--lr -1", "--lr must not be negative"),
    ("--top_p 0.9", "the importance correction would be wrong"),
    ("--top_k 20 --correction none --temperature 0.7", "--temperature 1 with them"),
    ("--delta 1.1", "--delta must be above 1 + clip_high = 1.2"),
    ("--eps 0", "--eps must be above 0"),
    ("--beta2 1", "--beta2 must be at least 0 and below 1"),
    ("--data {dir}/wide.csv", "wide.csv:2: more fields than the header has"),
    ("--resample 2", "it needs --drop_flat_groups"),
    ("--task aime24", "--task aime24 has no training examples"),
    ("--algo ppo", "--algo ppo: choose one of grpo"),
    ("--task chess", "--task chess: choose one of arithmetic"),
    ("--rewards gsm9k", "gsm8k"),
    ("--rewards no_such_file.py:f", "no_such_file.py"),
    ("--prompts 6 --minibatches 4", "--minibatches 4 must divide"),
    ("--max_tokens 4000", "more than the 2048 positions"),
    ("--max_prompt 3", "0 training prompts fit"),
    ("--data nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("--data nowhere", "'nowhere' is no task"),
    ("--data {dir}/empty.jsonl", "empty.jsonl: no examples in it"),
    ("--data {dir}/hole.jsonl", "hole.jsonl:17: no 'answer'"),
    ("--data {dir}/broken.jsonl", "broken.jsonl:4: not JSON"),
    ("--data {dir}/list.json", "must hold a list of objects"),
    ("--data {dir}/data.txt", "cannot read '.txt'"),
    ("--data {dir}/good.jsonl --question_key none", "good.jsonl:1: no 'none'"),
    ("--data {dir}/good.jsonl --answer_key gold", "good.jsonl:1: no 'gold'"),
    ("--model no/such-model", "--model no/such-model: no folder and not loadable from the hub"),
    ("--task gsm8k", "openai/gsm8k: not a file here and not loadable from the hub"),
])
def test_invalid_input_is_rejected_with_a_one_line_error(argv, says, files, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert says in one_line(argv.format(dir=files).split(), capsys)


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
    ("gate", "foo", "--gate foo: choose one of clip, detach, soft"),
    ("baseline", "mean", "--baseline mean: choose one of group, leave_one_out, batch, running, none"),
    ("zero_stage", 4, "--zero_stage 4: choose one of 1, 2, 3"),
    ("correction", None, "--correction None: choose one of none, token_truncate, token_mask, sequence_mask"),
])
def test_an_unknown_choice_is_refused_in_a_config_built_by_hand(field, value, says):
    with pytest.raises(ValueError) as e:
        nr.check_config(dataclasses.replace(nr.parse_config([]), **{field: value}))
    assert str(e.value) == says


def test_every_field_with_choices_refuses_an_unknown_one():
    cfg, hints = nr.parse_config([]), typing.get_type_hints(nr.Config)
    fields = [name for name, hint in hints.items() if typing.get_origin(hint) is typing.Literal]
    assert {"baseline", "scale", "ratio", "gate", "aggregate", "correction", "dtype"} <= set(fields)
    for name in fields:
        with pytest.raises(ValueError, match=f"^--{name} unknown: choose one of "):
            nr.check_config(dataclasses.replace(cfg, **{name: "unknown"}))


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
    groups = cli.fields_by_group(nr.Config)
    assert list(groups) == ["model and data", "rollout", "algorithm", "optimizer", "engines and memory",
                            "evaluation and files"]
    assert [name for fields in groups.values() for name in fields] == [
        f.name for f in dataclasses.fields(nr.Config)]
    assert all(len(text) >= 10 for fields in groups.values() for text in fields.values())


def test_help_shows_the_groups_every_flag_and_the_values_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        nr.main(["--algo", "dr_grpo", "--help"])
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for title in cli.fields_by_group(nr.Config):
        assert f"{title} options" in out, title
    flat = " ".join(out.replace("│", " ").split())
    for f in dataclasses.fields(nr.Config):
        assert f"--{f.name}" in flat, f.name
    assert "AdamW's learning rate" in flat and "weight of the k3 KL" in flat
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
    find_model = preflight.find_model
    assert find_model("Qwen2.5-Math-1.5B") == "Qwen/Qwen2.5-Math-1.5B"
    assert find_model("Llama-3.2-1B-Instruct") == "meta-llama/Llama-3.2-1B-Instruct"
    assert find_model("someone/else") == "someone/else"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen2.5-Math-1.5B").mkdir()
    assert find_model("Qwen2.5-Math-1.5B") == "Qwen2.5-Math-1.5B"
    assert find_model("models/tiny").endswith("models/tiny")  # beside the script, from any folder


def test_a_tenth_of_a_file_is_held_out_for_evaluation(files, tokenizer):
    cfg = nr.parse_config(["--data", str(files / "good.jsonl")])
    train_set, eval_set = data.load_splits(cfg, tokenizer)
    assert (len(train_set), len(eval_set)) == (36, 4)
    assert {e["question"] for e in train_set + eval_set} == {row["question"] for row in ROWS}


def test_importing_the_script_loads_neither_vllm_nor_deepspeed():
    slow = "vllm", "deepspeed", "transformers", "wandb", "datasets"
    code = f"import sys, nano_rlvr; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
