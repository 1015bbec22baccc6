"""Recorded runs: pytest-benchmark's JSON, read into rows of GPU time with their method, their clocks and what they ran on."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lab.timing.gpu_time import interquartile_range
from lab.timing.method import Clock

GPU_CLOCKS = frozenset(clock.value for clock in Clock)
# What makes two rows the same measurement, by names of `extra_info`. How it was timed is part of it.
SETTINGS = ("implementation", "page_size", "dtype", "kv_dtype")
TIMED_BY = ("clock", "l2")
MOST_NAMES = 3

# Names and values, scenario first.
Identity = tuple[tuple[str, str], ...]


class RecordedRunError(ValueError):
    """A file that does not hold what a recorded run holds; the message names the file and says what is wrong."""


@dataclass(frozen=True)
class RecordedCeilings:
    """What the GPU reached in this run and what its vendor states, GB/s (10**9) and TFLOP/s; None where it is not recorded."""

    bandwidth_gbps: float | None = None
    matrix_rate_tflops: float | None = None
    matrix_dtype: str | None = None
    datasheet_bandwidth_gbps: float | None = None
    datasheet_matrix_rate_tflops: float | None = None
    datasheet_source: str | None = None


@dataclass(frozen=True)
class Row:
    """One benchmark of a run.

    Attributes:
        name: the test's full name.
        samples_us: raw samples, microseconds per call, in the order in which they were taken.
        facts: what the benchmark recorded beside them, pytest-benchmark's `extra_info`.
    """

    name: str
    samples_us: tuple[float, ...]
    facts: Mapping[str, Any]

    @property
    def is_gpu_time(self) -> bool:
        """Whether a clock of the GPU took it: host time, or time by no stated clock, is something else."""
        return self.facts.get("clock") in GPU_CLOCKS

    @property
    def scenario(self) -> str:
        """What was computed; the test's name where that is not recorded."""
        return str(self.facts.get("scenario") or self.name)

    @property
    def identity(self) -> Identity:
        """What two rows share if they measure the same thing in the same way."""
        named = {key: str(self.facts[key]) for key in SETTINGS + TIMED_BY if self.facts.get(key) is not None}
        return (("scenario", self.scenario), *named.items())

    @property
    def timed_by(self) -> str:
        """Clock and state of L2, in words: "graph, L2 cold by rotation"."""
        words = str(self.facts.get("clock", "no stated clock"))
        return f"{words}, L2 {self.facts['l2']}" if self.facts.get("l2") else words

    @property
    def throttled_by(self) -> tuple[str, ...]:
        """What held the GPU's clocks back meanwhile; empty if nothing was seen to."""
        return tuple(self.facts.get("throttled_by") or ())

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def iqr_percent(self) -> float:
        """The distance between the quartiles, in percent of the median; 0 for a single sample."""
        return 100 * interquartile_range(self.samples_us) / self.median_us


@dataclass(frozen=True)
class RecordedRun:
    """One run of the benchmarks.

    Attributes:
        environment: `lab.provenance.environment` of that run; empty if the run did not record it.
        recorded_at: pytest-benchmark's time stamp.
    """

    path: Path
    environment: Mapping[str, Any]
    ceilings: RecordedCeilings
    rows: tuple[Row, ...]
    recorded_at: str | None = None

    def environment_at(self, where: Sequence[str]) -> Any:
        """A value of the environment by its keys from the outside in; None where it is not recorded."""
        found: Any = self.environment
        for key in where:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    @property
    def gpu_rows(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.is_gpu_time)

    @property
    def other_rows(self) -> tuple[Row, ...]:
        """Rows of host time, or of a clock that was not recorded: never compared with GPU time."""
        return tuple(row for row in self.rows if not row.is_gpu_time)


def in_words(identity: Identity) -> str:
    """What was measured, for people: "decode/llama-3.1-8b/64q1s4k, lab.kernels.trtllm, page_size 64, clock graph, l2 warm"."""
    return ", ".join(value if name in ("scenario", "implementation") else f"{name} {value}" for name, value in identity)


def read_run(path: str | Path) -> RecordedRun:
    """Read a file that `--benchmark-json` wrote, or `--benchmark-save` with `--benchmark-save-data`.

    Raises:
        RecordedRunError: no such file, not such a file, no raw samples, a sample that is no time, or one measurement twice.
    """
    path = Path(path)
    content = _content(path)
    try:
        return _run(path, content)
    except (AttributeError, TypeError, KeyError) as error:
        raise RecordedRunError(f"{path}: not in the form that pytest-benchmark and the lab write: {error}") from error


def _run(path: Path, content: Mapping[str, Any]) -> RecordedRun:
    lab = content.get("machine_info", {}).get("lab", {})
    rows = tuple(_row(path, entry) for entry in content["benchmarks"])
    _refuse_twice(path, [row.name for row in rows], "the benchmark")
    _refuse_twice(path, [in_words(row.identity) for row in rows if row.is_gpu_time], "the measurement")
    known = {field.name for field in fields(RecordedCeilings)}
    ceilings = {name: value for name, value in (lab.get("ceilings") or {}).items() if name in known}
    return RecordedRun(
        path=path,
        environment={name: value for name, value in lab.items() if name != "ceilings"},
        ceilings=RecordedCeilings(**ceilings),
        rows=rows,
        recorded_at=content.get("datetime"),
    )


def read_runs(path: str | Path) -> tuple[RecordedRun, ...]:
    """The run in a file, or the repeated runs in a folder, one per JSON file, by file name.

    Raises:
        RecordedRunError: see `read_run`; or a folder without JSON files.
    """
    path = Path(path)
    if not path.is_dir():
        return (read_run(path),)
    paths = sorted(path.glob("*.json"))
    if not paths:
        raise RecordedRunError(f"{path}: a folder without a JSON file in it")
    return tuple(read_run(each) for each in paths)


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordedRunError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RecordedRunError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("benchmarks"), list):
        raise RecordedRunError(f"{path}: not pytest-benchmark's JSON: it has no list of benchmarks")
    return content


def _row(path: Path, entry: Mapping[str, Any]) -> Row:
    name = entry.get("fullname") or entry.get("name")
    if not name:
        raise RecordedRunError(f"{path}: a benchmark without a name")
    samples_us = tuple(1e6 * seconds for seconds in entry.get("stats", {}).get("data") or ())
    if not samples_us:
        raise RecordedRunError(
            f"{path}: {name} has no raw samples; record with --benchmark-json, "
            "or with --benchmark-save and --benchmark-save-data"
        )
    wrong = next((sample for sample in samples_us if not (math.isfinite(sample) and sample > 0)), None)
    if wrong is not None:
        raise RecordedRunError(f"{path}: {name} has a sample of {wrong:g} µs: a benchmark that timed nothing")
    facts = entry.get("extra_info") or {}
    if not isinstance(facts, Mapping):
        raise RecordedRunError(f"{path}: {name} has an extra_info that is no mapping: {facts!r}")
    return Row(str(name), samples_us, facts)


def _refuse_twice(path: Path, names: list[str], what: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        others = f", and {len(twice) - MOST_NAMES} more" if len(twice) > MOST_NAMES else ""
        raise RecordedRunError(f"{path}: {what} is there twice: {'; '.join(twice[:MOST_NAMES])}{others}")
