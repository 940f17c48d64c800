"""bench/diff.py on runs that the test prepares."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench import diff
from conftest import fixed_rollouts, make_config, read_rows, write_rows
from runtime.log import Log

METRICS = {"lr": 1e-4, "mismatch/max": 2e-6, "kl": 1e-3, "entropy": 0.4, "loss": 1e-3,
           "grad_norm": 0.5, "reward/mean": 0.5, "curriculum/questions": 9}


@pytest.fixture
def runs(tokenizer, tmp_path):
    """(a, b): two equal runs of two steps, as the trainer writes them, but for their seconds."""
    for number, name in enumerate("ab"):
        folder = tmp_path / name
        log = Log(make_config(out=str(tmp_path), name=name), tokenizer)
        (folder / "inputs.sha256").write_text("0123")
        for step in (0, 1):
            rollouts = fixed_rollouts(tokenizer, groups=2, seed=step)
            logps = [r.vllm_logps for r in rollouts]
            answers = [{"question": "1+1", "completion": "2", "right": True}] if step else []
            log.changes = zip(rollouts, logps, logps)
            log.write(step, METRICS | {"seconds/update": 1.0 + number},
                      [rollouts[:4], rollouts[4:]], answers)
        (folder / "step-1/trainer").mkdir(parents=True)
        tensor = torch.linspace(-1, 1, 24).view(4, 6)
        save_file({"fp32": tensor, "exp_avg": 2 * tensor}, folder / "step-1/trainer/w.safetensors")
        save_file({"w": tensor}, folder / "step-1/model.safetensors")
    return tmp_path / "a", tmp_path / "b"


def change(folder, file, line=-1, **values):
    """Changes a row of a file of JSON lines."""
    rows = read_rows(folder / file)
    rows[line] |= values
    write_rows(folder / file, rows)


def change_weight(folder):
    path = folder / "step-1/trainer/w.safetensors"
    tensors = {name: x.clone() for name, x in load_file(path).items()}
    tensors["fp32"][1, 2] += 0.5
    save_file(tensors, path)


# a change at each stage of step 1, in the order of the step, and what the answer says about it
CHANGES = {
    "weights": (change_weight, "step-1: 1 tensors differ, the first: trainer/w.safetensors fp32, "
                "1 of 24 values, by 5.0e-01 at most"),
    "evaluation": (("eval.jsonl", {"completion": "3"}), "eval/completion of answer 0: '2' | '3'"),
    "data": (("rollouts.jsonl", {"prompt": "2+2"}), "prompt of rollout 7"),
    "tokens": (("rollouts.jsonl", {"tokens": 99}), "tokens of rollout 7: "),
    "rewards": (("rollouts.jsonl", {"reward": 2.0}), "reward of rollout 7: "),
    "advantages": (("rollouts.jsonl", {"advantage": 9.0}), "advantage of rollout 7: "),
    "trainer's log-probs": (("metrics.jsonl", {"entropy": 0.65}), "entropy: 0.4 | 0.65 "),
    "vLLM's log-probs": (("metrics.jsonl", {"mismatch/max": 0.2}), "mismatch/max: 2e-06 | "),
    "loss": (("metrics.jsonl", {"kl": 0.251}), "kl: 0.001 | 0.251 "),
    "learning rate": (("metrics.jsonl", {"lr": 1.01e-4}), "lr: 0.0001 | 0.000101"),
    "gradients": (("metrics.jsonl", {"grad_norm": 0.75}), "grad_norm: 0.5 | 0.75 (relative diff"),
    "other values": (("metrics.jsonl", {"curriculum/questions": 8}), "curriculum/questions: 9 | 8"),
}


def test_the_first_stage_that_differs_is_named_though_all_later_ones_differ_too(runs):
    a, b = runs
    for stage, (how, said) in reversed(CHANGES.items()):
        how(b) if callable(how) else change(b, how[0], **how[1])
        nothing, first, meaning = diff.answer(a, b)
        assert nothing == "settings and versions that differ: none"
        assert first.startswith(f"first difference: step 1, {stage}: {said}")
        assert meaning.strip() == diff.MEANINGS[stage]


def test_rounding_is_told_from_what_follows_it(runs):
    a, b = runs
    change(b, "metrics.jsonl", 0, loss=1e-3 + 1e-8, entropy=0.4 + 1e-8)
    change(b, "rollouts.jsonl", tokens=99)
    _, first, meaning, later = diff.answer(a, b)
    assert "step 0, trainer's log-probs: entropy: 0.4 | 0.40000001 (relative diff" in first
    assert meaning.strip() == diff.ROUNDING
    assert "beyond rounding: step 1, tokens: tokens of rollout 7" in later


def test_equal_runs_other_settings_and_inputs_a_shorter_run_and_a_damaged_one(runs):
    a, b = runs
    assert list(diff.answer(a, b))[1:] == ["no difference: all results are equal bit for bit"]
    with pytest.raises(SystemExit) as ended:
        diff.main([str(a), str(b)])
    assert not ended.value.code
    write_rows(b / "metrics.jsonl", read_rows(b / "metrics.jsonl")[:1])
    (b / "inputs.sha256").write_text("4567")
    about = json.loads((b / "config.json").read_text())
    about["config"] |= {"seed": 1, "save_every": 3}
    (b / "config.json").write_text(json.dumps(about))
    flags, first, _, cause, later = diff.answer(a, b)
    assert flags == "settings and versions that differ: --seed 0 | 1"
    assert "step 0, inputs: " in first and cause.endswith("the settings differ in --seed.")
    assert "where it shows first: step 1, other values: " in later
    with pytest.raises(SystemExit) as ended:
        diff.main([str(a), str(b)])
    assert ended.value.code == 1
    (b / "step-1/model.safetensors").write_text("")
    with pytest.raises(SystemExit, match=r"^diff: .*damaged, or not the folder of a run .*\Z"):
        diff.main([str(a), str(b)])


def test_a_line_that_is_there_twice_differs_and_a_name_is_no_escape_sequence(runs, capsys):
    a, b = runs
    change(a, "metrics.jsonl", 0, **{"\x1b[2J": 1})
    write_rows(b / "metrics.jsonl", [row for row in read_rows(a / "metrics.jsonl") for _ in "12"])
    with pytest.raises(SystemExit):
        diff.main([str(a), str(b)])
    assert r": \x1b[2J of line 1: only one run has it" in capsys.readouterr().out
