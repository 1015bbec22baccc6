"""What needs no GPU of the measuring: the clock, the samples' checks, how many copies take turns, in what order."""

from collections import Counter

import pytest

from lab.timing import L2, Clock, DeviceClock, GpuTime, Method
from lab.timing.cupti import Activity
from lab.timing.device_state import DeviceState
from lab.timing.gpu_time import MOST_COPIES, Staged, _from_records, _from_samples, _shuffled_rounds, buffer_copies

WARM = Method(Clock.GRAPH, L2.WARM)
ROTATED = Method(Clock.GRAPH, L2.COLD_ROTATION)
MEBIBYTE = 2**20


def test_the_clock_moves_only_when_told() -> None:
    clock = DeviceClock("some method")
    assert clock() == clock() == 0.0
    clock.advance(2.5e-6)
    assert clock() == 2.5e-6
    assert "some method" in repr(clock)


def test_median_and_spread_of_samples() -> None:
    time = GpuTime((3.0, 1.0, 2.0, 5.0, 4.0), WARM, launches=1)
    assert time.median_us == 3.0
    assert time.iqr_us == 2.0
    assert GpuTime((3.0,), WARM, launches=1).iqr_us == 0.0


@pytest.mark.parametrize("samples", [(), (1.0, 0.0), (1.0, -1.0), (float("nan"), 1.0), (float("inf"),)])
def test_samples_that_are_no_times_are_refused(samples: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="nothing was timed"):
        GpuTime(samples, WARM, launches=1)


def test_a_call_without_launches_is_refused() -> None:
    with pytest.raises(ValueError, match="0 launches"):
        GpuTime((1.0,), WARM, launches=0)


@pytest.mark.parametrize(
    ("bytes_moved", "copies"), [(500 * MEBIBYTE, 1), (120 * MEBIBYTE, 1), (119 * MEBIBYTE, 2), (30 * MEBIBYTE, 4)]
)
def test_a_byte_comes_round_only_after_twice_the_cache_was_read(bytes_moved: int, copies: int) -> None:
    assert buffer_copies(bytes_moved, ROTATED, l2_bytes=60 * MEBIBYTE) == copies
    assert buffer_copies(bytes_moved, WARM, l2_bytes=60 * MEBIBYTE) == 1


def test_work_too_small_for_rotation_is_refused_with_a_way_out() -> None:
    smallest = 120 * MEBIBYTE // MOST_COPIES
    assert buffer_copies(smallest, ROTATED, 60 * MEBIBYTE) == MOST_COPIES
    with pytest.raises(ValueError, match=f"more than {MOST_COPIES}: take the CUPTI clock"):
        buffer_copies(smallest - 1, ROTATED, 60 * MEBIBYTE)


def test_rounds_are_complete_and_not_always_in_one_order() -> None:
    order = _shuffled_rounds(["a", "b", "c"], 20)
    rounds = [tuple(order[start : start + 3]) for start in range(0, 60, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 3
    assert Counter(order) == {"a": 20, "b": 20, "c": 20}


def staged(calls: int, launches: int) -> Staged:
    return Staged([], [], run=lambda: None, before=None, number=calls, launches=launches)


def test_a_replays_time_is_shared_among_its_calls() -> None:
    time = _from_samples([50.0, 60.0], staged(calls=10, launches=2), WARM, DeviceState())
    assert time.samples_us == (5.0, 6.0)
    assert (time.calls_per_sample, time.launches) == (10, 2)


def test_records_of_a_replay_are_shared_among_its_calls() -> None:
    replay = [Activity("split", 0, 3000), Activity("combine", 4000, 5000)]
    replay += [Activity("split", 6000, 9000), Activity("combine", 10_000, 11_000)]
    time = _from_records([replay, replay], staged(calls=2, launches=2), WARM, DeviceState())
    assert time.samples_us == (5.5, 5.5)
    assert time.busy_us == 4.0
    assert time.kernels == ("split", "combine")


def test_a_lost_record_is_an_error_and_not_a_shorter_time() -> None:
    replay = [Activity("split", 0, 3000), Activity("combine", 4000, 5000)]
    with pytest.raises(RuntimeError, match=r"saw \[1, 2\] activities .* graph of 2: it lost some"):
        _from_records([replay, replay[:1]], staged(calls=1, launches=2), WARM, DeviceState())
