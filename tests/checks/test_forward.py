"""The judge of a forward pass: right implementations pass in every mode, and each deliberate defect is found."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import lab.metadata.mha.backend as backend_module
import lab.references
from corpus.kernels import kernel
from lab.checks import Contents, ForwardCase, Level, Outcome, Ranges, judge_forward
from lab.checks.parameters.metadata_axes import ON_DECODE
from lab.checks.properties import forward_modes
from lab.checks.properties.mla_modes import mla_mode_cases
from lab.kernels import portable
from lab.metadata import AttentionCall, ForwardMode, KVLayout, build_mha_metadata
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.workloads.forward_case import ATTENDING_MODES, PASS_CONTENTS
from lab.workloads.geometries import GEOMETRIES
from lab.workloads.inputs.forward_pass import build_forward
from tests.checks.small import decoding

CPU = torch.device("cpu")
P = 16
EXTENDED = ((15, 0, 40), (33, 1, 16))
DRAFTED = ((13, 0, 50), (4, 1, 3))
VERIFIED = ((13, 0, 16, 200), (4,) * 4)
RAGGED = (VERIFIED[0], (4, 1, 3, 4))
MIXED = ((15, 31, 40), (20, 1, 1))


def case_of(mode: str, lens: tuple[tuple[int, ...], tuple[int, ...]], **settings: Any) -> ForwardCase:
    return ForwardCase(ForwardMode[mode], "tiny", *lens, page_size=P, **settings)


# Offsets that cross a page for some request of each pass: 15 + 1, 13 + 4, 14 + 2.
CASES = {
    "decode": case_of("DECODE", ((15, 16, 50, 200), (1,) * 4)),
    "draft_decode_0": case_of("DECODE", ((15, 16, 50), (1,) * 3), draft_step=0),
    "draft_decode_2": case_of("DECODE", ((14, 16, 50), (1,) * 3), draft_step=2),
    "frozen_kv_draft": case_of("DECODE", ((1, 1, 16, 16, 50, 50), (1,) * 6), draft_step=FROZEN_KV_STEP, topk=2),
    "target_verify": case_of("TARGET_VERIFY", VERIFIED),
    "draft_extend_v1": case_of("DRAFT_EXTEND", DRAFTED),
    "draft_extend_v1_on_decode": case_of("DRAFT_EXTEND", DRAFTED, draft_extend=AttentionCall.DECODE),
    "draft_extend_v2": case_of("DRAFT_EXTEND_V2", (DRAFTED[0], (4,) * 3)),
    "draft_extend_v2_on_context": case_of(
        "DRAFT_EXTEND_V2", (DRAFTED[0], (4,) * 3), draft_extend=AttentionCall.CONTEXT
    ),
    "ragged_verify": case_of("RAGGED_VERIFY", RAGGED),
    "ragged_verify_padded": case_of("RAGGED_VERIFY", RAGGED, num_padding_rows=5),
    "extend": case_of("EXTEND", ((0, 0, 0), EXTENDED[1])),
    "extend_prefix": case_of("EXTEND", EXTENDED),
    "mixed": case_of("MIXED", MIXED),
    "padding_rows": case_of("EXTEND", (DRAFTED[0], (4, 20, 3)), num_padding_rows=5),
    "encoder_only_extend": case_of("EXTEND", EXTENDED, encoder_only=True),
    "encoder_only_verify": case_of("TARGET_VERIFY", VERIFIED, encoder_only=True),
    "mixed_tail": case_of("MIXED", MIXED, split_mixed_tail=True),
}


def expect_right(implementation: Any, case: ForwardCase, *device: torch.device) -> None:
    verdict = judge_forward(implementation, case, *device)
    assert verdict.outcome is Outcome.RIGHT, str(verdict)


def variants(case: ForwardCase) -> list[ForwardCase]:
    """Full and sliding-window layer, random and needle inputs."""
    return [
        replace(case, sliding_window=window, contents=contents)
        for window in ((False, False) if case.encoder_only else (False, True))
        for contents in PASS_CONTENTS
    ]


@pytest.mark.parametrize("mode", CASES)
def test_references_are_right(mode: str) -> None:
    for case in variants(CASES[mode]):
        expect_right(lab.references, case, CPU)


@pytest.mark.parametrize("mode", CASES)
def test_portable_kernel_is_right(mode: str) -> None:
    expect_right(portable, variants(CASES[mode])[2])  # a window, with random inputs


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("layout", KVLayout)
def test_page_sizes_and_layouts(page_size: int, layout: KVLayout) -> None:
    for mode in ("target_verify", "extend_prefix"):
        prefix_lens = (page_size - 3, 0, 2 * page_size)
        q_lens = CASES[mode].q_lens[: len(prefix_lens)]
        case = replace(CASES[mode], page_size=page_size, layout=layout, prefix_lens=prefix_lens, q_lens=q_lens)
        expect_right(lab.references, case, CPU)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float16, torch.float16), (torch.bfloat16, torch.float8_e4m3fn)])
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    for implementation in (lab.references, portable):
        case = replace(CASES["target_verify"], dtype=dtype, kv_dtype=kv_dtype)
        expect_right(implementation, case)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "gpt-oss-120b", "gemma-3-27b"])
def test_real_geometries(name: str) -> None:
    for mode in ("decode", "target_verify", "extend_prefix"):
        case = replace(CASES[mode], geometry=name, tensor_parallel=8)
        expect_right(lab.references, case, CPU)


def full_cases(**axes: Any) -> list[ForwardCase]:
    return [
        case
        for each in forward_modes.CHECK.interfaces
        for case in forward_modes.CHECK.cases(each, Ranges(**axes), Level.FULL)
    ]


def test_the_full_level_has_every_mode_geometry_page_size_and_width() -> None:
    cases = full_cases()
    modes = "DECODE TARGET_VERIFY DRAFT_EXTEND DRAFT_EXTEND_V2 EXTEND MIXED RAGGED_VERIFY"
    assert {case.mode.name for case in cases} == {*modes.split()}
    names = set(forward_modes.TENSOR_PARALLEL)
    assert {case.geometry for case in cases} == names | {"tiny"}
    assert len(names) == 5
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        for name in names:
            seen = {(case.page_size, case.q_lens[0]) for case in cases if (case.mode, case.geometry) == (mode, name)}
            assert seen == {(page_size, q_len) for page_size in (16, 32, 64, 128) for q_len in range(1, 9)}
    assert {case.geometry for case in cases if case.sliding_window} == {"gpt-oss-120b", "gemma-3-27b", "tiny"}
    assert {case.page_size for case in cases if case.kv_dtype == torch.float8_e4m3fn} == {64}
    assert len({repr(case) for case in cases}) == len(cases)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_full_level_makes_only_cases_that_are_accepted(name: str) -> None:
    cases = full_cases(geometries=(name,))
    assert {case.geometry for case in cases} == {name, "tiny"}


def test_every_kind_of_forward_mode_is_judged() -> None:
    """SPLIT_PREFILL and DLLM_EXTEND need no cases: all that a call sees of them is as in an EXTEND."""
    mha = {mode: (mode.query_rows, mode.uncounted, mode.mha_call) for mode in ATTENDING_MODES}
    on_mla = {mode for mode in ForwardMode if mode.mla_call is AttentionCall.MLA_DECODE}
    judged = {mha[case.mode] for case in forward_modes.mode_cases("tiny", P, (4,))}
    missing = [mode for mode, kind in mha.items() if kind not in judged]
    assert not missing, f"mode_cases of lab.checks.properties.forward_modes has no case of {missing}"
    missing = {*on_mla} - {case.mode for case in mla_mode_cases(32, (4,))} - {ForwardMode.IDLE}
    assert not missing, f"mla_mode_cases of lab.checks.properties.mla_modes has no case of {missing}"
    assert {*ON_DECODE} == {mode.name for mode in on_mla}, "ON_DECODE of lab.checks.parameters.metadata_axes, for K18"


def test_a_kernel_built_for_less_is_judged_on_the_geometries_that_fit() -> None:
    narrow = full_cases(head_dims=(64,), windows=(False,))
    assert {case.geometry for case in narrow} == {"gpt-oss-120b", "tiny"}
    assert not any(case.sliding_window for case in narrow)
    of_eight_heads = {case.geometry for case in full_cases(sinks=(False,), groups=(8,))}
    assert of_eight_heads == {"llama-3.1-70b", "qwen3-32b", "tiny-8x2x64"}


MUTANTS = (
    "seq_len_off_by_one last_page_lost table_of_first_request requests_rotated rows_reversed prefix_lost window_ignored "
    "window_off_by_one_narrow window_off_by_one_wide causal_to_full_mask causal_excludes_itself sink_ignored "
    "sink_of_next_head bmm1_off_by_ten_percent bmm2_off_by_five_percent heads_swapped zeros nan_in_one_head out_row_before "
    "out_row_beyond out_ignored padding_given_to_last query_scaled_in_place table_tail_written seq_lens_written "
    "sinks_overwritten page_tail_cleared"
)


@pytest.mark.parametrize("name", MUTANTS.split())
def test_a_wrong_kernel_is_found(name: str) -> None:
    """A sink shows against random logits; against needles, ten above all else, it is nothing."""
    contents = Contents.RANDOM if "sink" in name else Contents.NEEDLES
    modes = ("target_verify", "extend_prefix", "padding_rows", "decode")
    cases = (replace(CASES[mode], sliding_window=True, contents=contents) for mode in modes)
    verdicts = (judge_forward(kernel(name).implementation(), case, CPU) for case in cases)
    found = next(each for each in verdicts if each.outcome is Outcome.WRONG)
    says = {"out_row_before": "it wrote before its output", "seq_lens_written": "it changed its cache_seqlens_int32"}
    assert says.get(name, "") in found.reason


def changing_output(change: Callable[[torch.Tensor], object]) -> Any:
    """The reference's decode, whose output is changed in place."""
    return decoding(lambda **arguments: change(lab.references.trtllm_batch_decode_with_kv_cache(**arguments)))


