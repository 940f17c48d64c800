"""The evaluation: several sets, rewards of a row's own, templates, samples, selectors, thinking budgets."""
import json
import math
import random
from fractions import Fraction

import pytest

import data
import nano_rlvr as nr
import rewards
import runtime.flags
from conftest import close, make_config, within
from runtime import evaluation, log, stats
from runtime.log import Log

ROWS = [  # of a file: sums, and an instruction without an answer
    {"question": "3+4+5", "answer": "12", "reward": ""},
    {"question": "3+4-5", "answer": "2", "reward": " "},
    {"question": "Say it.", "reward": "instruction:1", "instruction_id_list": ["punctuation:no_comma"],
     "kwargs": [{}]},
]


@pytest.fixture
def mixed(tmp_path):
    """A file with rows that are judged in two ways."""
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return str(path)


# ---- sets

def test_each_set_keeps_its_name_and_is_judged_by_its_own_rewards(mixed, tokenizer):
    cfg = make_config(eval_data=f"arithmetic, countdown,{mixed}", eval_size=8, max_prompt=400)
    _, examples = data.load_splits(cfg, tokenizer, notify=pytest.fail)
    assert [e["eval_set"] for e in examples] == ["arithmetic"] * 8 + ["countdown"] * 8 + ["mixed"] * 3
    specs = [e.get("reward") for e in examples]
    assert specs == [None] * 8 + ["countdown:1,format:0.1"] * 8 + [None, None, "instruction:1"]
    assert examples[-1]["answer"] is None
    cfg = make_config(eval_data="arithmetic", rewards="random", eval_size=4)
    assert [e["reward"] for e in data.load_splits(cfg, tokenizer)[1]] == ["gsm8k:1"] * 4
    examples = data.load_splits(make_config(rewards="random"), tokenizer)[1]  # not named: as the training set
    assert all("reward" not in e and "eval_set" not in e for e in examples)


