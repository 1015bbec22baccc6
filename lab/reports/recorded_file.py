"""Read recorded files: benchmarks, reports of the judge, and experiments. A file's content determines its kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.files import read_json, without_suffix
from lab.named_enum import NamedEnum

# Facts of `lab.provenance.environment`: the heading, and the keys that lead to the value, the outermost key first.
FACTS: dict[str, tuple[str, ...]] = {
    "GPU": ("gpu",),
    "multiprocessors": ("multiprocessors",),
    "L2, bytes": ("l2_bytes",),
    "driver": ("nvidia_smi", "driver_version"),
    "CUDA": ("cuda",),
    "maximum SM clock": ("nvidia_smi", "clocks.max.sm"),
    "SM clock at the start": ("nvidia_smi", "clocks.sm"),
    "memory clock at the start": ("nvidia_smi", "clocks.mem"),
    "power limit": ("nvidia_smi", "power.limit"),
    "commit": ("commit",),
    "Python": ("python",),
}

# The facts that a comparison shows, in addition to the packages.
SHOWN = ("GPU", "commit", "driver", "CUDA", "Python")


class RecordedFileError(ValueError):
    """A file or folder cannot be read as recorded results. The message has its path and the reason."""


class FileKind(NamedEnum):
    """The kind of results in a recorded file."""

    BENCHMARKS = "benchmarks in pytest-benchmark's JSON"
    JUDGE = "a report of the judge"
    EXPERIMENT = "a mapping with facts and lists of rows, written by an experiment"
    OTHER = "other JSON"


@dataclass(frozen=True)
class RecordedFile:
    """A file of recorded results: its path, the kind of its results, and its parsed JSON."""

    path: Path
    name: str  #: path relative to the folder that was read, without ".json" or ".json.gz"
    kind: FileKind
    content: Any  #: the file's data: a mapping, or any JSON for `FileKind.OTHER`

    @property
    def environment(self) -> Mapping[str, Any]:
        """Return the recorded description of the machine (`lab.provenance.environment`); empty if none was recorded."""
        if self.kind is FileKind.BENCHMARKS:
            lab = self.content.get("machine_info", {}).get("lab", {})
            return {name: value for name, value in lab.items() if name != "ceilings"}
        return (self.content.get("environment") if isinstance(self.content, Mapping) else None) or {}

    @property
    def experiment(self) -> str:
        return str(self.content.get("experiment") or without_suffix(self.path).name)

    def fact(self, *keys: str) -> Any:
        """Return a value of the recorded environment, such as fact("packages", "torch"); None if it was not recorded."""
        return value_at(self.environment, keys)


def value_at(mapping: Any, keys: Sequence[str]) -> Any:
    found = mapping
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def read_file(path: Path, folder: Path | None = None) -> RecordedFile:
    """Read a recorded file of any kind. Raises RecordedFileError if it cannot be read, is not JSON or is damaged."""
    try:
        content = read_json(path)
    except OSError as error:
        raise RecordedFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RecordedFileError(f"{path}: not JSON: {error}") from error
    environment = content.get("environment") if isinstance(content, Mapping) else None
    if not isinstance(environment, Mapping | None):
        raise RecordedFileError(
            f"{path}: not in the form that the lab writes: its environment is {environment!r:.40}, and no object"
        )
    name = without_suffix(path).relative_to(folder or path.parent).as_posix()
    return RecordedFile(path, name, _kind(content), content)


def read_folder(folder: Path) -> tuple[RecordedFile, ...]:
    """Read all JSON files of a folder and its subfolders, sorted by name. Raises RecordedFileError if there is none."""
    paths = sorted((*folder.rglob("*.json"), *folder.rglob("*.json.gz")))
    if not paths:
        raise RecordedFileError(f"{folder}: no folder with JSON files in it; give one such as results/nvidia-h200")
    return tuple(read_file(path, folder) for path in paths)


def _kind(content: Any) -> FileKind:
    if not isinstance(content, Mapping) or ("verdicts" in content and "summary" in content):
        return FileKind.OTHER
    if isinstance(content.get("benchmarks"), list):
        return FileKind.BENCHMARKS
    if "implementation" in content and "checks" in content:
        return FileKind.JUDGE
    return FileKind.EXPERIMENT


class NotComparableError(ValueError):
    """Two recordings must not be compared. The message says why."""


def environment_facts(environments: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return {heading: keys that lead to the value in an environment} of all facts and packages: "CUDA": ("cuda",)."""
    packages = dict.fromkeys(name for each in environments for name in each.get("packages") or ())
    return {**FACTS, **{name: ("packages", name) for name in packages}}


def facts_of_sides(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[str, str]]:
    """Return {heading: (text before, text after)} of the environment fields that a comparison shows, such as the GPU."""
    found = {}
    for name, keys in environment_facts([*before, *after]).items():
        was, now = (
            ", ".join(sorted({str(value) for each in side if (value := value_at(each, keys)) is not None}))
            for side in (before, after)
        )
        if (was or now) and (name in SHOWN or keys[0] == "packages"):
            found[name] = was or "not recorded", now or "not recorded"
    return found
