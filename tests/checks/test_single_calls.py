"""Cases and bounds of K7 (shared pages), K11 (a scale below 0) and K13 (more rows and heads than 16 bits count)."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from corpus.kernels import kernel
from lab import references
from lab.calls.problem import E4M3, AttentionCall
from lab.checks import Level, Outcome, Ranges, judge_case
from lab.checks.properties import k13_boundaries
from lab.checks.properties.k11_sensitivity import scale_below_0
from lab.checks.run.judging import run_case
from lab.workloads.attention_case import AttentionCase, Contents, Storage
from lab.workloads.inputs.attention import build_attention
from tests.checks.small import decoding

CPU = torch.device("cpu")
PAGE_SIZE = 32
FIRST, LONGEST_FIRST = "a shared prefix", "unequal shared prefixes, the longest request first"
ALL_SHARED = "the longest request twice, alone"


def pages_of_the_first(**arguments: Any) -> Any:
    """Take all pages but the last of the first request for a request with the first request's first page."""
    tables = arguments["block_tables"].clone()
    pages = [-(-length // PAGE_SIZE) for length in arguments["seq_lens"].tolist()]
    for request in range(1, len(tables)):
        if tables[request, 0] == tables[0, 0]:
            shared = min(pages[0], pages[request]) - 1
            tables[request, :shared] = tables[0, :shared]
    return references.trtllm_batch_decode_with_kv_cache(**arguments | {"block_tables": tables})


def first_page_for_all(**arguments: Any) -> Any:
    """Read each page of the prefix that all requests share as the prefix's first page, if the prefix has several pages."""
    tables = arguments["block_tables"].clone()
    whole = int(arguments["seq_lens"].min()) // PAGE_SIZE
    is_shared = (tables == tables[0]).all(dim=0)[:whole].int().cumprod(0)
    if len(tables) > 1 and (shared := int(is_shared.sum())) > 1:
        tables[:, 1:shared] = tables[:, :1]
    return references.trtllm_batch_decode_with_kv_cache(**arguments | {"block_tables": tables})


def shared_pages_without_mask(**arguments: Any) -> Any:
    """Let each row see all keys if all requests have the same pages, as if those were a prefix before all rows."""
    tables = arguments["block_tables"]
    are_shared = len(tables) > 1 and bool((tables == tables[0]).all())
    return references.trtllm_batch_context_with_kv_cache(**arguments | ({"causal": False} if are_shared else {}))


@pytest.mark.parametrize(
    ("implementation", "interface", "kv_lens", "q_lens", "found_by"),
    [
        (decoding(pages_of_the_first), AttentionCall.DECODE, (64, 199, 172, 127), (1, 1, 1, 1), [LONGEST_FIRST]),
        # It takes what the first two requests share for what all share.
        (
            kernel("blind515").implementation(),
            AttentionCall.CONTEXT,
            (199, 172, 127, 64),
            (3, 1, 2, 1),
            [LONGEST_FIRST],
        ),
        (decoding(first_page_for_all), AttentionCall.DECODE, (64, 199, 172, 127), (1, 1, 1, 1), [ALL_SHARED, FIRST]),
        (
            SimpleNamespace(trtllm_batch_context_with_kv_cache=shared_pages_without_mask),
            AttentionCall.CONTEXT,
            (172, 199, 127, 64),
            (1, 3, 2, 1),
            [ALL_SHARED],
        ),
    ],
    ids=["one page", "two pages", "all two pages", "all pages"],
)
def test_a_prefix_that_is_taken_for_longer_than_it_is(
    implementation: Any,
    interface: AttentionCall,
    kv_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    found_by: list[str],
) -> None:
    model: dict[str, int] = {"num_kv_heads": 1, "group": 2, "head_dim": 64}
    case = AttentionCase(interface, kv_lens, q_lens, **model, storage=Storage(page_size=PAGE_SIZE))
    judged = judge_case(implementation, "K7", case, "cpu").judged
    assert [result.name for result in judged.results if result.wrong] == found_by


OF_E4M3 = AttentionCase(
    AttentionCall.DECODE,
    (63, 199, 128, 175),
    (1, 1, 1, 1),
    num_kv_heads=1,
    group=8,
    head_dim=128,
    kv_dtype=E4M3,
    arithmetic=E4M3,
    contents=Contents.NEEDLES,
    seed=14,
    storage=Storage(page_size=64, page_seed=14),
)


@pytest.mark.parametrize("seed", range(13, 19))
def test_a_query_cast_to_e4m3_is_within_the_bound(seed: int) -> None:
    inputs = build_attention(replace(OF_E4M3, seed=seed), CPU)
    cast = replace(inputs, query=inputs.query.to(E4M3).to(inputs.query.dtype))
    rules = {"bmm1_scale": scale_below_0(inputs)}
    assert inputs.truth(**rules).compare(cast.truth(arithmetic=torch.bfloat16, **rules).control).passed


def test_where_a_kernel_does_not_round_q_more_products_overflow() -> None:
    inputs = build_attention(OF_E4M3, CPU)
    plain = build_attention(replace(OF_E4M3, arithmetic=None), CPU)
    factors = [scale_below_0(each) / each.bmm1_scale for each in (inputs, plain)]
    assert factors == pytest.approx([-8.0, -25.0])


DECODES = (AttentionCall.DECODE, AttentionCall.MLA_DECODE)


def with_many_pairs(interface: AttentionCall, ranges: Ranges) -> list[AttentionCase]:
    cases = k13_boundaries.CHECK.cases(interface, ranges, Level.SMOKE)
    return [case for case in cases if sum(case.q_lens) * case.num_qo_heads > 65_535]


@pytest.mark.parametrize("interface", DECODES)
def test_the_smoke_level_has_a_cheap_call_of_more_than_65535_rows_and_heads(interface: AttentionCall) -> None:
    (case,) = with_many_pairs(interface, Ranges())
    assert sum(case.q_lens) * case.num_qo_heads * case.head_dim < 2**23
    assert max(case.kv_lens) < 16


def test_a_kernel_of_one_head_is_not_asked_for_as_many_requests() -> None:
    ranges = Ranges(groups=(1,), num_kv_heads=(1,), q_lens=(1,), mla_heads=(1,))
    assert not any(with_many_pairs(interface, ranges) for interface in DECODES)


def test_a_context_call_has_them_at_the_full_level() -> None:
    cases = k13_boundaries.CHECK.cases(AttentionCall.CONTEXT, Ranges(), Level.FULL)
    assert any(sum(case.q_lens) * case.num_qo_heads > 65_535 for case in cases)


@pytest.mark.parametrize("interface", DECODES)
def test_a_grid_of_65535_programs_is_wrong_in_it(interface: AttentionCall) -> None:
    def cut(**arguments: Any) -> Any:
        out = getattr(references, interface.value)(**arguments)
        out.view(-1, out.shape[-1])[65_535:] = 0
        return out

    (case,) = with_many_pairs(interface, Ranges())
    outcomes = [
        run_case(SimpleNamespace(**{interface.value: function}), k13_boundaries.CHECK, case, CPU, Ranges()).outcome
        for function in (getattr(references, interface.value), cut)
    ]
    assert outcomes == [Outcome.RIGHT, Outcome.WRONG]
