"""What README.md and docs/ say about the code is looked up in the code.

`PYTHONPATH=. python tests/test_readme.py` updates the line numbers and line counts in both READMEs.
"""
import re
import shlex

import pytest

import data
import nano_rlvr as nr
from conftest import ROOT
from runtime import __version__

READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
README = READMES[0].read_text()
PAGES = {path: path.read_text() for folder in (ROOT, ROOT / "docs", ROOT / "learn") for path in sorted(folder.glob("*.md"))}


def definitions():
    """{name: line} of the functions and classes of the script."""
    lines = (ROOT / "nano_rlvr.py").read_text().splitlines()
    return {m[1]: n for n, line in enumerate(lines, 1) if (m := re.match(r"(?:def|class) (\w+)", line))}


def line_count(name):
    """Lines of a Python file, or of all Python files of a folder."""
    paths = [ROOT / name] if name.endswith(".py") else (ROOT / name).glob("*.py")
    return sum(len(path.read_text().splitlines()) for path in paths)


def updated(text):
    """README with the present line of each linked definition and the present size of each listed file."""
    where = definitions()

    def link(m):
        return f"[{m[1]}](nano_rlvr.py#L{where[m[1]]})"

    def row(m):
        return f"| `{m[1]}` | {line_count(m[1]):,} |"

    text = re.sub(r"\[(\w+)\]\(nano_rlvr\.py#L\d+\)", link, text)
    return re.sub(r"^\| `([\w.]+/?)` \| [\d,]+ \|", row, text, flags=re.M)


def test_line_links_and_line_counts_are_those_of_the_files():
    for readme in (PAGES[path] for path in READMES):
        assert len(re.findall(r"nano_rlvr\.py#L\d+", readme)) >= 10 and readme.count("| `") >= 7
        assert updated(readme) == readme, "run PYTHONPATH=. python tests/test_readme.py"


def test_every_link_to_a_file_or_a_heading_leads_somewhere():
    for path, text in PAGES.items():
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            found = (path.parent / file).resolve() if file else path
            assert found.exists(), (path.name, target)
            if anchor and found.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", found.read_text(), re.M)
                anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert anchor in anchors, (path.name, target)


def test_every_preset_task_template_and_reward_is_named():
    text = "".join(PAGES.values())
    for name in [*nr.ALGOS, *data.TASKS, *data.TEMPLATES, *nr.rewards.REWARDS]:
        assert f"`{name}`" in text, name


def test_every_flag_in_the_pages_exists():
    fields = set(nr.Config.__dataclass_fields__)
    text = "\n".join(PAGES.values())
    commands = [line for line in text.splitlines() if "nano_rlvr.py" in line]
    commands += re.findall(r"`(--\w+[^`]*)`", text)
    flags = {flag for command in commands for flag in re.findall(r"--([\w-]+)", command)}
    launchers = {"nproc_per_node", "signals-to-handle", "shutdown-timeout", "kill-on-bad-exit"}
    assert flags - fields <= {"help"} | launchers and len(flags & fields) > 20


def test_the_reward_of_the_readme_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    (tmp_path / "my_rewards.py").write_text(code)
    with nr.rewards.Verifier(f"{tmp_path}/my_rewards.py:brief") as verifier:
        texts = ["<answer>7</answer>", "<answer>8</answer>", "<answer>7</answer>" + 400 * "!"]
        rewards, *_ = verifier(texts, answer=["7"] * 3)
    assert rewards == [1.0, 0.0, 0.0]


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


COMMANDS = sorted({(path.name, *words) for path, text in PAGES.items() for words in commands(text)})


@pytest.mark.parametrize("page, words", [(page, words) for page, *words in COMMANDS])
def test_every_command_in_the_pages_has_known_flags_and_legal_values(page, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "--template" in words:
        i = words.index("--template") + 1
        if words[i].startswith("$"):  # the variable of a loop
            words[i] = "r1"
        if words[i] not in data.TEMPLATES:  # a file of the user
            (tmp_path / words[i]).write_text("{question}")
    if "--resume" in words:  # needs a run
        del words[words.index("--resume"):words.index("--resume") + 2]
    nr.parse_config([word for word in words if word not in ("...", "…")])


def test_the_commands_of_all_pages_are_found():
    assert len(COMMANDS) >= 20 and {"README.md", "recipe_cs336.md", "recipe_qwen_math_1.5b.md"} <= {
        page for page, *_ in COMMANDS}


def test_the_reward_of_the_cs336_recipe_needs_the_format_and_the_right_answer(tmp_path):
    code = re.search(r"```python\n(.*?)```", PAGES[ROOT / "docs/recipe_cs336.md"], re.S)[1]
    (tmp_path / "cs336.py").write_text(code)
    with nr.rewards.Verifier(f"{tmp_path}/cs336.py:r1_zero") as verifier:
        texts = ["6*12=72 </think> <answer> 72 </answer>", "so 71 </think> <answer>71</answer>", "It is 72",
                 "</think> <answer>72"]
        rewards, *_ = verifier(texts, answer=["#### 72"] * 4)
    assert rewards == [1.0, 0.0, 0.0, 0.0]
    assert callable(nr.rewards.load(f"{tmp_path}/cs336.py", "rollout_to_answer", kind="rollout"))


def test_the_changelog_begins_with_the_version():
    assert re.search(r"^## (.*)$", PAGES[ROOT / "CHANGELOG.md"], re.M)[1] == __version__


if __name__ == "__main__":
    for path in READMES:
        path.write_text(updated(path.read_text()))
