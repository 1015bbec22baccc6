"""The table of the kernels that read K/V once: its points, targets, floors, judged variants and command line on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.kernels import trtllm
from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing import Ceilings, measure_ceilings
from lab.timing.method import L2, Clock, Method
from lab.workloads.forward_case import ForwardCase
from lab.workloads.scenarios import scenario
from lab.workloads.traces import TracedRequest, own_trace, snapshot
from studies import kv_read_once, variants
from studies.kv_read_once import (
    E4M3_CACHE,
    FLASHINFER,
    GROUPS,
    HOST,
    HOST_COLUMNS,
    HOST_PREPARED,
    HOST_TARGETS,
    PORTABLE,
    facts_of,
    floor_bytes,
    measure_host,
    points_of,
)
from studies.passes import FLASHINFER_MODULE, PORTABLE_MODULE, gpu_works, works_of
from studies.recording import table_of
from studies.targets import TIME_COLUMNS, Figure, Target, score, target_rows, target_text
from studies.variants import Point, PointFailedError, PointRows, TimingPlan, Variant, measure_point
from tests.devices import IN_INTERPRETER
from tests.studies.conftest import Command
from tests.studies.simulated import CEILINGS, SLOWER, hold_right

CPU = torch.device("cpu")
METHOD = Method(Clock.GRAPH, L2.COLD_ROTATION)
TRACE = [TracedRequest(0.0, 1000 + 10 * number, 1000) for number in range(64)]
SPEED, BANDWIDTH = (Target(figure, bound) for figure, bound in ((Figure.SPEED, 1.05), (Figure.BANDWIDTH, 30.0)))
SMALL = scenario("target_verify/tiny/2q2s70")
REFERENCE_MODULE = "lab.references"


def small_point(*targets: Target, case: ForwardCase = SMALL, group: str = "small") -> Point:
    both = (
        Variant(PORTABLE, case, PORTABLE_MODULE, targets),
        Variant(FLASHINFER, case, FLASHINFER_MODULE, needs_flashinfer=True),
    )
    return Point("2q2s70", both, {"group": group}, FLASHINFER)


def measure(point: Point, samples: int = 3, ceilings: Ceilings = SLOWER) -> PointRows:
    """GPU times against a slow GPU's ceilings."""
    return measure_point(point, gpu_works, TimingPlan(ceilings, METHOD, samples), facts_of)


def of_group(name: str) -> list[Point]:
    return points_of([name], TRACE)


def bounds(point: Point, figure: Figure) -> list[float]:
    return [target.bound for target in point.variants[0].targets if target.figure is figure]


@pytest.mark.parametrize(
    ("group", "requests", "keys", "speeds", "shares"),
    [
        ("64x4096", 64, 4096, [1.02, 1.02, 1.02, 1.75, 2.8], [92, 92, 92, 90, 80]),
        ("16x32768", 16, 32768, [1.02, 1.02, 1.02, 1.75, 2.8], [92, 92, 92, 90, 80]),
        ("1x81920", 1, 81920, [1.1, 1.1, 1.1, 1.9, 2.8], []),
        ("1x4096", 1, 4096, [1.1, 1.1, 1.1, 1.9, 2.8], []),
        ("trace", 64, None, [1.1, 1.1, 1.1, 1.75, 2.8], []),
    ],
)
def test_the_table_and_its_targets(
    group: str, requests: int, keys: int | None, speeds: list[float], shares: list[float]
) -> None:
    points = of_group(group)
    assert [sum(bounds(point, Figure.SPEED), 0.0) for point in points] == speeds
    assert [bound for point in points for bound in bounds(point, Figure.BANDWIDTH)] == shares
    for point, q_len in zip(points, (1, 2, 4, 8, 16), strict=True):
        assert [(variant.name, bool(variant.targets)) for variant in point.variants] == [
            (PORTABLE, True),
            (FLASHINFER, False),
        ]
        assert point.baseline == FLASHINFER
        (case,) = {variant.case for variant in point.variants}
        assert case.q_lens == (q_len,) * requests
        assert case.mode is (ForwardMode.DECODE if q_len == 1 else ForwardMode.TARGET_VERIFY)
        traced = tuple(length + q_len for length in snapshot(TRACE, 64))
        assert case.kv_lens == (traced if keys is None else (keys,) * requests)
        assert (case.model.num_qo_heads, case.model.num_kv_heads, case.model.head_dim) == (32, 4, 128)
        assert (case.page_size, case.dtype, case.kv_dtype) == (64, torch.bfloat16, torch.bfloat16)


