"""What the studies of forward passes share: right variants in outputs of their own, rows, recordings, and times on a GPU."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.kernels import support
from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing import Ceilings, GpuWork, measure_ceilings
from lab.workloads.batches import parse_batch
from lab.workloads.mla_case import MLACase
from lab.workloads.scenarios import scenario
from studies import decode_split, draft_extend_kernels, kv_read_once, mla_decode, passes
from studies.kv_read_once import E4M3_CACHE, PORTABLE
from studies.passes import PORTABLE_MODULE, gpu_works, works_of
from studies.targets import Figure, target_rows
from studies.variants import COLD, FactsOf, Point, PointRows, TimingPlan, Variant, measure_point
from tests.devices import IN_INTERPRETER
from tests.studies.conftest import Command
from tests.studies.recorded import recorded
from tests.studies.simulated import BANDWIDTH, CEILINGS, SLOW, SLOWER, SPEED, small_kv, small_mla
from tests.studies.test_kv_read_once import SMALL, again, of_group, runs_as
from tests.workloads.inputs.stale_calls import hold_right_on_any_contents

CPU, REFERENCES = torch.device("cpu"), "lab.references"
DECODE, CONTEXT = AttentionCall.DECODE, AttentionCall.CONTEXT
UNEQUAL = ("target_verify/tiny/q2s70_2q2s9_q2s33", "decode/tiny/q1s70_2q1s9_q1s33")
# Implementations that run on a CPU in place of FlashInfer's.
BOTH_CALLS = {
    "decode": (DECODE, REFERENCES),
    "context": (CONTEXT, REFERENCES),
    "portable decode": (DECODE, PORTABLE_MODULE),
}


def split(name: str, module: str) -> Point:
    return decode_split.point_of(name, module, (2, 4))


def extend() -> Point:
    return draft_extend_kernels.point_of(parse_batch("2q4s70"), BOTH_CALLS)


def caches() -> tuple[Variant, ...]:
    return (
        Variant(E4M3_CACHE, replace(SMALL, kv_dtype=torch.float8_e4m3fn), PORTABLE_MODULE),
        Variant(PORTABLE, SMALL, PORTABLE_MODULE),
        Variant("reference", SMALL, REFERENCES),
    )


def heads() -> tuple[Variant, ...]:
    """Of a number of heads that no model has."""
    (geometry,) = {point.variants[0].case.heads for point in of_group("heads") if "heads-20-" in point.name}
    case = kv_read_once.HeadsCase(ForwardMode.DECODE, geometry.name, (70,), (1,), heads=geometry)
    assert case.model.num_qo_heads == 20
    return (Variant(PORTABLE, case, PORTABLE_MODULE),)


def latents(case: MLACase) -> tuple[Variant, ...]:
    return (*mla_decode.variants_of(case), Variant("reference", case, REFERENCES))


# The variants of a point, and the number of different outputs, queries, caches and page tables that they have.
VARIANTS: dict[str, tuple[tuple[Variant, ...], tuple[int, int, int, int]]] = {
    **{
        f"{name} on {m}": (split(name, m).variants, (3, 1, 1, 1))
        for name in UNEQUAL
        for m in (REFERENCES, PORTABLE_MODULE)
    },
    "draft extend": (extend().variants, (3, 1, 1, 1)),
    "caches": (caches(), (3, 2, 2, 2)),
    "heads": (heads(), (1, 1, 1, 1)),
    # What plans on the host has tensors of its own, whose lengths and page ids stay.
    "MLA": (latents(small_mla()), (3, 2, 2, 2)),
    "MLA verify": (latents(small_mla(4)), (3, 2, 2, 2)),
    "MLA verify e4m3": (latents(small_mla(4, kv_dtype=torch.float8_e4m3fn)), (3, 2, 2, 2)),
}


def tensors_of(work: GpuWork) -> tuple[int, ...]:
    given = work.arguments
    metadata = given["metadata"]
    table = metadata.page_table if hasattr(metadata, "page_table") else metadata.block_kv_indices
    return tuple(each.data_ptr() for each in (given["out"], given["query"], given["cache"].storage, table))


def settings_of(backend: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(backend).items() if name != "implementation"}


@IN_INTERPRETER
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_right_in_an_output_of_its_own(name: str, request: pytest.FixtureRequest) -> None:
    variants, numbers = VARIANTS[name]
    plans = request.getfixturevalue("plans") if "MLA" in name else []
    works = works_of(variants, CPU)
    assert list(works) == [variant.name for variant in variants]
    for variant, work in zip(variants, works.values(), strict=True):
        assert work.arguments["cache"].storage.dtype == variant.case.kv_dtype
        assert (work.bytes_moved, work.operations) == (variant.case.bytes_moved, variant.case.operations)
        assert settings_of(work.prepare.__self__) == settings_of(variant.case.backend())  # type: ignore[attr-defined]
        hold_right_on_any_contents(work)
    assert tuple(len({*each}) for each in zip(*map(tensors_of, works.values()), strict=True)) == numbers
    assert len({id(work.redraw) for work in works.values()}) == numbers[2]  # one truth for the same tensors
    assert len(plans) == ("MLA" in name)  # for two calls


def speeds(*, baseline: int) -> list[dict[str, Any]]:
    """The times of `measured_interleaved` and the speeds in times that of a variant."""
    return [{"median_us": 10.0 + i, "speed_of_baseline": round((10.0 + baseline) / (10 + i), 3)} for i in range(2)]


# What differs with the trace, which was not the lab's own in the recorded runs. Recorded host times have no floor.
OF_A_TRACE = ("longest_kv_len", "kv_tokens", "bytes_moved", "operations", "floor_bytes")


@pytest.mark.parametrize(
    "study",
    [
        decode_split.DecodeSplitStudy(),
        draft_extend_kernels.DraftExtendKernels(),
        kv_read_once.KVReadOnce(),
        mla_decode.MLADecode(q_lens=(1, 4)),
    ],
    ids=lambda study: study.name(),
)
def test_the_points_are_those_of_the_recorded_run(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the passes, the floors and the targets, and the points that are too large."""
    recording, module = recorded(study.name()), sys.modules[type(study).__module__]
    rows = {(row["point"], row["arm"]): row for key in ("rows", "host") for row in recording.get(key, ())}
    monkeypatch.setattr(passes, "kernel_of", lambda variant, work: rows.get(work, {}).get("kernel"))
    host = {row["point"] for row in recording.get("host", ())}
    points = [point for part in study.parts for point in part.points]
    for point, variant in ((each, variant) for each in points for variant in each.variants):
        row = rows[point.name, variant.name]
        facts = point.row | dict(module.facts_of(variant, (point.name, variant.name)))
        left_out = OF_A_TRACE if "trace" in point.name else ("floor_bytes",) if point.name in host else ()
        assert {key: row[key] for key in facts if key not in left_out} == {
            key: value for key, value in facts.items() if key not in left_out
        }
        assert row.get("baseline", point.baseline) == point.baseline
        if not point.name.startswith("eager/"):  # whose target was another when they were recorded
            assert [target["target"] for target in row.get("targets", ())] == [each.bound for each in variant.targets]
        del rows[point.name, variant.name]
    assert rows == {}
    assert study.facts().get("skipped") == recording.get("skipped")


