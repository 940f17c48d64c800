"""learn/diff.py on runs that the test prepares, and the part of examples/fork.py that drops."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import diff
import fork
import nano_rlvr as nr
from conftest import fixed_rollouts, make_config, read_rows, write_rows
from runtime.log import Log

METRICS = {"draws": 1, "lr": 1e-4, "ratio": 1.0, "clipped": 0.0, "mismatch/mean_abs": 4e-7,
           "mismatch/max": 2e-6, "correction/w": 1.0, "kl": 1e-3, "entropy": 0.4, "loss": 1e-3,
           "grad_norm": 0.5, "skipped": 0.0, "reward/mean": 0.5, "group/flat": 0.0,
           "completion/length": 20.0, "tokens": 320, "curriculum/questions": 9}


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
        (folder / "final").mkdir()
        save_file({"fp32": tensor, "exp_avg": 2 * tensor}, folder / "step-1/trainer/w.safetensors")
        for place in ("step-1", "final"):
            save_file({"w": tensor}, folder / place / "model.safetensors")
    return tmp_path / "a", tmp_path / "b"


def edit(folder, file, change, line=-1):
    """Changes a row of a file of JSON lines: change(row)."""
    rows = read_rows(folder / file)
    change(rows[line])
    write_rows(folder / file, rows)


def add(folder, name, amount=0.25):
    edit(folder, "metrics.jsonl", lambda row: row.update({name: row[name] + amount}))


def replace(folder, name, value):
    edit(folder, "rollouts.jsonl", lambda row: row.update({name: value}))


def other_token(folder):
    edit(folder, "rollouts.jsonl", lambda row: row["per_token"]["text"].__setitem__(2, "other"))


def other_weight(folder):
    path = folder / "step-1/trainer/w.safetensors"
    tensors = {name: x.clone() for name, x in load_file(path).items()}
    tensors["fp32"][1, 2] += 0.5
    save_file(tensors, path)


# a change at each stage of step 1, in the order of the step, and what the answer says about it
CHANGES = {
    "weights": (other_weight, "step-1: 1 tensors differ, the first: trainer/w.safetensors fp32, "
                "1 of 24 values, by 5.0e-01 at most"),
    "evaluation": (lambda b: edit(b, "eval.jsonl", lambda row: row.update(completion="3")),
                   "eval/completion of answer 0: '2' | '3'"),
    "data": (lambda b: replace(b, "prompt", "2+2"), "prompt of rollout 7"),
    "tokens": (other_token, "text of rollout 7: "),
    "rewards": (lambda b: replace(b, "reward", 2.0), "reward of rollout 7: "),
    "advantages": (lambda b: replace(b, "advantage", 9.0), "advantage of rollout 7: "),
    "trainer's log-probs": (lambda b: add(b, "entropy"), "entropy: 0.4 | 0.65 "),
    "vLLM's log-probs": (lambda b: add(b, "mismatch/max"), "mismatch/max: 2e-06 | "),
    "loss": (lambda b: add(b, "kl"), "kl: 0.001 | 0.251 "),
    "learning rate": (lambda b: add(b, "lr", 1e-6), "lr: 0.0001 | 0.000101"),
    "gradients": (lambda b: add(b, "grad_norm"), "grad_norm: 0.5 | 0.75 (relative difference 2.5e"),
    "other values": (lambda b: add(b, "curriculum/questions"), "curriculum/questions: 9 | 9.25"),
}


@pytest.mark.parametrize("stage", CHANGES)
def test_the_first_stage_that_differs_is_named_though_all_later_ones_differ_too(runs, stage):
    a, b = runs
    for change, _ in [*CHANGES.values()][[*CHANGES].index(stage):]:
        change(b)
    nothing, first, meaning = diff.answer(a, b)
    assert nothing == "settings and versions that differ: none"
    assert first.startswith(f"first difference: step 1, {stage}: {CHANGES[stage][1]}")
    assert meaning.strip() == diff.MEANINGS[stage]


def test_rounding_is_told_from_what_follows_it(runs):
    a, b = runs
    edit(b, "metrics.jsonl", lambda row: row.update(loss=row["loss"] + 1e-8, entropy=0.4 + 1e-8), 0)
    assert list(diff.answer(a, b))[2:] == [
        f"    {diff.ROUNDING}", "first difference beyond rounding: none"]
    other_token(b)
    answer = list(diff.answer(a, b))
    assert "step 0, trainer's log-probs: entropy: 0.4 | 0.40000001 (relative difference 1.0e-08)" \
        in answer[1]
    assert "beyond rounding: step 1, tokens: text of rollout 7" in answer[3]


def test_equal_runs_other_settings_other_inputs_and_a_shorter_run(runs):
    a, b = runs
    assert list(diff.answer(a, b))[1:] == ["no difference: all results are equal bit for bit"]
    write_rows(b / "metrics.jsonl", read_rows(b / "metrics.jsonl")[:1])
    assert "other values: " in list(diff.answer(a, b))[1]
    (b / "inputs.sha256").write_text("4567")
    about = json.loads((b / "config.json").read_text())
    about["config"] |= {"seed": 1, "save_every": 3}
    (b / "config.json").write_text(json.dumps(about))
    flags, first, _, cause, later = diff.answer(a, b)
    assert flags == "settings and versions that differ: --seed 0 | 1"
    assert "step 0, inputs: " in first and cause.endswith("the settings differ in --seed.")
    assert "where it shows first: step 1, other values: " in later


@pytest.mark.parametrize("harm", [
    lambda b: shutil.rmtree(b),
    lambda b: (b / "config.json").write_text("{"),
    lambda b: (b / "metrics.jsonl").write_text("{\n{}\n"),
    lambda b: (b / "step-1/model.safetensors").write_text("")])
def test_a_missing_or_damaged_run_is_one_line(runs, harm):
    harm(runs[1])
    with pytest.raises(SystemExit, match="^diff: .*damaged, or not the folder of a run .*$") as e:
        diff.main([*map(str, runs)])
    assert "\n" not in str(e.value)


def test_a_dropped_group_is_not_trained_and_the_mean_is_that_of_the_others(group, tokenizer):
    """Without one of 4 groups of 4, 12 sequences are left: a token weighs 1 / (12 length)."""
    rollouts, cfg = fixed_rollouts(tokenizer), make_config(aggregate="sequence")
    groups = [rollouts[i:i + 4] for i in range(0, 16, 4)]
    for r in rollouts:
        r.weight = 0.0
    split = fork.without([groups[:2], groups[2:]], groups[1])
    assert [[groups.index(g) for g in part] for part in split] == [[0], [2, 3]]
    nr.assign_token_weights([r for part in split for g in part for r in g], cfg)
    for i, r in enumerate(rollouts):
        assert r.weight == (0.0 if i // 4 == 1 else 1 / (12 * r.length))
