"""bench/diff.py on runs that the test prepares, and the part of bench/fork.py that drops."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench import diff, fork
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
            metrics = METRICS | {"seconds/update": 1.0 + number}
            log.write(step, metrics, [rollouts[:4], rollouts[4:]], answers,
                      zip(rollouts, logps, logps))
        tensor = torch.linspace(-1, 1, 24).view(4, 6)
        (folder / "step-1/trainer").mkdir(parents=True)
        save_file({"fp32": tensor, "exp_avg": 2 * tensor}, folder / "step-1/trainer/w.safetensors")
        save_file({"w": tensor}, folder / "step-1/model.safetensors")
    return tmp_path / "a", tmp_path / "b"


def edit(file, change, line=-1):
    """A function that changes a row of a file of JSON lines in a folder: change(row)."""
    def edited(folder):
        rows = read_rows(folder / file)
        change(rows[line])
        write_rows(folder / file, rows)
    return edited


def add(name, amount=0.25):
    return edit("metrics.jsonl", lambda row: row.update({name: row[name] + amount}))


def replace(name, value):
    return edit("rollouts.jsonl", lambda row: row.update({name: value}))


def other_weight(folder):
    path = folder / "step-1/trainer/w.safetensors"
    tensors = {name: x.clone() for name, x in load_file(path).items()}
    tensors["fp32"][1, 2] += 0.5
    save_file(tensors, path)


other_token = edit("rollouts.jsonl", lambda row: row["per_token"]["text"].__setitem__(2, "other"))
# a change at each stage of step 1, in the order of the step, and what the answer says about it
CHANGES = {
    "weights": (other_weight, "step-1: 1 tensors differ, the first: trainer/w.safetensors fp32, "
                "1 of 24 values, by 5.0e-01 at most"),
    "evaluation": (edit("eval.jsonl", lambda row: row.update(completion="3")),
                   "eval/completion of answer 0: '2' | '3'"),
    "data": (replace("prompt", "2+2"), "prompt of rollout 7"),
    "tokens": (other_token, "text of rollout 7: "),
    "rewards": (replace("reward", 2.0), "reward of rollout 7: "),
    "advantages": (replace("advantage", 9.0), "advantage of rollout 7: "),
    "trainer's log-probs": (add("entropy"), "entropy: 0.4 | 0.65 "),
    "vLLM's log-probs": (add("mismatch/max"), "mismatch/max: 2e-06 | "),
    "loss": (add("kl"), "kl: 0.001 | 0.251 "),
    "learning rate": (add("lr", 1e-6), "lr: 0.0001 | 0.000101"),
    "gradients": (add("grad_norm"), "grad_norm: 0.5 | 0.75 (relative difference 2.5e"),
    "other values": (add("curriculum/questions"), "curriculum/questions: 9 | 9.25"),
}


def test_the_first_stage_that_differs_is_named_though_all_later_ones_differ_too(runs):
    a, b = runs
    for stage, (change, said) in reversed(CHANGES.items()):
        change(b)
        nothing, first, meaning = diff.answer(a, b)
        assert nothing == "settings and versions that differ: none"
        assert first.startswith(f"first difference: step 1, {stage}: {said}")
        assert meaning.strip() == diff.MEANINGS[stage]


def test_rounding_is_told_from_what_follows_it(runs):
    a, b = runs
    edit("metrics.jsonl", lambda row: row.update(loss=row["loss"] + 1e-8, entropy=0.4 + 1e-8), 0)(b)
    other_token(b)
    _, first, meaning, later = diff.answer(a, b)
    assert "step 0, trainer's log-probs: entropy: 0.4 | 0.40000001 (relative diff" in first
    assert meaning.strip() == diff.ROUNDING
    assert "beyond rounding: step 1, tokens: text of rollout 7" in later


def test_equal_runs_other_settings_other_inputs_and_a_shorter_run(runs):
    a, b = runs
    assert list(diff.answer(a, b))[1:] == ["no difference: all results are equal bit for bit"]
    write_rows(b / "metrics.jsonl", read_rows(b / "metrics.jsonl")[:1])
    (b / "inputs.sha256").write_text("4567")
    about = json.loads((b / "config.json").read_text())
    about["config"] |= {"seed": 1, "save_every": 3}
    (b / "config.json").write_text(json.dumps(about))
    flags, first, _, cause, later = diff.answer(a, b)
    assert flags == "settings and versions that differ: --seed 0 | 1"
    assert "step 0, inputs: " in first and cause.endswith("the settings differ in --seed.")
    assert "where it shows first: step 1, other values: " in later


def test_a_missing_or_damaged_run_is_one_line(runs):
    a, b = runs
    (b / "step-1/model.safetensors").write_text("")
    for folder in b, b / "missing":
        with pytest.raises(SystemExit, match=r"^diff: .*damaged, or not the folder of a run .*\Z"):
            diff.main([str(a), str(folder)])


def test_a_dropped_group_is_left_out_of_its_minibatch_and_not_a_group_that_equals_it():
    first, second, third = [1], [1], [2]
    split = fork.without([[first, second], [third]], second)
    assert split == [[first], [third]] and split[0][0] is first
