"""The Chinese README and notebook have the commands, figures and links of the English ones.

`python tests/test_translations.py` gives the Chinese notebook the present code cells and outputs.
"""
import copy
import re
from collections import Counter

import nbformat

from conftest import ROOT

ENGLISH, CHINESE = (ROOT / "README.md").read_text(), (ROOT / "README.zh-CN.md").read_text()
NOTEBOOK, TRANSLATION = (ROOT / f"notebooks/01_one_step{language}.ipynb" for language in ("", ".zh-CN"))
OWN_LINKS = {"README.md", "README.zh-CN.md", "notebooks/01_one_step.zh-CN.ipynb"}  # to the other language


def parts(text):
    """What a page has besides its words: {kind: Counter}."""
    blocks = re.findall(r"^```.*?^```", text, re.M | re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if link not in OWN_LINKS]
    text = re.sub(r"\]\([^)]+\)", "]", text)
    code = re.findall(r"`[^`]+`", text)
    text = re.sub(r"`[^`]+`", "", text)
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)
    rows = re.findall(r"^(#+|\|)", text, re.M)
    return {"code block": Counter(blocks), "code": Counter(code), "number": Counter(numbers),
            "link": Counter(links), "heading or table row": Counter(rows)}


def differences(english, chinese):
    """Lines that name what one of the two pages has and the other lacks."""
    ours, theirs = parts(english), parts(chinese)
    for kind in ours:
        for part in (ours[kind] | theirs[kind]).keys():
            if ours[kind][part] != theirs[kind][part]:
                yield f"{kind} {part!r}: {ours[kind][part]} times in English, {theirs[kind][part]} in Chinese"


def test_both_readmes_have_the_same_commands_figures_and_links():
    found = list(differences(ENGLISH, CHINESE))
    assert not found, "\n".join(found)


def test_what_is_changed_in_one_language_is_named():
    english = "## New\n```bash\nmake demo\n```\n| 99.6 % | see `--resume` in [2 pages](docs/speed.md) |"
    chinese = "## 新\n```bash\nmake demo\n```\n| 99.6 % | `--resume` 见[2 页](docs/speed.md) |"
    assert not list(differences(english, chinese))
    for old, new in (("99.6", "99.7"), ("demo", "demos"), ("--resume", "--result"), ("speed.md", "scale.md")):
        found = differences(english, chinese.replace(old, new))
        missing, added = sorted(found, key=lambda line: "0 in Chinese" not in line)
        assert old in missing and "1 times in English, 0 in Chinese" in missing
        assert new in added and "0 times in English, 1 in Chinese" in added
    [named] = differences(english, chinese.replace("## ", ""))
    assert named == "heading or table row '##': 1 times in English, 0 in Chinese"


def translated():
    """The Chinese notebook with the present code cells and outputs of the English one."""
    english, chinese = (nbformat.read(path, as_version=4) for path in (NOTEBOOK, TRANSLATION))
    text = {cell.id: cell.source for cell in chinese.cells if cell.cell_type == "markdown"}
    result = copy.deepcopy(english)
    for cell in result.cells:
        if cell.cell_type == "markdown":
            cell.source = text[cell.id]  # KeyError: a cell without translation
    return result


def test_the_chinese_notebook_has_the_code_and_the_outputs_of_the_english_one():
    chinese = nbformat.read(TRANSLATION, as_version=4)
    assert chinese == translated(), "run python tests/test_translations.py"


def test_the_chinese_notebook_has_the_formulas_and_figures_of_the_english_one():
    english, chinese = nbformat.read(NOTEBOOK, as_version=4), nbformat.read(TRANSLATION, as_version=4)
    for ours, theirs in zip(english.cells, chinese.cells, strict=True):
        if ours.cell_type == "markdown":
            assert re.search("[\u4e00-\u9fff]", theirs.source), theirs.id  # it is Chinese
            english_formulas, chinese_formulas = (
                Counter(re.findall(r"\$\$.*?\$\$|\$[^$]+\$", cell.source, re.S)) for cell in (ours, theirs))
            assert english_formulas == chinese_formulas, theirs.id
            found = [line for line in differences(ours.source, theirs.source) if "number" not in line]
            assert not found, (theirs.id, found)


if __name__ == "__main__":
    nbformat.write(translated(), TRANSLATION)
