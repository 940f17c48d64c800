"""The doctor names each planted fault and what to do; readers of a run's log survive a killed writer."""
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
from conftest import ENV, ROOT
import runtime.log
import runtime.report
from runtime import doctor
from verify import jail

QWEN = dict(  # Qwen2.5-1.5B: a folder with only this file has a plan
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=1536, intermediate_size=8960,
    num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, vocab_size=151936,
    tie_word_embeddings=True, max_position_embeddings=4096)
ENGINES = (doctor.deepspeed, doctor.vllm)  # started by one test only
SECRETS = dict(WANDB_API_KEY="sentinel1", HF_TOKEN="hf_sentinel2", OPENAI_API_KEY="sk-sentinel3")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """No GPU, network, account or lock; and what the doctor sets is undone."""
    monkeypatch.setattr(doctor, "driver_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


@pytest.fixture
def diagnose(monkeypatch, capsys):
    """diagnose(check, *argv) -> (status, text of this check, exit code), without starting engines."""
    monkeypatch.setattr(doctor, "MACHINE", [check for check in doctor.MACHINE if check not in ENGINES])

    def run(check, *argv):
        code = doctor.main(nr.parse_config, list(argv))
        output, _, verdict = capsys.readouterr().out.partition("verdict: ")
        parts = re.split(r"^(ok|note|FAIL) +(\w+) +", output, flags=re.MULTILINE)[1:]
        assert verdict.startswith("not ready" if code else "ready") and code == ("FAIL" in parts[::3])
        texts = {name: (status, text) for status, name, text in zip(parts[::3], parts[1::3], parts[2::3])}
        return *texts.get(check, (None, "")), code
    return run


def qwen(folder):
    (folder / "config.json").write_text(json.dumps(QWEN))
    return str(folder)


def test_a_machine_without_faults_is_ready(diagnose, tmp_path):
    status, text, code = diagnose("disk", "--out", str(tmp_path / "not" / "yet"))
    assert (status, code) == ("ok", 0)
    assert f"free in {tmp_path};" in text


# ---- the machine

@pytest.mark.parametrize("pins, status, named", [
    ("tqdm==1.0.0", "note", "tqdm is 4"), ("no-such-package==2.0", "FAIL", "no-such-package is missing"),
    ("torch==2.13.0\n# tests\nno-such-package==2.0", "ok", "the 1 packages")])
def test_packages_are_compared_with_the_pins(diagnose, monkeypatch, tmp_path, pins, status, named):
    (tmp_path / "requirements-cpu.txt").write_text(pins)
    monkeypatch.setattr(doctor, "REPOSITORY", tmp_path)
    found, text, _ = diagnose("versions")
    assert found == status and named in text
    assert ("-> pip install -r requirements-cpu.txt" in text) == (status != "ok")


def test_a_gpu_machine_with_a_cpu_build_of_torch_is_told_what_to_install(diagnose, monkeypatch):
    monkeypatch.setattr(doctor, "driver_cuda", lambda: (12, 8))
    monkeypatch.setattr(torch.version, "cuda", None)
    status, text, _ = diagnose("device")
    assert status == "FAIL" and "driver is for 12.8" in text and "-> pip install -r requirements.txt" in text


def test_a_cuda_build_of_torch_without_a_driver_is_told_to_install_that_for_cpus(diagnose, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    status, text, code = diagnose("device")
    assert (status, code) == ("FAIL", 1) and "there is no NVIDIA driver" in text
    assert "driver 580 or newer" in text and "pip install -r requirements-cpu.txt" in text


@pytest.mark.parametrize("available, free, capability, status, named", [
    (False, 80, (9, 0), "FAIL", "CUDA_VISIBLE_DEVICES"), (True, 80, (7, 5), "note", "--dtype float32"),
    (True, 40, (9, 0), "note", "nvidia-smi"), (True, 80, (9, 0), "ok", "a GPU, 80.0 of 80.0 GiB free")])
def test_a_gpu_is_described_with_its_limits(monkeypatch, available, free, capability, status, named):
    monkeypatch.setattr(doctor, "driver_cuda", lambda: (12, 8))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * doctor.GIB, 80 * doctor.GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found, *texts = doctor.device()
    assert found == status and named in " ".join(texts)


def test_no_compiler_fails(diagnose, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, text, _ = diagnose("compiler")
    assert status == "FAIL" and "apt-get install g++" in text
    status, text, _ = diagnose("git")
    assert status == "note" and "-> apt-get install git" in text


def test_on_a_gpu_a_missing_c_compiler_fails(diagnose, monkeypatch):
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("gcc", "clang") else found(tool))
    monkeypatch.delenv("CC", raising=False)
    assert diagnose("compiler")[0] == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="apt-get install gcc"):
        doctor.compiler()


def test_an_offload_that_cannot_be_compiled_is_told_what_it_needs(monkeypatch):
    def run_program(code):
        if "offload" in code:
            raise RuntimeError("ninja fails")
        return "a step"

    monkeypatch.setattr(doctor, "driver_cuda", lambda: (13, 0))
    monkeypatch.setattr(doctor, "run_program", run_program)
    status, found, advice = doctor.deepspeed()
    assert status == "note" and "--offload optimizer fails: ninja fails" in found
    assert "g++ and ninja" in advice and "toolkit" not in advice


def test_a_lock_of_deepspeed_fails_and_deepspeed_does_not_wait_for_it(diagnose, monkeypatch, tmp_path):
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    status, text, _ = diagnose("compiler")
    assert status == "FAIL" and f"{lock} to be removed: delete it" in text
    assert doctor.deepspeed() == ("note", "not tried", "see compiler")


def test_little_memory_is_a_note(diagnose, monkeypatch):
    little = SimpleNamespace(available=doctor.GIB, total=8 * doctor.GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: little)
    status, text, _ = diagnose("host_memory")
    assert status == "note" and "1.0 of 8.0 GiB are available" in text and "-> end other processes" in text


def test_a_full_disk_fails_and_a_small_shared_memory_is_a_note(diagnose, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**20, total=2**26))
    status, text, code = diagnose("disk")
    assert (status, code) == ("FAIL", 1)
    assert "a checkpoint takes 0.01" in text and "-> 4 must fit" in text
    status, text, _ = diagnose("shared_memory")
    assert status == "note" and "/dev/shm has 0.06 GiB" in text and "--shm-size" in text


