"""How the files depend on each other, and how plain their code is. Ruff checks how wide it is."""
import ast
import io
import re
import subprocess
import sys
import tokenize

import pytest

from conftest import ROOT

# A module imports only modules of a lower floor. What a user swaps in (a reward, a rollout, a train
# function) is handed down; nothing else is. Inside runtime/verify/ and runtime/report/ there are no
# floors.
FLOORS = [
    ["runtime", "runtime.messages"],
    ["runtime.ranks", "runtime.records"],
    ["runtime.vllm_patches"],
    ["runtime.verify.*", "runtime.report.*"],
    ["runtime.memory", "runtime.head", "runtime.sync"],
    ["rewards", "data"],
    ["runtime.flags", "runtime.batch", "runtime.lean_engine", "runtime.card"],
    ["runtime.stats", "runtime.model", "runtime.stop", "runtime.engine"],
    ["runtime.trainer"],
    ["runtime.guard", "runtime.checkpoint", "runtime.log"],
    ["runtime.evaluation"],
    ["nano_rlvr"],
]
SCRIPT = ["nano_rlvr.py", "rewards.py", "data.py"]
RUNTIME = ["runtime/*.py", "runtime/verify/*.py", "runtime/report/*.py"]
LADDER = ["learn/ladder/*.py"]
BESIDE = ["examples/*.py", "bench/*.py", "learn/*.py", "learn/lab/*.py", "models/*.py",
          "models/tiny/*.py", "notebooks/*.py"]
MOST_TOKENS_PER_LINE = 10  # of a line of code, on average over a file: one thought per line
MOST_LINES_PER_FUNCTION = 60  # of code
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def files(*patterns):
    paths = []
    for pattern in patterns:
        matches = sorted(ROOT.glob(pattern))
        assert matches, pattern
        paths += matches
    return paths


READ = [str(path.relative_to(ROOT)) for path in files(*SCRIPT, *RUNTIME, *LADDER, *BESIDE)]


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path):
    """Names a file imports, also inside functions: `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def floors():
    """{module: number of its floor}. Each file of script and runtime is on one floor."""
    number_of = {}
    for path in files(*SCRIPT, *RUNTIME):
        module = module_of(path)
        room = module.rpartition(".")[0] + ".*"
        places = [number for number, names in enumerate(FLOORS) if module in names or room in names]
        assert len(places) == 1 or module in ("runtime.verify", "runtime.report"), module
        number_of[module] = places[0] if places else 0
    return number_of


def test_a_module_imports_only_modules_of_a_lower_floor():
    floor = floors()
    for path in files(*SCRIPT, *RUNTIME):
        module = module_of(path)
        for other in imports(path) & floor.keys() - {"runtime"}:
            room = module.rpartition(".")[0]
            same_room = room in ("runtime.verify", "runtime.report") and other.startswith(room)
            assert floor[other] < floor[module] or same_room, f"{module} imports {other}"


def test_only_stop_has_global_state():
    found = set()
    for path in files(*SCRIPT, *RUNTIME):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.Global) for node in ast.walk(tree)):
            found.add(path.name)
    assert found == {"stop.py"}


def test_no_test_imports_another_test_file():
    for path in files("tests/*.py", "tests/*/*.py"):
        assert not [name for name in imports(path) if name.startswith("test_")], path


def code_lines(text):
    """{number of a line: its tokens of code}: no comments, docstrings, line ends and indents. An
    f-string is one token, also for Python 3.12 and later, which split it."""
    docstrings = set()  # numbers of the lines in which they begin
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            docstrings.add(node.lineno)
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
              tokenize.ENDMARKER)
    lines = {}
    open_strings = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        is_docstring = kind == "STRING" and token.start[0] in docstrings
        if token.type not in layout and not is_docstring and not open_strings:
            lines.setdefault(token.start[0], []).append(token.string)
        open_strings += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return lines


@pytest.mark.parametrize("name", READ)
def test_the_code_is_plain(name):
    """A shorter name is no way to fewer tokens, and there is no limit on lines."""
    text = (ROOT / name).read_text()
    lines = code_lines(text)
    tokens = sum(map(len, lines.values()))
    assert tokens <= MOST_TOKENS_PER_LINE * len(lines), f"{tokens / len(lines):.1f} tokens a line"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, COMPREHENSIONS):
            inside = [x for x in ast.walk(node) if isinstance(x, COMPREHENSIONS)]
            assert len(inside) == len(node.generators) == 1, f"{name}:{node.lineno}: nested"
        if isinstance(node, ast.FunctionDef):
            size = sum(node.lineno <= line <= node.end_lineno for line in lines)
            assert size <= MOST_LINES_PER_FUNCTION, f"{name}: {node.name} has {size} lines"


def test_the_sizes_are_printed_and_not_limited(capsys):
    """CHANGELOG records them for each release."""
    with capsys.disabled():
        print()
        for title, patterns in (("script", SCRIPT), ("runtime", RUNTIME), ("ladder", LADDER),
                                ("tests", ["tests/*.py", "tests/vectors/*.py"])):
            texts = [path.read_text() for path in files(*patterns)]
            lines = sum(text.count("\n") for text in texts)
            code = sum(len(code_lines(text)) for text in texts)
            print(f"{title}: {len(texts)} files, {lines:,} lines, {code:,} of code")
            assert code


def test_data_and_the_report_are_imported_without_torch():
    code = "import data, runtime.report.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_top_level_stays_small():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = {name.partition("/")[0] for name in listed.stdout.split()}
    if not names:
        pytest.skip("no git history here")
    folders = [name for name in names if (ROOT / name).is_dir() and not name.startswith(".")]
    assert len(names) <= 20 and len(folders) <= 8
    tree = (ROOT / "README.md").read_text().partition("```text\n")[2].partition("```")[0]
    shown = set(re.findall(r"^([\w.]+/?)", tree, re.M))
    assert {f"{name}/" for name in folders} <= shown, "the tree in README.md"
