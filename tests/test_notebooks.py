"""The notebooks run from top to bottom, and the outputs in them are those of the code."""
import re
from collections import Counter

import nbformat
import pytest

from conftest import ENV, ROOT
from notebooks import run

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STORED = {path.name: nbformat.read(path, as_version=4) for path in PATHS}
EXECUTED = [name for name in STORED if ".zh-CN." not in name]  # a translation


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.long
@pytest.mark.parametrize("name", EXECUTED)
def test_a_new_run_prints_what_is_stored_and_the_asserted_ranges_hold(name):
    """Cells tagged "exact" only compute formulas: their text is the same on any machine."""
    executed = code_cells(run.execute(ROOT / "notebooks" / name, env=ENV))  # runs its asserts
    exact = [(old, new) for old, new in zip(code_cells(STORED[name]), executed)
             if "exact" in old.metadata.get("tags", ())]
    assert len(exact) >= 4
    for old, new in exact:
        assert printed(new) == printed(old) != "", old.source


@pytest.mark.parametrize("name", STORED)
def test_the_stored_outputs_are_complete_and_small_and_the_code_is_plain(name):
    assert (ROOT / "notebooks" / name).stat().st_size < 300 * 1024
    for cell in code_cells(STORED[name]):
        assert "error" not in {output.output_type for output in cell.outputs}
        assert cell.execution_count, "run notebooks/run.py"
        has_plot = any("image/png" in output.get("data", {}) for output in cell.outputs)
        assert has_plot or "plt.show()" not in cell.source, cell.source
        assert printed(cell) or "print(" not in cell.source, cell.source
    code = "\n".join(cell.source for cell in code_cells(STORED[name]))
    assert not re.search(r"^ *(async )?(def|class) ", code, re.M)
    assert len(re.findall("^ *assert ", code, re.M)) >= 7  # numbers of a model have a stated range


def parts(text):
    """What a cell has besides its words: a Counter of code, formulas and links."""
    found = []
    for pattern in (r"(?ms)^```.*?^```", r"(?s)\$\$.*?\$\$|\$[^$`]+\$", r"(?<=\]\()[^)]+(?=\))",
                    r"`[^`]+`", r"(?m)^(?:#+|\|)"):
        found += re.findall(pattern, text)
        text = re.sub(pattern, "", text)
    return Counter(part for part in found if part != run.CHINESE.name)


def test_the_chinese_notebook_has_the_code_outputs_formulas_and_links_of_the_english_one():
    english, chinese = (STORED[path.name] for path in (run.ENGLISH, run.CHINESE))
    assert chinese == run.translated(), "run python notebooks/run.py"
    for ours, theirs in zip(english.cells, chinese.cells, strict=True):
        if ours.cell_type == "markdown":
            assert parts(ours.source) == parts(theirs.source), theirs.id
