"""The doctor names each planted fault and what to do."""
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import doctor
from conftest import ENV, ROOT
from models import SIZES
from runtime.memory import GIB

CHECKS = (doctor.versions, doctor.device, doctor.host, doctor.plan, doctor.disk)  # step takes long


@pytest.fixture
def diagnose(monkeypatch, capsys, tmp_path):
    """diagnose(*argv) -> {check: (status, text)}, without the step of the bundled model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))

    def run(*argv):
        code = doctor.main(list(argv), CHECKS)
        output, _, verdict = capsys.readouterr().out.partition("verdict: ")
        parts = re.split(r"^(ok|note|FAIL) +(\w+) +", output, flags=re.MULTILINE)[1:]
        failed = "FAIL" in parts[::3]
        assert (code, verdict.strip()) == ((1, "not ready") if failed else (0, "ready"))
        return {check: (status, text)
                for status, check, text in zip(parts[::3], parts[1::3], parts[2::3])}
    return run


FAULTS = {  # what is replaced -> by what; the check that notices, its status, its words
    "doctor.metadata.distributions": (
        lambda: [], "versions", "note", "torch is missing, pinned 2.*-r requirements-cpu.txt"),
    "shutil.which": (lambda tool: tool, "device", "note", "pip install -r requirements.txt"),
    "runtime.memory.free_host_bytes": (
        lambda: 2 * GIB, "host", "note", "2.0 GiB of memory are free.*libraries take 3 GiB"),
    "shutil.disk_usage": (lambda path: SimpleNamespace(free=2**20, total=2**26), "disk", "FAIL",
                          "a checkpoint takes 0.01, and 4 must fit")}


@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_is_found_by_its_check(diagnose, monkeypatch, place):
    function, check, status, words = FAULTS[place]
    monkeypatch.setattr(place, function)
    found = diagnose()
    assert found[check][0] == status and re.search(words, found[check][1])
    if place == "shutil.disk_usage":
        assert re.search("/dev/shm has 0.06.*--shm-size", found["host"][1])


@pytest.mark.parametrize("free, status", [(80, "ok"), (40, "note")])
def test_a_gpu_that_others_use_is_a_note(monkeypatch, capsys, free, status):
    monkeypatch.setattr(doctor.nr, "parse_config", lambda argv: SimpleNamespace(memory_gb=0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert doctor.main([], [doctor.device]) == 0
    assert capsys.readouterr().out.startswith(f"{status:4}  device    a GPU, {free}.0 of 80.0 GiB")


def test_a_model_that_is_not_here_fails_in_one_line(diagnose, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, text = diagnose("--model", "Qwen2.5-Math-1.5B")["plan"]
    assert status == "FAIL" and len(text.splitlines()) == 1
    assert "its config.json cannot be loaded" in text and "not in the local cache" in text


def test_memory_gb_without_a_gpu_shows_the_plan_for_one_of_that_size(diagnose, tmp_path):
    config = SIZES["1.5B"] | {"model_type": "qwen2", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))  # enough for a plan
    status, text = diagnose("--model", str(tmp_path), "--memory_gb", "24")["plan"]
    assert status == "ok" and text.startswith("for a GPU that is not here")
    assert ("1,543.7 M parameters in bfloat16 and 24.0 GiB: --offload optimizer --checkpointing on"
            in text)
    assert "--vllm_memory 0." in text and re.search(r"total .* 48\.\d\d$", text)
    status, text = diagnose("--model", str(tmp_path), "--memory_gb", "8")["plan"]
    assert status == "FAIL" and "this run may use 7.2" in text and "--max_tokens 1500" in text


def test_the_whole_command_takes_a_step(tmp_path):
    command = [sys.executable, "examples/doctor.py", "--out", str(tmp_path / "not" / "yet")]
    env = ENV | {"WANDB_API_KEY": "sentinel", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert "ok    step      the bundled model takes a step" in done.stdout, done.stdout
    assert f"free in {tmp_path};" in done.stdout
    assert done.returncode == 0 and "sentinel" not in done.stdout + done.stderr