def test_the_traced_lengths_are_the_given_traces() -> None:
    assert of_group("trace")[0].variants[0].case != points_of(["trace"], own_trace())[0].variants[0].case


def test_an_e4m3_cache_is_compared_with_the_kernels_own_bf16() -> None:
    for point, q_len in zip(of_group("e4m3"), (1, 4), strict=True):
        halved, whole = point.variants
        assert (halved.name, whole.name, point.baseline) == (E4M3_CACHE, PORTABLE, PORTABLE)
        assert {variant.module for variant in point.variants} == {PORTABLE_MODULE}
        assert (halved.case.kv_dtype, whole.case.kv_dtype) == (torch.float8_e4m3fn, torch.bfloat16)
        assert (len(whole.case.q_lens), whole.case.kv_lens[0], whole.case.q_lens[0]) == (64, 8192, q_len)
        assert bounds(point, Figure.SPEED) == [1.6]


def test_groups_and_head_dimensions_vary_one_by_one() -> None:
    models = [point.variants[0].case.model for point in of_group("heads")]
    assert [(model.group, model.head_dim) for model in models[::2]] == [
        (1, 128),
        (4, 128),
        (5, 128),
        (8, 128),
        (16, 128),
        (8, 64),
        (8, 256),
    ]
    assert {model.num_kv_heads for model in models} == {4}
    assert all(model.softmax_scale == model.head_dim**-0.5 for model in models)
    assert [point.variants[0].case.q_lens[0] for point in of_group("heads")] == [1, 4] * 7


def test_windows_extends_and_unequal_lengths() -> None:
    window = of_group("windows")[0].variants[0].case
    assert (window.window_left, window.kv_lens) == (127, (4096,) * 64)
    long_prefix, prefill = of_group("extend")
    assert [(point.variants[0].case.q_lens, point.variants[0].case.kv_lens) for point in (long_prefix, prefill)] == [
        ((512,), (32768,)),
        ((4096,), (4096,)),
    ]
    assert {point.variants[0].case.mode for point in (long_prefix, prefill)} == {ForwardMode.EXTEND}
    assert [bounds(point, Figure.SPEED) for point in (long_prefix, prefill)] == [[1.0], [0.7]]
    assert [sorted(point.variants[0].case.kv_lens) for point in of_group("unequal")] == [[512] * 63 + [81920]] * 3
    assert {HOST: (Target(Figure.HOST, 80.0),), HOST_PREPARED: (Target(Figure.HOST, 25.0),)} == HOST_TARGETS
    for group, targets in HOST_TARGETS.items():
        assert all(point.variants[0].targets == targets for point in of_group(group))


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


def test_without_flashinfer_the_portable_variants_remain() -> None:
    every = points_of([], TRACE, portable_only=True)
    assert {variant.module for point in every for variant in point.variants} == {PORTABLE_MODULE}
    assert [variant.name for variant in points_of(["e4m3"], TRACE, portable_only=True)[0].variants] == [
        E4M3_CACHE,
        PORTABLE,
    ]


def test_the_method_is_a_replayed_graph_with_a_cold_l2() -> None:
    assert Method(Clock.GRAPH, L2.COLD_ROTATION) == variants.COLD == TimingPlan(SLOWER).method


def test_floors_by_hand() -> None:
    plain = of_group("64x4096")[0].variants[0].case
    # 64 · 4,096 keys of 4 heads, K and V of 256 bytes, and 64 rows of 32 heads, query and output of 256 bytes.
    assert floor_bytes(plain) == plain.bytes_moved == 536_870_912 + 1_048_576
    decode, verify, _ = (point.variants[0].case for point in of_group("windows"))
    # Keys 3,968 to 4,095 are two pages of 8 heads, K and V of 128 bytes; the row is 64 heads, query and output of 128 bytes.
    assert floor_bytes(decode) == 64 * (2 * 64 * 8 * 2 * 128 + 64 * 2 * 128)
    # Four rows see keys from 3,965 on, of which 61 of their page's 64 are before it: three pages.
    assert floor_bytes(verify) == 64 * (3 * 64 * 8 * 2 * 128 + 4 * 64 * 2 * 128)
    assert verify.bytes_moved == 64 * (131 * 8 * 2 * 128 + 4 * 64 * 2 * 128)
    behind_a_page = scenario("decode/gpt-oss-120b/1q1s4080/window")  # 127 keys before the last of 4,080: page 61 on
    assert floor_bytes(behind_a_page) == 3 * 64 * 8 * 2 * 128 + 64 * 2 * 128


