"""Mutants of the ragged context call, before absorption."""

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corpus.mutants.mutant import RAGGED_CONTEXT, Defective, Memory, ReadOnce
from lab.calls import takes
from lab.calls.problem import E4M3
from lab.calls.ragged_context import RaggedAttention, RaggedContextCall
from lab.references.ragged_attention import ragged_attention
from lab.workloads.inputs.views import raw


class Ragged(Defective, is_model=True, interface=(RAGGED_CONTEXT,)):
    """FlashInfer's ragged context call by the reference: right, with the problem and the results in a mutant's hands."""

    def __init__(self) -> None:
        self.trtllm_ragged_attention_deepseek = takes(RaggedContextCall)(self.launch)

    def launch(self, call: RaggedContextCall) -> Any:
        problem = self.changed(self.posed(call))
        out, lse_log2 = ragged_attention(problem)
        self.finish(problem, out, lse_log2)
        self.finish_call(call, out)
        return problem.returned(out, lse_log2)

    def posed(self, call: RaggedContextCall) -> RaggedAttention:
        """Return the problem that a call poses."""
        return call.problem()

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        """Return the problem that is solved in place of the call's."""
        return self.misread(problem)

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        """Change the results in place."""

    def finish_call(self, call: RaggedContextCall, out: Tensor) -> None:
        """Change the output in place, by what the call says."""


def _with_keys(problem: RaggedAttention, starts: Tensor, lengths: Tensor) -> RaggedAttention:
    """Return a problem whose requests have these keys: so many, from these tokens on."""
    pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
    index = torch.cat([torch.arange(start, start + length) for start, length in pairs]).to(problem.key.device)
    key, value = (raw(side)[index].view(side.dtype) for side in (problem.key, problem.value))
    seq_lens = lengths.to(torch.int32)
    return replace(problem, key=key, value=value, seq_lens=seq_lens, cu_seqlens_kv=_offsets(seq_lens))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


class ChunksCausal(Ragged, instead={"causal": True}):
    """is_causal=False is ignored."""


class NewTokensUncausal(Ragged, instead={"causal": False, "window_left": -1}):
    """Rows see the new tokens after them."""


class RaggedCausalAtTopLeft(Ragged):
    """Row i sees the keys up to the i-th, however many are before the rows."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        if not problem.causal:
            return problem
        lengths = torch.minimum(problem.cu_seqlens_kv.diff(), problem.cu_seqlens_q.diff())
        return _with_keys(problem, problem.cu_seqlens_kv[:-1], lengths)


class RaggedRopeLeftOut(Ragged):
    """Q·K^T leaves out the elements after the first v_head_dim, the rotary part."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        dim = problem.v_head_dim
        return replace(problem, query=problem.query[..., :dim], key=problem.key[..., :dim])


class RaggedValueFromKey(Ragged, instead={"value": lambda problem: problem.key[..., : problem.v_head_dim]}):
    """Values are the keys' first elements, as after absorption."""


class RaggedScaleOfValues(Ragged, instead={"bmm1_scale": lambda problem: problem.v_head_dim**-0.5}):
    """bmm1_scale is taken as 1 / sqrt(v_head_dim)."""


class RaggedBmm2Ignored(Ragged, instead={"bmm2_scale": 1.0}):
    """bmm2_scale is taken as 1."""


class RaggedTensorScaleIgnored(Ragged):
    """A bmm1_scale on the device is taken as 1 / sqrt(head_dim)."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        given = isinstance(problem.bmm1_scale, Tensor)
        return replace(problem, bmm1_scale=problem.head_dim**-0.5) if given else problem


class RaggedSinksIgnored(Ragged, instead={"sinks": None}):
    """attention_sinks are ignored."""


class RaggedContextWindowIgnored(Ragged, instead={"window_left": -1}):
    """window_left is ignored."""


class RaggedHeadsShareKeys(Ragged, instead={"key": lambda problem: problem.key[:, :1].expand_as(problem.key)}):
    """All heads read the first one's keys."""


