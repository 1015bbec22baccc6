"""Inputs made of a case: histories that storage does not change, poison where nobody may read, codes that decode by hand."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lab.calls.problem import E4M3, NVFP4, AttentionCall
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.checks import AttentionCase, Contents, Dead, HeadPages, Storage, TableTail
from lab.references import trtllm_batch_decode_with_kv_cache
from lab.workloads.inputs.attention import AttentionInputs, build_attention
from lab.workloads.inputs.contents import draw_contents, needle_positions, new_workspace

CPU = torch.device("cpu")
CASE = AttentionCase(AttentionCall.DECODE, (35, 0, 16, 100), (2, 2, 2, 2), group=2)
MLA = AttentionCase(
    AttentionCall.MLA_DECODE, (35, 0, 16), (1,) * 3, num_kv_heads=1, group=4, head_dim=80, v_head_dim=64
)
CASES = [CASE, replace(CASE, kv_dtype=E4M3), replace(CASE, storage=Storage(kv_layout="NHD")), MLA]


def build(case: AttentionCase, **storage: Any) -> AttentionInputs:
    return build_attention(replace(case, storage=replace(case.storage, **storage)), CPU)


def tokens_first(pages: Tensor, case: AttentionCase) -> Tensor:
    """float32 [num_pages, page_size, num_kv_heads, head_dim], whatever the layout."""
    pages = pages.float()
    if case.is_mla:
        return pages.unsqueeze(2)
    return pages if case.storage.kv_layout == "NHD" else pages.transpose(1, 2)


def pages_of(inputs: AttentionInputs, request: int) -> list[int]:
    return inputs.block_tables[request, : -(-inputs.case.kv_lens[request] // inputs.case.page_size)].tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dead", Dead)
def test_every_other_cell_is_poisoned(case: AttentionCase, dead: Dead) -> None:
    inputs = build(case, dead=dead)
    live = torch.zeros(len(inputs.k_pages), case.page_size, dtype=torch.bool)
    for request, kv_len in enumerate(case.kv_lens):
        for position in range(kv_len):
            live[inputs.block_tables[request, position // case.page_size], position % case.page_size] = True
    assert int(live.sum()) == sum(case.kv_lens)
    for pages in (inputs.k_pages, inputs.v_pages):
        cells = tokens_first(pages, case)[~live]
        assert len(cells) > 100
        if dead is Dead.NAN:
            assert bool(cells.isnan().all())
        elif dead is Dead.ZERO:
            assert bool((cells == 0).all())
        else:
            assert bool((cells >= 256).all())
            assert bool(cells.isfinite().all())


def test_pages_are_shuffled_by_the_seed() -> None:
    pages = pages_of(build(CASE), 3)
    assert pages != sorted(pages)
    assert pages != pages_of(build(CASE, page_seed=1), 3)


def test_dead_columns_of_the_table_hold_what_was_asked_for() -> None:
    live = {page for request in range(4) for page in pages_of(build(CASE), request)}
    for tail, allowed in ((TableTail.FOREIGN, live), (TableTail.NEGATIVE, {-1}), (TableTail.FAR, {2**30})):
        inputs = build(CASE, table_tail=tail)
        assert inputs.block_tables.shape[1] == 7 + CASE.storage.spare_columns
        for request in range(4):
            cells = inputs.block_tables[request, len(pages_of(inputs, request)) :].tolist()
            assert set(cells) <= allowed


@pytest.mark.parametrize("case", [CASE, replace(CASE, kv_dtype=E4M3), replace(CASE, kv_dtype=NVFP4), MLA])
def test_storage_changes_no_history(case: AttentionCase) -> None:
    ways: list[dict[str, Any]] = [
        {"page_size": 64},
        {"dead": Dead.NAN},
        {"page_seed": 5},
        {"spare_columns": 40},
        {"first_page": 9},
        {"kv_layout": "NHD"},
        {"stacked": True},
        {"gaps_in_scale_factors": True},
    ]
    plain = build(case)
    for way in ways:
        other = build(case, **way)
        assert torch.equal(other.query, plain.query)
        for left, right in zip(other.histories, plain.histories, strict=True):
            assert all(torch.equal(a.float(), b.float()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("case", [CASE, replace(CASE, kv_dtype=E4M3, storage=Storage(kv_layout="NHD"))])
@pytest.mark.parametrize("head_pages", HeadPages)
def test_the_cells_that_a_head_does_not_see_are_poisoned(case: AttentionCase, head_pages: HeadPages) -> None:
    inputs = build(replace(case, head_pages=head_pages), dead=Dead.NAN, table_tail=TableTail.FAR)
    assert inputs.seen is not None
    for head in range(case.num_kv_heads):
        for request, seen in enumerate(inputs.seen):
            positions = seen[:, head].nonzero().flatten().tolist()
            assert int(inputs.seq_lens[head, request]) == len(positions)
            assert {position // 16 for position in positions} == {*inputs.case.selected_pages(request, head)}
            assert bool((inputs.block_tables[head, request, -(-len(positions) // 16) :] == 2**30).all())
        cells = tokens_first(inputs.v_pages, case)[:, :, head]
        assert int(cells.isfinite().all(dim=-1).sum()) == int(inputs.seq_lens[head].sum())


def test_heads_select_what_the_case_names() -> None:
    def selected(head_pages: HeadPages | None, request: int = 3) -> list[list[int]]:
        case = replace(CASE, num_kv_heads=8, head_pages=head_pages)
        return [case.selected_pages(request, head) for head in range(8)]

    assert selected(None) == selected(HeadPages.ALL) == [[*range(7)]] * 8  # 100 keys in pages of 16
    assert selected(HeadPages.LAST) == [[6]] * 8
    half = selected(HeadPages.HALF)
    assert all(pages == sorted(set(pages)) and pages[-1] == 6 for pages in half)
    assert len({tuple(pages) for pages in half}) > 5
    assert 3 < sum(map(len, half)) / 8 < 5
    assert selected(HeadPages.NOT_LAST) == [pages[:-1] for pages in half]
    assert selected(HeadPages.SOME_NONE) == [[] if head % 2 else half[head] for head in range(8)]
    assert selected(HeadPages.SOME_NONE, 0)[0] == []
    for each in HeadPages:
        assert selected(each, 1) == [[]] * 8  # no keys
    assert replace(CASE, seed=1, head_pages=HeadPages.HALF).selected_pages(3, 0) != half[0]


def test_only_a_decode_without_a_window_is_block_sparse() -> None:
    for changes, said in (
        ({"interface": AttentionCall.CONTEXT}, r"head_pages=HeadPages.LAST belongs to DECODE"),
        ({"window_left": 3}, "window_left=3 must be -1 in an MLA call, with head_pages"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(CASE, head_pages=HeadPages.LAST, **changes)


@pytest.mark.parametrize("head_pages", HeadPages)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, NVFP4])
def test_what_is_expected_of_a_block_sparse_call_is_the_references_result(
    head_pages: HeadPages, kv_dtype: torch.dtype
) -> None:
    case = replace(CASE, head_pages=head_pages, kv_dtype=kv_dtype, sinks=True, storage=Storage(dead=Dead.NAN))
    inputs = build_attention(case, CPU)
    out, lse = trtllm_batch_decode_with_kv_cache(
        **inputs.arguments() | {"out_dtype": torch.float64, "return_lse": True}
    )
    truth = inputs.truth(out_dtype=torch.float64)
    assert torch.allclose(out, truth.expected, rtol=0, atol=1e-12)
    assert torch.allclose(lse.double(), truth.lse_log2, atol=1e-5)


def test_stacked_pools_have_v_behind_each_page_of_k() -> None:
    inputs = build(CASE, stacked=True)
    page = inputs.k_pages[0].numel()
    assert inputs.k_pages.stride(0) == inputs.v_pages.stride(0) == 2 * page
    assert inputs.v_pages.data_ptr() - inputs.k_pages.data_ptr() == page * inputs.k_pages.element_size()


def test_far_pages_come_behind_the_first_page() -> None:
    inputs = build(CASE, first_page=1000)
    assert min(page for request in range(4) for page in pages_of(inputs, request)) >= 1000


def test_needles_stand_at_the_limits_of_each_row_and_beside_them() -> None:
    case = AttentionCase(AttentionCall.DECODE, (100,), (2,), window_left=20, contents=Contents.NEEDLES)
    found = needle_positions(case.kv_lens[0], case.q_lens[0], case.page_size, case.window_left)
    limits = {0, 98, 99, 98 - 20, 99 - 20, 96, 64}  # ends, rows, windows, the last page, the last tile
    assert {near for edge in limits for near in (edge - 1, edge, edge + 1) if 0 <= near < 100} <= set(found)
    assert {40, 50, 60}.isdisjoint(found)


def test_a_needle_outweighs_what_is_not_one() -> None:
    case = AttentionCase(AttentionCall.DECODE, (200,), (1,), num_kv_heads=1, group=1, contents=Contents.NEEDLES)
    inputs = build(case)
    logits = inputs.histories[0][0][:, 0].float() @ inputs.query[0, 0].float() * inputs.bmm1_scale
    needles = torch.zeros(200, dtype=torch.bool)
    needles[needle_positions(case.kv_lens[0], case.q_lens[0], case.page_size, case.window_left)] = True
    assert float(logits.softmax(0)[needles].sum()) > 0.99
    assert float(logits[needles].min()) > float(logits[~needles].max())


def test_a_counted_output_names_the_keys_that_were_seen() -> None:
    """Three keys of a request, all at the same weight: a third for each position, and all for the block of the first 32."""
    case = AttentionCase(AttentionCall.DECODE, (3,), (1,), num_kv_heads=2, group=1, contents=Contents.COUNTED)
    first, second = build(case).truth().expected[0]
    expected = torch.zeros(64, dtype=torch.float64)
    expected[[0, 1, 2]], expected[32] = 1 / 3, 1.0
    assert torch.allclose(first, expected)
    assert torch.allclose(second, 2 * expected)


def test_counted_positions_beyond_a_block_are_told_by_the_other_half() -> None:
    case = AttentionCase(
        AttentionCall.DECODE, (40,), (1,), num_kv_heads=1, group=1, window_left=0, contents=Contents.COUNTED
    )
    (only,) = build(case).truth().expected[0]
    assert only.nonzero().flatten().tolist() == [39 % 32, 32 + 39 // 32]


def logits_of(case: AttentionCase) -> Tensor:
    """The logits of the first request's first row and head."""
    inputs = build(case)
    return inputs.histories[0][0][:, 0].float() @ inputs.query[0, 0].float() * inputs.bmm1_scale


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3])
def test_low_logits_are_minus_200_000_and_equal(head_dim: int, kv_dtype: torch.dtype) -> None:
    for case in (replace(CASE, kv_dtype=kv_dtype, head_dim=head_dim), replace(MLA, kv_dtype=kv_dtype)):
        logits = logits_of(replace(case, contents=Contents.LOW))
        assert float(logits.min()) == float(logits.max()) == pytest.approx(-2e5, rel=0.05)


