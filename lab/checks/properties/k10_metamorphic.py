"""A result that changes with what cannot matter: page size and order, layout, strides, table width, the split of a scale.

No oracle is needed to see these, and a test that fixes one page size and one layout never does. What changes no arithmetic
must change no bit; what may be summed in another order must stay right.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lab.calls.problem import NVFP4
from lab.checks.check import Check, Level, counted, first_line, same
from lab.checks.parameters.attention import balanced
from lab.checks.trial import Result, Trial
from lab.ranges import Ranges
from lab.references.truth import Truth
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs, as_one_tensor, truth_of_call
from lab.workloads.interfaces import Interface

MOST_HEADS = 32
LARGE_PAGE = 256  # tokens; kernels were wrong from there on
SPARE_COLUMNS = (40, 1100)  # a little, and more than a block of 1,024 threads
FOLDED = 4.0  # a power of two: moving it between the query and the scale rounds nothing


def _cases(interface: Interface, ranges: Ranges, level: Level) -> Iterator[AttentionCase]:
    yield from balanced(ranges, interface, counted(level, 4, 32), seed=12)
    if interface is Interface.MLA_DECODE:
        return
    for case in balanced(ranges, interface, counted(level, 1, 4), seed=20):
        # As many heads as tokens in a page: the layouts' shapes are equal, their strides are not.
        many = replace(case, num_kv_heads=case.page_size, kv_lens=case.kv_lens[:2], q_lens=case.q_lens[:2])
        if case.page_size <= MOST_HEADS:
            yield from (replace(many, storage=replace(case.storage, kv_layout=layout)) for layout in ranges.kv_layouts)
        if True in ranges.nvfp4:
            if interface is Interface.DECODE or level is Level.FULL:
                yield replace(case, kv_dtype=NVFP4)
            yield _nvfp4_with_all(case, ranges)


def _nvfp4_with_all(case: AttentionCase, ranges: Ranges) -> AttentionCase:
    """Several rows, a window and sinks over an NVFP4 cache, whose kernels are others."""
    return replace(
        case,
        kv_dtype=NVFP4,
        arithmetic=None,
        q_lens=tuple(max(q_len, max(ranges.q_lens)) for q_len in case.q_lens),
        kv_lens=tuple(max(kv_len, 80) for kv_len in case.kv_lens),
        window_left=20 if True in ranges.windows else -1,
        sinks=True in ranges.sinks,
    )


def _judge(trial: Trial) -> None:
    inputs = trial.build()
    truth = truth_of_call(inputs)
    base = trial.call(inputs)
    trial.hold("as it is", base, truth)
    _storage(trial, truth, base)
    _strides(trial, inputs, truth, base)
    _scales(trial, inputs, truth, base)
    _bounds(trial, inputs, truth, base)
    _switched_off(trial, inputs)


def _storage(trial: Trial, truth: Truth, base: Result) -> None:
    storage = trial.case.storage
    moved = trial.attempt("pages in another order", trial.build(page_seed=storage.page_seed + 1))
    trial.same_bits("pages in another order", moved, base)
    for page_size in _page_sizes(trial):
        trial.vary(f"pages of {page_size} tokens", truth, trial.build(page_size=page_size))
    if not trial.case.is_mla:
        for layout in trial.ranges.kv_layouts:
            trial.vary(f"layout {layout}", truth, trial.build(kv_layout=layout))
        if trial.case.kv_dtype == NVFP4:
            gaps = trial.build(gaps_in_scale_factors=True)
            trial.vary("scale factors with gaps", truth, gaps)
        stacked = trial.build(stacked=True)
        trial.vary("V's page after each of K's", truth, stacked)
        trial.vary("kv_cache as one tensor", truth, stacked, kv_cache=as_one_tensor(stacked))


def _page_sizes(trial: Trial) -> tuple[int, ...]:
    """Of the ranges, and, where that holds large ones, a larger one."""
    if trial.case.is_mla:
        return trial.ranges.mla_page_sizes
    return (
        (*trial.ranges.page_sizes, LARGE_PAGE)
        if LARGE_PAGE // 2 in trial.ranges.page_sizes
        else trial.ranges.page_sizes
    )


def _strides(trial: Trial, inputs: AttentionInputs, truth: Truth, base: Result) -> None:
    """The same numbers as views of larger tensors."""
    what = "a page table with gaps between its rows"
    trial.same_bits(what, trial.attempt(what, replace(inputs, block_tables=in_wider_rows(inputs.block_tables))), base)
    trial.vary("a query with gaps between its rows", truth, replace(inputs, query=in_wider_rows(inputs.query)))
    spread = replace(inputs, k_pages=in_wider_pages(inputs.k_pages), v_pages=in_wider_pages(inputs.v_pages))
    trial.vary("pages with gaps between them", truth, spread)
    if not trial.case.is_mla:
        uneven = replace(inputs, v_pages=in_wider_pages(inputs.v_pages))
        trial.vary("V pages with gaps, K pages without", truth, uneven)


def in_wider_rows(tensor: Tensor) -> Tensor:
    """The tensor as a view of one with a row and a half of large values after each of its rows."""
    rows = tensor.flatten(1)
    wide = torch.full((len(rows), 2 * rows.shape[1] + 16), 2**15, dtype=tensor.dtype, device=tensor.device)
    wide[:, : rows.shape[1]] = rows
    return wide.as_strided(tensor.shape, (wide.stride(0), *tensor.stride()[1:]))


def in_wider_pages(pages: Tensor) -> Tensor:
    """The pages as a view of a pool in which each is followed by as many zeros."""
    wide = torch.zeros(len(pages), 2, *pages.shape[1:], dtype=pages.dtype, device=pages.device)
    wide[:, 0].view(torch.uint8).copy_(pages.view(torch.uint8))
    return wide[:, 0]


def _scales(trial: Trial, inputs: AttentionInputs, truth: Truth, base: Result) -> None:
    folded = replace(inputs, query=inputs.query * FOLDED)
    what = "the query times 4, bmm1_scale by 4"
    result = trial.attempt(what, folded, bmm1_scale=inputs.bmm1_scale / FOLDED)
    if trial.case.arithmetic is None:
        trial.same_bits(what, result, base)
    trial.hold(what, result, truth)  # a query that is rounded to e4m3 rounds otherwise when it is larger
    tensors = {
        "bmm1_scale": torch.tensor([inputs.bmm1_scale], dtype=torch.float32, device=trial.device),
        "bmm2_scale": torch.tensor([inputs.bmm2_scale], dtype=torch.float32, device=trial.device),
    }
    for name, value in tensors.items():
        trial.vary(f"{name} as a tensor", truth, inputs, **{name: value})
    if trial.case.interface is Interface.DECODE:
        log2 = tensors["bmm1_scale"] * math.log2(math.e)
        trial.vary("bmm1_scale_log2", truth, inputs, bmm1_scale_log2=log2)


def _bounds(trial: Trial, inputs: AttentionInputs, truth: Truth, base: Result) -> None:
    """Host bounds and the table's width may change how work is split, and nothing else."""
    bound = "max_kv_len" if trial.case.interface is Interface.CONTEXT else "max_seq_len"
    longest = max(max(trial.case.kv_lens), 1)
    for value in (longest, 4 * inputs.max_seq_len):
        trial.vary(f"{bound}={value}", truth, inputs, **{bound: value})
    for columns in SPARE_COLUMNS:
        trial.vary(f"a page table with {columns} spare columns", truth, trial.build(spare_columns=columns))
    if trial.case.interface is Interface.CONTEXT:
        rows = 2 * max(trial.case.q_lens)
        trial.vary("a larger max_q_len", truth, inputs, max_q_len=rows)
    if trial.device.type == "cuda":
        for enabled in (False, True):
            what = f"enable_pdl={enabled}"
            trial.same_bits(what, trial.attempt(what, inputs, enable_pdl=enabled), base)


def _switched_off(trial: Trial, inputs: AttentionInputs) -> None:
    """A window as wide as every request is none, and a sink of minus infinity is none."""
    if trial.case.is_mla:
        return
    longest = max(max(trial.case.kv_lens), 1)
    if True in trial.ranges.windows:
        _wide_windows(trial, inputs, longest)
    if True in trial.ranges.sinks:
        none = torch.full((trial.case.num_qo_heads,), -math.inf, dtype=torch.float32, device=trial.device)
        trial.vary("sinks of minus infinity", truth_of_call(inputs, sinks=None), inputs, sinks=none)
        some = torch.zeros_like(none)
        some[::2] = -math.inf
        trial.vary(
            "sinks of minus infinity for every other head", truth_of_call(inputs, sinks=some), inputs, sinks=some
        )


def _wide_windows(trial: Trial, inputs: AttentionInputs, longest: int) -> None:
    without = truth_of_call(inputs, window_left=-1)
    for window_left in (longest, longest - 1):
        trial.vary(f"window_left={window_left}, which hides nothing", without, inputs, window_left=window_left)


CHECK = Check("K10", "metamorphic", first_line(__doc__), _cases, _judge, adapt=same)
