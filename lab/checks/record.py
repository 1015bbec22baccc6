"""Read the JSON file of a report of the judge: the cases and the verdict on each.

The reader builds only known dataclasses, enums and dtypes from the `repr` of a case, and evaluates no code.
"""

import ast
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4
from lab.checks.explain.call_features import features_of_case
from lab.checks.properties import checks_by_key
from lab.checks.run.verdicts import SENTENCES, BitDifference, CaseVerdict, Judged, Outcome
from lab.files import DAMAGED, read_json
from lab.wording import shortened
from lab.workloads.interfaces import INTERFACES, interface_of

SHOWN_CHARACTERS = 200  # of an invalid text, in an error
DTYPES = (*HALF_DTYPES, E4M3, NVFP4, torch.float32, torch.int32, torch.int64)


class ReportError(ValueError):
    """The file is no report of the judge, or the report does not have the requested case."""


def read_cases(record: dict[str, Any]) -> Iterator[CaseVerdict]:
    """Yield the verdicts in the parsed JSON of a report, without `judged.results`. Raise ReportError if it is none, or was
    written before cases had numbers.
    """
    where = ""
    try:
        ranges = read_expression(record["ranges"])
        for case in record["cases"]:
            where = f"case {case.get('number')!r}: "
            sentences: dict[str, Any] = {name: tuple(case.get(name, ())) for name in SENTENCES}
            yield CaseVerdict(
                implementation=str(record["implementation"]),
                check=str(case["check"]),
                interface=interface_of(case["interface"]),
                case=read_expression(case["case"]),
                device=str(record["device"]),
                judged=Judged(
                    Outcome(case["outcome"]),
                    worst_ratio=float(case.get("worst_ratio", 0.0)),
                    judged=case.get("judged", 0),
                    by_lab=case.get("by_lab", False),
                    differences=tuple(BitDifference(what, float(by)) for what, by in case.get("differences", ())),
                    **sentences,
                ),
                ranges=read_expression(case["ranges"]) if "ranges" in case else ranges,
                drawn=case.get("drawn", False),
                finding=case.get("finding", ""),
                number=case["number"],
                sent_by=tuple(case.get("sent_by", ())),
            )
    except DAMAGED as error:
        raise ReportError(f"{where}it is no report of this lab's judge: {type(error).__name__}: {error}") from error


def read_record(path: Path) -> dict[str, Any]:
    """Return the parsed JSON of a report's file. Raise ReportError if there is no such file, or it is not a report."""
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    lists = [record.get("cases"), record.get("refusals", [])] if isinstance(record, dict) else [None]
    if not all(isinstance(each, list) for each in lists) or not all(isinstance(case, dict) for case in record["cases"]):
        raise ReportError(f"{path} is no report of the judge")
    if not isinstance(name := record.get("implementation", ""), str) or "\0" in name:
        raise ReportError(f"{path} is no report of the judge: its implementation has the name {name!r}")
    return record


def replaceable(path: Path) -> Path:
    """Return `path` if it is a new or empty file, or an earlier report, else raise ReportError. Create missing folders."""
    if path.is_fifo():
        raise ReportError(f"{path} is a pipe, and a report is written several times: name a file")
    if path.is_file() or not path.exists():
        folder = Path(os.path.realpath(path)).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ReportError(f"{path} cannot be written: {error.strerror}") from error
    if path.exists() and path.stat().st_size:
        try:
            read_record(path)
        except ReportError as error:
            raise ReportError(
                f"{error}, so that a report shall not replace it: name another file, or remove it"
            ) from error
    return path


def read_case(path: Path, number: int) -> CaseVerdict:
    """Read the verdict on the case with this number from a report's file. Raise ReportError if there is none."""
    record = read_record(path)
    chosen = [case for case in record["cases"] if case.get("number") == number]
    if not chosen:
        numbers = [case["number"] for case in record["cases"] if isinstance(case.get("number"), int)]
        there = f"it has {len(numbers)}, from {min(numbers)} to {max(numbers)}" if numbers else "it has none"
        raise ReportError(f"{path} has no case {number}: {there}")
    try:
        verdict, *_ = read_cases(record | {"cases": chosen})
        features_of_case(verdict.case)
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from error
    except DAMAGED as error:
        raise ReportError(f"{path}: case {number} is no case of a check: {error}") from error
    if verdict.check not in checks_by_key():
        raise ReportError(f"case {number} of {path} is of a check {verdict.check!r}, which this lab does not have")
    return replace(verdict, recorded_in=str(path))


@functools.cache
def _offered() -> tuple[dict[str, Callable[..., Any]], dict[str, Any]]:
    import lab.checks as offering

    classes = [each for name in offering.__all__ if isinstance(each := getattr(offering, name), type)]
    members = [member for each in classes if issubclass(each, Enum) for member in each]
    return (
        {each.__name__: each for each in classes if is_dataclass(each)},
        {repr(member): member for member in (*members, *DTYPES)}
        | {f"Interface.{each.name}": each for each in INTERFACES},  # in reports that were written until 2026-11
    )


def read_expression(text: str) -> Any:
    """Build the case or `Ranges` whose `repr` is `text`. Raise ValueError if there is none, or a field has an invalid value."""
    try:
        return _built(ast.parse(text, mode="eval").body)
    except (SyntaxError, *DAMAGED) as error:
        if type(error) is ValueError:
            raise
        raise ValueError(
            f"{shortened(repr(text), SHOWN_CHARACTERS)} is no case: {str(error) or repr(error)}"
        ) from error


def _built(node: ast.expr) -> Any:
    classes, members = _offered()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
        named = {keyword.arg or "**": _built(keyword.value) for keyword in node.keywords}
        return classes[node.func.id](*map(_built, node.args), **named)
    if isinstance(node, ast.Tuple):
        return tuple(map(_built, node.elts))
    if isinstance(node, ast.Dict):
        return {_built(key): _built(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in members:
        return members[name]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{shortened(repr(ast.unparse(node)), SHOWN_CHARACTERS)} is no part of a case") from None