def test_the_wrapper_is_named_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _, wrapper = mla_decode.variants_of(small_mla())
    work = GpuWork.of(print, 1, query=SimpleNamespace(device=torch.device("cuda")))
    for capability, name in (((9, 0), "FA3"), ((10, 0), "FA2")):
        monkeypatch.setattr(support, "capability_of", lambda device, capability=capability: capability)
        assert passes.kernel_of(wrapper, work).endswith(name)


def test_an_e4m3_cache_is_an_option_of_mla() -> None:
    cases = mla_decode.MLADecode(kv_dtype="e4m3").cases()
    assert {(case.dtype, case.kv_dtype) for case in cases} == {(torch.bfloat16, torch.float8_e4m3fn)}


# 140 keys of 2 heads, K and V of 128 bytes; 4 rows of 6 heads, query and output of 128 bytes. The rows of a request see 69
# and 70 keys: 278 pairs of two requests.
OF_SMALL = {
    "group": "small",
    "point": "2q2s70",
    "bytes_moved": 140 * 2 * 256 + 24 * 256,
    "operations": 4 * 64 * 6 * 278,
}
OF_SMALL |= {
    "floor_us": pytest.approx(10.17, abs=0.01),
    "floor_bound": "matrix",
    "floor_bytes": OF_SMALL["bytes_moved"],
}
# Keys 46 to 69 of two pages.
OF_WINDOW = {"bytes_moved": 24 * 512 + 6 * 256, "floor_bytes": 128 * 512 + 6 * 256, "floor_us": pytest.approx(8.384)}
# 140 entries of 64 bytes, and 4 vectors of 32 + 16 elements of 2 bytes; 2 · 2 heads · 140 pairs · 48 operations.
OF_MLA = {"point": "2q1s70/2 heads", "bytes_moved": 8960 + 384, "operations": 26_880, "baseline": "wrapper"}
OF_MLA |= {"floor_us": pytest.approx(2.336), "floor_bound": "memory"}
WRAPPER = {"kernel": "BatchMLAPagedAttentionWrapper with FA3", "plan": mla_decode.PLANNED, "targets": []}
FASTER, SLOWER_ROW = speeds(baseline=1)


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu", "plans")
@pytest.mark.parametrize(
    ("point", "facts_of", "ceilings", "expected"),
    [
        (
            small_kv(SMALL, SPEED, BANDWIDTH),
            kv_read_once.facts_of,
            SLOWER,
            [OF_SMALL | {"kernel": "portable", "iqr_us": 0.0} | FASTER, OF_SMALL | SLOWER_ROW],
        ),
        (
            small_kv(scenario("decode/tiny/1q1s70/window"), BANDWIDTH),
            kv_read_once.facts_of,
            SLOWER,
            [OF_WINDOW, OF_WINDOW],
        ),
        (
            mla_decode.point_of(small_mla()),
            mla_decode.facts_of,
            SLOW,
            [
                OF_MLA | {"kernel": "portable", "plan": None, "floor_percent": 23.36} | FASTER,
                OF_MLA | {"floor_percent": 21.236} | WRAPPER | SLOWER_ROW,
            ],
        ),
    ],
    ids=["small", "window", "MLA"],
)
def test_a_point_makes_a_row_per_variant(
    point: Point,
    facts_of: FactsOf,
    ceilings: Ceilings,
    expected: Sequence[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs_as(monkeypatch, references.trtllm_batch_decode_with_kv_cache)
    found = measure_point(point, gpu_works, TimingPlan(ceilings, samples=3), facts_of)
    assert (found.declined, found.wrong) == ([], [])
    assert [row["arm"] for row in found.rows] == [variant.name for variant in point.variants]
    assert {row["method"] for row in found.rows} == {str(COLD)}
    for row, wanted in zip(found.rows, expected, strict=True):
        assert {key: row[key] for key in wanted} == wanted
    for target in (target for row in found.rows for target in row.get("targets", ())):
        is_speed = target["figure"].startswith("x the speed")
        assert target["reached"] == found.rows[0]["speed_of_baseline" if is_speed else "bandwidth_percent"]
        assert (target["margin"], target["passed"]) == (pytest.approx(target["reached"] - target["target"]), True)


def made_up(point: Point) -> PointRows:
    """Times of 10 µs for the last variant and 10 more for each before it; the last one declines where requests have 4 rows."""
    shared = dict.fromkeys(("kernel", "kv_dtype", "floor_bound"), "some") | dict.fromkeys(("iqr_us", "floor_us"), 1.0)
    shared |= {"floor_percent": 50.0, "speed_of_baseline": 0.75}
    reached = {Figure.SPEED: 0.75, Figure.BANDWIDTH: 91.5}
    rows = [
        point.row
        | shared
        | {"arm": variant.name, "median_us": 10.0 * (len(point.variants) - place), "calls": place + 1}
        | {"targets": target_rows(variant.targets, reached, point.baseline)}
        for place, variant in enumerate(point.variants)
    ]
    declined = [point.row | {"arm": point.variants[-1].name, "reason": "not [here]"}]
    return PointRows(rows, declined if max(point.variants[0].case.q_lens) == 4 else [])


@pytest.mark.parametrize(
    ("line", "points", "printed"),
    [
        (
            "decode-split lab.references --splits 1,2,2 --only decode/tiny/2q1s70",
            ["decode/tiny/2q1s70 on lab.references"],
            ["1 call", "2 calls"],
        ),
        (
            "draft-extend-kernels --q-lens 2,4 --requests 1,4 --keys 1024 --most-keys 2048",
            ["q2s1k", "q4s1k"],
            ["30.0 / 20.0 (0.67)", "declined: q4s1k, portable decode: not [here]", "1 declined, 2 skipped"],
        ),
        (
            "kv-read-once --only extend,unequal",
            [point.name for group in ("extend", "unequal") for point in of_group(group)],
            ["1 x the speed of flashinfer: missed by 0.25", "targets: 1 passed, 1 missed, 0 not compared"],
        ),
        (
            "mla-decode --shapes 2x1024 --heads 16 --q-lens 1,4 --kv-dtype e4m3",
            ["2q1s1k/16 heads", "2q4s1k/16 heads"],
            ["0.8 x the speed of wrapper: missed by 0.05", "declined: 2q4s1k/16 heads, wrapper: not [here]"],
        ),
    ],
)
def test_a_command_records_every_point_and_prints_the_answer(
    line: str, points: list[str], printed: list[str], command: Command
) -> None:
    done = command(f"{line} --samples 5", made_up)
    assert (done.status, done.plans) == (0, [TimingPlan(CEILINGS, COLD, 5)] * len(points))
    assert list(dict.fromkeys(row["point"] for row in done.recorded["rows"])) == points
    assert (done.recorded["wrong"], done.recorded["samples"], done.recorded["method"]) == ([], 5, str(COLD))
    assert done.recorded["environment"] == {"gpu": "simulated", "ceilings": CEILINGS.facts()}
    said = " ".join(done.printed.split())
    for words in printed:
        assert words in said


def mla_again() -> Point:
    (case,) = mla_decode.MLADecode(shapes=((4, 1024),), heads=(16,), q_lens=(4,)).cases()
    portable = mla_decode.variants_of(case)[0]
    return replace(mla_decode.point_of(case), variants=(portable, replace(portable, name="again")), baseline="again")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "facts_of"),
    [
        (lambda: split("decode/tiny/q1s2k_7q1s99", PORTABLE_MODULE), decode_split.facts_of),
        (
            lambda: draft_extend_kernels.point_of(
                parse_batch("4q4s1k"), {call.name: (call, PORTABLE_MODULE) for call in (DECODE, CONTEXT)}
            ),
            draft_extend_kernels.facts_of,
        ),
        (lambda: again(scenario("target_verify/qwen3-32b/4q4s1k/tp2"), SPEED), kv_read_once.facts_of),
        (mla_again, mla_decode.facts_of),
    ],
    ids=["split", "extend", "read once", "MLA"],
)
def test_points_are_measured_on_a_gpu(make: Callable[[], Point], facts_of: FactsOf) -> None:
    point = make()
    found = measure_point(point, gpu_works, TimingPlan(measure_ceilings(torch.device("cuda")), samples=3), facts_of)
    assert (found.declined, found.wrong) == ([], [])
    assert [row["arm"] for row in found.rows] == [variant.name for variant in point.variants]
    assert all(row["median_us"] > 0 and row["buffer_copies"] >= 1 for row in found.rows)
