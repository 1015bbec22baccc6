"""Read recorded files: benchmarks, reports of the judge, and experiments. A file's content determines its kind."""

import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lab.files import read_json, without_suffix
from lab.named_enum import NamedEnum
from lab.timing.gpu_time import interquartile_range
from lab.timing.method import Clock
from lab.timing.statistics import INTERLEAVED, Speed, compare_samples

GPU_CLOCKS = frozenset(clock.value for clock in Clock)
# Two rows measure the same thing if they have the same scenario, and the same values of these facts and of `TIMED_BY`.
SETTINGS = ("implementation", "page_size", "dtype", "kv_dtype")
TIMED_BY = ("clock", "l2")
MODULE_PREFIX = "lab.kernels."
# An empty launch takes one to two microseconds, so the ratio of a time to a shorter floor means nothing and is not drawn.
LEAST_FLOOR_US = 1.0
MOST_NAMES = 3
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

Group = TypeVar("Group")
Member = TypeVar("Member")
# What a row measured and how, as (name, value) pairs. The first pair is the scenario.
Identity = tuple[tuple[str, str], ...]


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
        """Return a value of the environment, such as that of fact("packages", "torch"); None if there is none."""
        return value_at(self.environment, keys)


def value_at(mapping: Any, keys: Sequence[str]) -> Any:
    found = mapping
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def grouped(pairs: Iterable[tuple[Group, Member]]) -> dict[Group, list[Member]]:
    """Return the members of each group, in the order of the pairs (group, member)."""
    found: dict[Group, list[Member]] = {}
    for group, member in pairs:
        found.setdefault(group, []).append(member)
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


@dataclass(frozen=True)
class Row:
    """One benchmark of a run: the samples of one implementation on one scenario, and the fields recorded with them."""

    name: str  #: the test's full name
    samples_us: tuple[float, ...]  #: raw samples in microseconds per call, in the order of measurement
    #: all other recorded fields by name, such as the scenario and the floor (pytest-benchmark's `extra_info`)
    facts: Mapping[str, Any]

    @property
    def scenario(self) -> str:
        return str(self.facts.get("scenario") or self.name)

    @property
    def implementation(self) -> str:
        return str(self.facts.get("implementation") or "").removeprefix(MODULE_PREFIX)

    @property
    def identity(self) -> Identity:
        """Return (name, value) pairs of what was timed: scenario, implementation, page size, dtypes, clock, L2 cache."""
        named = {key: str(self.facts[key]) for key in SETTINGS + TIMED_BY if self.facts.get(key) is not None}
        return (("scenario", self.scenario), *named.items())

    @property
    def timed_by(self) -> str:
        words = str(self.facts.get("clock", "no stated clock"))
        return f"{words}, L2 {self.facts['l2']}" if self.facts.get("l2") else words

    @property
    def throttled_by(self) -> tuple[str, ...]:
        return tuple(self.facts.get("throttled_by") or ())

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def iqr_percent(self) -> float:
        """Return the interquartile range in percent of the median; 0 for a single sample."""
        return 100 * interquartile_range(self.samples_us) / self.median_us

    @property
    def time_over_floor(self) -> float | None:
        """Return median time / least possible time (floor); None if there is no floor, or it is below `LEAST_FLOOR_US`."""
        floor_us = self.facts.get("floor_us") or 0.0
        return self.median_us / floor_us if floor_us >= LEAST_FLOOR_US else None


# The rows of one run that timed different implementations of the same work, the fastest row first, each with its speed
# compared with the first row's.
Rivals = Sequence[tuple[Row, Speed]]


@dataclass(frozen=True)
class RecordedRun:
    """One recorded run of `lab bench`: a row per benchmark, and a description of the machine and software."""

    path: Path
    environment: Mapping[str, Any]  #: `lab.provenance.environment` of the run; empty if it was not recorded
    ceilings: Mapping[str, Any]  #: `lab.timing.Ceilings.facts` of the run; empty if they were not recorded
    rows: tuple[Row, ...]
    recorded_at: str | None = None  #: pytest-benchmark's time stamp
    #: one mapping per implementation without a time. "implementation" is its name, "reason" a sentence, and "scenario" the
    #: scenario that it does not support or computed wrongly (None if it is not installed on the machine).
    not_timed: tuple[Mapping[str, Any], ...] = ()

    @property
    def gpu_rows(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.facts.get("clock") in GPU_CLOCKS)

    @functools.cached_property
    def rivals(self) -> list[Rivals]:
        """Return groups of rows with GPU times. The rows of a group differ only in the implementation."""
        found = grouped(
            (without(row.identity, "implementation"), row)
            for row in sorted(self.gpu_rows, key=lambda row: row.median_us)
        )
        groups: list[Rivals] = []
        for _, (fastest, *slower) in sorted(found.items(), key=lambda each: each[0]):
            speeds = (compare_samples(fastest.samples_us, row.samples_us, INTERLEAVED).speed for row in slower)
            groups.append([(fastest, Speed.SAME), *zip(slower, speeds, strict=True)])
        return groups

    @property
    def other_rows(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.facts.get("clock") not in GPU_CLOCKS)


