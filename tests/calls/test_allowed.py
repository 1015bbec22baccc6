"""No argument of a call is ignored: its problem reads it, or it changes no result. A page says why the lab refuses some."""

import re
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from lab.calls import CALL_TYPES, AttentionCall
from lab.calls.allowed import FREE_ARGUMENTS, REFUSED
from tests.kernels.adapter_calls import context, decode, mla, ragged
from tests.kernels.test_dsv4 import arguments_of as dsv4

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "what_runs_where.md"
PLAIN_CALLS = {
    AttentionCall.DECODE: decode,
    AttentionCall.CONTEXT: context,
    AttentionCall.MLA_DECODE: mla,
    AttentionCall.RAGGED_CONTEXT: ragged,
    AttentionCall.DSV4_DECODE: dsv4,
}


@pytest.mark.parametrize("function", AttentionCall)
def test_every_argument_is_read_or_changes_no_result(function: AttentionCall) -> None:
    read = set()

    class Watched(CALL_TYPES[function]):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    Watched(**PLAIN_CALLS[function]()).problem()
    ignored = {each.name for each in fields(Watched)} - read - {*FREE_ARGUMENTS}
    assert not ignored, (
        f"every kernel would ignore {', '.join(sorted(ignored))} of {function.value}: pass it on to the problem, give the only "
        "values that the lab allows in lab.calls.allowed, or list it in its FREE_ARGUMENTS"
    )


def test_every_refused_argument_is_in_the_page() -> None:
    _, _, section = PAGE.read_text().partition("## Arguments that are refused")
    spans = re.findall(r"`([a-z0-9_]+\*?)", section.partition("\n## ")[0])
    missing = [name for name in REFUSED if not any(fnmatchcase(name, span) for span in spans)]
    assert not missing, (
        f"{', '.join(missing)}: say in {PAGE.name}, 'Arguments that are refused', why the lab refuses it"
    )
