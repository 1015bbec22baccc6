"""Recorded experiments, read and judged: for each change what its recordings say, and what they were measured on."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lab.reports.changes import CHANGES, Change, Recording
from lab.reports.changes.verdicts import Answer, Observation, Standing
from lab.reports.recorded import RecordedRunError

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Measured:
    """A recording, where it lies, and the day of the file, as YYYY-MM-DD."""

    path: Path
    recording: Recording
    day: str

    def fact(self, *keys: str) -> Any:
        """A value of the environment by its keys from the outside in; None where it is not recorded."""
        found: Any = self.recording.get("environment")
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    @property
    def held_back(self) -> list[tuple[str, ...]]:
        """Of each row that says so, what held the GPU's clocks back while it was timed; empty if nothing was seen to."""
        lists = [rows for rows in self.recording.values() if isinstance(rows, list)]
        devices = [row.get("device", row) for rows in lists for row in rows if isinstance(row, dict)]
        return [tuple(device["throttled_by"] or ()) for device in devices if "throttled_by" in device]


@dataclass(frozen=True)
class Entry:
    """A change and what was found.

    Attributes:
        answer: None where the change's experiment is not recorded.
        files: the recordings that it is made of.
        failure: a clause: how the command ended, or why a recording cannot be read; empty if neither failed.
    """

    change: Change
    answer: Answer | None
    files: tuple[Measured, ...]
    failure: str = ""

    @property
    def verdict(self) -> str:
        return NOT_RECORDED if self.answer is None else self.answer.verdict

    def claimed(self) -> list[Observation]:
        """What was observed of the statements that the change claims."""
        aspects = self.answer.aspects if self.answer else ()
        return [each for aspect in aspects if aspect.of_claim for each in aspect.observations]

    def of_attention(self, attention: str) -> str:
        """At how many of the points of MHA or MLA its statements hold."""
        mine = [each for each in self.claimed() if each.group.startswith(attention)]
        holding = sum(each.standing is Standing.HOLDS for each in mine)
        return f"{holding} of {len(mine)} points" if mine else NOT_RECORDED


def command_of(change: Change) -> str:
    """What measures a change."""
    return f"python -m lab.experiments.{change.module} --out {change.module}.json"


def file_of(folder: Path, module: str) -> Path:
    """Where an experiment's recording lies."""
    return folder / f"{module}.json"


def read_entries(
    folder: Path, changes: Sequence[Change] = CHANGES, failures: Mapping[str, str] | None = None
) -> list[Entry]:
    """What the recordings in a folder say; a change whose recording is not there, or cannot be read, has no answer.

    Args:
        failures: how commands ended that failed, by module.
    """
    return [_entry(folder, change, (failures or {}).get(change.module, "")) for change in changes]


def _entry(folder: Path, change: Change, failure: str) -> Entry:
    try:
        return _judged(folder, change, failure)
    except RecordedRunError as error:
        return Entry(change, None, (), "; ".join(filter(None, (failure, str(error)))))


def _judged(folder: Path, change: Change, failure: str) -> Entry:
    paths = {module: file_of(folder, module) for module in (change.module, *change.beside)}
    files = {module: _read(path) for module, path in paths.items() if path.exists()}
    if change.module not in files:
        return Entry(change, None, (), failure)
    try:
        answer = change.judge({module: found.recording for module, found in files.items()})
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        names = ", ".join(str(found.path) for found in files.values())
        message = f"{names}: not in the form that the experiment writes: {type(error).__name__}: {error}"
        raise RecordedRunError(message) from error
    return Entry(change, answer, tuple(files.values()), failure)


def _read(path: Path) -> Measured:
    try:
        recording = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordedRunError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(recording, dict):
        raise RecordedRunError(f"{path}: holds no recording but a {type(recording).__name__}")
    return Measured(path, recording, _day_of(path))


def _day_of(path: Path) -> str:
    """When a file was committed as it is, or else written: the recordings hold no date."""
    committed = _git(path, "log", "-1", "--format=%as")
    if committed and not _git(path, "status", "--porcelain"):
        return committed
    return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).strftime("%Y-%m-%d")


def _git(path: Path, *command: str) -> str:
    """What git says of a file; nothing where it does not know it, or is not there."""
    whole = ["git", "-C", str(path.parent), *command, "--", path.name]
    try:
        return subprocess.run(whole, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
