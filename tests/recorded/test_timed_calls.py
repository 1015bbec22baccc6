"""A recorded call that is drawn anew in place: right on any contents, and wrong where a call sees any of the old ones."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import AttentionCall
from lab.metadata.engine.lengths import exclusive_cumsum, num_pages
from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.case import recorded_cases
from lab.recorded.timed import RecordedPass
from lab.timing.forward import TimedPasses, case_facts
from lab.timing.staging import check_results, renew
from lab.workloads.inputs.redraw import SHORTER_EVERY, Seeds
from tests.cases import CONTEXT, RAGGED
from tests.recorded.kinds import CALLS, NVFP4, RANKS, int32
from tests.recorded.record_calls import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LENGTHS,
    PAGE_SIZE,
    context_arguments,
    decode_arguments,
    several_rows,
)
from tests.recorded.write_calls import write_call
from tests.workloads.inputs.stale_calls import (
    FIRST,
    SHORTER,
    STALE,
    WRONG,
    hold_planned_and_plain_right,
    hold_right,
    hold_right_on_any_contents,
    hold_wrong_if_stale,
)

CPU = torch.device("cpu")


SHORT = several_rows(seq_lens=int32(1, 2, 33))
KINDS = CALLS | RANKS | {"NVFP4": NVFP4, "short requests": RecordedCall(AttentionCall.DECODE, SHORT)}


@pytest.fixture
def passes(tmp_path: Path) -> Callable[[str], TimedPasses]:
    def timed(name: str) -> TimedPasses:
        call = KINDS[name]
        given = call.given | {"workspace_buffer": torch.zeros(1)}
        (case,) = recorded_cases(write_call(tmp_path / name, call.function.value, given, (torch.zeros(1),)))
        return TimedPasses.of(case, CPU)

    return timed


@pytest.mark.parametrize("name", KINDS)
def test_one_call_is_right_on_contents_that_change_under_it(name: str, passes: Any) -> None:
    hold_right_on_any_contents(passes(name).work(references))


@pytest.mark.parametrize("what", STALE)
def test_a_call_that_keeps_what_it_was_prepared_with_is_wrong(what: str, passes: Any) -> None:
    hold_wrong_if_stale(what, passes("decode").work)


def test_each_call_finds_some_tokens_changed_in_place_and_new_contents_are_everywhere(passes: Any) -> None:
    work = passes("decode").work(references)
    renew(work, FIRST)
    before = [side.clone() for side in work.arguments["kv_cache"]]
    renew(work, Seeds(FIRST.tokens, 3), tokens=False)
    tokens = [(request, token) for request, length in enumerate(LENGTHS) for token in range(length)]
    table = work.arguments["block_tables"]
    live = {(int(table[request, token // PAGE_SIZE]), token % PAGE_SIZE) for request, token in tokens}
    for side, old in zip(work.arguments["kv_cache"], before, strict=True):
        changed = (side != old).any(dim=-1).all(dim=1).nonzero().tolist()  # pages and slots
        assert {(page, slot) for page, slot in changed} == live  # all of 55 tokens: fewer than 256
    renew(work, SHORTER)
    for side, old in zip(work.arguments["kv_cache"], before, strict=True):
        assert bool((side != old).any(dim=-1).all())


def test_some_tokens_of_long_requests_change(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.workloads.inputs.redraw.MOST_TOUCHED", 8)
    work = passes("decode").work(references)
    renew(work, FIRST)
    before = work.arguments["kv_cache"][0].clone()
    renew(work, Seeds(FIRST.tokens, 3), tokens=False)
    assert int((work.arguments["kv_cache"][0] != before).any(dim=-1).all(dim=1).sum()) == 8
    hold_right(work, work.call(), SHORTER)


def test_lengths_become_shorter_for_some_seeds_and_keep_the_query_s_own_keys(passes: Any) -> None:
    work = passes("short requests").work(references)
    seen = set()
    for seed in range(40):
        renew(work, Seeds(1, seed))
        lengths = work.arguments["seq_lens"].tolist()
        assert lengths == [1, 2, 33] or seed % SHORTER_EVERY == 0
        seen.add(tuple(lengths))
    assert seen <= {(1, 2, last) for last in (30, 31, 32, 33)}
    assert len(seen) > 1


def test_offsets_of_pages_stay_offsets_of_pages(passes: Any) -> None:
    work = passes("context, offsets of pages").work(references)
    for seeds in (FIRST, SHORTER):
        renew(work, seeds)
        pages = num_pages(work.arguments["seq_lens"], PAGE_SIZE)
        assert torch.equal(work.arguments["cum_seq_lens_kv"], exclusive_cumsum(pages))


@pytest.mark.parametrize(("name", "is_right"), [("decode, e4m3", True), ("decode", False)])
def test_products_in_e4m3_are_right_over_an_e4m3_cache(name: str, is_right: bool, passes: Any) -> None:
    class Rounding:
        @staticmethod
        def trtllm_batch_decode_with_kv_cache(*, out: torch.Tensor, **arguments: Any) -> None:
            references.trtllm_batch_decode_with_kv_cache(out=out, **arguments)
            out.mul_(1.02)

    work = passes(name).work(Rounding)
    with contextlib.nullcontext() if is_right else pytest.raises(AssertionError, match=WRONG):
        hold_right(work, work.call(), FIRST)


def test_a_part_is_of_requests_that_the_seeds_choose(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.workloads.inputs.redraw.PART_PAIRS", 1)
    work = passes("decode, several rows").work(references)
    judged = set()
    for seed in range(12):
        seeds = Seeds(FIRST.tokens, seed)
        work.arguments["out"].copy_(torch.arange(6)[:, None, None])
        judged.add(tuple(work.redraw.results(work.arguments, seeds, whole=False)[:, 0, 0].tolist()))
        renew(work, seeds)
        work.call()()
        check_results([work], seeds, whole=False)
        work.arguments["out"].zero_()
        with pytest.raises(AssertionError, match=f"8 of 8 {WRONG}"):
            check_results([work], seeds, whole=False)
    assert judged == {(0, 1), (2, 3), (4, 5)}  # the rows of each request


def test_a_planned_call_keeps_lengths_and_pages_that_others_see_change(passes: Any) -> None:
    planned, _ = hold_planned_and_plain_right(passes("decode"))
    assert torch.equal(planned.arguments["block_tables"], decode_arguments()["block_tables"])


def test_works_share_all_but_their_outputs_and_no_tensor_with_the_judge(passes: Any) -> None:
    both = passes("decode")
    one, other = both.work(references), both.work(references)
    for first, second in ((one, other), (one.copy(3), other.copy(3))):
        assert first.arguments["kv_cache"] is second.arguments["kv_cache"]
        assert first.arguments["out"].data_ptr() != second.arguments["out"].data_ptr()
    pools = {each["kv_cache"][0].data_ptr() for each in (one.arguments, one.copy(3).arguments, both.forward.given)}
    assert len(pools) == 3


def test_shapes_strides_tables_and_deviations_are_the_recorded_ones(passes: Any) -> None:
    both = passes("decode, shared pages")
    work = both.work(references)
    made = KINDS["decode, shared pages"].given
    assert torch.equal(work.arguments["block_tables"], made["block_tables"])
    assert work.arguments["kv_cache"][1].stride() == made["kv_cache"][1].stride()
    assert both.forward.deviations == pytest.approx([1.0, 1.0, 1.0], abs=0.1)
    four_times = passes("decode, e4m3")
    assert four_times.forward.deviations == pytest.approx([1.0, 4.0, 4.0], abs=0.4)
    drawn = four_times.work(references)
    renew(drawn, FIRST)
    assert [float(side.float().std()) for side in drawn.arguments["kv_cache"]] == pytest.approx([4.0, 4.0], abs=0.4)
    renew(work, FIRST)
    table = work.arguments["block_tables"]
    assert table[2, 0] == table[1, 0] != made["block_tables"][1, 0]
    assert table[0, 1:].tolist() == [-1, 99]


def test_the_floor_is_of_the_keys_that_rows_see(passes: Any) -> None:
    """A key and its value are 2 · 2 heads · 64 elements of 2 bytes; a row and its output 2 · 4 · 64 · 2."""
    token, row, pair = 2 * KV_HEADS * HEAD_DIM * 2, 2 * HEADS * HEAD_DIM * 2, 4 * HEADS * HEAD_DIM
    expected = {
        "decode": (sum(LENGTHS) * token + 3 * row, sum(LENGTHS) * pair),
        "decode, several rows": (sum(LENGTHS) * token + 6 * row, (2 * sum(LENGTHS) - 3) * pair),
        "decode, window": (12 * token + 3 * row, 12 * pair),
        "decode, shared pages": ((sum(LENGTHS) - PAGE_SIZE) * token + 3 * row, sum(LENGTHS) * pair),
        "decode, separate tables": (sum(LENGTHS) * token + 3 * row, sum(LENGTHS) * pair),
        "decode, e4m3": (sum(LENGTHS) * token // 2 + 3 * row, sum(LENGTHS) * pair),
        "NVFP4": (sum(LENGTHS) * (token // 4 + token // 32) + 3 * row, sum(LENGTHS) * pair),
        # Request 1 has no row.
        "context, offsets of pages": ((5 + 33) * token + 8 * row, (3 + 4 + 5 + 29 + 30 + 31 + 32 + 33) * pair),
        "context, not causal": (sum(LENGTHS) * token + 7 * row, (5 + 4 * 17 + 2 * 33) * pair),
        "MLA": (45 * 80 * 2 + 2 * HEADS * (80 + 64) * 2, 45 * 2 * HEADS * (80 + 64)),
        "ragged": ((10 + 5) * 2 * HEADS * (48 + 32), (3 + 4 + 4 + 5 + 6) * 2 * HEADS * (48 + 32)),
    }
    for name, numbers in expected.items():
        sizes = passes(name).forward.case
        assert (sizes.bytes_moved, sizes.operations) == numbers, name


def test_facts_name_the_call(passes: Any) -> None:
    facts = case_facts(passes("context").forward.case)
    assert (facts["mode"], facts["geometry"], facts["page_size"]) == ("context", "4/2 heads of 64", 16)
    assert (facts["requests"], facts["query_tokens"], facts["kv_tokens"], facts["kv_dtype"]) == (3, 7, 55, "bfloat16")
    ragged = passes("ragged").forward
    assert (ragged.case.page_size, ragged.functions) == (None, [RAGGED])
    assert ragged.pool_bytes == 2 * 10 * HEADS * (48 + 32)


def test_a_call_that_cannot_be_timed_is_refused(tmp_path: Path) -> None:
    none = context_arguments(cum_seq_lens_q=int32(0, 0, 0, 0)) | {"workspace_buffer": torch.zeros(1)}
    changes = {"no request has a query row": {}, "batch_size=7": {"batch_size": 7}}
    for sentence, change in changes.items():
        (case,) = recorded_cases(write_call(tmp_path / sentence, CONTEXT, none | change, (torch.zeros(1),)))
        with pytest.raises(RecordingError, match=f"call 1: {sentence}"):
            RecordedPass.of(case, CPU)
    with pytest.raises(RecordingError, match=r"call 1: .*no such|cannot be read"):
        RecordedPass.of(dataclasses.replace(case, path=str(tmp_path / "absent")), CPU)
