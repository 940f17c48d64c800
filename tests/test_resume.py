"""Nothing is lost: checkpoints, damage to them, continued runs, signals, and one process per folder."""
import dataclasses
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import nano_rlvr as nr
from bench.faults import differences, rows
from conftest import ENV, EPS, ROOT, fixed_rollouts, make_checkpoints, make_config
import runtime.guard
import runtime.memory
import runtime.sampler
import runtime.trainer
from runtime import checkpoint, folder, memory, stop
from runtime.dist import RunError
from runtime.shape import ModelShape
from runtime.log import Log

ENV = ENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

# ---- whole runs, in processes that are killed

FLAGS = ("--prompts 8 --samples 4 --eval_size 16 --eval_every 2 --save_every 1 --max_tokens 64 "
         "--baseline running --ref_reset_every 2 --minibatches 2 --lr_end 1").split()
PIPES = dict(env=ENV, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def start(out, *flags, launcher=(sys.executable,)):
    return subprocess.Popen([*launcher, ROOT / "nano_rlvr.py", *FLAGS, "--out", out, *flags], **PIPES)


def finish(process, code=0):
    output = process.communicate()[0]
    assert process.returncode == code, output[-3000:]
    return output


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of 5 steps without a break."""
    out = tmp_path_factory.mktemp("whole")
    finish(start(out, "--steps", "5", "--name", "run"))
    return out / "run"


def test_a_run_killed_while_it_writes_a_checkpoint_continues_bit_for_bit_to_more_steps(whole, tmp_path):
    killed = start(tmp_path, "--steps", "4", "--name", "run", "--resume")  # there is no run yet: starts it
    wait_for(tmp_path / "run/step-3.part", killed)
    killed.kill()
    killed.communicate()
    finish(start(tmp_path, "--steps", "4", "--name", "run", "--resume"))
    assert len(rows(tmp_path / "run")) == 5
    command = [sys.executable, ROOT / "nano_rlvr.py", "--resume", tmp_path / "run", "--steps", "5"]
    subprocess.run(command, env=ENV, check=True)  # all other flags are those of the run
    assert differences(whole, tmp_path / "run") == []


def test_two_ranks_stop_at_a_signal_with_a_checkpoint_and_one_rank_continues(whole, tmp_path):
    stopped = start(tmp_path, "--steps", "5", "--name", "run", launcher=TORCHRUN)
    wait_for(tmp_path / "run/step-2", stopped)
    stopped.send_signal(signal.SIGTERM)  # torchrun passes it on
    output = stopped.communicate()[0]
    assert stopped.returncode != 0 and output.count("nano_rlvr: stopped by SIGTERM at step") == 1, output
    finish(start(tmp_path, "--steps", "5", "--name", "run", "--resume"))
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(6))
    before, after = rows(whole)[0], rows(tmp_path / "run")[0]  # the sums of two ranks have another order
    assert abs(before["loss"] - after["loss"]) <= 100 * EPS * abs(before["loss"])
    assert before["reward/mean"] == after["reward/mean"]


# ---- checkpoints

CASES = [dict(zero_stage=2), dict(zero_stage=1, dtype="bfloat16"), dict(zero_stage=3), dict(lora_rank=4),
         dict(zero_stage=3, dtype="bfloat16")]


def updated(policy, tokenizer, cfg, times=1):
    for i in range(times):
        nr.update(policy, [nr.collate(fixed_rollouts(tokenizer, seed=i))], cfg)


def state(checkpoints):
    weights = {name: w.clone() for name, w in runtime.trainer.named_weights(checkpoints.engine)}
    return weights | dict(checkpoints._tensors())


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_a_restored_trainer_takes_the_same_next_steps(group, tokenizer, tmp_path, changes):
    changes |= dict(lr=1e-2, kl_coef=0.0, mismatch_bound=1e9)
    cfg, where = make_config(**changes), dict(out=str(tmp_path), name="run")
    policy = nr.make_policy(cfg)
    checkpoints = make_checkpoints(policy, **changes, **where)
    updated(policy, tokenizer, cfg, 2)
    checkpoints.progress.step, checkpoints.progress.running_mean = 2, 0.25
    checkpoints.save()
    checkpoints.wait()
    saved = state(checkpoints)
    updated(policy, tokenizer, cfg, 2)
    assert not equal(state(checkpoints), saved)

    again = nr.make_policy(cfg)
    updated(again, tokenizer, cfg)  # AdamW's moments exist, as after the rehearsal, but they are others
    restored = make_checkpoints(again, resume=str(tmp_path / "run"), **changes, **where)
    assert dataclasses.astuple(restored.progress) == (2, 0.25, 0)
    assert equal(state(restored), saved)
    updated(again, tokenizer, cfg, 2)
    assert equal(state(restored), state(checkpoints))


@pytest.fixture
def two_steps(group, tokenizer, tmp_path):
    """(policy, Checkpoints) with the checkpoints step-1 and step-2 in tmp_path/run."""
    policy = nr.make_policy(make_config())
    checkpoints = make_checkpoints(policy, out=str(tmp_path), name="run")
    updated(policy, tokenizer, make_config(mismatch_bound=1e9, kl_coef=0.0))
    for checkpoints.progress.step in (1, 2):
        checkpoints.save()
    checkpoints.wait()
    return policy, checkpoints


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def list_nothing(path):
    path.write_text("{}")


@pytest.mark.parametrize("harm, name, says", [
    (cut, "trainer/00000.safetensors", "has .* bytes, not"),
    (flip_a_bit, "trainer/00000.safetensors", "another checksum"),
    (flip_a_bit, "model.safetensors", "another checksum"),
    (os.remove, "trainer/state.json", "No such file"),
    (os.remove, "manifest.json", "No such file"),
    (cut, "manifest.json", "JSONDecodeError"),
    (list_nothing, "manifest.json", "does not list trainer/state.json"),
])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
        two_steps, capsys, tmp_path, harm, name, says):
    policy, _ = two_steps
    run = tmp_path / "run"
    harm(run / "step-2" / name)
    restored = make_checkpoints(policy, out=str(tmp_path), name="run", resume=str(run), keep=1)
    assert restored.progress.step == 1
    shown = capsys.readouterr().err
    assert "step-2 is damaged" in shown and re.search(says, shown)
    assert sorted(path.name for path in run.glob("step-*")) == ["step-1", "step-2.damaged"]
    harm(run / "step-1" / name)
    with pytest.raises(ValueError, match="all checkpoints in .* are damaged"):
        make_checkpoints(policy, out=str(tmp_path), name="run", resume=str(run))


def test_a_file_that_the_manifest_does_not_list_is_not_read(two_steps, tmp_path):
    policy, checkpoints = two_steps
    saved = state(checkpoints)
    updated(policy, checkpoints.log.tokenizer, make_config(mismatch_bound=1e9, kl_coef=0.0))
    (tmp_path / "run/step-2/trainer/00000 (copy).safetensors").write_bytes(b"half a file")
    restored = make_checkpoints(policy, out=str(tmp_path), name="run", resume=str(tmp_path / "run"))
    assert restored.progress.step == 2 and equal(state(restored), saved)


def test_a_checkpoint_of_another_model_is_refused(two_steps, tmp_path):
    with pytest.raises(RunError, match="is a checkpoint of another model"):
        make_checkpoints(nr.make_policy(make_config(lora_rank=4)), out=str(tmp_path), name="run",
                         resume=str(tmp_path / "run"))


def test_a_full_disk_is_noticed_before_a_checkpoint_is_written(two_steps, tmp_path, monkeypatch):
    _, checkpoints = two_steps
    free = SimpleNamespace(free=checkpoints.bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    checkpoints.progress.step = 3
    with pytest.raises(RunError, match="a checkpoint needs 0.01 GiB"):
        checkpoints.save()
    free.free += 1
    checkpoints.save()
    checkpoints.wait()
    assert [path.name for path in folder.steps_on_disk(tmp_path / "run")] == ["step-2", "step-3"]


@pytest.mark.parametrize("memory", ["much", "little"])  # written in the background, or while the loop waits
def test_a_failed_write_is_noticed_and_leaves_the_older_checkpoints(two_steps, tmp_path, monkeypatch, memory):
    _, checkpoints = two_steps
    if memory == "little":
        monkeypatch.setattr(checkpoint.memory, "free_host_bytes", lambda: 0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints.progress.step = 3
    with pytest.raises(RunError, match="step-3 could not be written .*; older checkpoints are whole"):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limit[1]))  # bytes per file
            checkpoints.save()
            while not checkpoints.pending.done():
                time.sleep(0.01)
            checkpoints.check()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path.name for path in (tmp_path / "run").glob("step-*")} == {"step-1", "step-2"}
    assert checkpoint.newest_whole(tmp_path / "run").name == "step-2"


def test_the_newest_and_the_most_accurate_checkpoints_are_kept(two_steps, tmp_path):
    _, checkpoints = two_steps
    evaluation = {"eval/low": 0.0, "eval/high": 1.0, "eval/n": 4, "eval/no_verdict": 0.0, "eval/length": 1.0}
    for checkpoints.progress.step, accuracy in enumerate([0.5, 0.75, None, 0.75, 0.25, None], start=3):
        checkpoints.save()
        checkpoints.wait()
        checkpoints.log.write(checkpoints.progress.step, {} if accuracy is None else evaluation | {
            "eval/accuracy": accuracy})
    assert [path.name for path in folder.steps_on_disk(tmp_path / "run")] == ["step-4", "step-7", "step-8"]


def test_a_checkpoint_is_a_model_with_its_settings_and_final_is_the_same_without_the_trainers_state(
        two_steps, tmp_path):
    from transformers import AutoModelForCausalLM
    policy, checkpoints = two_steps
    checkpoints.save(final=True)
    checkpoints.wait()
    run = tmp_path / "run"
    for path in (run / "step-2", run / "final"):
        loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
        assert equal(loaded, {name: w for name, w in runtime.trainer.named_weights(policy)})
        assert json.loads((path / "nano_rlvr.json").read_text())["config"]["template"] == "chat"
    assert not (run / "final/trainer").exists()
    assert os.stat(run / "final/model.safetensors").st_ino == os.stat(run / "step-2/model.safetensors").st_ino
    (run / "final/config.json").write_text("{}")  # a file of its own: the checkpoint stays as it is
    assert checkpoint.damage(run / "step-2") == ""


# ---- logs


def test_logs_are_cut_back_to_the_checkpoint_also_after_a_broken_line(two_steps, tmp_path):
    policy, checkpoints = two_steps
    log = checkpoints.log
    log.write(0, {"loss": 1.0})
    checkpoints.progress.step = 3
    checkpoints.save()
    checkpoints.wait()
    log.write(3, {"loss": 2.0})
    with (log.folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 4, "lo')
    make_checkpoints(policy, out=str(tmp_path), name="run", resume=str(log.folder))
    assert (log.folder / "metrics.jsonl").read_text() == '{"step": 0, "loss": 1.0}\n'
    for path in folder.steps_on_disk(log.folder):
        shutil.rmtree(path)
    make_checkpoints(policy, out=str(tmp_path), name="run", resume=str(log.folder))
    assert not (log.folder / "metrics.jsonl").exists()  # killed before the first checkpoint
    assert (log.folder / "metrics.old").read_text() == '{"step": 0, "loss": 1.0}\n'


LINE = b'{"step": 1, "loss": 2.0}'  # the second one of a log, whose size is part of a checkpoint


@pytest.mark.parametrize("damaged", [
    LINE[:-9], b"", LINE + b" ", LINE[:9] + bytes(range(15)), b"x" * len(LINE),
    LINE.replace(b"step", b"stop"), b"1" * len(LINE)], ids=repr)
def test_a_damaged_log_is_named_with_its_line_and_left_as_it_is(tmp_path, damaged):
    path, sizes = tmp_path / "eval.jsonl", {"rollouts.jsonl": 9, "eval.jsonl": 2 * len(LINE) + 2}
    path.write_bytes(LINE + b"\n" + LINE + b"\n" + b"written later: is cut off")
    checkpoint.check_logs(tmp_path, sizes)
    path.write_bytes(LINE + b"\n" + damaged + b"\n" * bool(damaged))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="eval.jsonl:2 is damaged: .* move the file away"):
        checkpoint.check_logs(tmp_path, sizes)
    assert path.read_bytes() == before


def test_a_run_with_a_damaged_log_does_not_start_and_without_the_log_it_does(two_steps, tmp_path):
    policy, checkpoints = two_steps
    metrics, run = tmp_path / "run/metrics.jsonl", dict(out=str(tmp_path), name="run")
    checkpoints.log.write(2, {"loss": 1.0})
    checkpoints.progress.step = 3
    checkpoints.save()
    checkpoints.wait()
    cut(metrics)
    with pytest.raises(ValueError, match="metrics.jsonl:1 is damaged"):
        make_checkpoints(policy, resume=str(tmp_path / "run"), **run)
    metrics.rename(tmp_path / "metrics.mine")
    assert make_checkpoints(policy, resume=str(tmp_path / "run"), **run).progress.step == 3


def test_a_log_that_is_damaged_during_the_run_costs_no_checkpoint_and_not_the_final_weights(
        two_steps, tmp_path):
    _, checkpoints = two_steps
    checkpoints.log.write(2, {"eval/accuracy": 1.0} | dict.fromkeys(
        ("eval/low", "eval/high", "eval/n", "eval/no_verdict", "eval/length"), 1.0))
    (tmp_path / "run/metrics.jsonl").write_bytes(b"\x00\n" + LINE)
    for checkpoints.progress.step in (3, 4, 5):
        checkpoints.save(final=checkpoints.progress.step == 5)
        checkpoints.wait()
    assert [path.name for path in folder.steps_on_disk(tmp_path / "run")] == ["step-2", "step-4", "step-5"]
    assert (tmp_path / "run/final/model.safetensors").exists()


def test_a_full_disk_leaves_no_half_line_in_a_log(group, tokenizer, tmp_path):
    log = Log(make_config(out=str(tmp_path), name="run"), tokenizer)
    log.write(0, {"loss": 1.0})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, limit[1]))  # bytes per file: room for half a line more
        with pytest.raises(RunError, match="metrics.jsonl cannot be written"):
            log.write(1, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (log.folder / "metrics.jsonl").read_text() == '{"step": 0, "loss": 1.0}\n'


# ---- which runs may continue


@pytest.fixture
def saved(tmp_path):
    """The folder of a run with its config.json, and nothing else."""
    cfg = make_config(out=str(tmp_path), name="run", steps=10, lr_end=1.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps({"config": dataclasses.asdict(cfg)}))
    return tmp_path / "run"


@pytest.mark.parametrize("flags, says", [
    ("", None),
    ("--steps 20 --keep 5 --save_every 7 --wandb offline --timeout 1", None),
    ("--zero_stage 3 --pack_tokens 2048", None),
    ("--lr 1", "--lr 1.0 (was 0.0001)"),
    ("--seed 3 --temperature 0.5", "--seed 3 (was 0); --temperature 0.5 (was 1.0)"),
    ("--algo rloo", "--algo rloo (was grpo); --baseline leave_one_out (was group)"),
    ("--steps 5", "--steps 5 (was 10); --steps may only grow"),
    ("--steps 20 --lr_end 0.5", "the learning rate depends on --steps unless --lr_end is 1"),
    ("--lr 1 --resume_force", None),
    ("--name other", "are two runs"),
])
def test_a_run_continues_only_with_flags_that_give_the_same_results(saved, flags, says):
    argv = ["--resume", str(saved), *flags.split()]
    if says is None:
        cfg = nr.parse_config(argv)
        assert (cfg.samples, cfg.name, cfg.out) == (4, "run", str(saved.parent))
    else:
        with pytest.raises(ValueError) as e:
            nr.parse_config(argv)
        assert says in str(e.value)


def test_resume_without_a_value_means_the_run_of_this_name_or_a_new_one(saved, tmp_path, capsys):
    assert nr.parse_config(["--resume", "--name", "run", "--out", str(tmp_path)]).resume == str(saved)
    new = nr.parse_config(["--name", "new", "--resume", "--out", str(tmp_path)])
    assert new.resume == "" and "there is no run" in capsys.readouterr().out
    assert nr.parse_config(["--resume", "run", "--out", str(tmp_path)]).resume == str(saved)
    for argv, says in ((["--resume"], "--resume needs the folder of a run, or --name"),
                       (["--resume", "nowhere"], "--resume nowhere: no folder of a run")):
        with pytest.raises(ValueError, match=says):
            nr.parse_config(argv)


def test_a_changed_rounding_is_said(saved, capsys):
    nr.parse_config(["--resume", str(saved), "--zero_stage", "3"])
    assert "other zero_stage: from here the run is equal only up to rounding" in capsys.readouterr().out


def test_what_the_memory_plan_chose_is_chosen_anew_and_what_the_user_gave_is_kept(
        group, tokenizer, tmp_path, monkeypatch, capsys):
    shape = ModelShape.of(str(ROOT / "models/tiny"))

    def start(gib, *argv):
        """A run, or its continuation, on a simulated GPU -> its planned Config."""
        device = memory.Device(True, gib * memory.GIB, gib * memory.GIB, 64 * memory.GIB)
        monkeypatch.setattr(memory.Device, "here", lambda: device)
        cfg = memory.plan(nr.parse_config(["--out", str(tmp_path), *argv]), shape=shape)
        capsys.readouterr()
        Log(dataclasses.replace(cfg, name="run"), tokenizer)
        return cfg, memory.reference_stays, capsys.readouterr().out

    resume = ["--resume", "run"]
    first, stays, _ = start(16, "--checkpointing", "on")
    assert stays and first.vllm_memory > 0.6
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["config"] == dataclasses.asdict(first) | {"name": "run"}
    again, stays, screen = start(16, *resume)
    assert dataclasses.replace(again, resume="", name="") == first and stays and "note" not in screen
    other, _, screen = start(8, *resume)
    assert other.vllm_memory < first.vllm_memory - 0.05 and other.checkpointing == "on"
    assert "note: other memory plan than before: from here the run is equal only up to rounding" in screen
    start(16, *resume, "--pack_tokens", "4500")
    given, *_ = start(16, *resume)
    assert (given.pack_tokens, given.vllm_memory) == (4500, first.vllm_memory)
    del saved["memory plan"]  # a run of an older version: all of its values count as given
    (tmp_path / "run/config.json").write_text(json.dumps(saved))
    old, _, screen = start(8, *resume)
    assert old.vllm_memory == first.vllm_memory and "note" not in screen


def test_a_folder_belongs_to_one_process(group, tmp_path, monkeypatch):
    monkeypatch.setattr(folder.time, "strftime", lambda form: "20260101-000000")  # both start in one second
    cfg = make_config(out=str(tmp_path), name="mine")
    assert folder.claim_folder(cfg).name == "mine"
    with (tmp_path / "mine/lock").open("a") as other:  # as another process, which has its own open file
        folder._lock = None
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is running there"):
            folder.claim_folder(cfg)
    unnamed = dataclasses.replace(cfg, name="")
    first = folder.claim_folder(unnamed).name
    held, folder._lock = folder._lock, None
    assert folder.claim_folder(unnamed).name == f"{first}-1"
    held.close()
    (tmp_path / "mine/metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="mine holds a run already; .* --resume"):
        folder.claim_folder(cfg)
    assert folder.claim_folder(dataclasses.replace(cfg, resume=str(tmp_path / "mine"))).name == "mine"


def test_a_run_does_not_continue_with_other_data(group, tmp_path):
    cfg, examples = make_config(out=str(tmp_path), name="run"), [{"question": "1+1", "prompt_ids": [1, 2]}]
    folder.claim_folder(cfg, examples)
    resumed = dataclasses.replace(cfg, resume=str(tmp_path / "run"))
    folder.claim_folder(resumed, examples)
    with pytest.raises(ValueError, match="its data, tokenizer or --model have changed"):
        folder.claim_folder(resumed, [{"question": "1+1", "prompt_ids": [1, 3]}])
    folder.claim_folder(dataclasses.replace(resumed, resume_force=True), [])


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_run_does_not_continue_from_other_starting_weights(group, tmp_path, monkeypatch, file):
    model = tmp_path / "hub/models--me--tiny/snapshots/0123"  # as a hub id is kept in the local cache
    shutil.copytree(ROOT / "models/tiny", model)
    (model.parents[1] / "refs").mkdir()
    (model.parents[1] / "refs/main").write_text("0123")
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_OFFLINE", True)
    for name in (str(model), "me/tiny"):
        cfg = dataclasses.replace(make_config(out=str(tmp_path), name="run"), model=name)
        folder.claim_folder(cfg)
    resumed = dataclasses.replace(cfg, resume=str(tmp_path / "run"))
    for name in (str(model), "me/tiny"):
        folder.claim_folder(dataclasses.replace(resumed, model=name))
    flip_a_bit(model / file)
    for name in (str(model), "me/tiny"):
        with pytest.raises(ValueError, match="its data, tokenizer or --model have changed"):
            folder.claim_folder(dataclasses.replace(resumed, model=name))


def test_a_run_whose_checksum_is_missing_continues_only_by_force(group, tmp_path):
    cfg = make_config(out=str(tmp_path), name="run")
    folder.claim_folder(cfg)
    (tmp_path / "run/inputs.sha256").unlink()
    resumed = dataclasses.replace(cfg, resume=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="cannot be compared: .*inputs.sha256 is missing"):
        folder.claim_folder(resumed)
    folder.claim_folder(dataclasses.replace(resumed, resume_force=True))
    folder.claim_folder(resumed)


def test_passwords_in_urls_are_not_written(group, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--judge_url", "http://me:secret@host/v1"])
    Log(make_config(out=str(tmp_path), name="run", judge_url="http://me:secret@host/v1"), tokenizer)
    text = (tmp_path / "run/config.json").read_text()
    assert "secret" not in text and text.count("http://***@host/v1") == 2


# ---- signals and the screen

LOOP = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
from types import SimpleNamespace
from runtime import stop
def mine(llm, prompts, n, temperature, max_tokens, seeds=None, **sampling):
    stop.interruptible(print, "sampled")
    print("ready", flush=True)
    time.sleep(20)
    print("the rollout ends")
checkpoints = SimpleNamespace(
    save=lambda: print("saved"), wait=lambda: None, progress=SimpleNamespace(step=7), folder="runs/x")
with stop.on_signals():
    if sys.argv[1] == "start":
        print("ready", flush=True)
        time.sleep(60)
    with stop.with_checkpoint(checkpoints):
        if sys.argv[1] == "update":
            print("ready", flush=True)
            while stop.received is None:
                time.sleep(0.01)
            print("the update ends", flush=True)
            time.sleep(float(sys.argv[2]))
        if sys.argv[1] == "user":
            runtime.guard.checked(mine, "mine.py:mine")(None, [], 1, 1.0, 8)
        stop.interruptible(lambda: [print("ready", flush=True), time.sleep(20), print("the rollout ends")])
"""


@pytest.mark.parametrize("phase, number, code, says", [
    ("start", signal.SIGINT, 130, ["nano_rlvr: SIGINT before the first step"]),
    ("rollout", signal.SIGTERM, 143, ["saved", "stopped by SIGTERM at step 7; continue with: python"]),
    ("rollout", signal.SIGUSR1, 138, ["saved", "--resume runs/x"]),
    ("update", signal.SIGINT, 130, ["the update ends", "saved"]),
    ("user", signal.SIGTERM, 143, ["saved", "stopped by SIGTERM at step 7"]),  # --rollout's own code
])
def test_a_signal_ends_the_run_with_a_checkpoint_and_a_line(phase, number, code, says):
    command = [sys.executable, "-c", LOOP, phase, "0"]
    process = subprocess.Popen(command, **PIPES)
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.send_signal(number)
    output = finish(process, code)
    assert all(text in output for text in says)
    assert "the rollout ends" not in output and "Traceback" not in output


def test_a_call_that_fails_can_no_longer_be_left_by_a_signal(monkeypatch):
    monkeypatch.setattr(stop, "in_loop", True)
    with pytest.raises(ZeroDivisionError):
        stop.interruptible(lambda: 1 / 0)
    assert not stop.in_call


def test_a_second_signal_ends_the_run_at_once():
    process = subprocess.Popen([sys.executable, "-c", LOOP, "update", "20"], **PIPES)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    while "the update ends" not in process.stdout.readline():
        pass
    while process.poll() is None:  # signals within two seconds of the first are the same request
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.returncode == 143 and "saved" not in process.stdout.read()


def test_a_rank_gets_sigterm_when_torchrun_is_killed():
    code = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {LOOP!r}, 'rollout', '0'])"
    env = ENV | {"TORCHELASTIC_RUN_ID": "x"}
    launcher = subprocess.Popen([sys.executable, "-c", code], **PIPES | {"env": env})
    assert launcher.stdout.readline() == "ready\n"
    launcher.kill()
    output = launcher.stdout.read()  # until the rank, which has the same pipe, has ended
    assert "saved" in output and "stopped by SIGTERM" in output


