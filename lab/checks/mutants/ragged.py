"""Mutants of the ragged context call, before absorption."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls import takes
from lab.calls.ragged_context import RaggedAttention, RaggedContextCall
from lab.checks.mutants.mutant import RAGGED_CONTEXT, Defective, Memory
from lab.references.ragged_attention import ragged_attention


class Ragged(Defective, is_model=True, interface=(RAGGED_CONTEXT,)):
    """FlashInfer's ragged context call by the reference: right, with the problem and the results in a mutant's hands."""

    def __init__(self) -> None:
        self.trtllm_ragged_attention_deepseek = takes(RaggedContextCall)(self.launch)

    def launch(self, call: RaggedContextCall) -> Any:
        problem = self.changed(call.problem())
        out, lse_log2 = ragged_attention(problem)
        self.finish(problem, out, lse_log2)
        return problem.returned(out, lse_log2)

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        """Return the problem that is solved in place of the call's."""
        return self.misread(problem)

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        """Change the results in place."""


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
        starts = zip(problem.cu_seqlens_kv[:-1].tolist(), lengths.tolist(), strict=True)
        index = torch.cat([torch.arange(start, start + length) for start, length in starts]).to(problem.key.device)
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        problem = replace(problem, key=problem.key[index], value=problem.value[index])
        return replace(problem, seq_lens=lengths.to(torch.int32), cu_seqlens_kv=ends)


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
        starts, lengths = problem.cu_seqlens_q.tolist(), problem.seq_lens.tolist()
        for request, length in enumerate(lengths):
            if length == 0:
                out[starts[request] : starts[request + 1]] = math.nan


class RaggedRowsBeyond64Zero(Ragged):
    """Rows of a request from the 65th on are zero."""

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        for start, end in zip(problem.cu_seqlens_q[:-1].tolist(), problem.cu_seqlens_q[1:].tolist(), strict=True):
            out[start + 64 : max(start + 64, end)] = 0.0


class RaggedQueryScaledInPlace(Ragged):
    """The query is multiplied by its scale where it lies."""

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        problem.query.mul_(2.0)


class RaggedReadOnce(Memory, Ragged, is_model=True):
    """Not a mutant: tensors are copied when an address is first seen, and the copies serve later calls."""

    fields: tuple[str, ...] = ()

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        return replace(problem, **{name: self._kept(problem, getattr(problem, name)) for name in self.fields})

    def _kept(self, problem: RaggedAttention, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self.first((value.data_ptr(), value.shape, self.also_by(problem)), value.clone)

    def also_by(self, problem: RaggedAttention) -> Any:
        """Return what else must be as it was for a copy to serve."""


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


class RaggedFrozenRows(Memory, Ragged):
    """A grid has as many rows of a request as the first call with these offsets had: rows after them are zero."""

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        offsets = problem.cu_seqlens_q
        most = self.first(offsets.data_ptr(), lambda: int(offsets.diff().max()))
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            out[start + most : max(start + most, end)] = 0.0
