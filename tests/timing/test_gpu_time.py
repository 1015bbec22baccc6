"""What needs no GPU of the measuring: the clock, the samples' checks, how many copies take turns, in what order."""

import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.timing import L2, Clock, GpuTime, Method, cupti
from lab.timing.cupti import Activity
from lab.timing.device_state import DeviceState
from lab.timing.gpu_time import BufferContents, _from_records, _recorded, _shuffled_rounds
from lab.timing.sampling import RefusedTimeError, Sample, check_clocks, refuse_foreign_threads
from lab.timing.staging import MOST_COPIES, Staged, buffer_copies
from lab.timing.work import GpuWork
from lab.workloads.inputs.redraw import SHORTER_EVERY, SeededRedraw, Seeds

WARM = Method(Clock.GRAPH, L2.WARM)
ROTATED = Method(Clock.GRAPH, L2.COLD_ROTATION)
MEBIBYTE = 2**20


@pytest.mark.parametrize("samples", [(), (1.0, 0.0), (1.0, -1.0), (float("nan"), 1.0), (float("inf"),)])
def test_samples_that_are_no_times_are_refused(samples: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="nothing was timed"):
        GpuTime(samples, WARM, launches=1)
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
    return Staged([], [], run=lambda: None, flush=None, number=calls, launches=launches)


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


def test_the_device_is_read_while_it_works_on_a_tenth_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti, "record", lambda steps: [run() for _, run in steps])
    state, done = DeviceState(), []
    state.read = lambda device: done.append("read")  # type: ignore[method-assign]
    _recorded([(None, lambda: done.append("run"))] * 40, 40, state, 0)
    assert done == [*["run", "read"], *["run"] * 3] * 10


def test_two_clocks_that_disagree_refuse_the_time() -> None:
    """By 3 % and the slack together, of the medians; a sample without the host's time says nothing."""
    check_clocks([Sample(1000.0, 1056.0), Sample(1000.0, 900.0), Sample(1000.0, 1056.5), Sample(1.0, None)], 25.0)
    for samples in ([Sample(1000.0, 1060.0)], [Sample(1060.0, 1000.0)], [Sample(100.0, 1000.0), Sample(100.0, 900.0)]):
        with pytest.raises(RefusedTimeError, match="two waits for the whole GPU"):
            check_clocks(samples, 25.0)


class Noted(SeededRedraw):
    """A redraw that notes what is drawn anew."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []
        self.calls: list[tuple[int, int]] = []

    def inputs(self, number: int) -> dict[str, Any]:
        return {"number": number}

    def write_tokens(self, arguments: Mapping[str, Any], seed: int) -> None:
        self.tokens.append((arguments["number"], seed))

    def write_call(self, arguments: Mapping[str, Any], seeds: Seeds) -> None:
        self.calls.append((arguments["number"], seeds.call))

    def results(self, arguments: Mapping[str, Any], seeds: Any, *, whole: bool) -> Any:
        raise AssertionError

    def check_of(self, seeds: Any, *, whole: bool) -> Any:
        raise AssertionError


def test_every_query_is_new_in_each_turn_and_all_keys_before_long() -> None:
    redraw = Noted()
    buffers = [GpuWork(dict, {"number": number}, 2**26, redraw=redraw) for number in range(10)]
    contents = BufferContents(buffers, seed=7)
    for turn in range(60):
        contents.renew_tokens(turn)
        contents.renew_tokens(turn)  # another work's, over the same buffers
        contents.renew_calls(turn, buffers)
        now = {number: contents.seeds(turn, number) for number in range(10)}
        assert dict(redraw.calls[-10:]) == {number: each.call for number, each in now.items()}
        assert {number: [seed for of, seed in redraw.tokens if of == number][-1] for number in now} == {
            number: each.tokens for number, each in now.items()
        }
        assert len({each.call % SHORTER_EVERY for each in now.values()}) == 1  # lengths of a turn are short or not
    assert len({seed for _, seed in redraw.calls}) == 60 * 10
    first, later = redraw.tokens[:10], redraw.tokens[10:]
    assert sorted(number for number, _ in first) == list(range(10))
    assert len(later) == 8 * 59  # as many as RENEWED_BYTES allow
    assert {number for number, _ in later} == set(range(10))
    shorter = [contents.seeds(turn, 0).call % SHORTER_EVERY == 0 for turn in range(400)]
    assert 20 < sum(shorter) < 100


def test_contents_of_another_seed_are_others() -> None:
    buffers = [GpuWork(dict, {"number": 0}, 1, redraw=Noted())]
    one, same, other = (BufferContents(buffers, seed).seeds(3, 0) for seed in (1, 1, 2))
    assert one == same
    assert not set(one) & set(other)


def test_a_thread_of_a_kernels_is_refused(tmp_path: Path) -> None:
    """One of an installed package's is not: it waits in Python's own code."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        refuse_foreign_threads()
    source = tmp_path / "kernel.py"
    source.write_text("def run(begun, over):\n    begun.set()\n    over.wait()\n")
    begun, over, names = threading.Event(), threading.Event(), dict[str, Any]()
    exec(compile(source.read_text(), str(source), "exec"), names)
    thread = threading.Thread(target=names["run"], args=(begun, over))
    thread.start()
    begun.wait()
    try:
        with pytest.raises(RefusedTimeError, match=r"kernel\.py while kernels are timed"):
            refuse_foreign_threads()
    finally:
        over.set()
        thread.join()
    refuse_foreign_threads()
