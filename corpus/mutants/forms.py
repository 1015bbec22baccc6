"""Mutants that are wrong where several arguments meet, and for one form of an argument: rank, strides, address, type. The last ones
are of skip-softmax, of one rank's keys, and of arguments that change no result.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from corpus.models.split_kv import Call, Conditional, Forgiving, Partials, RowTile
from corpus.mutants.pages import with_strides
from corpus.wrong import CONTEXT, DECODE, MLA, wrong
from lab.calls.problem import E4M3, NVFP4, PagedAttention


def _lengths_of_first_rows(problem: PagedAttention) -> Tensor:
    first_pages = problem.k_block_tables[:, 0].where(problem.seq_lens > 0, -1 - torch.arange(problem.batch_size))
    is_same = first_pages[:, None] == first_pages
    return problem.seq_lens[is_same.int().argmax(1)]


class Combined(Conditional):
    """Kernels that are wrong where several arguments meet, and right with each by itself."""

    tensor_scales_exchanged = wrong(
        mla=True,
        where=lambda _, call: isinstance(call.bmm1_scale, Tensor) and isinstance(call.bmm2_scale, Tensor),
        instead={"bmm1_scale": lambda p, _: p.bmm2_scale},
    )("Where both scales are tensors, bmm2_scale is read in the place of bmm1_scale.")
    log2_ignored_beside_tensor = wrong(
        DECODE,
        where=lambda _, call: isinstance(call.bmm1_scale, Tensor),
        instead={"bmm1_scale": lambda _, call: call.bmm1_scale},
    )("bmm1_scale_log2 gives way to a bmm1_scale that is a tensor.")
    window_ignored_with_mask_and_sinks = wrong(
        DECODE, where=lambda p, _: p.mask is not None and p.sinks is not None, instead={"window_left": -1}
    )("A window is ignored where there is a draft mask and sinks too.")
    sinks_ignored_in_ragged_window = wrong(
        DECODE, where=lambda p, _: p.cu_seqlens_q is not None and p.window_left >= 0, instead={"sinks": None}
    )("Sinks are ignored where a decode call has cum_seq_lens_q and a window.")
    v_pages_from_k_in_window = wrong(
        where=lambda p, _: p.window_left >= 0, instead={"v_block_tables": lambda p, _: p.k_block_tables}
    )("V's own page table is ignored where there is a window.")
    mask_ignored_over_nvfp4 = wrong(DECODE, where=lambda p, _: p.kv_dtype == NVFP4, instead={"mask": None})(
        "A draft mask is taken for a causal one over an NVFP4 cache."
    )
    scale_of_v_ignored_with_e4m3_output = wrong(
        where=lambda p, _: p.query.dtype == E4M3 and p.out_dtype == E4M3, instead={"bmm2_scale": 1.0}
    )("bmm2_scale is ignored where the query and the output are e4m3, as over an NVFP4 cache on trtllm-gen.")
    rows_of_the_same_pages_are_one_request = wrong(
        CONTEXT, instead={"seq_lens": lambda p, _: _lengths_of_first_rows(p)}
    )(
        "Rows of the page table that begin with the same page get the length of the first, as no two requests share a page."
    )
    sinks_ignored_without_causality = wrong(CONTEXT, where=lambda p, _: not p.causal, instead={"sinks": None})(
        "Sinks are ignored with causal=False."
    )
    keys_counted_by_their_offsets = wrong(
        CONTEXT, source="vLLM 0.33.0 passes offsets of pages", instead={"seq_lens": lambda p, _: p.cu_seqlens_kv.diff()}
    )("The lengths are the steps of cum_seq_lens_kv.")

    @wrong(CONTEXT, stage="finish")
    def lse_base_e_without_causality(self, problem, out, lse):
        """The LSE is a natural logarithm with causal=False."""
        if lse is not None and not problem.causal:
            lse *= math.log(2.0)

    sinks_ignored_beside_tensor_scale = wrong(
        mla=True, where=lambda _, call: isinstance(call.bmm2_scale, Tensor), instead={"sinks": None}
    )("Sinks are ignored where bmm2_scale is a tensor.")
    mla_sinks_ignored_in_base_e = wrong(
        MLA, where=lambda _, call: call.return_lse_base == "basee", instead={"sinks": None}
    )("Sinks are ignored where an MLA decode asks for an LSE in base e.")
    mla_sinks_ignored_in_ragged_rows = wrong(
        MLA, where=lambda p, _: p.max_q_len > 1, instead={"sinks": None}, only_with="cu_seqlens_q"
    )("Sinks are ignored where an MLA decode has cum_seq_lens_q and several rows per request.")
    window_ignored_with_unsigned_lengths = wrong(
        where=lambda _, call: call.seq_lens.dtype == torch.uint32, instead={"window_left": -1}
    )("A window is ignored where seq_lens is uint32.")


LOAD_BYTES = 32


def _with_padding(problem: PagedAttention, _: Call) -> Tensor:
    """Return the query with 0 times the rows after the last request's added to every row."""
    end = problem.num_rows if problem.cu_seqlens_q is None else int(problem.cu_seqlens_q[-1])
    padding = problem.query[end:].to(torch.float32)
    return (problem.query.to(torch.float32) + (padding * 0.0).sum()).to(problem.query.dtype)