def runs_as(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """What FlashInfer's decode call does, with nothing prepared."""
    monkeypatch.delattr(trtllm, "prepare_trtllm_batch_decode_with_kv_cache")
    monkeypatch.setattr(trtllm, AttentionCall.DECODE.value, run)


@IN_INTERPRETER
def test_every_variant_is_right_in_an_output_of_its_own() -> None:
    e4m3 = replace(SMALL, kv_dtype=torch.float8_e4m3fn)
    three = (
        Variant(E4M3_CACHE, e4m3, PORTABLE_MODULE),
        Variant(PORTABLE, SMALL, PORTABLE_MODULE),
        Variant("reference", SMALL, REFERENCE_MODULE),
    )
    works = works_of(three, CPU)
    assert list(works) == [E4M3_CACHE, PORTABLE, "reference"]
    for variant, work in zip(three, works.values(), strict=True):
        assert work.arguments["cache"].storage.dtype == variant.case.kv_dtype
        assert work.bytes_moved == variant.case.bytes_moved
        hold_right(work)
    assert works[PORTABLE].redraw is works["reference"].redraw is not works[E4M3_CACHE].redraw
    for name, count in (("query", 2), ("out", 3)):
        assert len({work.arguments[name].data_ptr() for work in works.values()}) == count
    assert len({work.arguments["cache"].storage.data_ptr() for work in works.values()}) == 2


@IN_INTERPRETER
def test_heads_of_no_model_are_run_and_judged() -> None:
    (heads,) = {point.variants[0].case.heads for point in of_group("heads") if "heads-20-" in point.name}
    case = kv_read_once.HeadsCase(ForwardMode.DECODE, heads.name, (70,), (1,), heads=heads)
    work = works_of([Variant(PORTABLE, case, PORTABLE_MODULE)], CPU)[PORTABLE]
    assert work.arguments["query"].shape == (1, 20, 128)
    hold_right(work)


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu")
def test_a_point_makes_a_row_per_variant_with_floor_speed_and_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_as(monkeypatch, references.trtllm_batch_decode_with_kv_cache)
    outcome = measure(small_point(SPEED, BANDWIDTH))
    assert (outcome.declined, outcome.wrong) == ([], [])
    assert {row["method"] for row in outcome.rows} == {str(METHOD)}
    portable, other = outcome.rows
    assert [row["arm"] for row in outcome.rows] == [PORTABLE, FLASHINFER]
    # 140 keys of 2 heads, K and V of 128 bytes; 4 rows of 6 heads, query and output of 128 bytes.
    for row in outcome.rows:
        assert (row["group"], row["point"], row["mode"], row["q_len"]) == ("small", "2q2s70", "target_verify", 2)
        assert (row["num_qo_heads"], row["num_kv_heads"], row["head_dim"], row["longest_kv_len"]) == (6, 2, 64, 70)
        assert row["floor_bytes"] == row["bytes_moved"] == 140 * 2 * 256 + 4 * 6 * 256
        # Rows of a request see 69 and 70 keys: 278 pairs of two requests.
        assert row["operations"] == 4 * 64 * 6 * 278
        assert (row["floor_us"], row["floor_bound"]) == (pytest.approx(10.17, abs=0.01), "matrix")
    assert (portable["kernel"], portable["median_us"], portable["iqr_us"]) == ("portable", 10.0, 0.0)
    assert (portable["speed_of_baseline"], other["speed_of_baseline"]) == (1.1, 1.0)
    assert other["targets"] == []
    speed, bandwidth = portable["targets"]
    assert speed == {
        "figure": "x the speed of flashinfer",
        "target": 1.05,
        "reached": 1.1,
        "margin": 0.05,
        "passed": True,
    }
    assert (bandwidth["reached"], bandwidth["passed"]) == (portable["bandwidth_percent"], True)
    assert bandwidth["margin"] == pytest.approx(100 * 77824 / 8e4 - 30)


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu")
def test_the_floor_of_a_window_is_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_as(monkeypatch, references.trtllm_batch_decode_with_kv_cache)
    case = scenario("decode/tiny/1q1s70/window")  # keys 46 to 69 of two pages
    for row in measure(small_point(BANDWIDTH, case=case), samples=1).rows:
        assert (row["bytes_moved"], row["floor_bytes"]) == (24 * 512 + 6 * 256, 128 * 512 + 6 * 256)
        assert row["floor_us"] == pytest.approx((128 * 512 + 6 * 256) / 8000, abs=1e-3)
        assert [target["reached"] for target in row["targets"]] == [row["bandwidth_percent"]] * len(row["targets"])


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu")
def test_a_declined_variant_is_listed_and_the_other_is_measured() -> None:
    outcome = measure(small_point(SPEED, BANDWIDTH))  # FlashInfer's adapter declines a CPU
    (row,), (declined,) = outcome.rows, outcome.declined
    assert (declined["arm"], declined["point"], declined["group"]) == (FLASHINFER, "2q2s70", "small")
    assert "need a CUDA GPU" in declined["reason"]
    assert row["speed_of_baseline"] is None
    assert [target["passed"] for target in row["targets"]] == [None, True]
    assert target_text(row).startswith("1.05 x the speed of flashinfer: nothing to compare with; 30 % of the copy")


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("error", [ModuleNotFoundError, FileNotFoundError, RuntimeError, TypeError, ValueError])
def test_a_missing_module_of_flashinfers_is_a_row(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**arguments: Any) -> Any:
        raise error("no ninja")

    runs_as(monkeypatch, missing)
    outcome = measure(small_point(), samples=1)
    assert [row["arm"] for row in outcome.rows] == [PORTABLE]
    assert [row["reason"] for row in outcome.declined] == [f"FlashInfer cannot run it here: {error.__name__}: no ninja"]


@pytest.mark.usefixtures("on_cpu")
def test_an_error_that_stays_on_the_device_is_no_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("illegal memory access")

    runs_as(monkeypatch, fails)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    point = replace(small_point(), variants=small_point().variants[1:])
    with pytest.raises(PointFailedError, match="2q2s70: RuntimeError: illegal memory access"):
        measure(point)


@pytest.mark.usefixtures("on_cpu")
def test_what_fails_of_the_portable_kernel_stops_the_run_and_names_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**arguments: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(references, AttentionCall.DECODE.value, fails)
    point = Point("2q2s70", (Variant(PORTABLE, SMALL, REFERENCE_MODULE),), {"group": "small"}, PORTABLE)
    for measure_either in (measure, measure_host):
        with pytest.raises(PointFailedError, match="2q2s70: RuntimeError: no compiler"):
            measure_either(point)


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
@pytest.mark.parametrize("measure_either", [measure, measure_host], ids=["gpu", "host"])
@pytest.mark.parametrize("right_calls", [(1, 2), (3,)], ids=["wrong after", "wrong before"])
def test_a_wrong_variant_has_no_time(
    right_calls: tuple[int, ...], measure_either: Callable[[Point], PointRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call tells who declines, the second is judged before the times, the third after or among them."""
    runs_as(monkeypatch, right_at(*right_calls))
    outcome = measure_either(small_point())
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
    outcome = measure_host(small_point(*HOST_TARGETS[HOST]))
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
    outcome = measure_host(small_point(*HOST_TARGETS[HOST_PREPARED], group=HOST_PREPARED))
    assert (outcome.declined, outcome.wrong) == ([], [])
    assert [row["host_us"] for row in outcome.rows] == [20.5, 30.5]
    assert prepared == [2, 2]  # once to see whether it declines, once for the time


def time_row(**targets: Any) -> dict[str, Any]:
    return {
        "point": "64q1s4k",
        "arm": PORTABLE,
        "kernel": "portable",
        "kv_dtype": "bfloat16",
        "median_us": 1234.56,
        "iqr_us": 1.23,
        "floor_us": 126.6,
        "floor_bound": "memory",
        "floor_percent": 92.49,
        "speed_of_baseline": 1.05,
        "targets": target_rows(
            (Target(Figure.SPEED, 1.02), Target(Figure.BANDWIDTH, 92)),
            {Figure.SPEED: 1.05, Figure.BANDWIDTH: 91.5} | targets,
            FLASHINFER,
        ),
    }


def test_targets_say_by_how_much() -> None:
    row = time_row()
    assert target_text(row) == (
        "1.02 x the speed of flashinfer: passed by 0.03; 92 % of the copy bandwidth: missed by 0.5"
    )
    (host,) = target_rows(HOST_TARGETS[HOST_PREPARED], {Figure.HOST: 60.0}, FLASHINFER)
    assert (host["reached"], host["margin"], host["passed"]) == (60.0, -35.0, False)
    (barely,) = target_rows((Target(Figure.SPEED, 1.02),), {Figure.SPEED: 1.01996}, FLASHINFER)
    assert barely["passed"] is False  # though it rounds to 1.02
    (just,) = target_rows((Target(Figure.SPEED, 1.0),), {Figure.SPEED: 1.0}, FLASHINFER)
    assert just["passed"] is True
    assert score([row, {"targets": [host]}, {"targets": [{"passed": None}]}]) == {
        "passed": 1,
        "missed": 2,
        "not_compared": 1,
    }


def test_the_tables_have_a_line_per_point_and_variant() -> None:
    table = table_of("times", TIME_COLUMNS, [time_row(), time_row() | {"arm": FLASHINFER, "targets": []}])
    assert len(table.rows) == 2
    assert [cell.text for cell in table.rows[0]][:-1] == [
        "64q1s4k",
        PORTABLE,
        "portable",
        "bfloat16",
        "1,234.6",
        "1.2",
        "126.6",
        "memory",
        "92.5",
        "1.050",
    ]
    host = table_of("host", HOST_COLUMNS, [{"point": "a", "arm": "b", "host_us": 20.5, "iqr_us": 1, "targets": []}])
    assert [cell.text for cell in host.rows[0]] == ["a", "b", "20.50", "1.00"]  # no row has a target


def test_the_command_line_writes_every_point_and_prints_the_targets(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpu(point: Point) -> PointRows:
        declined = [{"group": "extend", "point": point.name, "arm": FLASHINFER, "reason": "not [here]"}]
        return PointRows([time_row() | {"point": point.name}], declined if "q4k" in point.name else [], [])

    def host(point: Point) -> PointRows:
        targets = target_rows(HOST_TARGETS[HOST_PREPARED], {Figure.HOST: 20.0}, FLASHINFER)
        row = {"point": point.name, "arm": PORTABLE, "host_us": 20.0, "iqr_us": 1.0, "targets": targets}
        return PointRows([row], [], [])

    monkeypatch.setattr(kv_read_once, "measure_host", host)
    done = command("kv-read-once --only extend,host,host_prepared --samples 5", gpu)
    assert (done.status, done.plans) == (0, [TimingPlan(CEILINGS, METHOD, 5)] * 2)
    recorded = done.recorded
    assert [row["point"] for row in recorded["rows"]] == [point.name for point in of_group("extend")]
    assert [row["point"] for row in recorded["host"]] == [
        point.name for point in of_group(HOST) + of_group(HOST_PREPARED)
    ]
    assert [row["reason"] for row in recorded["declined"]] == ["not [here]"]
    assert recorded["targets"] == {"passed": 8, "missed": 2, "not_compared": 0}
    assert (recorded["wrong"], recorded["samples"], recorded["method"]) == ([], 5, str(METHOD))
    assert recorded["environment"]["ceilings"]["bandwidth_gbps"] == 4000.0
    assert recorded["environment"]["gpu"] == "simulated"
    assert "synthetic" in recorded["trace"]
    assert "every request" in recorded["judged"]
    assert "missed by 0.5" in done.printed.replace("\n", "")
    assert "declined: extend/qwen3-32b/q4k/tp2, flashinfer: not [here]" in done.printed
    assert "targets: 8 passed, 2 missed, 0 not compared" in done.printed


def test_the_command_line_leaves_flashinfer_out(command: Command) -> None:
    def wrong(point: Point) -> PointRows:
        assert [variant.name for variant in point.variants] == [PORTABLE]
        return PointRows([], [], [{"point": point.name, "arm": PORTABLE, "reason": "3 vectors"}])

    done = command("kv-read-once --only windows --portable-only", wrong)
    assert (done.status, len(done.recorded["wrong"])) == (1, 3)


def again(case: ForwardCase, target: Target, group: str = "small") -> Point:
    both = (Variant(PORTABLE, case, PORTABLE_MODULE, (target,)), Variant("again", case, PORTABLE_MODULE))
    return Point("again", both, {"group": group}, "again")


@pytest.mark.gpu
def test_points_are_measured_on_a_gpu() -> None:
    case = scenario("target_verify/qwen3-32b/4q4s1k/tp2")
    outcome = measure(again(case, SPEED), ceilings=measure_ceilings(torch.device("cuda")))
    assert (outcome.declined, outcome.wrong) == ([], [])
    assert [row["arm"] for row in outcome.rows] == [PORTABLE, "again"]
    assert all(row["median_us"] > 0 and row["buffer_copies"] > 1 for row in outcome.rows)
    hosts = {group: measure_host(again(case, *HOST_TARGETS[group], group)) for group in (HOST, HOST_PREPARED)}
    assert all((host.declined, host.wrong) == ([], []) for host in hosts.values())
    assert all(row["host_us"] > 0 for host in hosts.values() for row in host.rows)