def test_declining_after_the_output_was_written_is_found() -> None:
    def write_and_decline(**arguments: Any) -> None:
        arguments["out"].zero_()
        raise NotImplementedError("too late")

    verdict = judge_forward(decoding(write_and_decline), CASES["decode"], CPU)
    assert verdict.outcome is Outcome.WRONG
    assert "declined, after it had written (too late)" in verdict.reason


# Defects of the metadata: the implementation is exact, the builder is not.


def offset_lengths(offset: int) -> Callable[[Any, Any, Any], Any]:
    return lambda metadata, batch, pool: replace(
        metadata,
        cache_seqlens_int32=metadata.cache_seqlens_int32 + offset,
        cu_seqlens_k=torch.nn.functional.pad((metadata.cache_seqlens_int32 + offset).cumsum(0), (1, 0)).int(),
    )


def tables_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any, Any], Any]:
    return lambda metadata, batch, pool: replace(
        metadata,
        page_table=change(metadata.page_table),
        swa_page_table=None if metadata.swa_page_table is None else change(metadata.swa_page_table),
    )


def wrong_entry(table: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.cat([table[1:2, :1], table[:1, 1:]], dim=1), table[1:]])


def full_table_for_window(metadata: Any, batch: Any, pool: Any) -> Any:
    return replace(metadata, swa_page_table=metadata.page_table % pool.swa_num_pages)


