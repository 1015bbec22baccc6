"""Read the judge's report files (JSON), and merge the reports of a run that several machines shared (`lab judge --shard 3/8`).

A case is stored as its `repr`. The reader builds only known dataclasses, enums and dtypes from it, and evaluates no code.
"""

import ast
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4
from lab.checks.explain.call_features import features_of_case
from lab.checks.parameters.covering import Shard
from lab.checks.properties import checks_by_key
from lab.checks.properties.check import Level
from lab.checks.report import WORST_FIRST, Report
from lab.checks.run.verdicts import SENTENCES, BitDifference, CaseVerdict, Judged, Key, Outcome, credible
from lab.files import DAMAGED, read_json
from lab.wording import joined, shortened
from lab.workloads.interfaces import INTERFACES, interface_of

SHOWN_CHARACTERS = 200  # of an invalid text, in an error
# Entries of a report that must be equal in all shards, with words for an error.
EQUAL = {
    "implementation": "the kernel",
    "level": "the level",
    "ranges": "the ranges",
    "device": "the device",
    "profile": "the profile",
    "refusals": "the refusals",
    "run": "the sources of the kernel or the lab, a setting, or the software",
}
DTYPES = (*HALF_DTYPES, E4M3, NVFP4, torch.float32, torch.int32, torch.int64)


class ReportError(ValueError):
    """A file is no report of the judge, or the report does not have the requested case."""


def read_cases(record: Mapping[str, Any], path: Path | None = None) -> Iterator[CaseVerdict]:
    """Yield the verdicts in the parsed JSON of a report. They have no results of single calls (`judged.results`), because a
    report does not store them. Raise ReportError, which names the file `path`, if the JSON is no report, or if a case has no
    number.
    """
    where = file = "" if path is None else f"{path}: "
    try:
        ranges = read_expression(record["ranges"])
        for case in record["cases"]:
            where = f"{file}case {case.get('number')!r}: "
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
                    alone=case.get("alone", ""),
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
    """Return the parsed JSON of a report's file. Raise ReportError if there is no such file, or if it is no report."""
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
    """Return `path`, and create its folder. Raise ReportError if the file exists and is neither empty nor a report."""
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
            raise ReportError(f"{error}. Only a report of the judge is replaced: name another file") from error
    return path


def read_case(path: Path, number: int) -> CaseVerdict:
    """Read the verdict on a case from a report's file. Raise ReportError if the report has no case with this number."""
    record = read_record(path)
    chosen = [case for case in record["cases"] if case.get("number") == number]
    if not chosen:
        numbers = [case["number"] for case in record["cases"] if isinstance(case.get("number"), int)]
        there = f"it has {len(numbers)}, from {min(numbers)} to {max(numbers)}" if numbers else "it has none"
        raise ReportError(f"{path} has no case {number}: {there}")
    verdict, *_ = read_cases(record | {"cases": chosen}, path)
    try:
        features_of_case(verdict.case)
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
    """Build the case or `Ranges` whose `repr` is `text`. Raise ValueError for another text, or if a value is invalid."""
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


def merged(paths: Sequence[Path], out: Path | None = None) -> Report:
    """Merge the reports of all shards (parts) of a run into one report. If several shards judged a case, keep the worst
    verdict. The commands that reproduce a case name the file `out`, to which the caller writes the merged report. Raise
    ReportError unless `paths` are the reports of all shards of one run, and each shard has ended.
    """
    by_path = {path: read_record(path) for path in paths}
    _check_shards(paths, by_path)
    records = list(by_path.values())
    found: dict[tuple[str, str], dict[Key, CaseVerdict]] = {}  # by check and function
    for path, record in by_path.items():
        for verdict in read_cases(record, path):
            of_check = found.setdefault((verdict.check, verdict.interface.value), {})
            is_known = verdict.outcome is Outcome.KNOWN
            held = verdict if is_known else replace(verdict, judged=credible(verdict.judged))
            both = (held, of_check.get(verdict.key, held))
            of_check[verdict.key] = min(
                both, key=lambda each: (WORST_FIRST.index(each.outcome), -each.judged.worst_ratio)
            )
    verdicts = [verdict for of_check in found.values() for verdict in of_check.values()]
    first, left_out = records[0], [record for record in records if record["left_out"]]
    ranges = (each for record in records for each in record["narrowed"].items())
    return Report(
        level=Level(first["level"]),
        environment=dict(first["environment"]),
        verdicts=tuple(
            replace(each, number=number, recorded_in=str(out or "")) for number, each in enumerate(verdicts, 1)
        ),
        ranges=read_expression(first["ranges"]),
        ended=left_out[0]["ended"] if left_out else "",
        interrupted=any(record["interrupted"] for record in records),
        narrowed=tuple(dict.fromkeys((interface_of(name), read_expression(text)) for name, text in ranges)),
        refusals=tuple(first["refusals"]),
        functions=tuple(dict.fromkeys(interface_of(name) for record in records for name in record["functions"])),
        folder=str(first.get("folder") or ""),
        **{name: first[name] for name in ("implementation", "device", "run", "profile")},
        **{name: sum(each[name] for each in records) for name in ("left_out", "num_random", "audited", "unended")},
    )


def _check_shards(paths: Sequence[Path], records: Mapping[Path, Mapping[str, Any]]) -> None:
    if not paths:
        raise ReportError("name the reports of all shards of a run")
    (first, expected), *others = records.items()
    for path, record in others:
        for name, words in EQUAL.items():
            if record.get(name) != expected.get(name):
                raise ReportError(f"{first} and {path} are not of one run: {words} differs")
    shards: dict[Shard, Path] = {}
    for path in paths:
        if not (text := str(records[path].get("shard") or "")):
            raise ReportError(f"{path} is no report of a shard: lab judge --shard writes one")
        shard = Shard.of(text)
        if (other := shards.setdefault(shard, path)) is not path:
            raise ReportError(f"{other} and {path} are both shard {shard}")
        if records[path].get("diagnosis") is None:
            raise ReportError(f"{path} is of a run that has not ended: run shard {shard} again with the same --out")
        if shard.count != next(iter(shards)).count:
            raise ReportError(f"{first} is shard {next(iter(shards))}, and {path} is shard {shard}")
    count = next(iter(shards)).count
    if missing := [str(number) for number in range(1, count + 1) if Shard(number, count) not in shards]:
        raise ReportError(f"of {count} shards, {joined(missing)} {'is' if len(missing) == 1 else 'are'} missing")