def in_loads(cache: Tensor, axis: int) -> Tensor:
    """Return the cache as it is read with the stride of an axis rounded down to loads of 8 elements."""
    return restrided(cache, axis, cache.stride(axis) // 8 * 8)


def restrided(cache: Tensor, axis: int, stride: int) -> Tensor:
    """Return [num_pages, num_kv_heads, page_size, last] as it is read with another stride of one axis."""
    strides = list(cache.stride()[:3])
    if strides[axis] == stride:
        return cache
    strides[axis] = stride
    return with_strides((strides[0], strides[1], strides[2]), cache)


def rounded_down(tensor: Tensor) -> Tensor:
    """Return the tensor as it is read from the last address before its own that is whole loads."""
    elements = tensor.data_ptr() % LOAD_BYTES // tensor.element_size()
    if elements in (0, tensor.storage_offset() + 1):
        return tensor
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - elements)


class Forms(Conditional):
    """Kernels that are wrong for one form of an argument: its rank, its strides, its address, its type."""

    scale_of_no_dimension_ignored = wrong(
        mla=True,
        where=lambda _, call: isinstance(call.bmm1_scale, Tensor) and call.bmm1_scale.ndim == 0,
        instead={"bmm1_scale": lambda p, _: p.head_dim**-0.5},
    )("bmm1_scale is taken as 1 / sqrt(head_dim) where it is a tensor of no dimension.")
    scale_of_two_dimensions_ignored = wrong(
        mla=True,
        where=lambda _, call: isinstance(call.bmm2_scale, Tensor) and call.bmm2_scale.ndim == 2,
        instead={"bmm2_scale": 1.0},
    )("bmm2_scale is taken as 1 where it is a tensor of two dimensions.")
    whole_scale_read_as_bits = wrong(
        mla=True, where=lambda _, call: isinstance(call.bmm2_scale, int), instead={"bmm2_scale": 0.0}
    )("A bmm2_scale that is an int is read as the bits of a float, which are nearly 0.")
    window_overflows = wrong(where=lambda _, call: call.window_left == 2**31 - 1, instead={"window_left": 0})(
        "The keys of a window, window_left + 1, overflow int32 at 2**31: a row sees its own key alone."
    )
    only_side_misread = wrong(
        where=lambda _, call: isinstance(call.kv_cache, Tensor) and call.kv_cache.shape[1] == 1,
        instead={"v_cache": lambda p, _: p.k_cache.view(torch.uint8).roll(-1, 0).view(p.k_cache.dtype)},
    )("V is looked for a page after K where kv_cache is one tensor with a second dimension of 1.")
    lse_alone_unwritten = wrong(results=lambda results, p: results if p.return_lse else (results[0], None))(
        "An lse without return_lse is left unwritten."
    )

    @wrong(stage="results")
    def strided_lse_written_packed(self, problem):
        """An lse that is not contiguous is written as if it were."""
        out, lse = super().results(problem)
        return out, lse if lse is None else lse.as_strided(lse.shape, (lse.shape[1], 1))

    @wrong(
        MLA,
        stage="finish_tile",
        where=lambda _, c: c.max_q_len is None,
        instead={"max_q_len": 1},
        only_with="cu_seqlens_q",
    )
    def mla_rows_of_no_bound_lost(self, problem, tile, rows):
        """max_q_len=None is taken as 1: of a request's rows through cum_seq_lens_q the first is computed."""
        if problem.cu_seqlens_q is not None and problem.max_q_len == 1:
            rows.values[1:] = 0.0

    mla_sinks_list_ignored = wrong(
        MLA, where=lambda _, call: isinstance(call.sinks, (list, tuple)), instead={"sinks": None}
    )("Sinks that come in a list are ignored.")
    mla_sinks_tensor_ignored = wrong(
        MLA, where=lambda _, call: isinstance(call.sinks, Tensor), instead={"sinks": None}
    )("Sinks that come as one tensor are ignored.")
    mla_tuple_of_sinks_ignored = wrong(
        MLA, where=lambda _, call: isinstance(call.sinks, tuple), instead={"sinks": None}
    )("Sinks are ignored where they are a tuple of one tensor.")

    @wrong(stage="results", mla=True)
    def out_within_storage_unwritten(self, problem):
        """An out that does not begin with its storage is left unwritten."""
        out, lse = super().results(problem)
        return torch.empty_like(out) if out.storage_offset() else out, lse

    @wrong(stage="query_rows", mla=True)
    def query_head_gap_ignored(self, problem, tile):
        """The heads of a query's row are taken to lie next to each other, wherever its rows lie."""
        query = problem.query
        packed = query.as_strided(query.shape, (query.stride(0), query.shape[2], 1))
        return packed[tile.rows].to(torch.float32).transpose(0, 1)

    token_gap_ignored = wrong(
        mla=True,
        where=lambda p, _: p.v_cache.stride(2) < p.v_cache.stride(1),
        instead={"v_cache": lambda p, _: restrided(p.v_cache, 2, p.k_cache.shape[3])},
    )("The tokens of a head of V are taken to lie next to each other in a page.")
    head_gap_ignored = wrong(
        where=lambda p, _: p.num_kv_heads > 1,
        instead={
            "k_cache": lambda p, _: restrided(
                p.k_cache,
                1,
                p.k_cache.shape[3] if p.k_cache.stride(1) < p.k_cache.stride(2) else p.page_size * p.k_cache.stride(2),
            )
        },
    )("The K/V heads of K are taken to lie next to each other.")
    stride_of_only_head_used = wrong(
        mla=True,
        where=lambda p, _: p.k_cache.stride(1) < p.k_cache.shape[3],
        instead={"k_cache": lambda p, _: restrided(p.k_cache, 0, p.k_cache.stride(1))},
    )("A page of an only K/V head is taken to be as large as the head's stride, which means nothing where it is small.")

    @wrong(changes="problem")
    def v_table_after_k_row(self, problem, call):
        """A row of V's own page table is taken to begin where K's row ends."""
        table = problem.k_block_tables
        if problem.v_block_tables is table:
            return problem
        after = table.storage_offset() + table.shape[1]
        return replace(problem, v_block_tables=table.as_strided(table.shape, table.stride(), after))

    query_base_rounded_down = wrong(mla=True, instead={"query": lambda p, _: rounded_down(p.query)})(
        "The query's address is rounded down to 32 bytes."
    )
    cache_base_rounded_down = wrong(mla=True, instead={"k_cache": lambda p, _: rounded_down(p.k_cache)})(
        "K's address is rounded down to 32 bytes."
    )
    token_stride_rounded_down = wrong(mla=True, instead={"v_cache": lambda p, _: in_loads(p.v_cache, 2)})(
        "The stride of V's tokens is taken as a whole number of loads of 8 elements."
    )
    page_stride_rounded_down = wrong(mla=True, instead={"k_cache": lambda p, _: in_loads(p.k_cache, 0)})(
        "The stride of K's pages is taken as a whole number of loads of 8 elements."
    )
    sinks_base_rounded_down = wrong(
        mla=True, instead={"sinks": lambda p, _: None if p.sinks is None else rounded_down(p.sinks)}, only_with="sinks"
    )("Sinks are read from the last address before their own that is whole loads.")
    padding_rows_reach_all = wrong(mla=True, instead={"query": _with_padding})(
        "Rows share the largest magnitude of all rows, padding too: NaN there reaches every result."
    )

    @wrong(stage="finish", mla=True)
    def rows_without_keys_multiplied(self, problem, out, lse):
        """Rows of a request without keys are its query times 0: what they hold comes through where it is NaN."""
        offsets = self.row_offsets(problem)
        for kv_len, start, end in zip(self.kv_lens(problem), offsets[:-1], offsets[1:], strict=True):
            if kv_len == 0:
                query = problem.query[start:end, :, : out.shape[-1]].to(torch.float32)
                out[start:end] = (query * 0.0).to(out.dtype)


