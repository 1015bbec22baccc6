"""Read recorded studies, and compute the answer about each change from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from lab.provenance import output_of
from lab.reports.recorded_file import FileKind, RecordedFile, RecordedFileError, read_file
from studies.changes import CHANGES, Change
from studies.changes.verdicts import NOT_RECORDED, Answer, Observation, Standing


@dataclass(frozen=True)
class Entry:
    """A change, and the answer about it: None if the study is not recorded. `failure` says how the measurement failed."""

    change: Change
    answer: Answer | None
    files: tuple[RecordedFile, ...]
    failure: str = ""

    @property
    def verdict(self) -> str:
        return NOT_RECORDED if self.answer is None else self.answer.verdict

    def claimed(self) -> list[Observation]:
        return self.answer.claimed if self.answer else []

    def of_attention(self, attention: str) -> str:
        """Return a text with the number of points of MHA or MLA (`attention`) at which the change's claims hold."""
        mine = [each for each in self.claimed() if each.group.startswith(attention)]
        holding = sum(each.standing is Standing.HOLDS for each in mine)
        return f"{holding} of {len(mine)} points" if mine else NOT_RECORDED


def file_of(folder: Path, module: str) -> Path:
    return folder / f"{module}.json"


def read_entries(
    folder: Path, changes: Sequence[Change] = CHANGES, failures: Mapping[str, str] | None = None
) -> list[Entry]:
    """Return an `Entry` for each change, from the recordings in a folder. `failures` has, for each study whose command failed,
    a clause that says how.
    """
    return [_entry(folder, change, (failures or {}).get(change.module, "")) for change in changes]


def _entry(folder: Path, change: Change, failure: str) -> Entry:
    paths = {module: file_of(folder, module) for module in (change.module, *change.further)}
    try:
        files = {module: _read(path) for module, path in paths.items() if path.exists()}
        answer = _answer(change, files) if change.module in files else None
    except RecordedFileError as error:
        return Entry(change, None, (), "; ".join(filter(None, (failure, str(error)))))
    return Entry(change, answer, tuple(files.values()) if answer else (), failure)


def _answer(change: Change, files: Mapping[str, RecordedFile]) -> Answer:
    try:
        return change.judge({module: found.content for module, found in files.items()})
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        names = ", ".join(str(found.path) for found in files.values())
        message = f"{names}: not in the form that the study writes: {type(error).__name__}: {error}"
        raise RecordedFileError(message) from error


def _read(path: Path) -> RecordedFile:
    file = read_file(path)
    if file.kind is not FileKind.EXPERIMENT:
        raise RecordedFileError(f"{path}: holds no study's recording but {file.kind.value}")
    return file


def held_back(file: RecordedFile) -> list[tuple[str, ...]]:
    """Return, for each row that records them, the reasons for reduced GPU clocks; an empty tuple if there were none."""
    lists = [rows for rows in file.content.values() if isinstance(rows, list)]
    devices = [row.get("device", row) for rows in lists for row in rows if isinstance(row, dict)]
    return [tuple(device["throttled_by"] or ()) for device in devices if "throttled_by" in device]


def day_of(path: Path) -> str:
    """Return the day of a file's last commit, or of its last uncommitted change, as YYYY-MM-DD."""
    committed = _git(path, "log", "-1", "--format=%as")
    if committed and not _git(path, "status", "--porcelain"):
        return committed
    return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).strftime("%Y-%m-%d")


def _git(path: Path, *command: str) -> str:
    return output_of(["git", "-C", str(path.parent), *command, "--", path.name])
