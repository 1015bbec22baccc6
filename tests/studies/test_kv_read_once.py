"""The kernels that read K/V once: which points are chosen, floors by hand, judged variants, and host times."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lab import references
from lab.calls.problem import AttentionCall
from lab.kernels import trtllm
from lab.workloads.forward_case import ForwardCase
from lab.workloads.scenarios import scenario
from lab.workloads.traces import TracedRequest, snapshot
from studies import kv_read_once
from studies.kv_read_once import (
    E4M3_CACHE,
    FLASHINFER,
    GROUPS,
    HOST,
    HOST_PREPARED,
    HOST_TARGETS,
    PORTABLE,
    floor_bytes,
    measure_host,
    points_of,
)
from studies.passes import PORTABLE_MODULE
from studies.targets import Figure, Target, target_rows, target_text
from studies.variants import Point, PointRows, Variant
from tests.devices import IN_INTERPRETER
from tests.studies.conftest import Command
from tests.studies.simulated import small_kv

TRACE = [TracedRequest(0.0, 1000 + 10 * number, 1000) for number in range(64)]
SMALL = scenario("target_verify/tiny/2q2s70")


def of_group(name: str) -> list[Point]:
    return points_of([name], TRACE)


def test_the_floor_of_a_window_has_whole_pages() -> None:
    """127 keys before the last of 4,080: pages 61 to 63, of 64 keys. 8 K/V heads and 64 query heads of 64 elements."""
    assert floor_bytes(scenario("decode/gpt-oss-120b/1q1s4080/window")) == 3 * 64 * 8 * 2 * 128 + 64 * 2 * 128


def test_the_traced_lengths_are_the_given_traces() -> None:
    for point, q_len in zip(of_group("trace"), (1, 2, 4, 8, 16), strict=True):
        assert {each.case.kv_lens for each in point.variants} == {tuple(kv + q_len for kv in snapshot(TRACE, 64))}


def test_only_chooses_groups_and_points() -> None:
    every = points_of([], TRACE)
    assert list(dict.fromkeys(point.facts["group"] for point in every)) == list(GROUPS)
    assert len({point.name for point in every}) == len(every)
    name = "extend/qwen3-32b/q4k/tp2"
    assert [(point.facts["group"], point.name) for point in points_of([name], TRACE)] == [("extend", name)]
    assert [point.facts["group"] for point in points_of(["extend", "1x4096"], TRACE)] == [
        *["1x4096"] * 5,
        *["extend"] * 2,
    ]
    with pytest.raises(ValueError, match=r"'64x1'; groups: 64x4096, 16x32768"):
        points_of(["64x1"], TRACE)


def runs_as(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """What FlashInfer's decode call does, with nothing prepared."""
    monkeypatch.delattr(trtllm, "prepare_trtllm_batch_decode_with_kv_cache")
    monkeypatch.setattr(trtllm, AttentionCall.DECODE.value, run)


