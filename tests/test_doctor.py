"""The doctor names each planted fault and what to do."""
import json
import re
from types import SimpleNamespace

import pytest
import torch

from examples import doctor
from runtime.memory import GIB
from shapes import SIZES

CHECKS = (doctor.versions, doctor.device, doctor.host, doctor.plan, doctor.hours, doctor.disk)


@pytest.fixture
def diagnose(monkeypatch, capsys):
    """diagnose(*argv) -> {check: (status, text)}, without the step of the bundled model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

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
    "examples.doctor.metadata.distributions": (
        lambda: [], "versions", "note", "torch is missing, pinned 2.*pip install --group cpu"),
    "runtime.memory.free_host_bytes": (
        lambda: 2 * GIB, "host", "note", "2.0 GiB of memory are free.*libraries take 3 GiB"),
    "shutil.disk_usage": (lambda path: SimpleNamespace(free=2**24, total=2**26), "disk", "FAIL",
                          "a checkpoint takes 0.01, and 4 must fit")}


@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_is_found_by_its_check(diagnose, monkeypatch, place):
    function, check, status, words = FAULTS[place]
    monkeypatch.setattr(place, function)
    found = diagnose()
    assert found[check][0] == status and re.search(words, found[check][1])


def test_memory_gb_without_a_gpu_shows_the_plan_for_one_of_that_size(diagnose, tmp_path):
    config = SIZES["1.5B"] | {"model_type": "qwen2", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))  # enough for a plan
    found = diagnose("--model", str(tmp_path), "--memory_gb", "24")
    assert found["hours"][0] == "ok" and re.search(r"(, [\d.]+ on [^,]+){3};", found["hours"][1])
    assert diagnose("--model", str(tmp_path), "--max_tokens", "1")["hours"][0] == "ok"
    status, text = found["plan"]
    assert status == "ok" and text.startswith("for a GPU that is not here")
    assert ("1,543.7 M parameters in bfloat16 and 24.0 of 24.0 GiB: --offload optimizer "
            "--gradient_checkpointing on") in text
    assert "--gpu_memory_utilization 0." in text and re.search(r"total .* 40\.\d\d$", text)
    status, text = diagnose("--model", str(tmp_path), "--memory_gb", "8")["plan"]
    assert status == "FAIL" and "this run may use 7.2" in text


def test_a_failed_step_is_said_in_one_line_and_the_step_has_valid_flags(
        monkeypatch, tmp_path, capsys):
    doctor.nr.parse_config([*doctor.STEP.split(), str(tmp_path)])
    monkeypatch.setattr(doctor, "STEP", "--prompts 3 --minibatches 2 --out")
    assert doctor.main([], [doctor.step]) == 1
    says = "FAIL  step      the bundled model cannot be trained: nano_rlvr: --minibatches 2 must"
    # a note about operators that DeepSpeed will compile may come first
    assert any(line.startswith(says) for line in capsys.readouterr().out.splitlines())


def test_the_look_is_the_first_look_of_a_run_with_these_flags():
    """Of a real run."""
    cfg = doctor.nr.parse_config([])
    found, limit = doctor.look(cfg, ["--max_tokens", "3"])
    assert found.count("a prompt: '<|user|>") == 2 and limit == "none is rewarded"
    assert found.count("a completion (gsm8k 0.0; gold answer '") == 3
    assert "no answer is rewarded: 100% were cut off: see --max_tokens\n" in found
    with pytest.raises(RuntimeError, match="nano_rlvr: --max_tokens 0"):
        doctor.look(cfg, ["--max_tokens", "0"])


def test_a_plan_for_another_card_samples_nothing(monkeypatch):
    monkeypatch.setattr(doctor, "child", None)
    argv = ["--memory_gb", "24"]
    found, limit = doctor.look(doctor.nr.parse_config(argv), argv)
    assert "no answers are sampled" in found and not limit
