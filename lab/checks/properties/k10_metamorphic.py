"""Find a result that depends on page size, page order, layout, strides, page table width, or where a scale is applied.

These errors show without a reference result, but a test with one page size and one layout never finds them. A change that does
not affect the arithmetic must not change a bit. If it may alter the order of sums, the result must be within the error bound.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch

from lab.calls.problem import NVFP4, AttentionCall
from lab.checks.case_run import CaseRun, Result
from lab.checks.parameters.values import Cache
from lab.checks.properties.check import Check, Scope, itself
from lab.checks.properties.variants import Variant
from lab.references.errors import Truth
from lab.references.softmax_attention import rounded
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs
from lab.workloads.inputs.call import CallInputs
from lab.workloads.inputs.guards import same_bits
from lab.workloads.inputs.ragged import RaggedInputs
from lab.workloads.inputs.views import GAP, Layout, apart

MOST_HEADS = 32
LARGE_PAGE = 256  # tokens; some kernels were wrong for pages of this size
SPARE_COLUMNS = (40, 1100)  # few columns, and more columns than a block has threads (1,024)
FOLDED = 4.0  # factor that is moved from the scale to the query: a power of two, so that nothing is rounded


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    yield from scope.balanced(4, 32, seed=12)
    ranges = scope.ranges
    if scope.interface is AttentionCall.MLA_DECODE:
        return
    for case in scope.balanced(1, 4, seed=20):
        # As many heads as tokens in a page: HND and NHD then have equal shapes and different strides.
        many = replace(case, num_kv_heads=case.page_size, kv_lens=case.kv_lens[:2], q_lens=case.q_lens[:2])
        if case.page_size <= MOST_HEADS:
            yield from (replace(many, storage=replace(case.storage, kv_layout=layout)) for layout in ranges.kv_layouts)
        if True in ranges.nvfp4:
            q_lens = tuple(max(q_len, *ranges.q_lens) for q_len in case.q_lens)
            kv_lens = tuple(max(kv_len, 80) for kv_len in case.kv_lens)
            window_left = 20 if True in ranges.windows else -1
            nvfp4 = replace(case, kv_dtype=NVFP4, arithmetic=None, q_lens=q_lens, kv_lens=kv_lens)
            yield replace(nvfp4, window_left=window_left, sinks=True in ranges.sinks)


def _judge(run: CaseRun) -> None:
    inputs, truth, base = run.base_call("as it is")
    _storage(run, inputs, truth)
    _strides(run, inputs, truth, base)
    _scales(run, inputs, truth, base)
    for variant in bounds(run, inputs):
        run.vary(variant.what, variant.inputs, truth, **variant.changes)
    for enabled in (False, True) if run.device.type == "cuda" else ():  # PDL is programmatic dependent launch
        run.vary(f"enable_pdl={enabled}", inputs, base, enable_pdl=enabled)
    _switched_off(run, inputs)


def _storage(run: CaseRun, inputs: AttentionInputs, truth: Truth) -> None:
    # Within the bound, not with equal bits: a kernel may add the pages in another order.
    for variant in chain([other_pages(run)], page_sizes(run)):
        # In some cases the page size decides which keys rows see, and where needles are.
        run.vary(variant.what, variant.inputs, truth if _is_same(variant.inputs, inputs) else variant.inputs.truth())
    if not run.case.is_mla:
        for layout in run.ranges.kv_layouts:
            run.vary(f"layout {layout}", run.build(kv_layout=layout), truth)
        if run.case.kv_dtype == NVFP4:
            run.vary("scale factors with gaps", run.build(gaps_in_scale_factors=True), truth)
        stacked = run.build(stacked=True)
        run.vary("V's page after each of K's", stacked, truth)
        both = torch.stack((stacked.k_pages, stacked.v_pages), dim=1)
        run.vary("kv_cache as one tensor", stacked, truth, kv_cache=both)


def _is_same(inputs: CallInputs, other: AttentionInputs) -> bool:
    if not isinstance(inputs, AttentionInputs) or inputs.selected is not None or inputs.seen is not None:
        return False
    sides, of_other = ([each.query, *chain(*each.histories)] for each in (inputs, other))
    return all(map(same_bits, sides, of_other))


def other_pages(run: CaseRun) -> Variant:
    return Variant("pages in another order", run.build(page_seed=run.case.storage.page_seed + 1))


def page_sizes(run: CaseRun) -> Iterator[Variant]:
    """Yield the call with pages of each size in `run.ranges`. Without MLA, also of 256 tokens if 128 is one of these sizes."""
    sizes = run.ranges.mla_page_sizes if run.case.is_mla else run.ranges.page_sizes
    if LARGE_PAGE // 2 in sizes and not run.case.is_mla:
        sizes = (*sizes, LARGE_PAGE)
    for page_size in sizes:
        yield Variant(f"pages of {page_size} tokens", run.build(page_size=page_size))


def _strides(run: CaseRun, inputs: AttentionInputs, truth: Truth, base: Result) -> None:
    spread = replace(inputs, block_tables=apart(inputs.block_tables, -2, GAP))
    run.vary("a page table with gaps between its rows", spread, base)
    if run.case.top_k:
        entries = apart(inputs.arguments()["block_tables"], -2, GAP)
        run.vary("selected entries with gaps between their rows", inputs, base, block_tables=entries)
    run.vary("a query with gaps between its rows", replace(inputs, query=Layout.ROWS_APART.of(inputs.query)), truth)
    keys = Cache.PAGES_APART.of(inputs.k_pages, 1)
    values = keys if run.case.is_mla else Cache.PAGES_APART.of(inputs.v_pages, 1)
    run.vary("pages with gaps between them", replace(inputs, k_pages=keys, v_pages=values), truth)
    if not run.case.is_mla:
        run.vary("V pages with gaps, K pages without", replace(inputs, v_pages=values), truth)


def _scales(run: CaseRun, inputs: AttentionInputs, truth: Truth, base: Result) -> None:
    folded = replace(inputs, query=rounded(inputs.query.to(torch.float32) * FOLDED, inputs.query.dtype))
    what = "the query times 4, bmm1_scale by 4"
    result = run.vary(what, folded, bmm1_scale=inputs.bmm1_scale / FOLDED)
    if run.case.arithmetic is None:
        run.expect_equal_bits(what, result, base)
    run.expect_close(what, result, truth)  # a larger query has other errors if it is rounded to e4m3
    tensors = {
        "bmm1_scale": torch.tensor([inputs.bmm1_scale], dtype=torch.float32, device=run.device),
        "bmm2_scale": torch.tensor([inputs.bmm2_scale], dtype=torch.float32, device=run.device),
    }
    for name, value in tensors.items():
        run.vary(f"{name} as a tensor", inputs, truth, **{name: value})
    if run.case.interface is AttentionCall.DECODE:
        log2 = tensors["bmm1_scale"] * math.log2(math.e)
        run.vary("bmm1_scale_log2", inputs, truth, bmm1_scale_log2=log2)


def bounds(run: CaseRun, inputs: CallInputs) -> Iterator[Variant]:
    """Yield the call with other bounds of the lengths, such as `max_seq_len`, and with wider page tables."""
    longest = max(*inputs.kv_lens, 1)
    room = longest if isinstance(inputs, RaggedInputs) else inputs.max_seq_len
    for value in (longest, 4 * room):
        yield Variant(f"{inputs.kv_bound}={value}", inputs, {inputs.kv_bound: value})
    for columns in () if isinstance(inputs, RaggedInputs) else SPARE_COLUMNS:
        yield Variant(f"a page table with {columns} spare columns", run.build(spare_columns=columns))
    if "max_q_len" in inputs.arguments():
        yield Variant("a larger max_q_len", inputs, {"max_q_len": 2 * max(inputs.q_lens)})


def _switched_off(run: CaseRun, inputs: AttentionInputs) -> None:
    if not run.case.has_window_argument:
        return
    longest = max(max(run.case.kv_lens), 1)
    without = inputs.truth(window_left=-1)
    for window_left in (longest, longest - 1) if True in run.ranges.windows else ():
        run.vary(f"window_left={window_left}, which hides nothing", inputs, without, window_left=window_left)
    if True in run.ranges.sinks:
        none = torch.full((run.case.num_qo_heads,), -math.inf, dtype=torch.float32, device=run.device)
        run.vary("sinks of minus infinity", inputs, inputs.truth(sinks=None), sinks=none)
        some = torch.zeros_like(none)
        some[::2] = -math.inf
        run.vary("sinks of minus infinity for every other head", inputs, inputs.truth(sinks=some), sinks=some)


CHECK = Check("K10", __doc__, _cases, _judge, drawn=itself)