def test_low_logits_of_a_float16_query_over_e4m3_are_as_low_as_they_can_be() -> None:
    logits = logits_of(replace(CASE, dtype=torch.float16, kv_dtype=E4M3, contents=Contents.LOW))
    assert float(logits.min()) == float(logits.max()) < -1e5


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, E4M3), (E4M3, E4M3)]
)
def test_tall_logits_climb_by_hundreds(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    changes = {"dtype": dtype, "kv_dtype": kv_dtype, "contents": Contents.TALL}
    case = AttentionCase(AttentionCall.DECODE, (2000,), (1,), **changes)
    for each in (case, replace(MLA, kv_lens=(2000,), q_lens=(1,), **changes)):
        of_steps = logits_of(each).split(64)
        assert float(of_steps[-1].mean() - of_steps[0].mean()) == pytest.approx(8 * 31, rel=0.05)
        assert all(float(after.mean() - before.mean()) > -1 for before, after in itertools.pairwise(of_steps))


def test_an_overshadowing_key_adds_nothing_and_the_others_show() -> None:
    logits_of = {Contents.OVERSHADOWED: 20, Contents.SHADED: 9}
    for case, contents in itertools.product((CASE, replace(CASE, kv_dtype=E4M3), MLA), logits_of):
        inputs = build(replace(case, contents=contents))
        keys, values = inputs.histories[0]
        logits = keys[:, 0].float() @ inputs.query[0, 0].float() * inputs.bmm1_scale
        assert float(logits[0]) == pytest.approx(logits_of[contents], rel=0.1)
        assert not logits[1:].any()
        assert not values[0].float().any()
        others = values[1:, 0].double().mean(0) * inputs.bmm2_scale
        seen = inputs.truth().expected[0, 0]
        ratio = (seen @ others / (others @ others)).item()
        weight = (len(keys) - 1) * math.exp(-float(logits[0]))
        assert ratio == pytest.approx(weight / (1 + weight), rel=1e-3)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_no_cast_rounds_the_query_that_sees_an_overshadowing_key(head_dim: int) -> None:
    query = build(replace(CASE, head_dim=head_dim, contents=Contents.SHADED)).query
    assert torch.equal(query.to(E4M3).to(query.dtype), query)


def test_the_workspace_begins_with_zeros() -> None:
    workspace = new_workspace(CPU)
    assert workspace.dtype == torch.uint8
    assert len(workspace) > SEMAPHORE_BYTES
    assert int(workspace.count_nonzero()) == 0


def test_arguments_are_flashinfer_s_and_leave_defaults_out() -> None:
    plain = set(build(CASE).arguments())
    shared = {"query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "bmm1_scale", "bmm2_scale"}
    assert plain == shared | {"max_seq_len", "q_len_per_req"}
    assert set(build(replace(CASE, window_left=3, sinks=True)).arguments()) == plain | {"window_left", "sinks"}
    ragged = build(replace(CASE, interface=AttentionCall.CONTEXT, q_lens=(1, 2, 3, 4))).arguments()
    bounds = {"max_q_len", "max_kv_len", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv"}
    assert set(ragged) == shared | bounds
    assert ragged["cum_seq_lens_q"].tolist() == [0, 1, 3, 6, 10]
    assert ragged["cum_seq_lens_kv"].tolist() == [0, 35, 35, 51, 151]
    assert build(MLA).arguments()["query"].shape == (3, 1, 4, 80)


def test_a_case_with_other_rows_has_as_many_keys_at_least() -> None:
    case = AttentionCase(AttentionCall.CONTEXT, (9, 3, 5), (1, 1, 1)).with_rows(2, 4, 5)
    assert (case.kv_lens, case.q_lens) == ((9, 4, 5), (2, 4, 5))


@pytest.mark.parametrize(
    ("case", "shape", "dtype"),
    [
        (AttentionCase(AttentionCall.CONTEXT, (9, 3), (2, 1), dtype=torch.float16), (3, 8, 64), torch.float16),
        (
            AttentionCase(AttentionCall.MLA_DECODE, (9, 3), (2, 2), num_kv_heads=1, head_dim=80, v_head_dim=64),
            (2, 2, 4, 64),
            torch.bfloat16,
        ),
    ],
)
def test_an_output_has_the_shape_and_the_dtype_of_its_call(
    case: AttentionCase, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs = build_attention(case, torch.device("cpu"))
    out = inputs.new_out()
    assert (tuple(out.shape), out.dtype) == (shape, dtype)
    assert out.isnan().any(dim=-1).all()
    assert inputs.new_out(torch.float32).dtype == torch.float32


def test_a_drawn_e4m3_query_is_clamped_before_the_cast() -> None:
    """Only newer versions of torch cast a value above 448 to 448. Older ones cast it to NaN."""

    class Casts(TorchFunctionMode):
        largest = 0.0

        def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.to and result.dtype == E4M3:
                self.largest = max(self.largest, float(args[0].abs().max()))
            return result

    case = AttentionCase(AttentionCall.DECODE, (200,), (1,), dtype=E4M3, kv_dtype=E4M3, contents=Contents.TALL)
    with Casts() as casts:
        draw_contents(case, CPU)
    assert casts.largest == 448.0
