"""A folder of recorded results: which of its JSON files holds what."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.reports.recorded import RecordedRun, read_run


class FolderError(ValueError):
    """A folder without recorded results, or a file that is not JSON; the message names it."""


@dataclass(frozen=True)
class Record:
    """One file: its path in the folder without ".json", and its content."""

    name: str
    content: Mapping[str, Any]

    @property
    def environment(self) -> Mapping[str, Any]:
        """`lab.provenance.environment` of its run; empty if not recorded."""
        return self.content.get("environment") or {}


@dataclass(frozen=True)
class Folder:
    """Recorded results by what they hold, each in the order of the files' names.

    Attributes:
        path: the folder.
        judged: `lab.checks.report.Report.write`'s files.
        surveys: verdicts of forward passes or of graphs, with a summary of counts.
        runs: pytest-benchmark's files.
        experiments: all others: facts and lists of rows.
        unread: files of another form, with what they hold.
    """

    path: Path
    judged: tuple[Record, ...] = ()
    surveys: tuple[Record, ...] = ()
    runs: tuple[RecordedRun, ...] = ()
    experiments: tuple[Record, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)


def read_folder(path: Path) -> Folder:
    """Read all JSON files of a folder and of the folders in it. What a file holds is told by its content, not by its name.

    Raises:
        FolderError: no such folder, no JSON file in it, or one that is not JSON.
        lab.reports.recorded.RecordedRunError: benchmarks that were not recorded as the lab does.
    """
    paths = sorted(path.rglob("*.json"))
    if not paths:
        raise FolderError(f"{path}: no folder with JSON files in it; give one such as results/nvidia-h200")
    kinds: dict[str, list[Any]] = {"judged": [], "surveys": [], "runs": [], "experiments": []}
    unread: dict[str, str] = {}
    for each in paths:
        record = Record(each.relative_to(path).with_suffix("").as_posix(), _content(each))
        if not isinstance(record.content, Mapping):
            unread[record.name] = f"a {type(record.content).__name__} of {len(record.content)} items"
            continue
        kind = _kind(record.content)
        kinds[kind].append(read_run(each) if kind == "runs" else record)
    return Folder(path, **{kind: tuple(found) for kind, found in kinds.items()}, unread=unread)


def _kind(content: Mapping[str, Any]) -> str:
    if "benchmarks" in content:
        return "runs"
    if "implementation" in content and "checks" in content:
        return "judged"
    return "surveys" if "verdicts" in content and "summary" in content else "experiments"


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FolderError(f"{path}: not JSON: {error}") from error
