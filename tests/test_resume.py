"""Nothing is lost: checkpoints, damage to them, which runs may continue, signals, failures."""
import contextlib
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers

import nano_rlvr as nr
from conftest import ROOT, fixed_rollouts, make_checkpoints, make_config
from runtime import checkpoint, memory, stop
from runtime.checkpoint import on_disk
from runtime.log import Log
from runtime.memory import ModelShape
from runtime.messages import RunError
from runtime.trainer import named_weights


def updated(policy, tokenizer, times=1):
    cfg = make_config(kl_coef=0.0, mismatch_bound=1e9)
    for seed in range(times):
        nr.update(policy, [nr.collate(fixed_rollouts(tokenizer, seed=seed))], cfg)


def state(checkpoints):
    weights = {name: w.clone() for name, w in named_weights(checkpoints.engine)}
    return weights | {f"{kind}.{name}": x for name, tensors in checkpoints._states()
                      for kind, x in tensors.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("changes", [
    dict(zero_stage=3, dtype="bfloat16"), dict(zero_stage=2, dtype="bfloat16", lora_rank=4)],
    ids=str)
def test_a_restored_trainer_takes_the_same_next_steps(group, tokenizer, tmp_path, changes):
    changes, where = changes | dict(lr=1e-2), dict(out=str(tmp_path), name="run")
    policy = nr.make_policy(make_config(**changes))
    checkpoints = make_checkpoints(policy, **changes, **where)
    updated(policy, tokenizer, 2)
    checkpoints.progress.step, checkpoints.progress.running_mean = 2, 0.25
    checkpoints.save()
    updated(policy, tokenizer, 2)

    again = nr.make_policy(make_config(**changes))
    updated(again, tokenizer)  # AdamW's moments exist, as after the rehearsal, but they are others
    restored = make_checkpoints(again, resume=str(tmp_path / "run"), **changes, **where)
    assert dataclasses.astuple(restored.progress) == (2, 0.25, 0)
    assert not equal(state(restored), state(checkpoints))
    updated(again, tokenizer, 2)
    assert equal(state(restored), state(checkpoints))


@pytest.fixture(scope="module")
def two_steps(group, tokenizer, tmp_path_factory):
    """(policy, the folder of its run with the checkpoints step-1 and step-2)."""
    out, policy = tmp_path_factory.mktemp("two"), nr.make_policy(make_config())
    checkpoints = make_checkpoints(policy, out=str(out), name="run")
    updated(policy, tokenizer)
    for checkpoints.progress.step in (1, 2):
        checkpoints.save()
    return policy, out / "run"


@pytest.fixture
def saving(two_steps, tmp_path):
    """Checkpoints of a copy of that run in tmp_path/run, about to save step 3."""
    policy, run = two_steps
    shutil.copytree(run, tmp_path / "run")
    checkpoints = make_checkpoints(policy, out=str(tmp_path), name="run")
    checkpoints.progress.step = 3
    return checkpoints


def resumed(saving, policy=None):
    run = saving.folder
    return make_checkpoints(
        policy or saving.engine, out=str(run.parent), name="run", resume=str(run))


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_harm_to_any_file_of_a_checkpoint_is_noticed(saving):
    step = saving.folder / "step-2"
    files = [path for path in step.rglob("*") if path.is_file()]
    assert len(files) > 40 and checkpoint.damage(step) == ""
    for path in files:
        before = path.read_bytes()
        for harm in (flip_a_bit, os.remove):
            harm(path)
            assert checkpoint.damage(step), path
            path.write_bytes(before)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(saving, capsys):
    run = saving.folder
    flip_a_bit(run / "step-2/model.safetensors")
    (run / "step-3.part").mkdir()  # of a run that was killed
    (run / "step-2.damaged/x").mkdir(parents=True)  # of an earlier time
    (run / "step-0003").mkdir()  # no checkpoint: the trainer writes step-3
    assert resumed(saving).progress.step == 1
    assert "step-2 is damaged (model.safetensors has another checksum" in capsys.readouterr().err
    assert sorted(path.name for path in run.glob("step-*")) == [
        "step-0003", "step-1", "step-2.damaged"]
    with pytest.raises(OSError, match="lora_A.*safetensors"):
        resumed(saving, nr.make_policy(make_config(lora_rank=4)))
    os.remove(run / "step-1/manifest.json")
    with pytest.raises(ValueError, match="all checkpoints in .* are damaged"):
        resumed(saving)


def test_too_little_room_for_a_checkpoint_is_noticed_before_the_run(saving, monkeypatch):
    needed = memory.checkpoint_bytes(saving.cfg, ModelShape.of(saving.cfg.model))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(ValueError, match="a checkpoint needs 0.01 GiB"):
        resumed(saving)


def test_with_save_every_minus_1_a_run_writes_no_checkpoint_and_needs_no_room(saving, monkeypatch):
    cfg = dataclasses.replace(saving.cfg, save_every=-1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    before = set(saving.folder.iterdir())
    checkpoints = checkpoint.Checkpoints(cfg, saving.log)
    checkpoints.restore(saving.engine)
    for checkpoints.progress.step in (3, 4):
        checkpoints.save(final=True)
    assert set(saving.folder.iterdir()) == before


@contextlib.contextmanager
def largest_file(size):
    """No file can grow beyond `size` bytes, as if the disk was full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failed_write_is_said_and_leaves_whole_files_only(saving):
    with largest_file(2**20), pytest.raises(RunError, match="step-3 could not be written") as e:
        saving.save()
    assert e.value.__cause__ is not None  # errors/rank-0.txt has its traceback, too
    assert {path.name for path in saving.folder.glob("step-*")} == {"step-1", "step-2"}
    saving.log.write(0, {"loss": 1.0})
    with largest_file(30), pytest.raises(RunError, match="metrics.jsonl cannot be written"):
        saving.log.write(1, {"loss": 2.0})  # room for half a line more
    assert (saving.folder / "metrics.jsonl").read_text() == '{"step": 0, "loss": 1.0}\n'


def test_the_newest_and_the_most_accurate_checkpoints_are_kept(saving):
    saving.cfg = dataclasses.replace(saving.cfg, keep=1)
    for saving.progress.step, accuracy in enumerate([0.5, 0.75, None, 0.75, 0.25, None], start=3):
        saving.save()
        metrics = {} if accuracy is None else {"eval/accuracy": accuracy}
        saving.log.rows.append({"step": saving.progress.step} | metrics)
    assert list(on_disk(saving.folder)) == [4, 8]


def test_a_checkpoint_is_a_model_and_final_the_same_without_the_trainers_state(saving):
    run = saving.folder
    saving.save(final=True)
    for path in (run / "step-3", run / "final"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
        assert equal(loaded, dict(named_weights(saving.engine)))
        settings = json.loads((path / "nano_rlvr.json").read_text())["config"]
        assert settings == dataclasses.asdict(saving.cfg)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        assert tokenizer.chat_template == saving.log.tokenizer.chat_template
    assert {path.name for path in (run / "step-3").iterdir()} == {
        path.name for path in (run / "final").iterdir()} | {"trainer", "manifest.json"}


def test_logs_are_cut_back_to_the_checkpoint(saving):
    path = saving.folder / "metrics.jsonl"
    for step in range(3):
        saving.log.write(step, {"loss": 1.0})
    kept = path.read_text()
    saving.save()
    saving.log.write(3, {"loss": 2.0})
    with path.open("a") as f:
        f.write('{"step": 4, "lo')
    resumed(saving)
    assert path.read_text() == kept
    for left in (len(kept) - 1, 0):
        os.truncate(path, left)
        resumed(saving)
        assert path.read_text() == kept[:left]  # a shorter one stays as it is


# ---- which runs may continue


@pytest.fixture
def saved(tmp_path):
    """The folder of a run with its config.json, and nothing else."""
    cfg = make_config(out=str(tmp_path), name="run", steps=10, lr_end=1.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps({"config": dataclasses.asdict(cfg)}))
    return tmp_path / "run"


@pytest.mark.parametrize("flags, says", [
    ("--steps 20 --keep 5 --save_every 7 --wandb offline --timeout 1 --data x --eval_data y", None),
    ("--seed 3 --temperature 0.5", "--seed 3 (was 0); --temperature 0.5 (was 1.0)"),
    ("--steps 5", "--steps 5 (was 10)"),
    ("--steps 20 --lr_end 0.5", "More --steps need --lr_end 1 from the start; else train on in"),
    ("--lr 1 --resume_force", None)])
def test_a_run_continues_only_with_flags_that_give_the_same_results(saved, flags, says):
    refused = pytest.raises(ValueError, match=re.escape(says or ""))
    with refused if says else contextlib.nullcontext():
        cfg = nr.parse_config(["--resume", str(saved), *flags.split()])
        assert (cfg.samples, cfg.name, cfg.out) == (4, "run", str(saved.parent))


def test_each_flag_is_free_or_only_rounds_or_is_refused(saved):
    free = set("name out resume resume_force config save_every keep timeout wandb data "
               "eval_data".split())
    rounds = set("zero_stage pack_tokens gradient_checkpointing offload gpu_memory_utilization "
                 "memory_gb compile layout".split())
    cfg = make_config(out=str(saved.parent), name="run")
    for name, value in vars(cfg).items():
        changed = dataclasses.replace(cfg, **{name: "x" if isinstance(value, str) else value + 1})
        refused = pytest.raises(ValueError, match=f"other results with --{name} ")
        with contextlib.nullcontext() if name in free | rounds else refused:
            nr.flags.check_resumed(changed, vars(cfg))


def test_resume_without_a_value_means_the_run_of_this_name_or_a_new_one(saved, tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert nr.parse_config(["--resume", "--name", "run", *out]).resume == str(saved)
    assert nr.parse_config(["--resume", "run", *out]).resume == str(saved)
    assert nr.parse_config(["--name", "new", "--resume", *out]).resume == ""
    assert "there is no run" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--resume nowhere: no folder of a run"):
        nr.parse_config(["--resume", "nowhere"])


def test_a_folder_belongs_to_one_process(group, tmp_path):
    cfg = make_config(out=str(tmp_path), name="mine")
    assert checkpoint.claim_folder(cfg).name == "mine"
    held = checkpoint._held.pop()  # as another process, with its own open file
    with pytest.raises(ValueError, match="another process is running there"):
        checkpoint.claim_folder(cfg)
    held.close()


def test_a_run_does_not_continue_with_other_inputs(group, tmp_path):
    model = shutil.copytree(ROOT / "models/tiny", tmp_path / "model")
    examples = [{"question": "1+1", "prompt_ids": [1, 2]}]
    cfg = make_config(out=str(tmp_path), name="run", model=str(model))
    checkpoint.claim_folder(cfg, examples)
    cfg = dataclasses.replace(cfg, resume=str(tmp_path / "run"))
    for change in (lambda: examples[0].update(prompt_ids=[1, 3]),
                   lambda: flip_a_bit(model / "model.safetensors"),
                   lambda: (tmp_path / "run/inputs.sha256").unlink()):
        checkpoint.claim_folder(cfg, examples)
        change()
        with pytest.raises(ValueError, match="data, tokenizer or --model have changed, or"):
            checkpoint.claim_folder(cfg, examples)
        checkpoint.claim_folder(dataclasses.replace(cfg, resume_force=True), examples)


def test_an_image_in_a_row_does_not_keep_a_run_from_continuing(group, tmp_path):
    cfg = make_config(out=str(tmp_path), name="run")
    row = {"question": "what is this?", "prompt_ids": [1]}
    checkpoint.claim_folder(cfg, [row | {"image": object()}])
    cfg = dataclasses.replace(cfg, resume=str(tmp_path / "run"))
    checkpoint.claim_folder(cfg, [row | {"image": object()}])


def test_passwords_in_urls_are_not_written_and_a_template_is_as_it_was(saving, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--data", "http://me:a@secret@host/v1"])
    Log(dataclasses.replace(saving.cfg, template="https://me@host"), saving.log.tokenizer)
    about = json.loads((saving.folder / "config.json").read_text())
    assert about["command"] == "x --data http://***@host/v1"
    assert about["config"]["template"] == "https://me@host"


def test_a_resumed_run_is_the_same_run_for_wandb(saving, monkeypatch):
    monkeypatch.setattr("wandb.init", init := mock.Mock())
    for mode, resume in (("offline", ""), ("online", str(saving.folder))):
        Log(dataclasses.replace(saving.cfg, wandb=mode, resume=resume), None)
        assert (init.call_args.kwargs["mode"], init.call_args.kwargs["resume"]) == (mode, "allow")
    first, second = (call.kwargs["id"] for call in init.call_args_list)
    assert first == second != ""


# ---- signals, failures and the screen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=lambda x: x.name)
def test_a_signal_ends_the_run_before_its_next_step_and_the_second_one_the_process(
        capfd, monkeypatch, number):
    saved, codes, progress = [], [], SimpleNamespace(step=7)  # `loop` stands in for Checkpoints
    loop = SimpleNamespace(save=lambda: saved.append(7), folder="x", progress=progress,
                           cfg=SimpleNamespace(save_every=20))
    monkeypatch.setattr(os, "_exit", codes.append)
    outer = signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores SIGINT
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup sets it
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        stop.check(loop)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # within two seconds: the same request
        assert saved == []  # the step goes on
        with pytest.raises(SystemExit) as e:
            stop.check(loop)
        monkeypatch.setattr(stop, "SAME", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)  # another one
        assert codes == []
        os.kill(os.getpid(), number)
    assert e.value.code == 128 + number and codes == [128 + number] and saved == [7]
    assert signal.signal(number, outer) == signal.SIG_DFL
    signal.signal(signal.SIGHUP, ignored)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(stop, "received", number)
    with pytest.raises(SystemExit):
        stop.check(loop)
    screen = capfd.readouterr().err
    assert "continue with: the same torchrun command --resume x" in screen
    assert screen.count(f"{number.name}: the run stops before its next step") == 1
    assert f"stopped by {number.name} at step 7; continue with: python" in screen


@pytest.mark.parametrize("error, says", [
    (RuntimeError("[x/gloo/tcp/pair.cc:1] Connection closed"), "nano_rlvr: another rank has ended"),
    (RuntimeError("[x/gloo/tcp/pair.cc:1] socket: Too many open files"), "nano_rlvr: .*open files"),
    (RunError("the reason"), "nano_rlvr: the reason .traceback: .*/errors/rank-0.txt"),
    (RunError("a\x1b[2J\r\nb\x9b\u202e\udcff"),
     r"^nano_rlvr: a\\x1b\[2J b\\x9b\\u202e\\udcff \(traceback"),
    (ZeroDivisionError("unexpected"), None),
])
def test_a_failure_is_one_line_that_names_the_file_with_the_traceback(tmp_path, error, says):
    expected = pytest.raises(SystemExit if says else type(error), match=says)
    with expected, stop.with_one_line(OSError, folder=tmp_path):
        raise error
    text = (tmp_path / "errors/rank-0.txt").read_text()
    assert text.startswith("Traceback") and "raise error" in text and str(error)[:5] in text
