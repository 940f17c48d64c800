"""Tasks, files, templates and the order of the data."""
import copy
import json
import re
import subprocess
import sys

import pytest
from tokenizers.processors import TemplateProcessing

import data
from conftest import ROOT, make_config, write_rows


@pytest.mark.parametrize("task", ["arithmetic", "countdown"])
def test_generated_examples_are_right_distinct_seeded_and_no_seed_trains_on_a_test_question(task):
    a, b = (data.load(task, "train", size=2000, seed=seed) for seed in (1, 2))
    assert a == data.load(task, "train", size=2000, seed=1) != b
    questions = {e["question"] for e in a}
    assert len(questions) == 2000
    for e in a:
        if task == "arithmetic":
            assert eval(e["question"]) == int(e["answer"])
        else:
            assert eval(e["answer"]) == e["target"] and str(e["target"]) in e["question"]
            assert all(str(n) in e["question"] and 1 <= n <= 99 for n in e["numbers"])
            assert len(e["numbers"]) in (3, 4) and 10 <= e["target"] <= 99
    questions |= {e["question"] for e in b}
    assert not questions & {e["question"] for e in data.load(task, "test", size=500)}


def test_products_are_right_and_no_pair_of_a_test_question_is_trained_on_in_either_order():
    sets = [data.load("products", split) for split in ("train", "test")]
    pairs = []
    for rows in sets:
        factors = [tuple(map(int, re.findall(r"\d+", row["question"]))) for row in rows]
        assert [a * b for a, b in factors] == [int(row["answer"]) for row in rows]
        pairs.append({frozenset(pair) for pair in factors})
    assert not pairs[0] & pairs[1] and len(pairs[0] | pairs[1]) == 11 * 12 / 2
    assert data.load("products", "train", seed=3) == sets[0]  # the split is that of every run


DEFAULTS = """
import data, rewards
for name, task in data.TASKS.items():
    assert rewards.parse_spec(task.rewards)
    assert not data.is_made(name) or data.load(name, size=2)
print(*data.TEMPLATES)
"""


def test_tasks_and_templates_that_have_a_name_need_no_folder_examples(tmp_path):
    for path in "rewards.py", "data.py", "runtime":
        (tmp_path / path).symlink_to(ROOT / path)
    shown = subprocess.check_output([sys.executable, "-c", DEFAULTS], cwd=tmp_path, text=True)
    assert shown.split() == ["chat", "none", "r1", "qwen_math"]


