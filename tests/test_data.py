"""Tasks, files, templates and the order of the data."""
import csv
import json

import pytest

import data
from conftest import SHARED, make_config


@pytest.mark.parametrize("task", ["arithmetic", "countdown"])
def test_generated_examples_are_right_distinct_and_seeded(task):
    a = data.load(task, "train", size=300, seed=1)
    assert a == data.load(task, "train", size=300, seed=1) != data.load(task, "train", size=300, seed=2)
    assert len({e["question"] for e in a}) == 300
    for e in a:
        if task == "arithmetic":
            assert eval(e["question"]) == int(e["answer"])
        else:
            assert eval(e["answer"]) == e["target"] and str(e["target"]) in e["question"]
            assert all(str(n) in e["question"] for n in e["numbers"])


@pytest.mark.parametrize("task", ["arithmetic", "countdown"])
def test_no_seed_puts_a_test_question_into_training(task):
    train = {e["question"] for seed in range(3) for e in data.load(task, "train", size=2000, seed=seed)}
    assert not train & {e["question"] for e in data.load(task, "test", size=500)}


def test_every_file_format_gives_the_same_examples(tmp_path):
    rows = [{"problem": f"what is {i}\u2028?", "solution": str(i), "level": str(i % 3)} for i in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
    (tmp_path / "a.json").write_text(json.dumps({"data": rows}))
    with (tmp_path / "a.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    import pyarrow
    from pyarrow import parquet
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    loaded = [data.load(str(tmp_path / f"a.{kind}")) for kind in ("jsonl", "json", "csv", "parquet")]
    assert loaded[0] == loaded[1] == loaded[2] == loaded[3]
    assert loaded[0][3] == {**rows[3], "question": rows[3]["problem"], "answer": "3"}
    assert data.load(str(tmp_path / "a.jsonl"), size=2) == loaded[0][:2]
    other_columns = data.load(str(tmp_path / "a.jsonl"), question_key="level", answer_key="problem")
    assert other_columns[1]["answer"].startswith("what is 1")


@pytest.mark.parametrize("row, says", [
    ({"question": 3, "answer": "x"}, "must be text"),
    ({"question": "a", "answer": None}, "'answer' is empty"),
    ({"question": "", "answer": "x"}, "'question' is empty"),
    (["a", "b"], "must be an object"),
])
def test_a_bad_row_is_named_with_its_line(tmp_path, row, says):
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "a", "answer": 0}) + "\n\n" + json.dumps(row))
    with pytest.raises(ValueError, match=says) as e:
        data.load(str(tmp_path / "a.jsonl"))
    assert "a.jsonl:3:" in str(e.value)  # blank lines count as lines


def test_byte_order_marks_long_fields_and_nested_columns_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": 1, "x": {"y": [1]}}', encoding="utf-8-sig")
    assert data.load(str(tmp_path / "a.jsonl")) == [{"question": "a", "answer": "1", "x": {"y": [1]}}]
    long = "word, " * 50_000  # the csv module's own limit is 131,072 characters
    (tmp_path / "a.csv").write_text(f'question,answer\n"{long}",1\n', encoding="utf-8-sig")
    assert data.load(str(tmp_path / "a.csv")) == [{"question": long, "answer": "1"}]


def test_a_key_or_column_that_is_there_twice_is_refused_but_empty_columns_are_not(tmp_path):
    (tmp_path / "a.json").write_text('[{"question": "a", "answer": 1, "x": {"y": 1, "y": 2}}]')
    with pytest.raises(ValueError, match="a.json:1: not readable as JSON .the key 'y' is there twice"):
        data.load(str(tmp_path / "a.json"))
    (tmp_path / "a.csv").write_text("question,answer,x,x,,\na,1,2,3,,\n")
    with pytest.raises(ValueError, match="a.csv:1: two columns have the name 'x'"):
        data.load(str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text("question,answer,,\na,1,,\n")  # as spreadsheets write it
    assert data.load(str(tmp_path / "a.csv")) == [{"question": "a", "answer": "1", "": ""}]


def test_a_column_that_the_trainer_replaces_is_named(tmp_path, tokenizer):
    rows = [{"question": f"{i}+{i}", "answer": str(2 * i), "level": 1} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row | {"step": 1, "index": i})
                                                   for i, row in enumerate(rows[:10])))
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps(row | {"prompt_ids": "x"})
                                                  for row in rows[10:]))
    notes = []
    cfg = make_config(data=str(tmp_path / "train.jsonl"), eval_data=str(tmp_path / "eval.jsonl"))
    data.load_splits(cfg, tokenizer, notify=notes.append)
    assert notes == [f"note: rewards do not see the column '{name}' of the data, but the trainer's"
                     for name in ("index", "prompt_ids", "step")]
    data.load_splits(make_config(), tokenizer, notify=notes.append)
    assert len(notes) == 3