@pytest.mark.parametrize("error, says", [
    (RuntimeError("[enforce fail at x/gloo/tcp/loop.cc:105] epoll_create: Too many open files"),
     "nano_rlvr: [0-9]+ open files are too few: raise the limit, ulimit -n"),
    (OSError(errno.ENOSPC, "No space left on device"), "nano_rlvr: /dev/shm is full"),
    (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "No space left on device: ./x/y."),
    (RuntimeError("[x/gloo/tcp/pair.cc:1] Connection closed by peer"), "nano_rlvr: another rank has ended"),
])
def test_what_has_run_out_is_named_and_not_taken_for_a_lost_rank(error, says):
    with pytest.raises(SystemExit, match=says), stop.with_one_line(OSError):
        raise error


def test_a_home_that_cannot_be_written_is_refused_or_replaced(tmp_path, monkeypatch):
    from vllm import envs
    (tmp_path / "file").write_text("")  # nobody, not even root, can make a folder in it
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file/extensions"))
    with pytest.raises(ValueError, match="file/extensions, which cannot be written: set HOME, or TORCH"):
        runtime.memory.need_compiler()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "new"))
    runtime.memory.need_compiler()
    envs.disable_envs_cache()  # which another engine of this process has filled
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file/vllm"))  # vLLM's files are only a cache
    with pytest.raises(RunError, match="vLLM does not start: Seed must be"):
        runtime.sampler.start_vllm(model=str(ROOT / "models/tiny"), seed=-5, max_num_seqs=1, max_model_len=64,
                           cuda_args={})
    assert folder.is_writable(Path(os.environ["VLLM_CACHE_ROOT"]))


def test_a_rank_that_does_not_answer_ends_the_others_with_one_line():
    code = """if True:
        import time, torch
        from runtime import dist, stop
        with stop.on_signals(), stop.with_one_line():
            dist.init_process_group(timeout=0.05)
            dist.all_gather([0])
            print("ready", flush=True)
            if dist.rank() == 1:
                time.sleep(600)
            dist.all_gather([1])
        """
    process = subprocess.Popen([*TORCHRUN, "--no-python", sys.executable, "-c", code], **PIPES)
    output = finish(process, 1)
    assert output.count("nano_rlvr: another rank has ended, or has not answered for --timeout minutes") == 1


def test_printing_continues_when_nobody_reads_any_more():
    code = ("import os, sys; from runtime import stop; stop.keep_printing()\n"
            "for i in range(100_000): print(i)\n"
            "print('x' * 100_000, file=sys.stderr)\n"
            "os.write(3, b'done')")
    read, write = os.pipe()
    command = f"{sys.executable} -c \"$CODE\" 3>&{write} 2>&1 | head -1"
    subprocess.run(["bash", "-c", command], env=ENV | {"CODE": code}, cwd=ROOT, pass_fds=[write], check=True)
    os.close(write)
    assert os.read(read, 100) == b"done"
