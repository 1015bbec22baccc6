"""Host time, by a clock that the calls themselves move."""

from collections.abc import Callable

import pytest
import torch

from lab.timing.host_time import BATCHES, HostTime, host_time


class Clock:
    """Nanoseconds that pass only when something says so."""

    def __init__(self) -> None:
        self.now_ns = 10**18  # beyond what a float counts in nanoseconds
        self.log: list[str] = []

    def __call__(self) -> int:
        return self.now_ns

    def taking(self, name: str, *durations_ns: int) -> Callable[[], None]:
        """A call that takes these times in turn, the last of them from then on."""
        left = list(durations_ns)

        def call() -> None:
            self.now_ns += left.pop(0) if len(left) > 1 else left[0]
            self.log.append(name)

        return call


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_sample_is_the_mean_of_a_batch_in_microseconds(clock: Clock) -> None:
    """The first call is not counted."""
    call = clock.taking("a", 10**9, 1000, 3000, 5000, 7000)
    assert host_time({"a": call}, batches=2, calls_per_batch=2, timer=clock)["a"].samples_us == (2.0, 6.0)


def test_calls_take_turns(clock: Clock) -> None:
    calls = {name: clock.taking(name, 1000) for name in "abc"}
    times = host_time(calls, batches=2, calls_per_batch=2, timer=clock)
    assert "".join(clock.log) == "abc" + "aabbcc" * 2
    assert list(times) == ["a", "b", "c"]


def test_the_gpu_is_waited_for_outside_the_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.taking("|", 10**9))
    times = host_time({name: clock.taking(name, 1500) for name in "ab"}, batches=2, calls_per_batch=1, timer=clock)
    assert "".join(clock.log) == "ab" + "|a|b" * 2 + "|"
    assert {time.samples_us for time in times.values()} == {(1.5, 1.5)}


def test_a_gpu_that_nobody_uses_is_not_woken(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("woken"))
    host_time({"a": clock.taking("a", 1)}, batches=1, calls_per_batch=1, timer=clock)


def test_the_median() -> None:
    assert HostTime((9.0, 1.0, 2.0)).median_us == 2.0
    assert HostTime((1.23456,)).facts() == {"host_us": 1.23, "host_samples_us": [1.235]}
    assert len(host_time({"a": lambda: None})["a"].samples_us) == BATCHES


@pytest.mark.parametrize("options", [{"batches": 0}, {"calls_per_batch": 0}])
def test_nothing_to_measure_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"batches=.* and calls_per_batch=.* must be at least 1"):
        host_time({"a": lambda: None}, **options)