def window_written_through_full_slots(metadata: Any, batch: Any, pool: Any) -> Any:
    return replace(metadata, swa_out_cache_loc=batch.out_cache_loc % (pool.swa_num_pages * pool.page_size))


def rows_shifted(metadata: Any, batch: Any, pool: Any) -> Any:
    offsets = metadata.cu_seqlens_q.clone()
    offsets[1] -= 1
    return replace(metadata, cu_seqlens_q=offsets)


METADATA_DEFECTS = {
    "draft step's own token not counted": ("draft_decode_2", False, offset_lengths(-1)),
    "draft step offset missing": ("draft_decode_2", False, offset_lengths(-3)),
    "verify's tokens not counted": ("target_verify", False, offset_lengths(-4)),
    "draft extend V2 counts its tokens twice": ("draft_extend_v2", False, offset_lengths(4)),
    "decode length short by one": ("decode", False, offset_lengths(-1)),
    "extend length short by one": ("extend_prefix", False, offset_lengths(-1)),
    "wrong entry": ("decode", False, tables_changed(wrong_entry)),
    "column shifted": ("decode", False, tables_changed(lambda table: table.roll(1, 1))),
    "row shifted": ("target_verify", False, tables_changed(lambda table: table.roll(1, 0).contiguous())),
    "never filled": ("decode", False, tables_changed(torch.zeros_like)),
    "full pool's table for a window": ("decode", True, full_table_for_window),
    "written through full slots": ("target_verify", True, window_written_through_full_slots),
    "draft extend rows shifted": ("draft_extend_v1", False, rows_shifted),
}


