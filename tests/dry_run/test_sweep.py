"""`why_not` against FlashInfer's own launcher: a part of the sweep, and that the sweep sees what it is for."""

from dataclasses import replace
from typing import Any

import pytest

from lab.calls.features import Feature
from lab.calls.problem import AttentionCall
from lab.dry_run import sweep
from lab.dry_run.sweep_points import SWEPT, points
from lab.kernels.support import trtllm_gen
from tests.dry_run.on_a_b200 import NEEDS_A_LAUNCHER

pytestmark = [NEEDS_A_LAUNCHER, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
DECODE, CONTEXT = AttentionCall.DECODE, AttentionCall.CONTEXT
MLA, RAGGED, DSV4 = AttentionCall.MLA_DECODE, AttentionCall.RAGGED_CONTEXT, AttentionCall.DSV4_DECODE
SAGE: dict[str, Any] = {"dims": (128, 128), "causal": False, "sage": (1, 16)}


@pytest.mark.parametrize("gpu", sweep.SWEPT_GPUS)
def test_every_so_many_th_call_agrees(gpu: str) -> None:
    verdicts = list(sweep.sweep(gpu, drawn=200, every=19))
    assert [each for each in verdicts if each.agreement not in sweep.AGREED] == []
    counts = sweep.counted(verdicts)
    assert all(counts[call.value]["taken by both"] >= 3 for call in SWEPT), counts
    assert all(counts[call.value]["refused by both"] > 10 for call in SWEPT), counts


def verdict(call: AttentionCall, **values: Any) -> sweep.Verdict:
    point = SWEPT[call].model.completed(values)
    assert point is not None
    with sweep.unguarded_machine("b200") as gpu:
        return sweep.judged(gpu, call, point)


@pytest.mark.parametrize(
    ("call", "values", "kernel"),
    [
        (DECODE, {}, "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64"),
        (
            DECODE,
            {"dtypes": "fp16/e4m3/fp16", "head_dim": 512},
            "fmhaSm100fKernel_QFp16KvE4m3OFp16H512PagedKvDenseP64",
        ),
        (DECODE, {"page_size": 128, "group": 1}, "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalPaged"),
        (CONTEXT, {"head_dim": 80, "page_size": 16}, "fmhaSm100fKernel_QkvBfloat16OBfloat16H80PagedKvCausalP16"),
        (MLA, {"heads": 32, "dims": (256, 64)}, "fmhaSm100fKernel_QkvBfloat16OBfloat16HQk320HV256PagedKvDenseP64"),
        (RAGGED, {}, "fmhaSm100fKernel_QkvBfloat16OBfloat16HQk192HV128SeparateQkvCausal"),
        (
            RAGGED,
            SAGE | {"dtypes": "int8/int8/bf16"},
            "fmhaSm100aKernel_QkInt8VE4m3OBfloat16H128SeparateQkvDenseVarSeqQ128Kv128SageQ1SageK16SageV1",
        ),
        (
            RAGGED,
            SAGE | {"dtypes": "e4m3/e4m3/fp16", "sage": (1, 4)},
            "fmhaSm100fKernel_QkvE4m3OFp16H128SeparateQkvDenseVarSeqQ128Kv128SageQ1SageK4SageV1",
        ),
        (DSV4, {"gap": "1 tokens a page"}, "fmhaSm100fKernel_QkvBfloat16OBfloat16H512HVPerCta128PagedKvDense"),
    ],
)
def test_a_taken_call_comes_to_a_kernel_of_its_sizes(call: AttentionCall, values: dict[str, Any], kernel: str) -> None:
    found = verdict(call, **values)
    assert (found.refusal, found.failure, found.agreement) == (None, None, "taken by both")
    assert str(found.kernel).startswith(kernel)


@pytest.mark.parametrize(
    ("call", "values", "failure"),
    [
        (DECODE, {"query": "expanded"}, "launched with other strides of the query"),
        (DECODE, {"v_strides": "others"}, "launched with other strides of tmaV_"),
        (
            DECODE,
            {"dtypes": "e4m3/nvfp4/e4m3", "factors": "V 16 bytes a page"},
            "launched with other strides of tmaVSf_",
        ),
        (DECODE, {"mask": True, "q_len": 4}, "launched, and the mask is not read"),
        (DECODE, {"group": 192}, "launched with 128 query heads of several K/V heads in one CTA"),
        (RAGGED, {"query": "heads 16 elements apart"}, "launched with strides of a contiguous query"),
        (MLA, {"max_kv_len": 0}, "the process was killed by SIGFPE"),
        (DSV4, {"heads": 24}, "ValueError: Expected 8, 16, 32, 64, or 128 query heads, got 24"),
    ],
)
def test_what_the_launcher_says_nothing_of_is_seen(call: AttentionCall, values: dict[str, Any], failure: str) -> None:
    found = verdict(call, **values)
    assert str(found.failure).startswith(failure)
    assert found.agreement == "refused by both"


def test_what_works_with_few_short_requests_alone_is_refused() -> None:
    assert verdict(MLA, heads=160).agreement == "refused for longer requests"
    assert verdict(MLA, heads=64, dims=(256, 64)).agreement == "refused for longer requests"


def test_a_limit_that_a_row_lacks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {**trtllm_gen.LIMITS, DECODE: trtllm_gen.LIMITS[DECODE][:1]}
    for module in (trtllm_gen, sweep):
        monkeypatch.setattr(module, "LIMITS", lacking)
    for values in ({"group": 130}, {"kv_start": "K 8 bytes on"}, {"query": "expanded"}):
        assert verdict(DECODE, **values).agreement == "taken, and the launcher fails"


def test_a_limit_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    row = trtllm_gen.TRTLLM_GEN_DECODE
    monkeypatch.setattr(
        sweep, "kernel_for", lambda call, capability: replace(row, honours=row.honours - {Feature.SINKS})
    )
    assert verdict(DECODE, sinks=True).agreement == "refused, and launched"


def test_another_reason_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**trtllm_gen.LIMITS, DECODE: (lambda problem: "takes no query heads",)}
    for module in (trtllm_gen, sweep):
        monkeypatch.setattr(module, "LIMITS", wrong)
    assert verdict(DECODE, kv_start="K 8 bytes on").agreement == "refused for another reason"


def test_points_are_all_different_and_have_every_value() -> None:
    for call, model in ((call, each.model) for call, each in SWEPT.items()):
        found = list(points(call, drawn=50))
        assert len({repr(point) for point in found}) == len(found)
        for axis, values in model.axes.items():
            assert {repr(point[axis]) for point in found} == set(map(repr, values))
        changed = [sum(point[axis] != value for axis, value in model.default.items()) for point in found]
        assert max(changed) >= 5  # of a drawn point: its base and a change have at most 4, the axes of a triple 3


def test_the_page_has_each_kind_of_refusal_once() -> None:
    verdicts = {"b200": [verdict(DECODE, head_dim=size) for size in (96, 112, 128)]}
    text = sweep.page(verdicts)
    assert "| B200 | `trtllm_batch_decode_with_kv_cache` | 3 | 1 | 2 | 0 | 0 | 0 |" in text
    assert text.count("has kernels in trtllm-gen's table of FlashInfer 0.6.13 for head_dim") == 1
    assert text.endswith("None.\n")
    assert [each["agreement"] for each in sweep.record(verdicts)["verdicts"]["b200"]] == [
        "refused by both",
        "refused by both",
        "taken by both",
    ]
