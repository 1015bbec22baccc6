"""Each notebook is what its script says, and runs top to bottom."""

import io
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

# What the extras dev and plots bring.
pytest.importorskip("ipykernel")
pytest.importorskip("jupytext")
pytest.importorskip("matplotlib")
pytest.importorskip("nbclient")

import nbformat
import torch
from PIL import Image

from notebooks.execute import FOLDER, PICTURE_COLOURS, execute, read_script, scripts, shrink_pictures
from tests.notebooks.forked_kernels import forked_kernels

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 120
MOST_BYTES = 600_000

each_script = pytest.mark.parametrize("script", scripts(), ids=lambda script: script.stem)


def kinds(notebook: nbformat.NotebookNode) -> list[list[list[str]]]:
    """Of each cell's outputs: the forms in which they are there, such as text or a picture."""
    return [
        [sorted(output.get("data", {})) or [output.output_type] for output in cell.get("outputs", ())]
        for cell in notebook.cells
    ]


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the texts that cells print, without fractions and powers, whose last digit differs between machines."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return [re.sub(r"\d+\.\d+|\d+e[+-]\d+", "#", output.text) for output in outputs if output.output_type == "stream"]


def test_scripts_and_notebooks_are_paired() -> None:
    assert scripts()
    assert {path.stem for path in scripts()} == {path.stem for path in FOLDER.glob("*.ipynb")}


@each_script
def test_the_notebook_is_its_script(script: Path) -> None:
    path = script.with_suffix(".ipynb")
    notebook, source = nbformat.read(path, as_version=4), read_script(script)
    nbformat.validate(notebook)
    assert [(cell.id, cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.id, cell.cell_type, cell.source) for cell in source.cells
    ], "run `make notebooks`"
    assert path.stat().st_size <= MOST_BYTES
    assert str(ROOT) not in path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def kernels() -> Iterator[None]:
    with forked_kernels():
        yield


@each_script
@pytest.mark.usefixtures("kernels")
def test_it_runs_and_shows_what_is_committed(script: Path) -> None:
    start = time.monotonic()
    ran = execute(script)
    assert time.monotonic() - start <= MOST_SECONDS
    committed = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    assert kinds(ran) == kinds(committed), "run `make notebooks`"
    if not torch.cuda.is_available():  # where a cell may time
        assert printed(ran) == printed(committed), "run `make notebooks`"


def test_a_picture_gets_smaller_and_keeps_its_rare_colours() -> None:
    picture, made = Image.effect_noise((300, 300), 9).convert("RGB"), io.BytesIO()
    picture.putpixel((1, 1), (200, 0, 0))
    picture.save(made, "png")
    output = nbformat.v4.new_output("display_data", {"image/png": b64encode(made.getvalue()).decode()})
    shrink_pictures(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])]))
    smaller = b64decode(output.data["image/png"])
    shown = Image.open(io.BytesIO(smaller)).convert("RGB")
    assert len(smaller) < len(made.getvalue())
    assert len(shown.getcolors()) <= PICTURE_COLOURS
    assert shown.getpixel((1, 1)) == (200, 0, 0)