def _without_small_splits(
    partials: Partials, is_small: Callable[[torch.Tensor], torch.Tensor], problem: PagedAttention
) -> Partials:
    """Leave out splits by the difference of their largest logit to that of all splits before them, itself included."""
    if not problem.skip_softmax:
        return partials
    difference = (partials.largest - partials.largest.cummax(dim=-1).values).nan_to_num(nan=0.0)
    left_out = is_small(difference)
    left_out[..., 0] = False
    return partials._replace(largest=partials.largest.masked_fill(left_out, -math.inf))


def _one_more(problem: PagedAttention) -> torch.Tensor | None:
    if problem.num_visible is None:
        return None
    stored = problem.seq_lens.to(torch.int64).repeat_interleave(torch.tensor(problem.row_offsets()).diff())
    return torch.minimum(problem.num_visible[: len(stored)] + 1, stored)


class SkipSoftmax(Forgiving):
    @wrong(stage="merged", mla=True)
    def skip_threshold_not_divided(self, problem: PagedAttention, tile: RowTile, partials: Partials):
        """The threshold of skip-softmax is its factor, not divided by the number of keys."""
        small = _without_small_splits(partials, lambda each: torch.exp(each) < problem.skip_softmax, problem)
        return super().merged(problem, tile, small)

    @wrong(stage="merged", mla=True)
    def skip_threshold_of_logits(self, problem: PagedAttention, tile: RowTile, partials: Partials):
        """The difference of two logits is compared with the threshold of skip-softmax, not its exponential."""
        threshold = problem.skip_softmax / max(tile.kv_len, 1)
        return super().merged(problem, tile, _without_small_splits(partials, lambda each: each < threshold, problem))


