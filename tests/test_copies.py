"""The copies of the repository that learn/exercise.py and learn/find_the_bug.py make, and one in
which docs/add_an_algorithm.md is followed word by word."""
import ast
import difflib
import json
import random
import re
import subprocess
import sys
import tomllib

import mutations
from conftest import ENV, ROOT
from learn import exercise, find_the_bug

PAGE = (ROOT / "docs/add_an_algorithm.md").read_text()
BLOCK = re.compile(r"`([\w./-]+\.(?:py|md))`|^```(diff|python|bash)\n(.*?)^```$", re.M | re.S)


def differences(folder):
    """{file: [removed and added lines]} of a copy."""
    found = {}
    for path in folder.rglob("*.*"):
        file = path.relative_to(folder)
        if path.suffix in (".py", ".toml") and path.read_text() != (ROOT / file).read_text():
            old, new = ((base / file).read_text().splitlines() for base in (ROOT, folder))
            found[str(file)] = [line for line in difflib.ndiff(old, new) if line[0] in "-+"]
    return found


def test_an_exercise_lacks_the_bodies_of_its_functions_and_nothing_else(tmp_path):
    for number in exercise.EXERCISES:
        exercise.make(number, folder := tmp_path / str(number))
        functions, changed = exercise.functions(number), differences(folder)
        assert changed.keys() == {file for file, _ in functions}
        lines = sum(changed.values(), [])
        added = [line[2:].strip() for line in lines if line[0] == "+"]
        raised = [line.split("write ")[1] for line in added if line.startswith("raise")]
        assert sorted(raised) == sorted(f'{name} in {file}")' for file, name in functions)
        texts = exercise.page()[number][-1]  # where the page has other docstrings
        assert all(line.startswith("raise") or line in texts for line in added)
        assert not any(line.startswith(("- def ", "- class ")) for line in lines)


def test_the_page_and_the_markers_name_every_exercise():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    markers = settings["tool"]["pytest"]["ini_options"]["markers"]
    page = exercise.page()
    assert list(page) == list(exercise.EXERCISES)
    teacher = (ROOT / "learn/teacher.md").read_text()
    for number, (title, _, _, _, text) in page.items():
        assert f"exercise_{number}: learn/exercises.md" in markers
        assert all((ROOT / file).exists() for file in exercise.tests_of(number)[:-2])
        assert all(f"`{name}`" in text for _, name in exercise.functions(number)), number
        assert f"\n## {number}. {title}\n" in teacher
        product = "".join((ROOT / file).read_text() for file, _ in exercise.functions(number))
        code = "".join(re.findall(r"```python\n(.*?)```", text, re.S))
        for node in ast.parse(code).body:  # the signature on the page is the product's
            assert code.split("\n")[node.lineno - 1] in product


def test_a_planted_bug_is_one_place_and_the_reveal_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(find_the_bug, "FOLDER", tmp_path / "bug")
    monkeypatch.setattr(random, "choice", lambda faults: chosen.append(faults[-1]) or faults[-1])
    chosen = []
    find_the_bug.main("kl")
    [(what, file, _)] = chosen
    assert "+ pass\n" not in re.sub(" +", " ", (ROOT / "tests/faults.txt").read_text())
    assert what.startswith("kl:") and what not in capsys.readouterr().out  # unseen
    assert differences(tmp_path / "bug").keys() == {file}
    find_the_bug.main("--hint")
    assert capsys.readouterr().out.startswith(f"{file}, ")
    find_the_bug.main("--reveal")
    assert what in capsys.readouterr().out
    (tmp_path / "bug" / file).write_text((ROOT / file).read_text())
    find_the_bug.main("--reveal")
    assert capsys.readouterr().out == "no difference: it is repaired\n"


def test_a_grade_counts_the_repositorys_tests_and_only_the_files_to_write(tmp_path):
    """The tests that a student has changed, whether they pass or fail, are not those that count."""
    for name, tests in (("solved", "raise ValueError"), ("empty", "pass")):
        exercise.make(14, folder := tmp_path / name / "14")
        if name == "solved":
            (folder / "data.py").write_text((ROOT / "data.py").read_text())
        (folder / "tests/test_data.py").write_text(
            f"import pytest\n@pytest.mark.exercise_14\ndef test():\n    {tests}\n")
    code = (  # TRL and vLLM are not needed here
        "import json, sys; from learn import exercise; "
        "exercise.mutations.import_libraries = lambda: __import__('deepspeed'); "
        "exercise.main('--grade', *sys.argv[1:])")
    folders = [tmp_path / name / "14" for name in ("solved", "empty")]
    run = subprocess.run([sys.executable, "-c", code, *folders],
                         cwd=ROOT, env=ENV, capture_output=True, text=True)
    grades = [json.loads(line) for line in run.stdout.splitlines()]
    assert [(g["exercise"], g["points"], g["of"]) for g in grades] == [(14, 1, 1), (14, 0, 1)], (
        run.stderr)
    assert grades[1]["message"].endswith("NotImplementedError: write batch_at in data.py")


def apply(diff, text):
    """text with the lines of a diff block replaced, which must occur exactly once."""
    old, new = ("".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in kinds)
                for kinds in (" -", " +"))
    assert text.count(old) == 1, f"not once in the file:\n{old}"
    return text.replace(old, new)


def test_whoever_follows_the_page_gets_passing_tests(tmp_path):
    """A block of code belongs to the file that the text names last."""
    mutations.copy(tmp_path)
    for name, kind, block in BLOCK.findall(PAGE):
        if name:
            path = tmp_path / name
        elif kind == "diff":
            path.write_text(apply(block, path.read_text()))
        elif kind == "python":
            path.write_text((path.read_text() if path.exists() else "") + block)
        elif kind == "bash":
            commands = re.sub(r"\bpython\b", sys.executable, block)
    subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=tmp_path, check=True)
    done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=ENV, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cases = (tmp_path / "tests/vectors/cases.json").read_text()
    for name in ("preset lite_ppo", "baseline median"):
        assert name in cases
    assert len(re.findall(r"\d+ passed", done.stdout)) == 2 and "failed" not in done.stdout
