"""What is made of CUPTI's records, and that nothing is made up where there are none."""

import enum
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.timing.cupti import Activity, _cupti, busy_us, record, span_us


def activities(*times_ns: tuple[int, int]) -> list[Activity]:
    return [Activity(f"kernel {number}", start, end) for number, (start, end) in enumerate(times_ns)]


@pytest.mark.parametrize(
    ("times_ns", "span", "busy"),
    [
        ([], 0.0, 0.0),
        ([(1000, 4000)], 3.0, 3.0),
        ([(1000, 2000), (5000, 7000)], 6.0, 3.0),  # a gap of 3 µs
        ([(1000, 4000), (2000, 6000)], 5.0, 5.0),  # overlap counts once
        ([(1000, 9000), (2000, 3000), (8500, 9500)], 8.5, 8.5),  # one inside another
        ([(5000, 7000), (1000, 2000)], 6.0, 3.0),  # in any order
    ],
)
def test_span_counts_gaps_and_busy_does_not(times_ns: list[tuple[int, int]], span: float, busy: float) -> None:
    assert span_us(activities(*times_ns)) == span
    assert busy_us(activities(*times_ns)) == busy


class Kinds(enum.IntEnum):
    RUNTIME = 1
    DRIVER = 2
    CONCURRENT_KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    EXTERNAL_CORRELATION = 6


class SimulatedCupti:
    """CUPTI as `record` uses it: `launch` makes a record, delivered when the buffers are flushed."""

    ActivityKind = Kinds
    ExternalCorrelationKind = SimpleNamespace(CUSTOM0=0)
    cuptiError = OSError  # noqa: N815 (CUPTI's name)

    def __init__(self) -> None:
        self.pending: list[Any] = []
        self.pushed: int | None = None
        self.enabled: set[int] = set()
        self.finalized = False

    def launch(self, kind: Kinds, start: int, end: int, name: str = "a kernel") -> None:
        if (
            not {kind, Kinds.RUNTIME, Kinds.DRIVER} <= self.enabled
        ):  # a launch through either API; without, no correlation
            return
        correlation = len(self.pending) + 100
        if self.pushed is not None and Kinds.EXTERNAL_CORRELATION in self.enabled:
            external = SimpleNamespace(
                kind=Kinds.EXTERNAL_CORRELATION, correlation_id=correlation, external_id=self.pushed
            )
            self.pending.append(external)
        self.pending.append(SimpleNamespace(kind=kind, correlation_id=correlation, start=start, end=end, name=name))

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        assert requested() == (8 * 2**20, 0)  # a buffer's size as in CUPTI's samples; as many records as fit
        self.completed = completed

    def activity_enable(self, kind: int) -> None:
        self.enabled.add(kind)

    def activity_push_external_correlation_id(self, kind: int, number: int) -> None:
        self.pushed = number

    def activity_pop_external_correlation_id(self, kind: int) -> None:
        self.pushed = None

    def activity_flush_all(self, flag: int) -> None:
        self.completed(self.pending)

    def finalize(self) -> None:
        self.enabled.clear()
        self.finalized = True


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedCupti:
    cupti = SimulatedCupti()
    monkeypatch.setattr("lab.timing.cupti._cupti", lambda: cupti)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return cupti


def test_each_run_has_its_own_activities_and_a_flush_belongs_to_none(simulated: SimulatedCupti) -> None:
    def flush() -> None:
        simulated.launch(Kinds.CONCURRENT_KERNEL, 0, 900, "flush")

    def run() -> None:
        simulated.launch(Kinds.CONCURRENT_KERNEL, 2000, 3000, "second")
        simulated.launch(Kinds.MEMSET, 1000, 1500)

    runs = record([(flush, run), (flush, run)])
    expected = [Activity("MEMSET", 1000, 1500), Activity("second", 2000, 3000)]
    assert runs == [expected, expected]
    assert simulated.finalized
    assert not simulated.enabled


def test_a_run_without_activities_is_an_error(simulated: SimulatedCupti) -> None:
    def run() -> None:
        simulated.launch(Kinds.CONCURRENT_KERNEL, 0, 10)

    with pytest.raises(RuntimeError, match="nothing run on the GPU in run 1 of 2"):
        record([(None, run), (None, lambda: None)])
    assert simulated.finalized


def test_cupti_is_let_go_when_a_run_fails(simulated: SimulatedCupti) -> None:
    def broken() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError):
        record([(None, broken)])
    assert simulated.finalized
    assert not simulated.enabled


@pytest.mark.parametrize(
    ("version", "message"),
    [("13.0.1", r"pip install '.\[cupti\]'.*graph clock"), ("12.8.0", r"13 or later .* this is 12\.8\.0")],
)
def test_without_cupti_python_the_error_says_what_to_install(
    version: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    monkeypatch.setattr("importlib.metadata.version", lambda package: version)
    with pytest.raises(RuntimeError, match=message):
        record([(None, lambda: None)])


def test_the_oldest_cupti_python_is_taken(monkeypatch: pytest.MonkeyPatch, simulated: SimulatedCupti) -> None:
    monkeypatch.setattr("lab.timing.cupti._cupti", _cupti)
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=simulated, __path__=[]))
    monkeypatch.setitem(sys.modules, "cupti.cupti", simulated)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "13.0.0")
    assert len(record([(None, lambda: simulated.launch(Kinds.MEMCPY, 1, 2))])) == 1
