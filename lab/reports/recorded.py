"""Read recorded runs of `lab bench`: a row for each benchmark, with its samples."""

import functools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.reports.recorded_file import FileKind, RecordedFile, RecordedFileError, read_file, value_at
from lab.reports.tables import grouped
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
# What a row measured and how, as (name, value) pairs. The first pair is the scenario.
Identity = tuple[tuple[str, str], ...]


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
        """Return groups of rows with GPU times. The rows of a group differ in the implementation, and agree in the rest of
        `identity`. Each group is a list of (row, its speed compared with the fastest row), the fastest row first.
        """
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


def without(identity: Identity, *names: str) -> Identity:
    return tuple(item for item in identity if item[0] not in names)


def in_words(identity: Identity) -> str:
    return ", ".join(value if name in ("scenario", "implementation") else f"{name} {value}" for name, value in identity)


def read_run(path: str | Path) -> RecordedRun:
    """Read a run that pytest-benchmark recorded with all samples. Raises RecordedFileError if the file is not such a run."""
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
    """Read the run in a file, or all runs in a folder. Raises RecordedFileError if a file cannot be read as a run."""
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
