"""The copies of the repository that learn/exercise.py and learn/find_the_bug.py make."""
import ast
import configparser
import difflib
import json
import random
import re
import subprocess
import sys

import pytest

import exercise
import find_the_bug
from conftest import ENV, ROOT


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
    functions, short = exercise.functions(number), exercise.docstrings(number)
    changed = differences(tmp_path)
    assert changed.keys() == {file for file, _ in functions}
    raised = [line.split("write ")[1] for lines in changed.values() for line in lines
              if line.split()[:2] == ["+", "raise"]]
    assert sorted(raised) == sorted(f'{name} in {file}")' for file, name in functions)
    for file in changed:  # all is left but bodies, and docstrings for which the page has others
        stub, product = functions_of(tmp_path / file), functions_of(ROOT / file)
        assert {str(f[:3]) for f in stub} <= {str(f[:3]) for f in product}
        assert {f[0] for f in stub if f not in product} == {f[0] for f in stub} & short.keys()
        assert {name.split(".")[-1] for of, name in functions if of == file} <= {
            name for name, *_ in stub}


def test_the_page_and_the_markers_name_every_exercise():
    markers = configparser.ConfigParser()
    markers.read(ROOT / "pytest.ini")
    page = exercise.page()
    assert list(page) == list(exercise.EXERCISES) and len(page) >= 12
    teacher = (ROOT / "learn/teacher.md").read_text()
    for number, (title, _, _, before, text) in page.items():
        assert f"exercise_{number}:" in markers["pytest"]["markers"]
        assert all((ROOT / file).exists() for file in exercise.tests_of(number)[:-2])
        assert all(f"`{name}`" in text for _, name in exercise.functions(number)), number
        needed = re.findall(r"\d+", before.partition("exercise")[2])
        assert all(int(other) < number for other in needed)
        assert f"\n## {number}. {title}\n" in teacher
        code = "".join(re.findall(r"```python\n(.*?)```", text, re.S))
        for node in ast.parse(code).body:  # the signature on the page is the product's
            signature = code.split("\n")[node.lineno - 1]
            assert any(signature in (ROOT / file).read_text()
                       for file, _ in exercise.functions(number)), signature


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
    find_the_bug.main("--hint")
    said = capsys.readouterr().out
    assert said.startswith(f"{file}, ") and "outside" not in said
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


def test_a_grade_counts_the_repositorys_tests_and_only_the_files_to_write(tmp_path):
    """The tests that a student has changed, whether they pass or fail, are not those that count."""
    solution = (ROOT / "data.py").read_text()
    for name, text, tests in (("solved", solution, "raise ValueError"), ("empty", "", "pass"),
                              ("endless", f"{solution}\nwhile True: pass\n", "pass")):
        folder = tmp_path / name / "14"
        exercise.make(14, folder)
        (folder / "data.py").write_text(text or (folder / "data.py").read_text())
        (folder / "tests/test_data.py").write_text(
            f"import pytest\n@pytest.mark.exercise_14\ndef test():\n    {tests}\n")
    code = (  # TRL and vLLM are not needed here
        "import json, sys; sys.path.insert(0, 'learn'); import exercise; "
        "exercise.mutations.import_libraries = lambda: __import__('deepspeed'); "
        "exercise.main('--grade', *sys.argv[1:3]); "
        "print(json.dumps(exercise.grade(exercise.Path(sys.argv[3]), limit=1)))")
    folders = [tmp_path / name / "14" for name in ("solved", "empty", "endless")]
    run = subprocess.run([sys.executable, "-c", code, *folders],
                         cwd=ROOT, env=ENV, capture_output=True, text=True)
    grades = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0 and [(g["points"], g["of"]) for g in grades] == [
        (1, 1), (0, 1), (0, 1)], run.stderr
    assert {(g["exercise"], g["title"]) for g in grades} == {(14, "Data without state")}
    says = ["all tests pass", "NotImplementedError: write batch_at in data.py", "after 1 seconds"]
    assert all(text in g["message"] for text, g in zip(says, grades, strict=True))