def test_a_missing_matplotlib_fails(diagnose, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, text, _ = diagnose("matplotlib")
    assert status == "FAIL" and "pip install matplotlib" in text


def test_a_hub_that_does_not_answer_is_a_note_and_a_model_on_it_fails_in_one_line(diagnose, monkeypatch):
    assert diagnose("hub")[:1] == ("note",)
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # read once, by the import below
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, text, code = diagnose("model", "--model", "Qwen2.5-Math-1.5B")
    assert (status, code) == ("FAIL", 1)
    assert len(text.splitlines()) == 2 and "-> give a local folder" in text
    assert diagnose("plan", "--model", "Qwen2.5-Math-1.5B")[:1] == (None,)


def test_a_hub_that_answers_anything_is_reachable(diagnose, monkeypatch):
    class Forbidden(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(403)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Forbidden) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert diagnose("hub")[0] == "ok"
        server.shutdown()


def test_a_check_that_raises_fails_with_the_first_line_of_its_message(diagnose, monkeypatch):
    def broken():
        raise KeyError("the disk\nhas a hole")
    monkeypatch.setattr(doctor, "MACHINE", [broken])
    status, text, code = diagnose("broken")
    assert (status, code) == ("FAIL", 1) and "the disk" in text


def test_an_engine_that_fails_is_reported_with_its_last_error():
    with pytest.raises(RuntimeError, match="^ValueError: second$"):
        doctor.run_program("try: 1 / 0\nexcept ZeroDivisionError: raise ValueError('second')")
    with pytest.raises(RuntimeError, match="exit code -9"):
        doctor.run_program("import os; os.kill(os.getpid(), 9)")


# ---- the flags

def test_bad_flags_fail_and_the_machine_is_checked_all_the_same(diagnose):
    status, text, code = diagnose("flags", "--eps", "0")
    assert (status, code) == ("FAIL", 1) and "--eps 0.0: must be above 0" in text
    assert diagnose("device", "--eps", "0")[0] == "ok" and diagnose("plan", "--eps", "0")[0] is None


@pytest.mark.parametrize("mode, key, status, named", [
    ("online", None, "FAIL", "no API key: run `wandb login`"), ("off", None, "note", "no API key"),
    ("offline", None, "ok", "--wandb offline works"), ("online", "sentinel1", "FAIL", "must have 40")])
def test_wandb_without_a_key_fails_only_where_it_is_needed(diagnose, monkeypatch, mode, key, status, named):
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    found, text, _ = diagnose("wandb", "--wandb", mode)
    assert found == status and named in text and "sentinel" not in text
    if status == "FAIL":
        with pytest.raises(ValueError, match=f"^--wandb online: .*{named}"):
            runtime.log.check_wandb(mode)


def test_a_missing_wandb_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    runtime.log.check_wandb("off")
    with pytest.raises(ValueError, match="^--wandb offline: .*pip install wandb, or use --wandb off$"):
        runtime.log.check_wandb("offline")


def test_programs_of_the_model_need_a_jail(diagnose, monkeypatch):
    assert "not needed" in diagnose("jail")[1]
    monkeypatch.setattr(jail, "isolation", lambda: None)
    status, text, _ = diagnose("jail", "--rewards", "code")
    assert status == "FAIL" and "install bubblewrap" in text
    status, text, _ = diagnose("jail", "--rewards", "code", "--allow_unsafe_code")
    assert status == "note" and "-> install bubblewrap" in text


def test_memory_gb_without_a_gpu_shows_the_plan_for_one_of_that_size(diagnose, tmp_path):
    argv = ["--model", qwen(tmp_path), "--memory_gb", "24", "--out", str(tmp_path)]
    status, text, _ = diagnose("plan", *argv)
    assert status == "note" and "for a GPU of 24 GiB, which this machine does not have" in text
    assert "1,543.7 M parameters in bfloat16 and 24.0 GiB: --offload optimizer --checkpointing on" in text
    assert "--vllm_memory 0.6" in text and "host memory: 47 GiB" in text
    assert "in float32" in diagnose("plan", *argv, "--memory_gb", "48", "--dtype", "float32")[1]
    small = diagnose("plan", *argv, "--memory_gb", "12", "--lora_rank", "16")[1]  # less than the host has
    assert "for a GPU of 12 GiB" in small


def test_a_plan_that_does_not_fit_fails_with_the_flags_to_change(diagnose, tmp_path):
    status, text, code = diagnose("plan", "--model", qwen(tmp_path), "--memory_gb", "8")
    assert (status, code) == ("FAIL", 1)
    assert "this run may use 7.2" in text and "try --max_tokens 1500 --lora_rank 32" in text


def test_an_out_folder_that_cannot_be_written_fails(diagnose):
    status, text, _ = diagnose("flags", "--out", "/proc/runs")
    assert status == "FAIL" and "cannot write into /proc" in text


# ---- the command

def test_without_any_package_it_still_reports_and_exits_with_1():
    code = ("import sys; from runtime import doctor\n"
            "doctor.MACHINE = [check for check in doctor.MACHINE if check is not doctor.vllm]\n"
            "sys.exit(doctor.main(lambda argv: __import__('nano_rlvr').parse_config(argv), []))")
    command = [sys.executable, "-S", "-c", code]  # -S: without the folder of the packages
    run = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr == ""
    assert "FAIL  flags          No module named '" in run.stdout
    assert "torch is missing, pinned 2" in run.stdout and "verdict: not ready" in run.stdout


def test_the_whole_command_starts_both_engines_and_prints_no_secret(tmp_path):
    env = ENV | SECRETS | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    run = subprocess.run([sys.executable, "-m", "runtime.doctor", "--out", str(tmp_path)], cwd=ROOT, env=env,
                         capture_output=True, text=True)
    checks = re.findall(r"^(ok|note|FAIL) +(\w+)", run.stdout, re.MULTILINE)
    statuses = {name: status for status, name in checks}
    wanted = ["flags"] + [check.__name__ for check in doctor.MACHINE + doctor.RUN + doctor.PLAN]
    assert list(statuses) == wanted
    assert statuses["vllm"] == "ok" and "samples 16 tokens" in run.stdout, run.stdout
    if statuses["compiler"] == "ok":  # no other run holds the lock just now
        assert "a ZeRO-2 step" in run.stdout and run.returncode == 0, run.stdout
    assert "sentinel" not in run.stdout + run.stderr


# ---- readers of logs

def metrics(folder, *lines):
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
    return folder


def test_a_last_line_that_is_cut_off_is_skipped_with_a_note(tmp_path, capsys):
    whole = b'{"step": 0, "reward/mean": 0.5}'
    for cut in (b'{"step": 1, "rew', b'{"step": 1, "name": "\xc3', b"{"):
        assert runtime.report.read(metrics(tmp_path, whole, cut)) == [json.loads(whole)]
        assert capsys.readouterr().err == f"note: {tmp_path}/metrics.jsonl:2 is cut off: skipped\n"
    assert runtime.report.read(metrics(tmp_path, whole, whole)) == 2 * [json.loads(whole)]
    assert capsys.readouterr().err == ""


def test_a_broken_line_in_the_middle_and_a_missing_file_end_the_command_in_one_line(tmp_path):
    def run(folder):
        command = [sys.executable, "-m", "runtime.curve", str(folder), "--out", str(tmp_path / "curve.png")]
        return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
    broken = run(metrics(tmp_path, b'{"step": 0, "rew', b'{"step": 1}'))
    assert broken.returncode == 1
    assert broken.stderr.startswith(f"curve: {tmp_path}/metrics.jsonl:1: ") and broken.stderr.count("\n") == 1
    missing = run(tmp_path / "no such run")
    assert missing.returncode == 1
    assert "no such run/metrics.jsonl" in missing.stderr and missing.stderr.count("\n") == 1
