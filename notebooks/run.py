"""Runs the notebooks from top to bottom and stores their outputs and plots in them.

    python notebooks/run.py            all of them
    python notebooks/run.py 01 02      those whose names begin so

Left out are what libraries print to stderr and, where the engines start, all text: these cells have
the tag "quiet". At the end the Chinese notebook gets the code cells and outputs of the English one.
"""
import base64
import io
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parent
ENGLISH = FOLDER / "01_one_step.ipynb"
CHINESE = FOLDER / "01_one_step.zh-CN.ipynb"


def shrink(output):
    """Stores the plot of a cell's output, if there is one, with 64 colours: a third of its size."""
    png = output.get("data", {}).get("image/png")
    if png:
        small = io.BytesIO()
        large = io.BytesIO(base64.b64decode(png))
        image = Image.open(large).convert("RGB")
        image.quantize(64, dither=Image.Dither.NONE).save(small, "png", optimize=True)
        output["data"]["image/png"] = base64.b64encode(small.getvalue()).decode()


def execute(path, env=os.environ):
    """The notebook with the outputs of a new run. env: its environment variables.

    Raises nbclient's CellExecutionError if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": FOLDER}}
    NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True,
                   resources=where).execute(env=env)
    for cell in notebook.cells:
        if cell.cell_type == "code":  # on stderr are only warnings of libraries
            hidden = ["stderr"] + ["stdout"] * ("quiet" in cell.metadata.get("tags", ()))
            cell.outputs = [output for output in cell.outputs if output.get("name") not in hidden]
            for output in cell.outputs:
                shrink(output)
    notebook.metadata.pop("language_info", None)  # this machine's Python
    return notebook


def translated():
    """The Chinese notebook with the present code cells and outputs of the English one.

    Raises KeyError if a cell of text has no translation.
    """
    text = {cell.id: cell.source for cell in nbformat.read(CHINESE, as_version=4).cells}
    result = nbformat.read(ENGLISH, as_version=4)
    for cell in result.cells:
        if cell.cell_type == "markdown":
            cell.source = text[cell.id]
    return result


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*[a-z].ipynb")):  # not the translation
        if not sys.argv[1:] or path.name.startswith(tuple(sys.argv[1:])):
            notebook = execute(path)
            nbformat.write(notebook, path)
            print(f"{path.name}: {len(notebook.cells)} cells, {path.stat().st_size / 1024:.0f} KiB")
    nbformat.write(translated(), CHINESE)
