"""Find a call that is right in a unit test and wrong in an engine's MLA forward pass.

The check makes forward passes in all modes, from the requests' tokens to the outputs. Unit tests lack an engine's arguments: a
page table that ends in -1, lengths of a draft extend with padding rows, and lengths of a draft step without draft tokens.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from lab.calls.problem import E4M3, LATENT_CALLS, AttentionCall
from lab.checks.properties.check import Check, Scope
from lab.checks.properties.forward_modes import judge_pass, pass_dtypes, smoke_q_lens
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.lengths import DraftAttention
from lab.workloads.attention_case import Contents
from lab.workloads.inputs.mla_pass import build_mla_pass
from lab.workloads.mla_case import MLACase


def mla_mode_cases(page_size: int, q_lens: tuple[int, ...], **dims: Any) -> Iterator[MLACase]:
    """Yield forward passes in each mode of the MLA decode kernel. `dims` has the sizes of the layer, fields of `MLACase`."""
    case: Callable[..., MLACase] = partial(MLACase, page_size=page_size, **dims)
    prefixes, unequal = (0, page_size - 1, page_size, page_size + 1, 3 * page_size + 5, 300), (5, 1, 2, 4, 3, 1)
    equal, ones = (3,) * len(prefixes), (1,) * len(prefixes)
    yield case(ForwardMode.DECODE, prefixes, ones)
    for attention, step in itertools.product((DraftAttention.MLA, DraftAttention.MLA_WITH_OFFSET), (0, 2)):
        yield case(ForwardMode.DECODE, prefixes, ones, draft_step=step, attention=attention)
    for q_len in q_lens:
        edge = max(page_size - q_len, 0)
        crossing = (0, edge, edge + 1, page_size, 3 * page_size + 5, 300)
        verify = case(ForwardMode.TARGET_VERIFY, crossing, (q_len,) * len(crossing))
        yield verify
        if q_len == 4:
            yield replace(verify, virtual_slots=True)
        yield replace(verify, mode=ForwardMode.DRAFT_EXTEND_V2)
    # Padded to as many rows as the longest request has, and to more rows.
    yield case(ForwardMode.RAGGED_VERIFY, prefixes, unequal, num_draft_tokens=5)
    for rows in (unequal, equal):
        yield case(ForwardMode.RAGGED_VERIFY, prefixes, rows, num_draft_tokens=8)
    for virtual in (False, True):
        yield case(ForwardMode.DRAFT_EXTEND, prefixes, unequal, virtual_slots=virtual)
    # Unequal numbers of rows with the same sum as equal ones: 2 and 4 instead of 3 and 3.
    yield case(ForwardMode.DRAFT_EXTEND, prefixes[-2:], (2, 4))
    yield case(ForwardMode.DRAFT_EXTEND, prefixes, equal)


def _uniform_cases(prefix_lens: tuple[int, ...], q_len: int, **settings: Any) -> Iterator[MLACase]:
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        rows = 1 if mode is ForwardMode.DECODE else q_len
        yield MLACase(mode, prefix_lens, (rows,) * len(prefix_lens), **settings)


def _engine_cases(page_size: int, q_len: int, **dims: Any) -> Iterator[MLACase]:
    case: Callable[..., MLACase] = partial(MLACase, page_size=page_size, **dims)
    # On some ranks a request has no token, and some prefixes end at a page edge of a rank.
    sharded = (0, 1, 2, 2 * page_size - 1, 2 * page_size, 4 * page_size + 1, 300)
    for size in (2, 4):
        yield case(ForwardMode.DECODE, sharded, (1,) * len(sharded), dcp_size=size)
    prefixes = (page_size - 1, page_size, 300)
    yield from _uniform_cases(prefixes, q_len, page_size=page_size, num_padding_requests=2, **dims)
    yield case(ForwardMode.RAGGED_VERIFY, prefixes, (1, 4, 2), num_padding_rows=5)


def _sparse_cases(page_size: int, q_len: int, **dims: Any) -> Iterator[MLACase]:
    prefixes = (1, page_size - 1, page_size, 3 * page_size + 5, 300)
    shared: dict[str, Any] = {"page_size": page_size, "index_topk": 130, **dims}
    yield from _uniform_cases(prefixes, q_len, **shared)
    yield MLACase(ForwardMode.DECODE, prefixes, (1,) * len(prefixes), draft_step=1, **shared)
    yield MLACase(ForwardMode.DECODE, prefixes, (1,) * len(prefixes), num_padding_requests=2, **shared)
    extend = MLACase(ForwardMode.EXTEND, (0, *prefixes[1:]), (5, 2, 70, 4, 1), **shared)
    verify = MLACase(ForwardMode.TARGET_VERIFY, prefixes, (q_len,) * len(prefixes), **shared)
    decode = MLACase(ForwardMode.DECODE, (0, 1, 300), (1, 1, 1), **shared)  # on some ranks a row has no entry
    yield from (extend, replace(decode, dcp_size=4), *(replace(each, dcp_size=2) for each in (verify, extend)))


def two_pool_cases(q_len: int, **dims: Any) -> Iterator[MLACase]:
    """Yield forward passes of DeepSeek-V4. Some rows see fewer tokens than the window has, and some rows more compressed
    entries than the indexer selects. `dims` has the sizes of the layer, fields of `MLACase`.
    """
    prefixes, ones, equal = (0, 126, 127, 300, 700), (1,) * 5, (q_len,) * 5
    case: Callable[..., MLACase] = partial(MLACase, prefix_lens=prefixes, page_size=128, qk_rope_head_dim=0, **dims)
    yield case(ForwardMode.DECODE, q_lens=ones, compress_ratio=4, index_topk=130)
    yield case(ForwardMode.DECODE, q_lens=ones, compress_ratio=2, index_topk=130, num_padding_requests=2)
    yield case(ForwardMode.DECODE, prefix_lens=(1, *prefixes[1:]), q_lens=ones, compress_ratio=0, draft_step=1)
    yield case(ForwardMode.TARGET_VERIFY, q_lens=equal, compress_ratio=128)
    yield case(ForwardMode.TARGET_VERIFY, q_lens=equal, compress_ratio=1, index_topk=130)
    yield case(ForwardMode.DRAFT_EXTEND_V2, q_lens=equal, compress_ratio=0, num_padding_requests=2)
    ragged = case(ForwardMode.RAGGED_VERIFY, q_lens=(5, 1, 2, 4, 3), compress_ratio=128, num_draft_tokens=8)
    yield replace(ragged, num_padding_rows=5)
    extend = case(ForwardMode.EXTEND, q_lens=(5, 9, 2, 3, 1), compress_ratio=4, index_topk=130)
    yield from (extend, replace(extend, compress_ratio=128, index_topk=None, page_size=256))


def _cases(scope: Scope) -> Iterator[MLACase]:
    ranges = scope.ranges
    if scope.interface is not AttentionCall.MLA_DECODE:
        yield from _of_two_pools(scope)
        return
    q_lens = tuple(ranges.q_lens) if scope.is_full else smoke_q_lens(ranges)
    dtypes = pass_dtypes(ranges.dtypes[0])
    head_dims = ranges.mla_head_dims if scope.is_full else ranges.mla_head_dims[:1]
    heads = ranges.mla_heads[len(ranges.mla_heads) // 2]
    for page_size in ranges.mla_page_sizes:
        for head_dim, rank in head_dims:
            dims = {"num_qo_heads": heads, "kv_lora_rank": rank, "qk_rope_head_dim": head_dim - rank}
            for case in (*_engine_cases(page_size, q_lens[0], **dims), *mla_mode_cases(page_size, q_lens, **dims)):
                yield replace(case, contents=Contents.NEEDLES, **dtypes)
    if (dtypes["dtype"], E4M3) in ranges.dtypes:
        e4m3 = replace(case, dtype=dtypes["dtype"], kv_dtype=E4M3)
        yield e4m3
        cast = replace(e4m3, query_dtype=E4M3)  # as SGLang passes it
        yield cast
        yield replace(cast, mode=ForwardMode.RAGGED_VERIFY, q_lens=(5, 1, 2, 4, 3, 1), num_draft_tokens=6)
        decode = replace(cast, mode=ForwardMode.DECODE, q_lens=(1,) * len(cast.prefix_lens))
        yield decode
        yield replace(decode, dcp_size=2)
        yield replace(cast, mode=ForwardMode.TARGET_VERIFY, index_topk=130)
    for sparse in _sparse_cases(max(ranges.mla_page_sizes), q_lens[0], **dims):
        yield replace(sparse, contents=Contents.NEEDLES, **dtypes)


def _of_two_pools(scope: Scope) -> Iterator[MLACase]:
    ranges = scope.ranges
    dtypes, heads = pass_dtypes((ranges.dtypes[0][0],) * 2), ranges.mla_heads[len(ranges.mla_heads) // 2]
    for _, rank in ranges.mla_head_dims if scope.is_full else ranges.mla_head_dims[:1]:
        for q_len in ranges.q_lens if scope.is_full else smoke_q_lens(ranges):
            for case in two_pool_cases(q_len, num_qo_heads=heads, kv_lora_rank=rank):
                yield replace(case, **dtypes)
                if (dtypes["dtype"], E4M3) in ranges.dtypes and case.compress_ratio == 4:
                    yield replace(case, dtype=dtypes["dtype"], kv_dtype=E4M3, query_dtype=E4M3)  # as SGLang passes it


CHECK = Check(
    "M2", __doc__, _cases, lambda run: judge_pass(run, build_mla_pass(run.case, run.device)), LATENT_CALLS, quick=5
)