def environment_facts(environments: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the environment fields that reports show, by heading: the keys that lead to the field, the outermost first."""
    packages = dict.fromkeys(name for each in environments for name in each.get("packages") or ())
    return {**FACTS, **{name: ("packages", name) for name in packages}}


def facts_of_sides(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[str, str]]:
    """Return the environment fields that a comparison shows: for each heading, (text before, text after)."""
    found = {}
    for name, keys in environment_facts([*before, *after]).items():
        was, now = (
            ", ".join(sorted({str(value) for each in side if (value := value_at(each, keys)) is not None}))
            for side in (before, after)
        )
        if (was or now) and (name in SHOWN or keys[0] == "packages"):
            found[name] = was or "not recorded", now or "not recorded"
    return found


def without(identity: Identity, *names: str) -> Identity:
    return tuple(item for item in identity if item[0] not in names)


def in_words(identity: Identity) -> str:
    return ", ".join(value if name in ("scenario", "implementation") else f"{name} {value}" for name, value in identity)


def read_run(path: str | Path) -> RecordedRun:
    """Read a run that pytest-benchmark recorded with all samples. Raises RecordedFileError."""
    return run_of(read_file(Path(path)))


def run_of(file: RecordedFile) -> RecordedRun:
    if file.kind is not FileKind.BENCHMARKS:
        known = "a report of the judge, and " if file.kind is FileKind.JUDGE else ""
        raise RecordedFileError(f"{file.path}: {known}not pytest-benchmark's JSON: it has no list of benchmarks")
    path, content = file.path, file.content
    try:
        rows = tuple(_row(path, entry) for entry in content["benchmarks"])
        ceilings = value_at(content, ("machine_info", "lab", "ceilings")) or {}
        not_timed = tuple(content.get("not_timed") or ())
        run = RecordedRun(path, file.environment, ceilings, rows, content.get("datetime"), not_timed)
    except (AttributeError, TypeError, KeyError) as error:
        raise RecordedFileError(f"{path}: not in the form that pytest-benchmark and the lab write: {error}") from error
    _refuse_twice(path, [row.name for row in rows], "the benchmark")
    _refuse_twice(path, [in_words(row.identity) for row in run.gpu_rows], "the measurement")
    return run


def read_runs(path: str | Path) -> tuple[RecordedRun, ...]:
    """Read the run in a file, or all runs in a folder. Raises RecordedFileError."""
    path = Path(path)
    if not path.is_dir():
        return (read_run(path),)
    paths = sorted((*path.glob("*.json"), *path.glob("*.json.gz")))
    if not paths:
        raise RecordedFileError(f"{path}: a folder without a JSON file in it")
    return tuple(read_run(each) for each in paths)


def _row(path: Path, entry: Mapping[str, Any]) -> Row:
    name = entry.get("fullname") or entry.get("name")
    if not name:
        raise RecordedFileError(f"{path}: a benchmark without a name")
    samples_us = tuple(1e6 * seconds for seconds in entry.get("stats", {}).get("data") or ())
    if not samples_us:
        raise RecordedFileError(
            f"{path}: {name} has no raw samples; record with --benchmark-json, "
            "or with --benchmark-save and --benchmark-save-data"
        )
    wrong = next((sample for sample in samples_us if not (math.isfinite(sample) and sample > 0)), None)
    if wrong is not None:
        raise RecordedFileError(f"{path}: {name} has a sample of {wrong:g} µs: a benchmark that timed nothing")
    facts = entry.get("extra_info") or {}
    if not isinstance(facts, Mapping):
        raise RecordedFileError(f"{path}: {name} has an extra_info that is no mapping: {facts!r}")
    return Row(str(name), samples_us, facts)


def _refuse_twice(path: Path, names: list[str], what: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        others = f", and {len(twice) - MOST_NAMES} more" if len(twice) > MOST_NAMES else ""
        raise RecordedFileError(f"{path}: {what} is there twice: {'; '.join(twice[:MOST_NAMES])}{others}")
