"""The evaluation: several sets, rewards of a row's own, templates, examples/test_time.py."""
import json
import math
import random
import re
from fractions import Fraction

import pytest

import data
import nano_rlvr as nr
import rewards
import runtime.flags
import test_time as example
from conftest import ROOT, close, make_config, within, write_rows
from runtime import evaluation, log, stats
from runtime.log import Log

INSTRUCTION = f"{ROOT}/examples/instructions.py:instruction"
ROWS = [  # of a file: sums, and an instruction without an answer
    {"question": "3+4+5", "answer": "12", "reward": ""},
    {"question": "3+4-5", "answer": "2", "reward": " "},
    {"question": "Say it.", "reward": INSTRUCTION,
     "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]


# ---- sets

def test_each_set_keeps_its_name_and_is_judged_by_its_own_rewards(tmp_path, tokenizer):
    mixed = write_rows(tmp_path / "mixed.jsonl", ROWS)
    cfg = make_config(eval_data=f"arithmetic, countdown,{mixed}", eval_size=8, max_prompt=400)
    _, examples = data.load_splits(cfg, tokenizer, notify=pytest.fail)
    sets = [e["eval_set"] for e in examples]
    assert sets == ["arithmetic"] * 8 + ["countdown"] * 8 + ["mixed"] * 3
    assert [e.get("reward") for e in examples] == (
        [None] * 8 + ["countdown:1,format:0.1"] * 8 + [None, None, INSTRUCTION])
    assert examples[-1]["answer"] is None
    cfg = make_config(eval_data="arithmetic", rewards="random", eval_size=4)
    assert [e["reward"] for e in data.load_splits(cfg, tokenizer)[1]] == ["gsm8k:1"] * 4
    examples = data.load_splits(make_config(rewards="random"), tokenizer)[1]  # not named
    assert all("reward" not in e and "eval_set" not in e for e in examples)


def test_names_of_sets_differ_and_no_set_may_be_empty(tmp_path, tokenizer):
    for folder in "xy":
        (tmp_path / folder).mkdir()
    x, y = (write_rows(tmp_path / folder / "a.jsonl", ROWS[:1]) for folder in "xy")
    with pytest.raises(ValueError, match="^--eval_data .*: two sets have the name a"):
        data.load_eval_sets(make_config(eval_data=f"{x},{y}"))
    cfg = make_config(eval_data="countdown,arithmetic", max_prompt=60)
    with pytest.raises(ValueError, match="^--eval_data countdown: none of its prompts fits into"):
        data.load_splits(cfg, tokenizer, notify=lambda _: None)


def test_the_interval_of_several_sets_holds_their_mean_19_times_in_20():
    one = evaluation.set_metrics([{"accuracy": i < 3, "length": 2 * i} for i in range(10)])
    assert (one["accuracy"], one["n"], one["length"]) == (0.3, 10, 9)
    assert (one["low"], one["high"]) == stats.wilson_interval(3, 10)
    for name, x in evaluation.mean_of_sets([one]).items():  # of one set: its own
        close(x, one[name])
    rng, sets, held, trials = random.Random(0), ((0.1, 30), (0.5, 100), (0.9, 50)), 0, 2000
    for _ in range(trials):
        drawn = [[{"accuracy": rng.random() < p} for _ in range(n)] for p, n in sets]
        mean = evaluation.mean_of_sets(list(map(evaluation.set_metrics, drawn)))
        assert mean["n"] == 180
        held += mean["low"] <= 0.5 <= mean["high"]  # the mean of the three p
    # five standard errors of the share, and one hundredth: the interval is an approximation
    within(abs(held / trials - 0.95), 5 * math.sqrt(0.95 * 0.05 / trials) + 0.01)


# ---- templates

def test_a_run_keeps_the_text_of_its_template_and_a_trained_model_brings_it(
        tmp_path, capsys, tokenizer):
    path = tmp_path / "t.txt"
    path.write_text("1+1\n2\n{question}\nA:\n")  # the last line break ends the file
    cfg = nr.parse_config(["--template", str(path)])
    assert cfg.template == "1+1\n2\n{question}\nA:"
    prompt = data.encode({"question": "{x}"}, tokenizer, cfg.template)
    assert tokenizer.decode(prompt) == "1+1\n2\n{x}\nA:"
    (tmp_path / "run").mkdir()
    config = {"config": vars(cfg) | {"name": "run"}}
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    resume = ["--resume", str(tmp_path / "run"), "--template", str(path)]
    assert nr.parse_config(resume).template == cfg.template
    path.write_text("Question: {question}\nA:")
    with pytest.raises(ValueError, match=r"--template Question: \{question\} A: \(was 1\+1 2 "):
        nr.parse_config(resume)
    (tmp_path / runtime.flags.RECORD).write_text(json.dumps({"config": vars(cfg)}))
    path.unlink()
    capsys.readouterr()
    assert nr.parse_config(["--model", str(tmp_path)]).template == cfg.template
    nr.parse_config(["--model", str(tmp_path), "--template", "r1"])
    assert "note: --template r1, but" in capsys.readouterr().err


def test_bad_templates_are_refused_in_one_line(tmp_path):
    path = tmp_path / "t.txt"
    for content, says in ((b"Answer!", "needs {question}"), (b"\xff", "can't decode byte 0xff")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^--template {path}: .*{re.escape(says)}.*$"):
            nr.parse_config(["--template", str(path)])


# ---- what is printed and written

def test_the_screen_has_a_line_per_set_and_one_for_their_mean():
    one = dict(accuracy=0.5, low=0.4, high=0.6, n=15, length=7.0, truncated=0.1, no_verdict=0.0)
    one |= {"best@4/logprob": 0.75}
    text = "accuracy 50.0% (95 % interval 40.0% to 60.0%, n = 15), mean length 7.0, "
    text += "best@4/logprob 75.0%"
    metrics = {f"eval/{name}/{key}": x for name in ("math500", "my.set-1")
               for key, x in one.items()}
    overall = {f"eval/{key}": x for key, x in one.items()} | {"eval/timeouts": 0.0}
    assert log.evaluation_text(overall) == f"held-out: {text}"
    assert log.evaluation_text(metrics | overall).splitlines() == [
        f"math500: {text}", f"my.set-1: {text}", f"mean: {text}"]
    overall["eval/no_verdict"] = 0.25
    assert ", mean length 7.0, no_verdict 25.0%, best@4" in log.evaluation_text(overall)


def test_answers_are_cut_back_to_the_checkpoint_with_the_other_logs(group, tokenizer, tmp_path):
    run = Log(make_config(out=str(tmp_path), name="run"), tokenizer)
    run.write(0, {"loss": 1.0}, answers=[{"question": "1+1", "answer": Fraction(2)}])  # any type
    sizes = run.sizes()
    run.write(1, {"loss": 1.0}, answers=[{"question": "1+2"}])
    run.cut_back(sizes)
    answers = (tmp_path / "run/eval.jsonl").read_text()
    assert answers == '{"step": 0, "question": "1+1", "answer": "2"}\n'


# ---- the real engine

def test_an_evaluation_of_two_sets_with_vllm(llm, tokenizer, tmp_path, monkeypatch):
    mixed = write_rows(tmp_path / "mixed.jsonl", ROWS)
    cfg = make_config(eval_data=f"arithmetic,{mixed}", eval_size=16, eval_n=4)
    _, examples = data.load_splits(cfg, tokenizer, notify=lambda _: None)
    calls, rollout = [], nr.rollout

    def recorded(*arguments, **sampling):
        calls.append(rollout(*arguments, **sampling))
        return calls[-1]
    monkeypatch.setattr(nr, "rollout", recorded)
    specs = [e.get("reward") for e in examples]
    with rewards.Verifier(cfg.rewards, messages=True, row_specs=specs) as verifier:
        metrics, rows = nr.evaluate(llm, examples, verifier, cfg)
    greedy, samples = calls  # each for both sets at once
    assert len(greedy) == 19 and len(samples) == 4 * 19
    assert [row["question"] for row in rows] == [e["question"] for e in examples]
    assert [row["completion"] for row in rows] == [r.text for r in greedy]
    right = [rewards.gsm8k_reward([r.text], answer=[e["answer"]])[0]
             for r, e in zip(greedy[:18], examples)]
    right.append(float("," not in greedy[18].text and greedy[18].text.strip() != ""))
    assert [row["right"] for row in rows] == [x == 1 for x in right]
    assert [set(row["parts"]) for row in rows] == [{"gsm8k"}] * 18 + [{"instruction"}]
    shares = {"arithmetic": sum(right[:16]) / 16, "mixed": sum(right[16:]) / 3}
    for name, share in shares.items():
        close(metrics[f"eval/{name}/accuracy"], share)
        assert metrics[f"eval/{name}/low"] <= share <= metrics[f"eval/{name}/high"]
    close(metrics["eval/accuracy"], sum(shares.values()) / 2)
    assert metrics["eval/n"] == 19 and metrics["eval/crashes"] == metrics["eval/timeouts"] == 0
    hits = []  # of the samples of the sums, by their mean log-prob
    for i, e in enumerate(examples[:16]):
        best = max(samples[4 * i:4 * i + 4], key=lambda r: sum(r.vllm_logps) / len(r.vllm_logps))
        hits += rewards.gsm8k_reward([best.text], answer=[e["answer"]])
    close(metrics["eval/arithmetic/best@4/logprob"], sum(hits) / 16)


# ---- examples/test_time.py

def test_a_completion_is_cut_at_the_budget_and_has_to_answer(llm, tokenizer):
    prompt = data.encode({"question": "3+4"}, tokenizer, "chat")
    thoughts = tokenizer.encode("<think>3+4=7", add_special_tokens=False) * 3
    short, long = (nr.Rollout(prompt, ids, "x", False, [0.0] * len(ids))
                   for ids in (thoughts[:5], thoughts))
    opener = tokenizer.encode(example.OPENER, add_special_tokens=False)
    same, forced = example.force_answers(llm, [short, long], 5)
    assert same is short and forced.prompt == prompt
    assert forced.completion[:5 + len(opener)] == thoughts[:5] + opener
    assert example.OPENER in forced.text
    assert forced.text == tokenizer.decode(forced.completion, skip_special_tokens=True)
    assert len(forced.completion) - len(opener) == forced.length <= 5 + example.ANSWER


def test_a_selector_sees_the_question_and_takes_the_first_of_the_best():
    group = [nr.Rollout([0], [0], text, False, [0.0]) for text in "abcd"]
    seen = {}

    def selector(texts, **columns):
        seen.update(columns, texts=texts)
        return [None, [(1, 1.0), (2, 0.0)], 0.5, 0.4]  # step rewards: their mean
    assert example.best_of(group, {"question": "1+1", "answer": "2"}, selector) is group[1]
    assert seen == {"question": ["1+1"] * 4, "texts": list("abcd")}
    nothing = example.best_of(group, {"question": ""}, lambda texts, question: [None] * 4)
    assert nothing is group[0]
