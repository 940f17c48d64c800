"""What the README promises about the code is looked up in the code."""
import re

from conftest import ROOT

import data
import nano_rlvr as nr

README = (ROOT / "README.md").read_text()


def test_line_links_point_at_the_definitions_they_name():
    lines = (ROOT / "nano_rlvr.py").read_text().splitlines()
    links = re.findall(r"\[(\w+)\]\(nano_rlvr\.py#L(\d+)\)", README)
    where = {m[1]: n for n, line in enumerate(lines, 1) if (m := re.match(r"(?:def|class) (\w+)", line))}
    assert len(links) >= 12
    assert {name: int(n) for name, n in links} == {name: where[name] for name, _ in links}


def test_every_preset_task_and_template_is_named():
    for name in [*nr.ALGOS, *data.TASKS, *data.TEMPLATES]:
        assert f"`{name}`" in README, name


def test_every_flag_in_the_readme_exists():
    fields = set(nr.Config.__dataclass_fields__)
    script = [line for line in README.splitlines() if "nano_rlvr.py" in line] + re.findall(r"`(--\w+[^`]*)`", README)
    flags = {flag for text in script for flag in re.findall(r"--(\w+)", text)}
    assert flags - fields <= {"help", "nproc_per_node"} and len(flags & fields) > 10
