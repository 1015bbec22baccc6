"""Quantise the tensors of a ragged context call as SageAttention does, with scales of blocks of rows and of keys."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3
from lab.references.errors import Truth
from lab.references.softmax_attention import E4M3_MAX, quantize_e4m3
from lab.workloads.inputs.ragged import RaggedInputs

LARGEST = {torch.int8: 127.0, E4M3: E4M3_MAX}  # absolute value of a quantised element
LEAST_SCALE = 1e-6  # of a block of zeros
FACTORS = 3  # neighbours are multiplied by 1, 2 and 3, so that a neighbour's scale shows


@dataclass(frozen=True, eq=False)
class SageInputs(RaggedInputs):
    """The tensors of a ragged call with SageAttention's scales. `query` and `parts` (K and V) are dequantised, in float64."""

    quantised: dict[str, Any] = field(default_factory=dict)  # the arguments with quantised tensors and scales

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | self.quantised

    def truth(self, **changes: Any) -> Truth:
        return super().truth(**{"arithmetic": E4M3} | changes)


def quantised_inputs(inputs: RaggedInputs, dtype: torch.dtype, q_block: int, k_block: int) -> SageInputs:
    """Quantise the tensors of a ragged call: query and key to `dtype` (int8 or e4m3), value to e4m3. Padding is removed."""
    rows, q_stored, q_scales = _in_blocks(inputs.query, inputs.q_lens, dtype, q_block)
    keys, values = map(torch.cat, zip(*inputs.parts, strict=True))
    keys, k_stored, k_scales = _in_blocks(keys, inputs.kv_lens, dtype, k_block)
    head, channel = (torch.arange(size, device=values.device) for size in values.shape[1:])
    values = values.double() * (1 + (head.unsqueeze(1) + channel) % FACTORS)
    v_scales = _scales(values.abs().amax(dim=0), E4M3)
    v_stored = quantize_e4m3(values, v_scales.double())
    values = v_stored.double() * v_scales.double()
    given: dict[str, Any] = {name: getattr(inputs, name) for name in RaggedInputs.__dataclass_fields__}
    given |= {"query": rows, "with_padding": False}
    given["parts"] = list(zip(keys.split(inputs.kv_lens), values.split(inputs.kv_lens), strict=True))
    quantised = {"query": q_stored, "key": k_stored, "value": v_stored}
    scales = {
        "sage_attn_sfs": (q_scales, k_scales, None, v_scales),
        "num_elts_per_sage_attn_blk": (q_block, k_block, 0, 1),
    }
    return SageInputs(**given, quantised=quantised | scales)


def _in_blocks(tokens: Tensor, lens: tuple[int, ...], dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise tokens in blocks. Return (dequantised tokens, float64; quantised tokens; scales, NaN for unused blocks)."""
    firsts = itertools.accumulate(lens, initial=0)
    numbers = [
        first // block + request + token // block
        for request, (first, count) in enumerate(zip(firsts, lens, strict=False))
        for token in range(count)
    ]
    of_tokens = torch.tensor(numbers, dtype=torch.int64, device=tokens.device)
    tokens = tokens.double() * (1 + of_tokens % FACTORS).view(-1, 1, 1)
    largest = tokens.new_full((tokens.shape[1], -(-len(tokens) // block) + len(lens) - 1), math.nan)
    sizes = tokens.abs().amax(dim=2).T
    largest = largest.scatter_reduce(1, of_tokens.expand_as(sizes), sizes, "amax", include_self=False)
    scales = _scales(largest, dtype)
    factors = scales[:, of_tokens].T.unsqueeze(2).double()
    stored = quantize_e4m3(tokens, factors) if dtype == E4M3 else (tokens / factors).round().to(dtype)
    return stored.double() * factors, stored, scales


def _scales(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return (largest / LARGEST[dtype]).float().clamp(min=LEAST_SCALE)
