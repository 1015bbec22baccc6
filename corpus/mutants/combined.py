"""Mutants that are wrong where several arguments meet, and right with each by itself."""

import math

import torch
from torch import Tensor

from corpus.models.split_kv import Conditional
from corpus.wrong import CONTEXT, DECODE, MLA, wrong
from lab.calls.problem import E4M3, PagedAttention


def _lengths_of_first_rows(problem: PagedAttention) -> Tensor:
    first_pages = problem.k_block_tables[:, 0].where(problem.seq_lens > 0, -1 - torch.arange(problem.batch_size))
    is_same = first_pages[:, None] == first_pages
    return problem.seq_lens[is_same.int().argmax(1)]


class Combined(Conditional):
    """Kernels that are wrong where several arguments meet, and right with each by itself."""

    tensor_scales_exchanged = wrong(
        mla=True,
        where=lambda _, call: isinstance(call.bmm1_scale, Tensor) and isinstance(call.bmm2_scale, Tensor),
        instead={"bmm1_scale": lambda problem, _: problem.bmm2_scale},
    )("Where both scales are tensors, bmm2_scale is read in the place of bmm1_scale.")
    log2_ignored_beside_tensor = wrong(
        DECODE,
        where=lambda _, call: isinstance(call.bmm1_scale, Tensor),
        instead={"bmm1_scale": lambda _, call: call.bmm1_scale},
    )("bmm1_scale_log2 gives way to a bmm1_scale that is a tensor.")
    window_ignored_with_mask_and_sinks = wrong(
        DECODE,
        where=lambda problem, _: problem.mask is not None and problem.sinks is not None,
        instead={"window_left": -1},
    )("A window is ignored where there is a draft mask and sinks too.")
    sinks_ignored_in_ragged_window = wrong(
        DECODE,
        where=lambda problem, _: problem.cu_seqlens_q is not None and problem.window_left >= 0,
        instead={"sinks": None},
    )("Sinks are ignored where a decode call has cum_seq_lens_q and a window.")
    v_pages_from_k_in_window = wrong(
        where=lambda problem, _: problem.window_left >= 0,
        instead={"v_block_tables": lambda problem, _: problem.k_block_tables},
    )("V's own page table is ignored where there is a window.")
    mask_ignored_over_nvfp4 = wrong(DECODE, where=lambda problem, _: problem.is_nvfp4, instead={"mask": None})(
        "A draft mask is taken for a causal one over an NVFP4 cache."
    )
    scale_of_v_ignored_with_e4m3_output = wrong(
        where=lambda problem, _: problem.query.dtype == E4M3 and problem.out_dtype == E4M3, instead={"bmm2_scale": 1.0}
    )("bmm2_scale is ignored where the query and the output are e4m3, as over an NVFP4 cache on trtllm-gen.")
    rows_of_the_same_pages_are_one_request = wrong(
        CONTEXT, instead={"seq_lens": lambda problem, _: _lengths_of_first_rows(problem)}
    )(
        "Rows of the page table that begin with the same page get the length of the first, as no two requests share a page."
    )
    sinks_ignored_without_causality = wrong(
        CONTEXT, where=lambda problem, _: not problem.causal, instead={"sinks": None}
    )("Sinks are ignored with causal=False.")

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
        MLA, where=lambda problem, _: problem.max_q_len > 1, instead={"sinks": None}, only_with="cu_seqlens_q"
    )("Sinks are ignored where an MLA decode has cum_seq_lens_q and several rows per request.")
    window_ignored_with_unsigned_lengths = wrong(
        where=lambda _, call: call.seq_lens.dtype == torch.uint32, instead={"window_left": -1}
    )("A window is ignored where seq_lens is uint32.")
