"""The Chinese notebook has the code, outputs, formulas and links of the English one.

`python tests/test_translations.py` gives it the present code cells and outputs."""
import copy
import re
from collections import Counter

import nbformat

from conftest import ROOT

ENGLISH, CHINESE = (ROOT / f"notebooks/01_one_step{language}.ipynb" for language in ("", ".zh-CN"))


def parts(text):
    """What a cell has besides its words: a Counter of code, formulas and links."""
    found = []
    for pattern in (r"(?ms)^```.*?^```", r"(?s)\$\$.*?\$\$|\$[^$`]+\$", r"(?<=\]\()[^)]+(?=\))",
                    r"`[^`]+`", r"(?m)^(?:#+|\|)"):
        found += re.findall(pattern, text)
        text = re.sub(pattern, "", text)
    return Counter(part for part in found if part != CHINESE.name)


def translated():
    """The Chinese notebook with the present code cells and outputs of the English one."""
    text = {cell.id: cell.source for cell in nbformat.read(CHINESE, as_version=4).cells
            if cell.cell_type == "markdown"}
    result = copy.deepcopy(nbformat.read(ENGLISH, as_version=4))
    for cell in result.cells:
        if cell.cell_type == "markdown":
            cell.source = text[cell.id]  # KeyError: a cell without translation
    return result


def test_the_chinese_notebook_has_the_code_outputs_formulas_and_links_of_the_english_one():
    english, chinese = (nbformat.read(path, as_version=4) for path in (ENGLISH, CHINESE))
    assert chinese == translated(), "run python tests/test_translations.py"
    for ours, theirs in zip(english.cells, chinese.cells, strict=True):
        if ours.cell_type == "markdown":
            assert parts(ours.source) == parts(theirs.source), theirs.id


if __name__ == "__main__":
    nbformat.write(translated(), CHINESE)