def right_at(*right_calls: int) -> Callable[..., Any]:
    """The decode call, whose logits are thrice as large but at these calls, counted from 1."""
    made: list[int] = []

    def run(**arguments: Any) -> None:
        made.append(1)
        scale = arguments["bmm1_scale"] * (1 if len(made) in right_calls else 3)
        references.trtllm_batch_decode_with_kv_cache(**arguments | {"bmm1_scale": scale})

    return run


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("right_calls", [(1, 2), (3,)], ids=["wrong after", "wrong before"])
def test_a_wrong_variant_has_no_host_time(right_calls: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call tells who declines, the second is judged before the times, the third after them."""
    runs_as(monkeypatch, right_at(*right_calls))
    outcome = measure_host(small_kv(SMALL))
    assert [row["arm"] for row in outcome.rows] == [PORTABLE]
    (wrong,) = outcome.wrong
    assert (wrong["arm"], wrong["point"]) == (FLASHINFER, "2q2s70")
    assert "of 24 output vectors are wrong" in wrong["reason"]


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu")
def test_host_times_are_of_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation that can prepare a call makes its whole one."""
    eager: list[dict[str, Any]] = []

    def run(**arguments: Any) -> None:
        eager.append(arguments)
        references.trtllm_batch_decode_with_kv_cache(**arguments)

    runs_as(monkeypatch, run)
    monkeypatch.setattr(
        trtllm, "prepare_trtllm_batch_decode_with_kv_cache", lambda **_: pytest.fail("prepared"), raising=False
    )
    outcome = measure_host(small_kv(SMALL, *HOST_TARGETS[HOST]))
    assert (outcome.declined, outcome.wrong) == ([], [])
    portable, other = outcome.rows
    assert (portable["arm"], portable["host_us"], portable["iqr_us"]) == (PORTABLE, 20.5, 0.5)
    assert (other["arm"], other["host_us"], other["targets"]) == (FLASHINFER, 30.5, [])
    assert target_text(portable) == "80 µs of host time: passed by 59.5"
    assert len(eager) == 3  # the first, the judged one, the timed one
    assert {arguments["q_len_per_req"] for arguments in eager} == {2}


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu")
def test_host_times_of_prepared_calls_are_of_what_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []

    def prepare(**arguments: Any) -> Callable[[], Any]:
        prepared.append(arguments["q_len_per_req"])
        return partial(references.trtllm_batch_decode_with_kv_cache, **arguments)

    monkeypatch.setattr(trtllm, AttentionCall.DECODE.value, lambda **_: pytest.fail("called whole"))
    monkeypatch.setattr(trtllm, "prepare_trtllm_batch_decode_with_kv_cache", prepare)
    outcome = measure_host(small_kv(SMALL, *HOST_TARGETS[HOST_PREPARED], group=HOST_PREPARED))
    assert (outcome.declined, outcome.wrong) == ([], [])
    assert [row["host_us"] for row in outcome.rows] == [20.5, 30.5]
    assert prepared == [2, 2]  # once to see whether it declines, once for the time


def test_the_command_line_records_host_times_apart(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def host(point: Point) -> PointRows:
        targets = target_rows(point.variants[0].targets, {Figure.HOST: 30.0}, FLASHINFER)
        return PointRows([point.row | {"arm": PORTABLE, "host_us": 30.0, "iqr_us": 1.0, "targets": targets}])

    monkeypatch.setattr(kv_read_once, "measure_host", host)
    done = command("kv-read-once --only host,host_prepared")
    assert (done.status, done.recorded["rows"]) == (0, [])
    assert [row["point"] for row in done.recorded["host"]] == [
        point.name for group in (HOST, HOST_PREPARED) for point in of_group(group)
    ]
    assert done.recorded["targets"] == {"passed": 3, "missed": 3, "not_compared": 0}
    for words in ("30.00", "1.00", "25 µs of host time: missed by 5", "80 µs of host time: passed by 50"):
        assert words in done.printed


def test_the_command_line_leaves_flashinfer_out(command: Command) -> None:
    def wrong(point: Point) -> PointRows:
        assert {variant.module for variant in point.variants} == {PORTABLE_MODULE}
        names = [variant.name for variant in point.variants]
        return PointRows([], [], [{"point": point.name, "arm": names, "reason": "3 vectors"}])

    done = command("kv-read-once --only windows,e4m3 --portable-only", wrong)
    assert done.status == 1
    assert [row["arm"] for row in done.recorded["wrong"]] == [[E4M3_CACHE, PORTABLE]] * 2 + [[PORTABLE]] * 3


def again(case: ForwardCase, target: Target, group: str = "small") -> Point:
    both = (Variant(PORTABLE, case, PORTABLE_MODULE, (target,)), Variant("again", case, PORTABLE_MODULE))
    return Point("again", both, {"group": group}, "again")


@pytest.mark.gpu
@pytest.mark.parametrize("group", HOST_TARGETS)
def test_host_times_are_measured_on_a_gpu(group: str) -> None:
    host = measure_host(again(scenario("target_verify/qwen3-32b/4q4s1k/tp2"), *HOST_TARGETS[group], group))
    assert (host.declined, host.wrong) == ([], [])
    assert all(row["host_us"] > 0 for row in host.rows)