@pytest.mark.parametrize("defect", METADATA_DEFECTS)
def test_a_defect_of_the_metadata_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, sliding_window, change = METADATA_DEFECTS[defect]

    def build(batch: Any, pool: Any, **_: Any) -> Any:
        return change(build_mha_metadata(batch, pool), batch, pool)

    monkeypatch.setattr(backend_module, "build_mha_metadata", build)
    case = replace(CASES[mode], sliding_window=sliding_window, contents=Contents.NEEDLES)
    assert judge_forward(lab.references, case, CPU).outcome is Outcome.WRONG


def test_a_wrong_verdict_names_the_vector() -> None:
    verdict = judge_forward(changing_output(lambda out: out[5, 3].mul_(1.05)), CASES["target_verify"], CPU)
    (wrong,) = verdict.judged.wrongs
    assert "the pass: 1 of 96 vectors are wrong, of requests [1]: row 5 (request 1) head 3: " in wrong
    error, bound = map(float, re.findall(r"(?:error|bound) ([0-9.e-]+)", wrong))
    assert 0.04 < error < 0.06
    assert 0 < bound < 0.02


@pytest.mark.parametrize("sliding_window", [False, True])
def test_operations_and_bytes_count_what_is_visible(sliding_window: bool) -> None:
    case = replace(CASES["extend_prefix"], sliding_window=sliding_window)
    window = case.window_left if sliding_window else 10**6
    pairs, keys = 0, 0
    for prefix, q_len in zip(case.prefix_lens, case.q_lens, strict=True):
        seen = set()
        for position in range(prefix, prefix + q_len):
            visible = range(max(0, position - window), position + 1)
            pairs += len(visible)
            seen |= set(visible)
        keys += len(seen)
    heads, dim = case.model.num_qo_heads, case.model.head_dim
    assert case.operations == 4 * dim * heads * pairs
    assert case.bytes_moved == 2 * 2 * dim * (keys * case.model.num_kv_heads + sum(case.q_lens) * heads)


def test_what_must_not_matter_is_poisoned() -> None:
    forward = build_forward(replace(CASES["decode"], sliding_window=True), CPU)
    poisoned = (forward.cache.k_cache.float().abs() > 1e29).flatten(2).all(dim=2)  # [pages, page_size]
    assert poisoned[0].all(), "the sink page"
    live = -(-forward.metadata.cache_seqlens_int32 // P)
    for request, kv_len in enumerate(forward.case.kv_lens):
        row = forward.metadata.swa_page_table[request]
        last_page, tokens = int(row[live[request] - 1]), (kv_len - 1) % P + 1
        assert not poisoned[last_page, :tokens].any()
        assert poisoned[last_page, tokens:].all(), "the tail of the last page"
    # Pages before the window have been given back: their cells name the sink, where a kernel that reads them finds poison.
    assert (forward.metadata.swa_page_table[3, : (200 - forward.case.window_left) // P] == 0).all()
    assert (200 - forward.case.window_left) // P > 0
    dead = torch.arange(forward.metadata.page_table.shape[1]) >= live.unsqueeze(1)
    assert dead.any()
    assert (forward.metadata.page_table[dead] != 0).any(), "table tails name foreign pages"
