"""Readers of bytes from outside: whatever stands in a file, a reader gives what it promises or
raises ValueError with one line. Completions are in test_rewards.py."""
import contextlib
import json
import shutil

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data
from conftest import ROOT, make_config
from examples import judge
from runtime import model, records

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = st.sampled_from(["question", "answer", "prompt", "solution", "reward", "step", "eval_set",
                         "tests", "", "a\nb", "\ud800", "\x1b[2J", "config", "lr", "steps"])
SCALARS = st.sampled_from([None, True, 0, -1, 7, 1e-05, 1e999, float("nan"), 10**30, "", " ", "72",
                           "\\frac{1}{2}", "\frac12", "\ud800", "\0", "\x1b[2J", "math:1", "nan"])
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=2) | st.dictionaries(NAMES, x,
                                                                                   max_size=2))
ROWS = st.dictionaries(NAMES, VALUES, max_size=5) | VALUES
BYTES = st.sampled_from([
    b"{", b"}", b"[", b"]", b'"', b":", b",", b"\n", b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"'",
    b"\\", b"\\ud800", b"null", b"NaN", b"1e999", b"question", b"answer", b"step", b"PAR1", b" ",
    b'{"question": "1+1", "answer": "2"}', b"question,answer\n1+1,2\n", b"\xe2\x80\xa8",
    b"[" * 5000])


@st.composite
def files(draw):
    """Bytes of a file: lines of JSON, some damaged; a list of objects; or anything."""
    rows = [json.dumps(row).encode() for row in draw(st.lists(ROWS, max_size=4))]
    text = draw(st.sampled_from([b"\n".join(rows), b"[" + b",".join(rows) + b"]"]))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + b"".join(draw(st.lists(BYTES, max_size=4))) + text[place:]
    return text


@contextlib.contextmanager
def refusal(begins="", names=""):
    """A block that may raise ValueError, with one line that begins so and names something."""
    try:
        yield
    except ValueError as e:
        line = str(e)
        assert line and not {"\n", "\r"} & set(line)
        assert line.startswith(begins) and names in line


@quick
@given(content=files(), kind=st.sampled_from(data.FILES),
       key=st.sampled_from(["", "none", "prompt"]))
def test_a_data_file_gives_examples_of_text_or_one_line_with_its_name(tmp_path, content, kind, key):
    path = tmp_path / f"a{kind}"
    path.write_bytes(content)
    with refusal(begins=str(path)):
        for example in data.load(str(path), answer_key=key):
            assert example["question"].strip() and example["question"].encode()
            if key != "none":
                assert isinstance(example["answer"], str)
                assert example["answer"].strip() not in ("", "nan", "inf", "-inf")


@quick
@given(content=files())
def test_a_file_of_a_run_gives_rows_with_a_step_or_one_line_with_its_name(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with refusal(begins=str(path)):
        assert all(int(row["step"]) is not None for row in records.read(tmp_path))


@settings(quick, max_examples=15)
@given(file=st.sampled_from(["config.json", "tokenizer_config.json", "tokenizer.json"]),
       name=st.data())
def test_a_model_folder_with_a_changed_setting_is_loaded_or_refused_in_one_line(
        tmp_path, file, name):
    shutil.copytree(ROOT / "models/tiny", tmp_path / "m", dirs_exist_ok=True)
    path = tmp_path / "m" / file
    about = json.loads(path.read_text())
    about[name.draw(st.sampled_from(sorted(about)))] = name.draw(SCALARS)
    path.write_text(json.dumps(about))
    with refusal(names="--model"):
        model.load_tokenizer(make_config(model=str(tmp_path / "m")))


@quick
@given(st.lists(st.sampled_from([
    "SCORE:", "SCORE: ", "7", "10", "11", "7.5", "7/10", "/100", "**", ",5", "-3", "%", "\n", "٣",
    "\0", "\ud800", "ten", " / ", ".", "score: 9"]), max_size=12).map("".join))
def test_the_reply_of_a_judge_is_a_score_from_0_to_1_or_none(reply):
    score = judge._score(reply)
    assert score is None or 0 <= score <= 1 and "SCORE:" in reply
    assert judge._score(f"{reply}\nSCORE: 7") == 0.7


def test_the_grammar_of_files_is_nasty_and_not_only_nasty():
    """Else the tests above would only see refusals."""
    drawn, whole = [], []

    @quick
    @given(content=files())
    def count(content):
        drawn.append(content)
        with contextlib.suppress(ValueError, RecursionError):
            whole.append(json.loads(content))
    count()
    assert 0.1 < len(whole) / len(drawn) < 0.9
