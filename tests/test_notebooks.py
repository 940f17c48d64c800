"""The notebooks run from top to bottom, and the outputs that are stored in them are those of the code."""
import ast
import re

import pytest

import nano_rlvr as nr
from conftest import ENV, ROOT

nbformat = pytest.importorskip("nbformat", reason="nbclient and ipykernel are not installed")
pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STORED = {path.name: nbformat.read(path, as_version=4) for path in PATHS}
EXECUTED = [name for name in STORED if ".zh-CN." not in name]  # a translation: tests/test_translations.py


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def syntax(cell):
    """The syntax tree of a cell, without the lines of IPython such as %matplotlib."""
    return ast.parse(re.sub(r"^%.*", "", cell.source, flags=re.M))


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def is_exact(cell):
    """Whether a cell only computes formulas: its text is the same on any machine."""
    return "exact" in cell.metadata.get("tags", ())


@pytest.mark.parametrize("name", EXECUTED)
def test_a_new_run_prints_what_is_stored_and_the_asserted_ranges_hold(name):
    from notebooks.run import execute
    executed = code_cells(execute(ROOT / "notebooks" / name, env=ENV))  # fails if an assert in a cell does
    exact = [(old, new) for old, new in zip(code_cells(STORED[name]), executed) if is_exact(old)]
    assert len(exact) >= 4
    for old, new in exact:
        assert printed(new) == printed(old) != "", old.source


@pytest.mark.parametrize("name", STORED)
def test_the_stored_outputs_are_complete_and_small(name):
    assert (ROOT / "notebooks" / name).stat().st_size < 300 * 1024
    for cell in code_cells(STORED[name]):
        kinds = {output.output_type for output in cell.outputs}
        assert "error" not in kinds
        assert cell.execution_count, "run notebooks/run.py"
        if "plt.show()" in cell.source:
            assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.source
        if "print(" in cell.source:
            assert printed(cell), cell.source


@pytest.mark.parametrize("name", STORED)
def test_no_cell_defines_a_function_or_a_class_and_numbers_of_a_model_have_a_stated_range(name):
    cells = code_cells(STORED[name])
    assert any("import nano_rlvr as nr" in cell.source for cell in cells)
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)  # ruff forbids to name a lambda
    for cell in cells:
        assert not [node for node in ast.walk(syntax(cell)) if isinstance(node, defined)], cell.source
    ranges = sum(isinstance(node, ast.Assert) for cell in cells for node in ast.walk(syntax(cell)))
    assert ranges >= 7


@pytest.mark.parametrize("name", STORED)
def test_every_function_that_the_text_links_to_is_in_the_script(name):
    text = "\n".join(cell.source for cell in STORED[name].cells if cell.cell_type == "markdown")
    names = re.findall(r"\[`(\w+)`\]\(\.\./nano_rlvr\.py\)", text)
    assert all(hasattr(nr, name) for name in names), names
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / "notebooks" / target).exists(), target
