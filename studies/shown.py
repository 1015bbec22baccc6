"""What the page of recorded results (`lab html`) shows of a study besides its numbers: the question and the pictures."""

import ast
import importlib.util
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lab.reports.pictures.style import Drawing
from studies import EXPERIMENTS


def question_and_drawings(name: str) -> tuple[str, Sequence[Drawing]]:
    """Return the question that a study's module begins with, and its drawings; ("", ()) for a name that no study has."""
    return (question_of(name), drawings_of(name)) if name in EXPERIMENTS else ("", ())


def question_of(name: str) -> str:
    """Return the first paragraph of the docstring of a study's module.

    The module is read and not imported, because some modules import packages that the page does not need.
    """
    spec = importlib.util.find_spec(EXPERIMENTS[name])
    assert spec is not None
    assert spec.origin is not None
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n", 1)[0].replace("\n", " ")


def drawings_of(name: str) -> Sequence[Drawing]:
    """Return `DRAWINGS` of the module of `studies.pictures` with the study's name; () where there is none."""
    module = f"studies.pictures.{name}"
    return () if importlib.util.find_spec(module) is None else getattr(import_module(module), "DRAWINGS", ())
