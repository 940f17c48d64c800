"""The copies of the repository that learn/exercise.py and learn/find_the_bug.py make."""
import ast
import configparser
import difflib
import random
import re

import pytest

import exercise
import find_the_bug
from conftest import ROOT

PAGE = (ROOT / "learn/exercises.md").read_text()


def differences(folder):
    """{file: [removed and added lines]} of a copy."""
    found = {}
    for path in folder.rglob("*.*"):
        file = path.relative_to(folder)
        if path.suffix in (".py", ".ini") and path.read_text() != (ROOT / file).read_text():
            old, new = ((base / file).read_text().splitlines() for base in (ROOT, folder))
            found[str(file)] = [line for line in difflib.ndiff(old, new) if line[0] in "-+"]
    return found


def functions_of(path):
    """[(name, decorators, parameters, docstring)] of the functions in a file."""
    return [(f.name, [*map(ast.unparse, f.decorator_list)], ast.unparse(f.args),
             ast.get_docstring(f))
            for f in ast.walk(ast.parse(path.read_text())) if isinstance(f, ast.FunctionDef)]


@pytest.mark.parametrize("number", exercise.EXERCISES)
def test_an_exercise_lacks_the_bodies_of_its_functions_and_nothing_else(number, tmp_path):
    exercise.make(number, tmp_path)
    functions = exercise.EXERCISES[number][1]
    changed = differences(tmp_path)
    assert changed.keys() == {function.split(":")[0] for function in functions}
    added = [line for lines in changed.values() for line in lines if line[0] == "+"]
    raised = ["+", "raise", "NotImplementedError"]
    assert [line.split() for line in added] == [raised] * len(functions)
    for file in changed:  # all is left but what stood in the bodies
        assert {*map(str, functions_of(tmp_path / file))} <= {*map(str, functions_of(ROOT / file))}
        written = {f.split(":")[1].split(".")[-1] for f in functions if file in f}
        assert written <= {name for name, *_ in functions_of(tmp_path / file)}


def test_the_page_and_the_markers_name_every_exercise():
    markers = configparser.ConfigParser()
    markers.read(ROOT / "pytest.ini")
    for number, (title, functions) in exercise.EXERCISES.items():
        assert f"exercise_{number}:" in markers["pytest"]["markers"]
        assert all((ROOT / file).exists() for file in exercise.tests_of(number)[:-2])
        [section] = re.findall(rf"^## {number}\. (.*?)(?=^## |\Z)", PAGE, re.M | re.S)
        assert section.lower().startswith(title.lower()), number
        assert all(f"`{function.split(':')[1]}`" in section for function in functions), number
    assert len(exercise.EXERCISES) >= 12


def test_a_planted_bug_is_one_place_and_the_reveal_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(find_the_bug, "FOLDER", tmp_path / "bug")
    monkeypatch.setattr(random, "choice", lambda faults: chosen.append(faults[-1]) or faults[-1])
    chosen = []
    find_the_bug.main("kl")
    [(what, file, _)] = chosen
    assert what.startswith("kl:") and what not in capsys.readouterr().out  # unseen
    assert differences(tmp_path / "bug").keys() == {file}
    with pytest.raises(SystemExit, match="exists already"):
        find_the_bug.main()
    find_the_bug.main("--reveal")
    shown = capsys.readouterr().out
    assert what in shown and file in shown
    (tmp_path / "bug" / file).write_text((ROOT / file).read_text())
    find_the_bug.main("--reveal")
    assert capsys.readouterr().out == "no difference: it is repaired\n"


def test_an_unknown_topic_or_exercise_ends_with_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="no topic 'typo'"):
        find_the_bug.plant(tmp_path, "typo")
    for word in ("17", "k3", "0"):
        with pytest.raises(SystemExit, match=f"no exercise '{word}'"):
            exercise.main(word)
    assert not list(tmp_path.iterdir())
