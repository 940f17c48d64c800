"""What README.md and docs/ say about the code is looked up in the code.

`PYTHONPATH=. python tests/test_readme.py` updates the line numbers and line counts in README.md.
"""
import re

import data
import nano_rlvr as nr
from conftest import ROOT

README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}


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
    assert len(re.findall(r"nano_rlvr\.py#L\d+", README)) >= 10 and README.count("| `") >= 7
    assert updated(README) == README, "run PYTHONPATH=. python tests/test_readme.py"


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
    torchruns = {"nproc_per_node", "signals-to-handle", "shutdown-timeout"}
    assert flags - fields <= {"help"} | torchruns and len(flags & fields) > 20


def test_the_reward_of_the_readme_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    (tmp_path / "my_rewards.py").write_text(code)
    with nr.rewards.Verifier(f"{tmp_path}/my_rewards.py:brief") as verifier:
        texts = ["<answer>7</answer>", "<answer>8</answer>", "<answer>7</answer>" + 400 * "!"]
        rewards, *_ = verifier(texts, answer=["7"] * 3)
    assert rewards == [1.0, 0.0, 0.0]


if __name__ == "__main__":
    (ROOT / "README.md").write_text(updated(README))