def test_every_file_format_gives_the_same_examples(tmp_path):
    import pyarrow
    from pyarrow import csv, parquet
    rows = [{"problem": f"what is {i}\u2028?", "solution": str(i), "level": str(i % 3)}
            for i in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
    (tmp_path / "a.json").write_text(json.dumps({"data": rows}))
    table = pyarrow.Table.from_pylist(rows)
    csv.write_csv(table, tmp_path / "a.csv")
    parquet.write_table(table, tmp_path / "a.parquet")
    wanted = [row | {"question": row["problem"], "answer": row["solution"]} for row in rows]
    for kind in "jsonl", "json", "csv", "parquet":
        assert data.load(str(tmp_path / f"a.{kind}")) == wanted
    assert data.load(str(tmp_path / "a.jsonl"), size=2) == wanted[:2]
    other = data.load(str(tmp_path / "a.jsonl"), question_key="level", answer_key="problem")
    assert other[1]["answer"].startswith("what is 1")


MAKE = """
def make(split, size, seed):
    for i in range(size):
        yield {"question": f"{split} {seed} {i}", "answer": i, "size": size}
def twice(*args):  # more than it is asked for
    return list(make(*args)) * 2
"""


def test_a_function_makes_the_rows_of_a_set_from_split_size_and_seed(tmp_path, tokenizer):
    (tmp_path / "mine.py").write_text(MAKE)
    make, twice = (f"{tmp_path}/mine.py:{name}" for name in ("make", "twice"))
    for source in make, twice:
        assert data.load(source, "test", size=3, seed=5) == [
            {"question": f"test 5 {i}", "answer": str(i), "size": 3} for i in range(3)]
    assert len(data.load(make)) == 8192 and len(data.load(twice)) == 16384
    cfg = make_config(data=make, eval_data=f"{make},{twice}", eval_size=2, seed=7)
    train_set, eval_set = data.load_splits(cfg, tokenizer)
    assert train_set[0]["question"] == "train 7 0"
    assert [(e["eval_set"], e["question"]) for e in eval_set] == [
        (f"mine.py-{name}", f"test 0 {i}") for name in ("make", "twice") for i in range(2)]
    page = (ROOT / "docs/data_and_rewards.md").read_text()
    code = re.search(r"```python\n(# my_file.py\n.*?)```", page, re.S)[1]
    (tmp_path / "page.py").write_text(code)
    for example in data.load(f"{tmp_path}/page.py:make", size=5):
        assert eval(example["question"]) == int(example["answer"])


def test_blank_lines_byte_order_marks_long_fields_and_nested_columns_are_read(tmp_path):
    row = {"question": "a", "answer": "1", "x": {"y": [1]}}
    path = write_rows(tmp_path / "a.jsonl", [row], encoding="utf-8-sig")
    assert data.load(path) == [row]
    long = "word, " * 50_000  # the csv module's own limit is 131,072 characters
    (tmp_path / "a.csv").write_text(f'question,answer\n"{long}",1\n', encoding="utf-8-sig")
    assert data.load(str(tmp_path / "a.csv")) == [{"question": long, "answer": "1"}]
    row = {"question": "a", "tests": []}
    (tmp_path / "b.jsonl").write_text(f"\n\n{json.dumps(row)}")
    assert data.load(str(tmp_path / "b.jsonl"), answer_key="none") == [row]
    with pytest.raises(ValueError, match=r"b.jsonl:3: no 'answer' \(it has 'question', 'tests'\);"):
        data.load(str(tmp_path / "b.jsonl"))


def test_questions_that_are_held_out_are_not_trained_on(tmp_path, tokenizer):
    rows = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(20)]
    train = write_rows(tmp_path / "train.jsonl", rows * 3)
    test, notes = write_rows(tmp_path / "eval.jsonl", rows[:3]), []
    columns = {"step": 1, "timeout": 2}  # the trainer's
    other = write_rows(tmp_path / "my set@1.jsonl", [row | columns for row in rows[3:5]])
    cfg = make_config(data=train, eval_data=f"{test},{other}")
    train_set, eval_set = data.load_splits(cfg, tokenizer, notify=notes.append)
    assert [e["question"] for e in train_set] == [row["question"] for row in rows[5:] * 3]
    assert [e["eval_set"] for e in eval_set] == ["eval"] * 3 + ["my-set-1"] * 2  # plain names
    assert [notes.pop(0) for _ in range(2)] == [
        f"note: rewards get the trainer's column '{name}', not that of the data"
        for name in ("step", "timeout")]
    spaced = [{"question": f" {i} +\n{i}\u00a0", "answer": str(2 * i)} for i in range(4)]
    cfg = make_config(data=write_rows(tmp_path / "spaced.jsonl", spaced), eval_data=test)
    train_set, _ = data.load_splits(cfg, tokenizer, notify=notes.append)
    assert [e["question"] for e in train_set] == [spaced[3]["question"]]
    notes.remove("3 of 4 training examples left out: their questions are held out")
    cfg = make_config(data=test, eval_data=test)
    with pytest.raises(ValueError, match="0 training prompts are left, 1 needed: held out"):
        data.load_splits(cfg, tokenizer)
    cfg.steps = 0
    assert len(data.load_splits(cfg, tokenizer)[1]) == 3  # only evaluates
    # a tenth of this file is held out
    train_set, eval_set = data.load_splits(make_config(data=train), tokenizer, notify=notes.append)
    held_out = {e["question"] for e in eval_set}
    assert len(eval_set) == 6 and held_out.isdisjoint(e["question"] for e in train_set)
    assert len(train_set) == 3 * (20 - len(held_out))
    assert notes == [f"{n} of 60 training examples left out: their questions are held out"
                     for n in (15, 60 - len(train_set))]


def test_prompts_that_are_too_long_are_left_out_and_too_few_are_refused(tokenizer, monkeypatch):
    rows = data.function_rows
    monkeypatch.setattr(data, "function_rows", lambda make, split, size, seed: rows(
        make, split, min(size, 256), seed))  # in place of 8,192
    monkeypatch.setattr(data, "AT_ONCE", 100)
    cfg, notes = make_config(max_prompt=22, eval_size=64), []
    kept = data.load_splits(cfg, tokenizer, notify=notes.append)
    for examples, size, name, note in zip(kept, (256, 64), ("training", "evaluation"), notes):
        assert max(len(e["prompt_ids"]) for e in examples) == 22
        left = f"{size - len(examples)} of {size} {name}"
        assert note == f"{left} prompts left out: longer than --max_prompt 22"
        for e in examples:
            assert e["prompt_ids"] == data.encode(e, tokenizer, cfg.template)
    with pytest.raises(ValueError, match="64 evaluation prompts are left, 65 needed: "):
        data.load_splits(cfg, tokenizer, at_least=65, notify=notes.append)


def test_templates(tokenizer):
    example = {"question": "Let {x} be {question}?"}
    for template, end in (
            ("none", example["question"]), ("chat", f"<|user|>{example['question']}<|assistant|>"),
            ("r1", "User: Let {x} be {question}?. Assistant:"),
            ("qwen_math", "user\nLet {x} be {question}?<|im_end|>\n<|im_start|>assistant\n")):
        assert tokenizer.decode(data.encode(example, tokenizer, template)).endswith(end)


