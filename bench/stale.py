"""Which results are older than the code that they measure.

    python -m bench.stale        lists them with the changed files, and marks each page

A page of results names the commits of its runs, and in its commands the files that were run. It is
stale if the code of one of these files or of LOOP (comments and docstrings left out) is not that of
these commits any more.
"""
import ast
import functools
import re
import subprocess
import sys

from bench.common import ROOT

MARK = "Stale: the code has changed since."  # a paragraph below the conditions
LOOP = {f"{name}.py" for name in (
    "nano_rlvr", "data", "rewards", "runtime/batch", "runtime/model", "runtime/engine",
    "runtime/head", "runtime/lean_engine", "runtime/vllm_patches",
    "runtime/trainer")}
COMMIT = re.compile(r"\b[Cc]ommit ([0-9a-f]{7,}(?:-dirty)?(?:, (?=[0-9a-f]{7}))?)+")


def pages():
    folders = ("bench/results", "learn/lab/results")
    paths = [ROOT / "learn/lab/chapter_1.md"]  # with the results of r1
    for folder in folders:
        paths += sorted((ROOT / folder).glob("*.md"))
    return [path for path in paths if path.stem not in ("r1", "README")]


@functools.cache
def show(commit, file):
    """A file of a commit, or None if this history has no such commit or file."""
    done = subprocess.run(["git", "show", f"{commit}:{file}"], cwd=ROOT, capture_output=True)
    return None if done.returncode else done.stdout.decode()


@functools.cache
def code(text):
    """What a Python file does, to be compared: without comments and docstrings. None: no file."""
    tree = ast.parse(text or "")
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            node.body = node.body[ast.get_docstring(node) is not None:]
    return text and ast.dump(tree)


def conditions(text):
    """(the page's paragraphs without the mark, those that name commits, by number, the commits)"""
    parts = [part for part in text.strip().split("\n\n") if not part.startswith("Stale: ")]
    with_commits = []  # numbers of paragraphs
    commits = []
    for number, part in enumerate(parts):
        match = COMMIT.search(part)
        if match:
            with_commits.append(number)
            commits += re.findall(r"[0-9a-f]{7,}", match[0])
    return parts, with_commits, commits


def changed(text):
    """The files whose code has changed since the runs of a page."""
    modules = re.findall(
        r"\b((?:bench|examples)[./]\w+|learn[./]lab[./](?:faulty_rewards|r1))\b", text)
    files = LOOP | {f"{module.replace('.', '/')}.py" for module in modules}
    _, _, commits = conditions(text)
    older = []
    for file in sorted(files):
        if (ROOT / file).exists():
            now = code((ROOT / file).read_text())
            if any(code(show(commit, file)) != now for commit in commits):
                older.append(file)
    return older


def main(argv):
    for path in pages():
        text = path.read_text()
        parts, with_commits, commits = conditions(text)
        files = changed(text)
        if files:
            print(f"stale: {path.relative_to(ROOT)}: {', '.join(files)} changed since "
                  f"{', '.join(commits)}")
            parts.insert(with_commits[-1] + 1, MARK)
        path.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