class RankKeys(Forgiving):
    """Kernels of one rank's keys."""

    rank_keys_to_the_last_rows = wrong(DECODE, mla=True, instead={"num_visible": None})(
        "The rows of a request see the rank's keys as if its last keys were those of the rows."
    )
    rank_bound_inclusive = wrong(
        DECODE, mla=True, instead={"num_visible": lambda p: _one_more(p)}, only_with="num_visible"
    )("A row sees the rank's first key after its own position too.")
    rank_rows_before_keys_see_first = wrong(
        DECODE,
        mla=True,
        instead={"num_visible": lambda p: p.num_visible.clamp(min=1)},
        only_with="num_visible",
        trigger="a row stands before the rank's first key",
    )(
        "The keys before a row are divided by the number of ranks toward zero: a row before the rank's first key sees that key."
    )


class Hints(Conditional):
    o_scale_multiplies_output = wrong(
        DECODE,
        where=lambda p, call: p.out_dtype == E4M3 and call.o_scale is not None,
        instead={"bmm2_scale": lambda p, call: p.bmm2_scale * call.o_scale},
    )("An e4m3 output is multiplied by o_scale, which V alone is multiplied by.")
    e4m3_output_divided_by_o_scale = wrong(
        DECODE,
        where=lambda p, call: p.out_dtype == E4M3 and call.o_scale is not None,
        instead={"bmm2_scale": lambda p, call: p.bmm2_scale / call.o_scale},
    )("An e4m3 output is divided by o_scale, and V is not multiplied by it.")
    v_as_k_with_transform_mode = wrong(
        DECODE,
        where=lambda _, call: call.bf16q_fp8kv_transform_mode == "k_only",
        instead={"v_cache": lambda p, _: p.k_cache},
    )("V is read from where K was converted to, with a bf16q_fp8kv_transform_mode of k_only.")
    mla_scale_ignored_with_scale_format = wrong(
        MLA, where=lambda _, call: call.kv_scale_format == "arbitrary_fp32", instead={"bmm1_scale": 1.0}
    )("bmm1_scale is ignored with a kv_scale_format of arbitrary_fp32, as if the cache had scales of its own.")