@pytest.mark.parametrize("case", (ROOT / "tests/rows.jsonl").read_text().splitlines())
def test_rows_as_trl_verl_sharegpt_and_open_reasoner_zero_have_them_are_read_or_make_is_shown(
        tmp_path, case):
    row, answer, system, says = map(json.loads(case).get, ("row", "answer", "system", "says"))
    path = write_rows(tmp_path / "a.jsonl", [row])
    if says:
        with pytest.raises(ValueError, match=rf":1: {re.escape(says)}.* def make\(split, size, s"):
            data.load(path)
        return
    columns = row if isinstance(row, dict) else {"messages": row}
    [example] = data.load(path)
    assert (example["question"], example["answer"]) == ("How many eggs?", answer)
    assert example.get("system_prompt") == system
    assert columns == {name: example[name] for name in columns}  # for the rewards


def with_processor(tokenizer, single):
    """A copy of a tokenizer that adds tokens to every text: "<s> $A </s>"."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    ids = [(token, other.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    other.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    return other


def test_a_prompt_has_one_bos_and_on_every_day_the_same_date(tokenizer):
    """As Llama 3's: the tokenizer adds the BOS, the chat template writes it and asks for today."""
    other = with_processor(tokenizer, "<s> $A")
    other.chat_template = ("<s>{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}"
                           "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for template in "<s>Q: {question}", "Q: {question}", "none", "chat":
        ids = data.encode({"question": "1+1"}, other, template)
        assert ids.count(other.bos_token_id) == 1 and ids[0] == other.bos_token_id
    assert "26 Jul 2024 00:00:00.0" in other.decode(ids)
    # a text of two BOS is not the tokenizer's
    bos = tokenizer.eos_token
    assert data.encode({"question": "1+1"}, tokenizer, f"{bos}{bos}{{question}}")[:2] == [
        tokenizer.eos_token_id] * 2


@pytest.mark.parametrize("single", ["<s> $A </s>", "$A </s>", "<s> $A", "$A"])
def test_a_prompt_ends_without_the_eos_that_a_tokenizer_puts_behind_every_text(single, tokenizer):
    other = with_processor(tokenizer, single)
    for template in "none", "qwen_math", "r1", "Q: {question}":
        ids = data.encode({"question": "1+1"}, other, template)
        text = data.TEMPLATES.get(template, template).replace("{question}", "1+1")
        assert other.decode(ids) == "<s>" * single.startswith("<s>") + text


def test_a_system_prompt_is_a_message_of_a_chat_and_a_text_before_the_question_elsewhere(
        tokenizer):
    example = {"question": "1+1", "system_prompt": "Add."}
    for template, text in (("none", "Add.\n\n1+1"), ("Q: {question}.", "Q: Add.\n\n1+1."),
                           ("chat", "<|system|>Add.<|user|>1+1<|assistant|>")):
        assert tokenizer.decode(data.encode(example, tokenizer, template)) == text
    for gap in None, float("nan"), "":  # a row without one, of a set with some
        gap = example | {"system_prompt": gap}
        assert tokenizer.decode(data.encode(gap, tokenizer, "none")) == "1+1"
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="chat template omits the message of the system; use"):
        data.encode(example, other, "chat")


def test_questions_with_the_text_of_a_control_token_are_in_a_note(tmp_path, tokenizer):
    rows = [{"question": question, "answer": "1"} for question in (
        "What does <|endoftext|> mean?", "1+1", "<think>", "<|endoftext|>" * 2)]
    notes = []
    for part, note in (rows, ["note: 2 of 36 questions have a control token of the tokenizer in "
                              "their text, such as <|endoftext|>"]), (rows[1:3], []):
        cfg = make_config(data=write_rows(tmp_path / "a.jsonl", part), eval_data="arithmetic")
        data.load_splits(cfg, tokenizer, notify=notes.append)
        assert notes == note
        notes.clear()


@pytest.mark.exercise_14
def test_an_epoch_shows_every_example_once_and_ranks_share_a_batch():
    examples = list(range(10))
    epoch = [e for step in range(5) for e in data.batch_at(examples, step, 2)]
    next_epoch = [e for step in range(5, 10) for e in data.batch_at(examples, step, 2)]
    assert sorted(epoch) == sorted(next_epoch) == examples and epoch != next_epoch, (
        f"two epochs of {examples}: yours {epoch} and {next_epoch}, wanted each example once, in "
        "two orders")
    for step in range(7):
        ranks = [data.batch_at(examples, step, 4, seed=3, rank=rank, world=2) for rank in (0, 1)]
        wanted = data.batch_at(examples, step, 4, seed=3)
        assert ranks[0] + ranks[1] == wanted, (
            f"step {step}: your two ranks have {ranks}, wanted the parts of {wanted}")
    small = data.batch_at([1, 2], 0, 8)  # a small data set is repeated within a batch
    assert len(small) == 8, f"8 of [1, 2]: yours {small}, wanted 8 examples"
