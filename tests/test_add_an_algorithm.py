"""docs/add_an_algorithm.md, followed word by word in a copy of the repository."""
import re
import subprocess
import sys

import mutations
from conftest import ENV, ROOT

PAGE = (ROOT / "docs/add_an_algorithm.md").read_text()
BLOCK = re.compile(r"`([\w./-]+\.(?:py|md))`|^```(diff|python|bash)\n(.*?)^```$", re.M | re.S)


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
