"""Mutants of the ragged context call, before absorption."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from corpus.models.ragged import Ragged, RaggedReadOnce
from corpus.wrong import wrong
from lab.calls.block_scales import BlockScales
from lab.calls.problem import E4M3
from lab.calls.ragged_context import RaggedAttention


def _with_keys(problem: RaggedAttention, starts: Tensor, lengths: Tensor) -> RaggedAttention:
    """Return a problem whose requests have these keys: so many, from these tokens on."""
    pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
    index = torch.cat([torch.arange(start, start + length) for start, length in pairs]).to(problem.key.device)
    key, value = (side[index] for side in (problem.key, problem.value))
    seq_lens = lengths.to(torch.int32)
    return replace(problem, key=key, value=value, seq_lens=seq_lens, cu_seqlens_kv=_offsets(seq_lens))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


class RaggedCalls(Ragged):
    chunks_causal = wrong(instead={"causal": True})("is_causal=False is ignored.")
    new_tokens_uncausal = wrong(instead={"causal": False, "window_left": -1})("Rows see the new tokens after them.")

    @wrong(stage="changed")
    def ragged_causal_at_top_left(self, problem):
        """Row i sees the keys up to the i-th, however many are before the rows."""
        if not problem.causal:
            return problem
        lengths = torch.minimum(problem.cu_seqlens_kv.diff(), problem.cu_seqlens_q.diff())
        return _with_keys(problem, problem.cu_seqlens_kv[:-1], lengths)

    @wrong(stage="changed")
    def ragged_rope_left_out(self, problem):
        """Q·K^T leaves out the elements after the first v_head_dim, the rotary part."""
        dim = problem.v_head_dim
        return replace(problem, query=problem.query[..., :dim], key=problem.key[..., :dim])

    ragged_value_from_key = wrong(instead={"value": lambda p: p.key[..., : p.v_head_dim]})(
        "Values are the keys' first elements, as after absorption."
    )
    ragged_scale_of_values = wrong(instead={"bmm1_scale": lambda p: p.v_head_dim**-0.5})(
        "bmm1_scale is taken as 1 / sqrt(v_head_dim)."
    )

    @wrong(stage="changed")
    def ragged_tensor_scale_ignored(self, problem):
        """A bmm1_scale on the device is taken as 1 / sqrt(head_dim)."""
        given = isinstance(problem.bmm1_scale, Tensor)
        return replace(problem, bmm1_scale=problem.head_dim**-0.5) if given else problem

    ragged_bmm2_ignored = wrong(instead={"bmm2_scale": 1.0})("bmm2_scale is taken as 1.")
    ragged_bmm2_of_no_dimension_ignored = wrong(
        where=lambda p: isinstance(p.bmm2_scale, Tensor) and p.bmm2_scale.dim() == 0, instead={"bmm2_scale": 1.0}
    )("A bmm2_scale that is a tensor of no dimension is taken as 1.")
    ragged_bmm2_tensor_ignored_with_lse = wrong(
        where=lambda p: p.return_lse and isinstance(p.bmm2_scale, Tensor), instead={"bmm2_scale": 1.0}
    )("A bmm2_scale on the device is taken as 1 where an LSE is returned.")
    ragged_sinks_ignored = wrong(instead={"sinks": None})("attention_sinks are ignored.")
    ragged_context_window_ignored = wrong(instead={"window_left": -1})("window_left is ignored.")
    ragged_heads_share_keys = wrong(instead={"key": lambda p: p.key[:, :1].expand_as(p.key)})(
        "All heads read the first one's keys."
    )

    @wrong(stage="changed")
    def ragged_last_key_of_tile_lost(self, problem):
        """The 64th key of the batch is zero."""
        key = problem.key.clone()
        key[63:64] = 0.0
        return replace(problem, key=key)

    @wrong(stage="finish")
    def ragged_lse_base_e(self, problem, out, lse_log2):
        """The LSE is a natural logarithm, and a merge in base 2 gives the wrong weights."""
        if lse_log2 is not None:
            lse_log2 *= math.log(2.0)

    @wrong(stage="finish")
    def ragged_lse_of_empty_chunk(self, problem, out, lse_log2):
        """A row without keys has an LSE of 0, and so a weight in a merge."""
        if lse_log2 is not None:
            lse_log2.masked_fill_(lse_log2 == -math.inf, 0.0)

    @wrong(stage="finish")
    def ragged_empty_rows_nan(self, problem, out, lse_log2):
        """A row without keys is NaN."""
        rows = itertools.pairwise(problem.cu_seqlens_q.tolist())
        for (start, end), length in zip(rows, problem.seq_lens.tolist(), strict=True):
            if length == 0:
                out[start:end] = math.nan

    ragged_query_scaled_in_place = wrong(finish=lambda _, p, *__: p.query.mul_(2.0))(
        "The query is multiplied by its scale where it lies."
    )

    @wrong(stage="changed")
    def ragged_groups_interleaved(self, problem):
        """Query head h reads K/V head h % num_kv_heads."""
        group = problem.group
        key, value = (torch.cat([side] * group, dim=1) for side in (problem.key, problem.value))
        return replace(problem, key=key, value=value)

    ragged_heads_beyond64_zero = wrong(finish=lambda _, p, out, lse_log2: out[:, 64:].zero_())(
        "Query heads from the 65th on are zero."
    )
    ragged_values_of_two_thirds = wrong(finish=lambda _, p, out, __: out[..., p.head_dim * 2 // 3 :].zero_())(
        "Values have two thirds of the keys' elements, as DeepSeek's have: outputs after them are zero."
    )

    @wrong(stage="changed")
    def ragged_query_heads_packed(self, problem):
        """Heads of the query are read as if they lay side by side, whatever their stride."""
        query = problem.query
        return replace(problem, query=query.as_strided(query.shape, (query.stride(0), problem.head_dim, 1)))

    @wrong(stage="changed")
    def ragged_values_packed(self, problem):
        """Values are read as if they lay side by side, whatever their strides."""
        shape = problem.value.shape
        return replace(problem, value=problem.value.as_strided(shape, (shape[1] * shape[2], shape[2], 1)))

    ragged_lse_given_alone_unwritten = wrong(where=lambda p: not p.return_lse, instead={"lse": None})(
        "A given lse is not written without return_lse."
    )

    @wrong(stage="finish")
    def ragged_lse_packed(self, problem, out, lse_log2):
        """An lse with gaps is written as if it had none."""
        if lse_log2 is not None and not lse_log2.is_contiguous():
            packed = lse_log2.contiguous()
            lse_log2.as_strided(packed.shape, packed.stride()).copy_(packed)

    @wrong(stage="finish")
    def ragged_out_in_query_dtype(self, problem, out, lse_log2):
        """Into an out of another dtype, elements of the query's dtype are written."""
        if out.dtype != problem.query.dtype and problem.out is not None:
            elements = out.to(problem.query.dtype).view(torch.uint8).flatten()
            out.view(torch.uint8).flatten()[: len(elements)] = elements

    ragged_half_of_e4m3_queries = wrong(
        where=lambda p: p.query.dtype == E4M3 and p.out is None, instead={"out_dtype": torch.float16}
    )("The output of e4m3 queries is float16.")

    @wrong(stage="changed")
    def ragged_requests_beyond128_wrap(self, problem):
        """From the 129th on, requests read keys from where those of the one 128 before them begin."""
        starts = problem.cu_seqlens_kv[:-1]
        return _with_keys(problem, starts[torch.arange(len(starts)) % 128], problem.cu_seqlens_kv.diff())

    @wrong(stage="changed")
    def ragged_keys_before4096_lost(self, problem):
        """Of a request's keys only the last 4,096 are read."""
        lengths = problem.cu_seqlens_kv.diff().clamp(max=4096)
        return _with_keys(problem, problem.cu_seqlens_kv[1:] - lengths, lengths)

    @wrong(stage="posed")
    def ragged_mirrors_read_as_int32(self, call):
        """Lengths on the host in int64 are read as int32: every second one is zero."""
        problem, rows = call.problem(), call.q_seq_lens_cpu
        if rows is None or rows.dtype != torch.int64:
            return problem
        return replace(problem, cu_seqlens_q=_offsets(rows.view(torch.int32)[: len(rows)]).to(problem.query.device))

    @wrong(stage="changed")
    def ragged_requests_without_rows_left_out(self, problem):
        """Requests without rows are left out of the rows' offsets, and not of the keys'."""
        rows = problem.cu_seqlens_q.diff()
        return replace(problem, cu_seqlens_q=_offsets(torch.cat((rows[rows > 0], rows[rows == 0]))))

    @wrong(stage="finish")
    def ragged_rows_before_keys_see_first(self, problem, out, lse_log2):
        """A causal row that stands before its request's first key sees that key."""
        rows, keys = (itertools.pairwise(each.tolist()) for each in (problem.cu_seqlens_q, problem.cu_seqlens_kv))
        for (row, end), (key, last) in zip(rows, keys, strict=True):
            before = end - row - (last - key)
            if problem.causal and last > key and before > 0:
                first = problem.value[key].to(torch.float32) * problem.bmm2_scale
                heads = first.repeat_interleave(problem.group, dim=0)
                out[row : row + before] = heads.to(out.dtype)

    @wrong(stage="finish")
    def ragged_sink_of_minus_infinity_nan(self, problem, out, lse_log2):
        """A head whose sink is minus infinity is NaN."""
        if problem.sinks is not None:
            out[:, problem.sinks == -math.inf] = math.nan

    ragged_scale_unsigned = wrong(instead={"bmm1_scale": lambda p: abs(p.bmm1_scale)})(
        "A negative bmm1_scale counts as a positive one."
    )
    ragged_window_ignored_with_sinks = wrong(instead={"window_left": -1}, only_with="sinks")(
        "With sinks, window_left is ignored."
    )
    ragged_uncausal_sinks_ignored = wrong(instead={"sinks": lambda p: p.sinks if p.causal else None})(
        "With is_causal=False, attention_sinks are ignored."
    )

    @wrong(stage="finish_call")
    def ragged_rows_without_keys_left_by_mirrors(self, call, out):
        """With lengths on the host, tiles of 64 rows that see no key are not launched: their output is not written."""
        lengths = call.host_lengths()
        if lengths is not None and call.is_causal:
            for first, rows, keys in zip(call.cum_seq_lens_q.tolist(), *lengths, strict=False):
                out[first : first + max(rows - keys, 0) // 64 * 64] = 1.0

    @wrong(stage="changed")
    def ragged_tokens_wrap_int32(self, problem):
        """The offset of a token's key is computed in 32 bits: tokens from 2**31 elements on are the first ones."""
        key, stride = problem.key, problem.key.stride(0)
        if stride * len(key) < 2**31:
            return problem
        read = torch.arange(len(key), device=key.device) * stride % 2**31 // stride
        return replace(problem, key=key[read])

    @wrong(stage="finish_call")
    def ragged_scratch_taken_for_zero(self, call, out):
        """The workspace's scratch is taken for zero, and added to the output."""
        if call.workspace_buffer is not None:
            out += call.workspace_buffer.view(torch.uint8)[-1].to(out.dtype)

    @wrong(stage="launch")
    def ragged_workspace_kept(self, call):
        """Sums go to the workspace of the first call with these heads, by launch parameters that are kept with it."""
        kept = self.first((call.query.shape, call.query.dtype), lambda: call.workspace_buffer)
        if kept is not None:
            kept.view(torch.uint8)[-1] = 1
        return super().launch(call)

    @wrong(changes="launch")
    def ragged_output_reused(self, returned, call):
        """An output that the call makes is written again by the next call of its shape."""
        if call.out is not None:
            return returned
        out = returned[0] if call.return_lse else returned
        kept = self.first((out.shape, out.dtype), lambda: out).copy_(out)
        return (kept, returned[1]) if call.return_lse else kept

    @wrong(stage="changed")
    def ragged_lse_of_first_call(self, problem):
        """Launch parameters are kept by shape, with the first LSE that a caller gave."""
        if problem.lse is None:
            return problem
        return replace(problem, lse=self.first((problem.query.shape, problem.lse.shape), lambda: problem.lse))


class RaggedTensorsReadOnce(RaggedReadOnce):
    ragged_offsets_read_once = wrong(fields=("cu_seqlens_q",))(
        "The offsets of the rows are copied once per tensor: those written into it later have no effect."
    )
    ragged_lengths_read_once = wrong(fields=("seq_lens", "cu_seqlens_kv"))(
        "Lengths, and the offsets of the keys, are copied once per tensor: those written into them later have no effect."
    )
    ragged_scales_read_once = wrong(fields=("bmm1_scale", "bmm2_scale"))(
        "Scales on the device are read on the host in the first call: what is written there later has no effect."
    )
    ragged_sinks_read_once = wrong(fields=("sinks",))(
        "attention_sinks are copied once per tensor: what is written there later has no effect."
    )
    ragged_query_read_once = wrong(fields=("query",))(
        "The query is converted once per tensor: what is written there later has no effect."
    )
    ragged_keys_kept_by_length = wrong(fields=("key", "value"), also_by=lambda kept, p: tuple(p.seq_lens.tolist()))(
        "Keys and values are converted once for each batch of lengths: what is written there later has no effect."
    )


@wrong()
class RaggedRowsBeyond64Zero(Ragged):
    """Rows of a request from the 65th on are zero."""

    most = 64

    def finish(self, problem, out, lse_log2):
        for start, end in itertools.pairwise(problem.cu_seqlens_q.tolist()):
            out[start + self.most : max(start + self.most, end)] = 0.0


@wrong()
class RaggedFrozenRows(RaggedRowsBeyond64Zero):
    """A grid has as many rows of a request as the first call with these offsets had: rows after them are zero."""

    def changed(self, problem):
        offsets = problem.cu_seqlens_q
        self.most = self.first(offsets.data_ptr(), lambda: int(offsets.diff().max()))
        return problem


@wrong()
class RaggedRowsBeyond1024Zero(RaggedRowsBeyond64Zero, most=1024):
    """Rows of a request from the 1,025th on are zero."""


LEAST_MAXIMUM = -87.0  # e of it is about float32's least normal number


def _least_sinks(problem: RaggedAttention) -> Tensor:
    least = torch.full((problem.num_qo_heads,), LEAST_MAXIMUM, device=problem.query.device)
    return least if problem.sinks is None else problem.sinks.maximum(least)


class RaggedRange(Ragged):
    ragged_maximum_begins_at_least = wrong(instead={"sinks": _least_sinks})(
        "A softmax begins with a maximum of -87 and its weight of 1: a row of lower logits is lost."
    )
    ragged_bmm2_without_sign = wrong(instead={"bmm2_scale": lambda p: abs(p.bmm2_scale)})(
        "bmm2_scale is taken without its sign."
    )


def _other_scales(**change: Callable[[BlockScales], Tensor]) -> Callable[[RaggedAttention], BlockScales]:
    def changed(problem: RaggedAttention) -> BlockScales:
        assert problem.block_scales is not None
        return replace(problem.block_scales, **{name: of(problem.block_scales) for name, of in change.items()})

    return changed


class SageScales(Ragged, only_with="block_scales"):
    """Kernels that apply a wrong scale of SageAttention."""

    sage_keys_by_previous_block = wrong(
        instead={"block_scales": _other_scales(key=lambda scales: scales.key.roll(1, dims=1))}
    )("A block of keys is multiplied by the scale of the block before it.")
    sage_values_by_head_0 = wrong(
        instead={"block_scales": _other_scales(value=lambda scales: scales.value[:1].expand_as(scales.value))},
    )("Values of all heads are multiplied by the scales of head 0.")

    @wrong(stage="changed")
    def sage_blocks_across_requests(self, problem):
        """Blocks of keys are counted through the batch: a request may begin within the last block of the one before it."""
        scales = problem.block_scales
        token = torch.arange(len(problem.key), device=problem.key.device)
        of_keys = problem.key.double() * scales.key[:, token // scales.k_block].T.unsqueeze(2).double()
        return replace(problem.dequantized(), key=of_keys)


TILE = 64


def rows_and_tail(problem: RaggedAttention) -> tuple[slice, slice]:
    """Return the rows of the last request, and the tokens after it that its last tile has."""
    rows, keys = problem.cu_seqlens_q.tolist()[-2:], problem.cu_seqlens_kv.tolist()[-2:]
    return slice(*rows), slice(keys[1], keys[1] + (keys[0] - keys[1]) % TILE)


class RaggedTiles(Ragged):
    """Kernels of the ragged context call that read its last tile of keys whole, tokens after the last offset with it."""

    @wrong(stage="finish")
    def ragged_tokens_after_last_weighed(self, problem, out, lse_log2):
        """Values after the last offset, up to a tile of 64 keys, are multiplied by weights of zero: a NaN stays."""
        rows, tail = rows_and_tail(problem)
        out[rows] += (problem.value[tail].to(torch.float32) * 0.0).sum().to(out.dtype)

    @wrong(stage="finish")
    def ragged_logits_after_last_lowered(self, problem, out, lse_log2):
        """Logits of keys after the last offset, up to a tile of 64, are lowered by infinity: a NaN stays."""
        rows, tail = rows_and_tail(problem)
        stays = (problem.key[tail].to(torch.float32) * 0.0).sum()
        for result in (out, lse_log2):
            if result is not None:
                result[rows] += stays.to(result.dtype)
