"""Mutants of skip-softmax, and of arguments that change no result."""

import math
from collections.abc import Callable

import torch

from corpus.models.split_kv import Conditional, Forgiving, Partials, RowTile
from corpus.wrong import DECODE, MLA, wrong
from lab.calls.problem import E4M3, PagedAttention


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