class RaggedLastKeyOfTileLost(Ragged):
    """The 64th key of the batch is zero."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        key = problem.key.clone()
        key[63:64] = 0.0
        return replace(problem, key=key)


class RaggedLseBaseE(Ragged):
    """The LSE is a natural logarithm, and a merge in base 2 gives the wrong weights."""

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        if lse_log2 is not None:
            lse_log2 *= math.log(2.0)


class RaggedLseOfEmptyChunk(Ragged):
    """A row without keys has an LSE of 0, and so a weight in a merge."""

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        if lse_log2 is not None:
            lse_log2.masked_fill_(lse_log2 == -math.inf, 0.0)


class RaggedEmptyRowsNan(Ragged):
    """A row without keys is NaN."""

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        rows = itertools.pairwise(problem.cu_seqlens_q.tolist())
        for (start, end), length in zip(rows, problem.seq_lens.tolist(), strict=True):
            if length == 0:
                out[start:end] = math.nan


class RaggedRowsBeyond64Zero(Ragged):
    """Rows of a request from the 65th on are zero."""

    most = 64

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        for start, end in itertools.pairwise(problem.cu_seqlens_q.tolist()):
            out[start + self.most : max(start + self.most, end)] = 0.0


class RaggedQueryScaledInPlace(Ragged, finish=lambda _, problem, *__: problem.query.mul_(2.0)):
    """The query is multiplied by its scale where it lies."""


class RaggedReadOnce(ReadOnce, Ragged, is_model=True):
    """Not a mutant: tensors are copied when an address is first seen, and the copies serve later calls."""


class RaggedOffsetsReadOnce(RaggedReadOnce, fields=("cu_seqlens_q",)):
    """The offsets of the rows are copied once per tensor: those written into it later have no effect."""


class RaggedLengthsReadOnce(RaggedReadOnce, fields=("seq_lens", "cu_seqlens_kv")):
    """Lengths, and the offsets of the keys, are copied once per tensor: those written into them later have no effect."""


class RaggedScalesReadOnce(RaggedReadOnce, fields=("bmm1_scale", "bmm2_scale")):
    """Scales on the device are read on the host in the first call: what is written there later has no effect."""


class RaggedSinksReadOnce(RaggedReadOnce, fields=("sinks",)):
    """attention_sinks are copied once per tensor: what is written there later has no effect."""


class RaggedQueryReadOnce(RaggedReadOnce, fields=("query",)):
    """The query is converted once per tensor: what is written there later has no effect."""


class RaggedKeysKeptByLength(
    RaggedReadOnce, fields=("key", "value"), also_by=lambda kept, problem: tuple(problem.seq_lens.tolist())
):
    """Keys and values are converted once for each batch of lengths: what is written there later has no effect."""


class RaggedFrozenRows(Memory, RaggedRowsBeyond64Zero):
    """A grid has as many rows of a request as the first call with these offsets had: rows after them are zero."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        offsets = problem.cu_seqlens_q
        self.most = self.first(offsets.data_ptr(), lambda: int(offsets.diff().max()))
        return problem


class RaggedGroupsInterleaved(Ragged):
    """Query head h reads K/V head h % num_kv_heads."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        group = problem.num_qo_heads // problem.num_kv_heads
        key, value = (torch.cat([raw(side)] * group, dim=1).view(side.dtype) for side in (problem.key, problem.value))
        return replace(problem, key=key, value=value)


class RaggedHeadsBeyond64Zero(Ragged, finish=lambda _, problem, out, lse_log2: out[:, 64:].zero_()):
    """Query heads from the 65th on are zero."""


class RaggedValuesOfTwoThirds(Ragged, finish=lambda _, problem, out, __: out[..., problem.head_dim * 2 // 3 :].zero_()):
    """Values have two thirds of the keys' elements, as DeepSeek's have: outputs after them are zero."""


class RaggedQueryHeadsPacked(Ragged):
    """Heads of the query are read as if they lay side by side, whatever their stride."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        query = problem.query
        return replace(problem, query=query.as_strided(query.shape, (query.stride(0), problem.head_dim, 1)))


class RaggedValuesPacked(Ragged):
    """Values are read as if they lay side by side, whatever their strides."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        shape = problem.value.shape
        return replace(problem, value=problem.value.as_strided(shape, (shape[1] * shape[2], shape[2], 1)))


class RaggedLseGivenAloneUnwritten(Ragged, where=lambda problem: not problem.return_lse, instead={"lse": None}):
    """A given lse is not written without return_lse."""


class RaggedLsePacked(Ragged):
    """An lse with gaps is written as if it had none."""

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        if lse_log2 is not None and not lse_log2.is_contiguous():
            packed = lse_log2.contiguous()
            lse_log2.as_strided(packed.shape, packed.stride()).copy_(packed)


class RaggedOutInQueryDtype(Ragged):
    """Into an out of another dtype, elements of the query's dtype are written."""

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        if out.dtype != problem.query.dtype and problem.out is not None:
            elements = out.to(problem.query.dtype).view(torch.uint8).flatten()
            out.view(torch.uint8).flatten()[: len(elements)] = elements


class RaggedHalfOfE4m3Queries(
    Ragged,
    where=lambda problem: problem.query.dtype == E4M3 and problem.out is None,
    instead={"out_dtype": torch.float16},
):
    """The output of e4m3 queries is float16."""


class RaggedRowsBeyond1024Zero(RaggedRowsBeyond64Zero, most=1024):
    """Rows of a request from the 1,025th on are zero."""


class RaggedRequestsBeyond128Wrap(Ragged):
    """From the 129th on, requests read keys from where those of the one 128 before them begin."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        starts = problem.cu_seqlens_kv[:-1]
        return _with_keys(problem, starts[torch.arange(len(starts)) % 128], problem.cu_seqlens_kv.diff())


class RaggedKeysBefore4096Lost(Ragged):
    """Of a request's keys only the last 4,096 are read."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        lengths = problem.cu_seqlens_kv.diff().clamp(max=4096)
        return _with_keys(problem, problem.cu_seqlens_kv[1:] - lengths, lengths)