def test_questions_of_every_set_are_left_out_of_the_training_set(tmp_path, tokenizer):
    rows = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(20)]
    for name, part in (("train", rows), ("a", rows[:3]), ("b", rows[10:12])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    cfg = make_config(data=str(tmp_path / "train.jsonl"), eval_data=f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")
    train_set, eval_set = data.load_splits(cfg, tokenizer, notify=lambda _: None)
    assert [e["question"] for e in train_set] == [r["question"] for r in rows[3:10] + rows[12:]]
    assert [e["eval_set"] for e in eval_set] == ["a"] * 3 + ["b"] * 2


def test_names_of_sets_are_plain_and_differ_and_no_set_may_be_empty(tmp_path, tokenizer):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my set@1.jsonl").write_text(json.dumps(ROWS[0]))
    x, y = (f"{tmp_path}/{folder}/my set@1.jsonl" for folder in "xy")
    examples = data.load_eval_sets(make_config(eval_data=f"{x},arithmetic", eval_size=1))
    assert [e["eval_set"] for e in examples] == ["my-set-1", "arithmetic"]
    with pytest.raises(ValueError, match="^--eval_data .*: two sets have the name my-set-1; rename a file$"):
        data.load_eval_sets(make_config(eval_data=f"{x},{y}"))
    cfg = make_config(eval_data="countdown,arithmetic", max_prompt=60)
    with pytest.raises(ValueError, match="^--eval_data countdown: none of its prompts fits into"):
        data.load_splits(cfg, tokenizer, notify=lambda _: None)


def test_a_reward_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": 1, "reward": 0.5}')
    with pytest.raises(ValueError, match="a.jsonl:1: 'reward' must be text, .* this is float"):
        data.load(str(tmp_path / "a.jsonl"))


def test_the_interval_of_one_set_is_its_own_and_that_of_several_holds_their_mean_19_times_in_20():
    one = stats.set_metrics([{"accuracy": i < 3, "length": 2 * i} for i in range(10)])
    assert (one["accuracy"], one["n"], one["length"]) == (0.3, 10, 9)
    assert (one["low"], one["high"]) == stats.wilson_interval(3, 10)
    for name, x in stats.mean_of_sets([one]).items():
        close(x, one[name])
    rng, sets, held, trials = random.Random(0), ((0.1, 30), (0.5, 100), (0.9, 50)), 0, 2000
    for _ in range(trials):
        drawn = [stats.set_metrics([{"accuracy": rng.random() < p} for _ in range(n)]) for p, n in sets]
        mean = stats.mean_of_sets(drawn)
        assert mean["n"] == 180
        held += mean["low"] <= 0.5 <= mean["high"]  # the mean of the three p
    # five standard errors of the share, and one hundredth: the interval is an approximation
    within(abs(held / trials - 0.95), 5 * math.sqrt(0.95 * 0.05 / trials) + 0.01)


# ---- templates

def test_a_template_file_is_the_prompt_and_the_opener_of_an_answer(tmp_path, tokenizer):
    path = tmp_path / "t.txt"
    path.write_text("1+1\n2\n{question}\n{opener}</think>\n\n")
    text = data.read_template(str(path))
    assert tokenizer.decode(data.encode({"question": "{x}"}, tokenizer, text)) == "1+1\n2\n{x}\n"
    assert data.split_template(text)[1] == "</think>\n"  # the last line break ends the file
    path.write_text("Q: {question} A:")
    assert data.split_template(data.read_template(str(path))) == ("Q: {question} A:", data.DEFAULT_OPENER)
    assert all(data.split_template(name)[1].strip() for name in data.TEMPLATES)


def test_a_run_keeps_the_text_of_its_template_and_a_trained_model_brings_it(tmp_path, capsys):
    path = tmp_path / "t.txt"
    path.write_text("Q: {question}\nA:")
    cfg = nr.parse_config(["--template", str(path)])
    assert cfg.template == "Q: {question}\nA:"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps({"config": vars(cfg) | {"name": "run"}}))
    resume = ["--resume", str(tmp_path / "run")]
    assert nr.parse_config([*resume, "--template", str(path)]).template == cfg.template
    path.write_text("Question: {question}\nA:")
    other = r"--template Question: \{question\} A: \(was Q: \{question\} A:\)"  # in one line
    with pytest.raises(ValueError, match=other):
        nr.parse_config([*resume, "--template", str(path)])
    (tmp_path / runtime.flags.RECORD).write_text(json.dumps({"config": vars(cfg)}))
    path.unlink()
    capsys.readouterr()
    assert nr.parse_config(["--model", str(tmp_path)]).template == cfg.template
    nr.parse_config(["--model", str(tmp_path), "--template", "r1"])
    [note] = [line for line in capsys.readouterr().err.splitlines() if "--template" in line]
    assert note.startswith("note: --template r1, but") and note.endswith("--template Q: {question} A:")


@pytest.mark.parametrize("argv, says", [
    ("--template nowhere.txt", "--template nowhere.txt: no such file, and not one of chat, none, r1, q"),
    ("--template {dir}/plain.txt", "--template plain.txt: the prompt needs {question}"),
    ("--template {dir}/late.txt", "--template late.txt: the prompt needs {question}"),
    ("--template {dir}/binary.txt", "{dir}/binary.txt:1: byte 0xff is no UTF-8 text"),
    ("--eval_budget 64,x", "--eval_budget 64,x: must be numbers of tokens such as 64,256"),
    ("--eval_budget 0", "--eval_budget 0: must be numbers of tokens"),
    ("--eval_n 4 --eval_select gsm9k", "unknown reward 'gsm9k'"),
])
def test_bad_values_are_refused_in_one_line(argv, says, tmp_path):
    (tmp_path / "plain.txt").write_text("Answer!")
    (tmp_path / "late.txt").write_text("Answer!{opener}{question}")
    (tmp_path / "binary.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError) as e:
        nr.parse_config([word.replace("{dir}", str(tmp_path)) for word in argv.split()])
    assert says.replace("{dir}", str(tmp_path)) in str(e.value) and "\n" not in str(e.value)


def test_a_selector_without_samples_is_named(capsys):
    nr.parse_config(["--eval_select", "steps"])
    assert "note: --eval_select steps has no effect without --eval_n" in capsys.readouterr().err


def test_a_budget_needs_room_for_the_opener_and_an_answer(tokenizer):
    fits = make_config(eval_budget="8,78", max_tokens=96)  # 78 + 2 tokens of the opener + 16
    data.load_splits(fits, tokenizer, notify=lambda _: None)
    with pytest.raises(ValueError, match="^--eval_budget 79: with 2 tokens that open the answer and 16 "):
        data.load_splits(make_config(eval_budget="8,79", max_tokens=96), tokenizer)


# ---- samples and selectors

def sample(right, logps=(0.0,), sampled=None, text=""):
    """A rollout with a verdict."""
    ids = [0] * len(logps)
    return nr.Rollout([0], ids, text, False, list(logps), sampled, parts={"first": float(right)})


def test_the_sample_with_the_highest_mean_log_prob_of_its_sampled_tokens_is_chosen():
    def chosen(*group):
        return stats.sample_values(group, lambda text: None)[f"best@{len(group)}/logprob"]
    assert chosen(sample(0, [-1.0, -1.0]), sample(1, [-0.5, -1.0, -0.75]))  # the sum would choose the first
    assert not chosen(sample(1, [-1.0]), sample(0, [-0.5]))
    tool = [-3.0, 0.0, 0.0, 0.0]  # the last three are a tool's output
    assert chosen(sample(1, [-1.0] * 4), sample(0, tool, [True, False, False, False]))


def test_the_first_of_equals_is_chosen_and_none_is_no_value():
    group = [sample(0), sample(1), sample(1)]
    assert not stats.best_is_right(group, [0.5, 0.5, 0.1])
    assert stats.best_is_right(group, [None, -2.0, -3.0])
    assert not stats.best_is_right(group, [None] * 3)


def test_a_selector_sees_no_column_but_the_question():
    groups = [[sample(0, text="a"), sample(1, text="b")], [sample(1, text="c"), sample(1, text="d")]]
    examples = [{"question": "1+1", "answer": "2", "solution": "2"}, {"question": "2+2", "answer": "4"}]
    seen = {}

    def selector(texts, **columns):
        seen.update(columns, texts=texts)
        return [0.5, None, [(1, 1.0), (2, 0.0), (3, 0.5)], 2.0], {}, {"reward/timeouts": 0.0}
    values, counts = evaluation.select(selector, groups, examples)
    assert values == [[0.5, None], [0.5, 2.0]] and counts == {"reward/timeouts": 0.0}  # the mean of the steps
    questions = ["1+1", "1+1", "2+2", "2+2"]
    ids = [r.completion for group in groups for r in group]
    assert seen == dict(texts=list("abcd"), question=questions, prompts=questions, completion_ids=ids, step=0)


@pytest.mark.parametrize("spec, column", [("gsm8k", "answer"), ("countdown", "numbers")])
def test_a_selector_that_reads_the_gold_answer_is_refused(spec, column):
    examples = [{"question": "1+1", "answer": "2", "numbers": [1], "target": 1}]
    opened = []

    def start(spec, **settings):
        opened.append(rewards.Verifier(spec, workers=1, **settings))
        return opened[-1]
    with pytest.raises(ValueError, match=f"^--eval_select {spec}: it reads the column '{column}', which"):
        evaluation.start_verifiers(make_config(eval_n=2, eval_select=spec), start, examples, examples)
    _, selector = evaluation.start_verifiers(make_config(), start, examples, examples)
    assert selector is None
    for verifier in opened:
        verifier.close()


# ---- budgets

def test_a_completion_is_cut_at_the_budget_and_an_earlier_end_stays(tokenizer):
    rollouts = [nr.Rollout([1, 2], list(range(65, 65 + n)), "", False, [0.0] * n) for n in (6, 20)]
    cfg = make_config(eval_budget="6,4", max_tokens=96)
    calls = []

    def answer(prompts, n, temperature, max_tokens):
        calls.append((prompts, n, temperature, max_tokens))
        return [nr.Rollout(p, tokenizer.encode("7</answer>"), "7", False, [0.0] * 2) for p in prompts]
    opened = evaluation.open_answers(rollouts, cfg, tokenizer, "</think><answer>", answer)
    opener = tokenizer.encode("</think><answer>")
    assert list(opened) == [(4, 0), (4, 1), (6, 1)]  # the other one is not longer than the budget
    [(prompts, *arguments)] = calls
    assert arguments == [1, 0.0, 96 - 6 - len(opener)]
    for ((budget, i), r), prompt in zip(opened.items(), prompts):
        cut = rollouts[i].completion[:budget] + opener
        assert len(cut) == budget + 2 and prompt == rollouts[i].prompt + cut
        assert r.completion == cut + tokenizer.encode("7</answer>") and r.prompt == rollouts[i].prompt
        assert r.text == tokenizer.decode(r.completion, skip_special_tokens=True)
        assert r.text.endswith("</think><answer>7</answer>")


def test_answers_are_asked_for_also_if_no_completion_is_long_enough(tokenizer):
    """rollout() is collective: a rank that left it out would not be where the others are."""
    calls = []
    short = nr.Rollout([1, 2], [65], "", False, [0.0])
    cfg = make_config(eval_budget="4", max_tokens=96)
    assert evaluation.open_answers([short], cfg, tokenizer, "", lambda *args: calls.append(args) or []) == {}
    assert [prompts for prompts, *_ in calls] == [[]]


# ---- what is printed and written

SETS = {"": dict(accuracy=0.5, low=0.4, high=0.6, n=30, length=7.0, truncated=0.1, no_verdict=0.0) | {
    "best@4/logprob": 0.75, "timeouts": 0.0}}
SETS |= {name: SETS[""] | {"n": 15} for name in ("math500", "my.set-1")}


def test_the_table_has_a_row_per_set():
    metrics = {f"eval/{name}/{key}" if name else f"eval/{key}": x for name, m in SETS.items()
               for key, x in m.items()}
    assert log.evaluation_sets(metrics) == SETS and list(log.evaluation_sets(metrics))[-1] == ""
    head, *rows = [line.split("  ") for line in log.evaluation_table(metrics).splitlines()]
    assert head[0].strip() == "set" and head[-1].strip() == "best@4/logprob"
    assert [row[0].strip() for row in rows] == ["math500", "my.set-1", "mean"]
    for row, n in zip(rows, ("15", "15", "30")):
        cells = [cell.strip() for cell in row if cell.strip()]
        assert cells[1:] == ["50.0%", "40.0% to 60.0%", n, "7.0", "10.0%", "0.0%", "75.0%"]
    assert log.evaluation_text(metrics).endswith(
        "n = 30), mean length 7.0, best@4/logprob 75.0%, math500 50.0%, my.set-1 50.0%")
    alone = {f"eval/{key}": x for key, x in SETS[""].items()}
    assert log.evaluation_table(alone).splitlines()[1].startswith("held-out")


def test_answers_are_cut_back_to_the_checkpoint_with_the_other_logs(group, tokenizer, tmp_path):
    run = Log(make_config(out=str(tmp_path), name="run"), tokenizer)
    run.write(0, {"loss": 1.0}, answers=[{"question": "1+1", "answer": Fraction(2)}])  # of any type
    sizes = run.sizes()
    run.write(1, {"loss": 1.0}, answers=[{"question": "1+2"}])
    run.cut_back(sizes)
    assert (tmp_path / "run/eval.jsonl").read_text() == '{"step": 0, "question": "1+1", "answer": "2"}\n'


def test_the_mean_of_a_reward_is_over_the_rollouts_that_have_it(group):
    cfg, metrics = make_config(), {"seconds/rollout": 1.0, "seconds/update": 1.0}
    rollouts = [nr.Rollout([0], [0], "", False, [0.0], reward=x, parts=parts) for x, parts in (
        (1.0, {"math": 1.0}), (0.0, {"math": None}), (0.5, {"instruction": 0.0, "math": 0.5}))]
    metrics = log.summary(cfg, [], [rollouts], metrics)
    assert metrics["reward/math"] == 0.75 and metrics["reward/instruction"] == 0.0
    assert metrics["reward/mean"] == 0.5


# ---- the real engine

def test_an_evaluation_of_two_sets_with_vllm(llm, tokenizer, mixed, monkeypatch):
    cfg = make_config(eval_data=f"arithmetic,{mixed}", eval_size=16, eval_n=4, eval_select="steps",
                      eval_budget="4,16")
    _, examples = data.load_splits(cfg, tokenizer, notify=lambda _: None)
    calls, rollout = [], nr.rollout

    def recorded(*arguments, **sampling):
        calls.append(rollout(*arguments, **sampling))
        return calls[-1]
    monkeypatch.setattr(nr, "rollout", recorded)
    specs = [e.get("reward") for e in examples]
    with rewards.Verifier(cfg.rewards, messages=True, row_specs=specs) as verifier, \
            rewards.Verifier(cfg.eval_select, messages=True) as selector:
        metrics, rows = nr.evaluate(llm, examples, verifier, cfg, selector)
    greedy, samples, answers = calls  # each for both sets at once
    assert len(greedy) == 19 and len(samples) == 4 * 19
    assert [row["question"] for row in rows] == [e["question"] for e in examples]
    assert [row["completion"] for row in rows] == [r.text for r in greedy]
    right = [rewards.gsm8k_reward([r.text], answer=[e["answer"]])[0] for r, e in zip(greedy[:18], examples)]
    right.append(float("," not in greedy[18].text and greedy[18].text.strip() != ""))
    assert [row["right"] for row in rows] == [x == 1 for x in right]
    assert [set(row["parts"]) for row in rows] == [{"gsm8k"}] * 18 + [{"instruction"}]
    shares = {"arithmetic": sum(right[:16]) / 16, "mixed": sum(right[16:]) / 3}
    for name, share in shares.items():
        close(metrics[f"eval/{name}/accuracy"], share)
        assert metrics[f"eval/{name}/low"] <= share <= metrics[f"eval/{name}/high"]
    close(metrics["eval/accuracy"], sum(shares.values()) / 2)
    assert metrics["eval/n"] == 19 and metrics["eval/crashes"] == metrics["eval/timeouts"] == 0

    hits = {}  # of the samples of the sums
    for i, e in enumerate(examples[:16]):
        group = samples[4 * i:4 * i + 4]
        judged = rewards.gsm8k_reward([r.text for r in group], answer=[e["answer"]] * 4)
        steps = [rewards.steps_reward([r.text], question=[e["question"]])[0] for r in group]
        for name, scores in (("logprob", [sum(r.vllm_logps) / len(r.vllm_logps) for r in group]),
                             ("steps", [sum(x for _, x in s) / len(s) for s in steps])):
            hits.setdefault(name, []).append(judged[max(range(4), key=scores.__getitem__)])
    for name, values in hits.items():
        close(metrics[f"eval/arithmetic/best@4/{name}"], sum(values) / 16)

    cut = [(budget, i) for budget in (4, 16) for i, r in enumerate(greedy) if len(r.completion) > budget]
    assert len(cut) == len(answers) > 19
    opener = tokenizer.encode("</think><answer>")
    texts = {(budget, i): r.text for budget in (4, 16) for i, r in enumerate(greedy)}
    for (budget, i), r in zip(cut, answers):
        assert r.prompt == greedy[i].prompt + greedy[i].completion[:budget] + opener
        texts[budget, i] = tokenizer.decode(greedy[i].completion[:budget] + opener + r.completion,
                                            skip_special_tokens=True)
    for budget in (4, 16):
        share = sum(rewards.gsm8k_reward([texts[budget, i]], answer=[e["answer"]])[0]
                    for i, e in enumerate(examples[:16])) / 16
        close(metrics[f"eval/arithmetic/budget@{budget}"], share)
    assert metrics["eval/arithmetic/budget@4"] <= metrics["eval/arithmetic/accuracy"]
