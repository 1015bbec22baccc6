"""A pass that is drawn anew in place: right on any contents, and wrong where a call sees any of the old ones."""

from typing import Any

import pytest
import torch

from lab import references
from lab.metadata import ForwardMode
from lab.timing.forward import TimedPasses
from lab.timing.staging import check_results, renew
from lab.workloads import ForwardCase, scenario
from lab.workloads.inputs.forward_pass import build_forward
from lab.workloads.inputs.mla_pass import build_mla_pass
from lab.workloads.inputs.redraw import Seeds
from lab.workloads.mla_case import MLACase
from tests.workloads.inputs.stale_calls import (
    FIRST,
    STALE,
    hold_planned_and_plain_right,
    hold_right_on_any_contents,
    hold_wrong_if_stale,
)

CPU = torch.device("cpu")
SCENARIOS = [
    "decode/tiny/3q1s100",
    "decode/tiny/3q1s100/window",
    "decode/tiny/3q1s100/e4m3",
    "decode/tiny/5q1s100/splits3",
    "target_verify/tiny/3q4s90/hnd",
    "target_verify/tiny/3q4s90/window",
    "target_verify/tiny/3q4s90/encoder_only",
    "ragged_verify/tiny/q1s40_q3s70/padding3",
    "draft_extend/tiny/q1s40_q3s70",
    "draft_extend_v2/tiny/2q4s70/on_context",
    "extend/tiny/q20s90_q3s3_q5s64",
    "extend/tiny/3q40",
    "mixed/tiny/q20s90_3q1s50/split_tail",
]
TWO_POOLS: dict[str, Any] = {"page_size": 128, "qk_rope_head_dim": 0, "kv_lora_rank": 64}
MLA = [
    MLACase(ForwardMode.DECODE, (30, 100), (1, 1), page_size=32),
    MLACase(ForwardMode.DECODE, (30, 100), (1, 1), page_size=32, draft_step=1),
    MLACase(ForwardMode.DECODE, (30, 100), (1, 1), page_size=32, dcp_size=2),
    MLACase(ForwardMode.TARGET_VERIFY, (30, 100), (4, 4), page_size=32),
    MLACase(ForwardMode.DRAFT_EXTEND, (30, 100), (2, 4), page_size=32),
    MLACase(ForwardMode.TARGET_VERIFY, (30, 100), (4, 4), page_size=32, index_topk=20),
    MLACase(ForwardMode.DECODE, (30, 300), (1, 1), compress_ratio=4, index_topk=20, **TWO_POOLS),
    MLACase(ForwardMode.TARGET_VERIFY, (30, 500), (4, 4), compress_ratio=128, **TWO_POOLS),
    MLACase(ForwardMode.EXTEND, (30, 300), (9, 4), compress_ratio=0, **TWO_POOLS),
]
NVFP4 = ForwardCase(ForwardMode.DECODE, "tiny", (30, 100), (1, 1), page_size=32, kv_dtype=torch.uint8)
BRANCHES = ForwardCase(ForwardMode.DECODE, "tiny", (30, 30, 70, 70), (1,) * 4, -1, topk=2, page_size=16)


def passes(case: Any) -> TimedPasses:
    if isinstance(case, MLACase):
        return TimedPasses.over(build_mla_pass(case, CPU))
    return TimedPasses.over(build_forward(scenario(case, None) if isinstance(case, str) else case, CPU))


@pytest.mark.parametrize("case", [*SCENARIOS, *MLA, NVFP4, BRANCHES], ids=str)
def test_one_call_is_right_on_contents_that_change_under_it(case: Any) -> None:
    hold_right_on_any_contents(passes(case).work(references))


def test_each_call_finds_some_tokens_changed_in_place() -> None:
    """So that a copy of K and V is stale that is made anew only where pages seem to be others."""
    work = passes("decode/tiny/3q1s100").work(references)
    renew(work, FIRST)
    before = work.arguments["cache"].storage.clone()
    renew(work, Seeds(FIRST.tokens, 3), tokens=False)
    after = work.arguments["cache"].storage
    changed = (before != after).flatten(3).any(3)
    assert 200 < int(changed[0].sum()) <= 256  # of 300 tokens
    assert torch.equal(changed[0], changed[1])
    assert int(changed[0].any(1).sum()) == 6  # pages of 64 tokens: two of each request


@pytest.mark.parametrize("what", STALE)
def test_a_call_that_keeps_what_it_was_prepared_with_is_wrong(what: str) -> None:
    hold_wrong_if_stale(what, passes("decode/tiny/3q1s100").work)


def test_a_planned_call_keeps_lengths_and_pages_that_others_see_change() -> None:
    planned, plain = hold_planned_and_plain_right(passes("decode/tiny/3q1s100"))
    assert planned.arguments["cache"].storage.data_ptr() != plain.arguments["cache"].storage.data_ptr()


def test_works_over_a_pass_share_all_but_their_outputs() -> None:
    both = passes("decode/tiny/3q1s100")
    one, other = both.work(references), both.work(references)
    for first, second in ((one, other), (one.copy(3), other.copy(3))):
        assert first.arguments["cache"] is second.arguments["cache"]
        assert first.arguments["out"].data_ptr() != second.arguments["out"].data_ptr()
    assert one.copy(3).arguments["cache"].storage.data_ptr() != one.arguments["cache"].storage.data_ptr()


def test_a_part_is_of_requests_that_the_seeds_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.workloads.inputs.redraw.PART_PAIRS", 1)
    work = passes("decode/tiny/3q1s100").work(references)
    assert work.redraw is not None
    renew(work, FIRST)
    work.call()()
    parts = [work.redraw.results(work.arguments, Seeds(1, seed), whole=False) for seed in range(40)]
    assert {len(part) for part in parts} == {1}
    assert len({float(part.double().sum()) for part in parts}) == 3  # requests
    check_results([work], FIRST, whole=False)
    work.arguments["out"].zero_()
    with pytest.raises(AssertionError, match="6 of 6 output vectors are wrong"):
        check_results([work], FIRST, whole=False)