class RaggedMirrorsReadAsInt32(Ragged):
    """Lengths on the host in int64 are read as int32: every second one is zero."""

    def posed(self, call: RaggedContextCall) -> RaggedAttention:
        problem, rows = call.problem(), call.q_seq_lens_cpu
        if rows is None or rows.dtype != torch.int64:
            return problem
        return replace(problem, cu_seqlens_q=_offsets(rows.view(torch.int32)[: len(rows)]).to(problem.query.device))


class RaggedRequestsWithoutRowsLeftOut(Ragged):
    """Requests without rows are left out of the rows' offsets, and not of the keys'."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        rows = problem.cu_seqlens_q.diff()
        return replace(problem, cu_seqlens_q=_offsets(torch.cat((rows[rows > 0], rows[rows == 0]))))


class RaggedRowsBeforeKeysSeeFirst(Ragged):
    """A causal row that stands before its request's first key sees that key."""

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        rows, keys = (itertools.pairwise(each.tolist()) for each in (problem.cu_seqlens_q, problem.cu_seqlens_kv))
        for (row, end), (key, last) in zip(rows, keys, strict=True):
            before = end - row - (last - key)
            if problem.causal and last > key and before > 0:
                first = problem.value[key].to(torch.float32) * problem.bmm2_scale
                heads = first.repeat_interleave(problem.num_qo_heads // problem.num_kv_heads, dim=0)
                out[row : row + before] = heads.to(out.dtype)


class RaggedSinkOfMinusInfinityNan(Ragged):
    """A head whose sink is minus infinity is NaN."""

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        if problem.sinks is not None:
            out[:, problem.sinks == -math.inf] = math.nan


class RaggedScaleUnsigned(Ragged, instead={"bmm1_scale": lambda problem: abs(problem.bmm1_scale)}):
    """A negative bmm1_scale counts as a positive one."""


class RaggedBmm2OfNoDimensionIgnored(
    RaggedBmm2Ignored, where=lambda problem: isinstance(problem.bmm2_scale, Tensor) and problem.bmm2_scale.dim() == 0
):
    """A bmm2_scale that is a tensor of no dimension is taken as 1."""


class RaggedWindowIgnoredWithSinks(Ragged, instead={"window_left": -1}, only_with="sinks"):
    """With sinks, window_left is ignored."""


class RaggedUncausalSinksIgnored(Ragged, instead={"sinks": lambda problem: problem.sinks if problem.causal else None}):
    """With is_causal=False, attention_sinks are ignored."""


class RaggedBmm2TensorIgnoredWithLse(
    RaggedBmm2Ignored, where=lambda problem: problem.return_lse and isinstance(problem.bmm2_scale, Tensor)
):
    """A bmm2_scale on the device is taken as 1 where an LSE is returned."""


class RaggedRowsWithoutKeysLeftByMirrors(Ragged):
    """With lengths on the host, tiles of 64 rows that see no key are not launched: their output is not written."""

    def finish_call(self, call: RaggedContextCall, out: Tensor) -> None:
        lengths = call.host_lengths()
        if lengths is not None and call.is_causal:
            for first, rows, keys in zip(call.cum_seq_lens_q.tolist(), *lengths, strict=False):
                out[first : first + max(rows - keys, 0) // 64 * 64] = 1.0


class RaggedTokensWrapInt32(Ragged):
    """The offset of a token's key is computed in 32 bits: tokens from 2**31 elements on are the first ones."""

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        key, stride = problem.key, problem.key.stride(0)
        if stride * len(key) < 2**31:
            return problem
        read = torch.arange(len(key), device=key.device) * stride % 2**31 // stride
        return replace(problem, key=raw(key)[read].view(key.dtype))


class RaggedScratchTakenForZero(Ragged):
    """The workspace's scratch is taken for zero, and added to the output."""

    def finish_call(self, call: RaggedContextCall, out: Tensor) -> None:
        if call.workspace_buffer is not None:
            out += call.workspace_buffer.view(torch.uint8)[-1].to(out.dtype)


class RaggedWorkspaceKept(Memory, Ragged):
    """Sums go to the workspace of the first call with these heads, by launch parameters that are kept with it."""

    def launch(self, call: RaggedContextCall) -> Any:
        kept = self.first((call.query.shape, call.query.dtype), lambda: call.workspace_buffer)
        if kept is not None:
            kept.view(torch.uint8)[-1] = 1
        return super().launch(call)


class RaggedOutputReused(Memory, Ragged):
    """An output that the call makes is written again by the next call of its shape."""

    def launch(self, call: RaggedContextCall) -> Any:
        returned = super().launch(call)
        if call.out is not None:
            return returned
        out = returned[0] if call.return_lse else returned
        kept = self.first((out.shape, out.dtype), lambda: out).copy_(out)
        return (kept, returned[1]) if call.return_lse else kept