def test_a_list_as_answer_is_kept_for_rewards_that_ask_for_it(tmp_path):
    row = {"question": "a", "answer": ["1", "2"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert data.load(str(tmp_path / "a.jsonl"), answer_key="none") == [row]
    with pytest.raises(ValueError, match="'answer' must be text or a number, this is list"):
        data.load(str(tmp_path / "a.jsonl"))


def test_questions_that_are_held_out_are_not_trained_on(tmp_path, tokenizer):
    rows = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows * 3)))
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, rows[:5])))
    notes = []
    cfg = make_config(data=str(tmp_path / "train.jsonl"), eval_data=str(tmp_path / "eval.jsonl"))
    train_set, eval_set = data.load_splits(cfg, tokenizer, notify=notes.append)
    assert [e["question"] for e in train_set] == [row["question"] for row in rows[5:] * 3]
    assert notes == ["15 of 60 training examples left out: their questions are held out"]
    same = dict(data=str(tmp_path / "eval.jsonl"), eval_data=str(tmp_path / "eval.jsonl"))
    with pytest.raises(ValueError, match="nothing is left to train on: all 5 training questions"):
        data.load_splits(make_config(**same), tokenizer)
    assert len(data.load_splits(make_config(**same, steps=0), tokenizer)[1]) == 5  # only evaluates
    cfg = make_config(data=str(tmp_path / "train.jsonl"))  # a tenth of this file is held out
    train_set, eval_set = data.load_splits(cfg, tokenizer, notify=notes.append)
    held_out = {e["question"] for e in eval_set}
    assert len(eval_set) == 6 and held_out.isdisjoint(e["question"] for e in train_set)
    assert len(train_set) == 3 * (20 - len(held_out))
    assert notes[1] == f"{54 - len(train_set)} of 54 training examples left out: their questions are held out"


def test_rows_without_an_answer_are_read_when_told_so(tmp_path):
    row = {"question": "Write f.", "tests": ["assert f() == 1"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert data.load(str(tmp_path / "a.jsonl"), answer_key="none") == [row]
    with pytest.raises(ValueError, match="no 'answer'"):
        data.load(str(tmp_path / "a.jsonl"))


def test_templates(tokenizer):
    example = {"question": "Let {x} be {question}?"}
    decode = lambda template: tokenizer.decode(data.encode(example, tokenizer, template))  # noqa: E731
    assert decode("none") == example["question"]
    assert decode("chat") == f"<|user|>{example['question']}<|assistant|>"
    assert decode("r1").endswith("User: Let {x} be {question}?. Assistant:")
    turn = "<|im_start|>user\nLet {x} be {question}?<|im_end|>\n<|im_start|>assistant\n"
    assert decode("qwen_math").endswith(turn)
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        data.encode(example, tokenizer, "chat")


@pytest.mark.exercise_14
def test_an_epoch_shows_every_example_once_and_ranks_share_a_batch():
    examples = list(range(10))
    epoch = [e for step in range(5) for e in data.batch_at(examples, step, 2)]
    next_epoch = [e for step in range(5, 10) for e in data.batch_at(examples, step, 2)]
    assert sorted(epoch) == sorted(next_epoch) == examples and epoch != next_epoch
    for step in range(7):
        ranks = [data.batch_at(examples, step, 4, seed=3, rank=rank, world=2) for rank in (0, 1)]
        assert data.batch_at(examples, step, 4, seed=3) == ranks[0] + ranks[1]
    assert len(data.batch_at([1, 2], 0, 8)) == 8  # a small data set is repeated within a batch


@pytest.mark.skipif(not SHARED.is_dir(), reason="no folder with the data sets beside the repository")
@pytest.mark.parametrize("name, count", [
    ("gsm8k/train", 7473), ("gsm8k/test", 1319), ("math500/test", 500),
    ("aime24/test", 30), ("amc23/test", 83),
])
def test_all_examples_of_the_published_files_are_read(name, count):
    examples = data.load(str(SHARED / f"{name}.jsonl"))
    assert len(examples) == count and all(e["question"] and e["answer"] for e in examples)


def test_prompts_that_are_too_long_are_left_out_and_counted_and_too_few_are_refused(tokenizer):
    cfg, notes = make_config(max_prompt=22, eval_size=64), []
    train_set, eval_set = data.load_splits(cfg, tokenizer, notify=notes.append)
    for kept, size, name, note in zip((train_set, eval_set), (8192, 64), ("training", "evaluation"), notes):
        assert all(len(e["prompt_ids"]) <= 22 for e in kept)
        assert note == f"{size - len(kept)} of {size} {name} prompts left out: longer than --max_prompt 22"
    with pytest.raises(ValueError, match="evaluation prompts fit into --max_prompt 22 tokens, 65 needed"):
        data.load_splits(cfg, tokenizer, at_least=65, notify=notes.append)


def test_docstring_examples():
    import doctest
    assert doctest.testmod(data).failed == 0 and doctest.testmod(data).attempted >= 2
