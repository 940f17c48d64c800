"""The Chinese README and notebook have the commands, figures and links of the English ones.

`python tests/test_translations.py` gives the Chinese notebook the present code cells and outputs.
"""
import copy
import re
from collections import Counter

import nbformat

from conftest import ROOT

NOTEBOOK, TRANSLATION = (ROOT / f"notebooks/01_one_step{language}.ipynb"
                         for language in ("", ".zh-CN"))
TO_THE_OTHER_LANGUAGE = {"README.md", "README.zh-CN.md", "notebooks/01_one_step.zh-CN.ipynb"}


def parts(text):
    """What a page has besides its words: a Counter of (kind, text)."""
    found = []
    for kind, pattern in (("code block", r"(?ms)^```.*?^```"),
                          ("formula", r"(?s)\$\$.*?\$\$|\$[^$`]+\$"),
                          ("link", r"(?<=\]\()[^)]+(?=\))"), ("code", r"`[^`]+`"),
                          ("number", r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"),
                          ("heading or table row", r"(?m)^(?:#+|\|)")):
        found += [(kind, part) for part in re.findall(pattern, text)]
        text = re.sub(pattern, "", text)
    return Counter(part for part in found if part[1] not in TO_THE_OTHER_LANGUAGE)


def test_both_readmes_have_the_same_commands_figures_and_links():
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    assert parts(english) == parts(chinese)


def translated():
    """The Chinese notebook with the present code cells and outputs of the English one."""
    english, chinese = (nbformat.read(path, as_version=4) for path in (NOTEBOOK, TRANSLATION))
    text = {cell.id: cell.source for cell in chinese.cells if cell.cell_type == "markdown"}
    result = copy.deepcopy(english)
    for cell in result.cells:
        if cell.cell_type == "markdown":
            cell.source = text[cell.id]  # KeyError: a cell without translation
    return result


def test_the_chinese_notebook_has_the_code_outputs_formulas_and_figures_of_the_english_one():
    english, chinese = (nbformat.read(path, as_version=4) for path in (NOTEBOOK, TRANSLATION))
    assert chinese == translated(), "run python tests/test_translations.py"
    for ours, theirs in zip(english.cells, chinese.cells, strict=True):
        if ours.cell_type == "markdown":
            of_both = [{part: n for part, n in parts(cell.source).items() if part[0] != "number"}
                       for cell in (ours, theirs)]
            assert of_both[0] == of_both[1], theirs.id


if __name__ == "__main__":
    nbformat.write(translated(), TRANSLATION)
