"""Return the question and the pictures of a study, for the page of recorded results (`lab html`)."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from lab.reports.pictures.style import Drawing
from studies import STUDIES, question_of


def question_and_drawings(name: str) -> tuple[str, Sequence[Drawing]]:
    """Return the question of a study, and its drawings; ("", ()) for a name that no study has."""
    return (question_of(name), drawings_of(name)) if name in STUDIES else ("", ())


def drawings_of(name: str) -> Sequence[Drawing]:
    module = f"studies.pictures.{name}"
    return () if find_spec(module) is None else getattr(import_module(module), "DRAWINGS", ())
