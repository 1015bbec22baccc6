"""Pair each script with its notebook and run it: `python notebooks/execute.py`, or with the scripts to run.

The script is the source; the `.ipynb` of the same name is made from it, with the outputs of a run on this machine.
"""

import argparse
import io
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
TIME_LIMIT_S = 120
PICTURE_COLOURS = 64  # flat colours and grey edges of letters: a palette makes a picture a third as large


def scripts() -> list[Path]:
    """The numbered notebooks, as scripts."""
    return sorted(FOLDER.glob("[0-9]*.py"))


def read_script(script: Path) -> nbformat.NotebookNode:
    """The notebook of a percent script, without outputs; the same script gives the same bytes."""
    notebook = jupytext.read(script)
    for place, cell in enumerate(notebook.cells):
        cell.id = f"cell-{place}"  # jupytext draws them at random
    paired_as = {"formats": notebook.metadata["jupytext"]["formats"]}  # for Jupytext in Jupyter
    notebook.metadata = {"jupytext": paired_as, "kernelspec": notebook.metadata["kernelspec"]}
    return notebook


def execute(script: Path) -> nbformat.NotebookNode:
    """Run a notebook top to bottom in a new kernel, as Jupyter does, in its own folder. Its pictures are as large as they came.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
        nbclient.exceptions.CellTimeoutError: a cell took longer than `TIME_LIMIT_S`.
    """
    notebook = read_script(script)
    client = NotebookClient(
        notebook,
        timeout=TIME_LIMIT_S,
        record_timing=False,
        coalesce_streams=True,  # however slowly a cell prints
        resources={"metadata": {"path": str(script.parent)}},
    )
    client.execute()
    notebook.metadata["language_info"] = {"name": "python"}  # not the version that ran it
    return notebook


def shrink_pictures(notebook: nbformat.NotebookNode) -> None:
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        data = output.get("data", {})
        if "image/png" in data:
            smaller = io.BytesIO()
            picture = Image.open(io.BytesIO(b64decode(data["image/png"]))).convert("RGB")
            # The median cut, Pillow's own choice, merges colours that cover little: a legend's green and blue become one teal.
            palette = picture.quantize(PICTURE_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            palette.save(smaller, "png", optimize=True)
            data["image/png"] = b64encode(smaller.getvalue()).decode()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Pair notebooks with their scripts and run them.")
    parser.add_argument("scripts", nargs="*", type=Path, help="which to run (default: all)")
    for script in parser.parse_args(argv).scripts or scripts():
        start = time.monotonic()
        notebook = execute(script)
        shrink_pictures(notebook)
        nbformat.validate(notebook)
        nbformat.write(notebook, script.with_suffix(".ipynb"))
        print(f"{script.with_suffix('.ipynb')}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
