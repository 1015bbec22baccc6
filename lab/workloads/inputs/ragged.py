"""Build the tensors of a ragged context call: query rows, keys and values of all requests, then padding of large values. The
tensors can be quantised as SageAttention does, with scales of blocks of rows and of keys.
"""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, AttentionCall
from lab.references.errors import Truth
from lab.references.softmax_attention import E4M3_MAX, Rules, quantize_e4m3
from lab.workloads.attention_case import Contents, short_repr
from lab.workloads.forward_case import check_contents, check_dtype
from lab.workloads.inputs.attention import running_sum
from lab.workloads.inputs.contents import draw_histories, needle_positions, new_workspace
from lab.workloads.inputs.expected import truth_of_requests
from lab.workloads.requests import PassLens

TILE = 64  # keys or rows that kernels process at a time
PADDING = 3  # number of rows and of keys after the last request
PADDED = 1e4  # value of the padding: large, and finite in float16
LARGEST = {torch.int8: 127.0, E4M3: E4M3_MAX}  # absolute value of a quantised element
LEAST_SCALE = 1e-6  # of a block of zeros
FACTORS = 3  # neighbours are multiplied by 1, 2 and 3, so that a neighbour's scale shows

Parts = list[tuple[Tensor, Tensor]]  # each request's keys and values, [kv_len, num_kv_heads, head_dim or v_head_dim]


@dataclass(frozen=True, repr=False)
class RaggedCase(PassLens):
    """MLA prefill by `trtllm_ragged_attention_deepseek`, as data. Tokens see a cached prefix and new tokens up to their own."""

    prefix_lens: tuple[int, ...]  #: number of cached tokens of each request; negative: fewer keys than query rows
    q_lens: tuple[int, ...]  #: number of new tokens of each request; may be 0
    chunk: int = 64  #: largest number of cached tokens of a request in one call
    num_heads: int = 2  #: number of K/V heads
    group: int = 1  #: query heads per K/V head
    head_dim: int = 192  #: of queries and keys; 192 in DeepSeek-V3
    v_head_dim: int = 128  #: of values and outputs; 128 in DeepSeek-V3
    dtype: torch.dtype = torch.bfloat16  #: of all tensors: float16, bfloat16 or float8_e4m3fn
    window_left: int = -1  #: number of keys before its own position that a row sees; -1 for all
    contents: Contents = Contents.RANDOM  #: one of `PASS_CONTENTS`
    seed: int = 0  #: seed of all random numbers

    interface = AttentionCall.RAGGED_CONTEXT

    def __post_init__(self) -> None:
        if not self.q_lens or len(self.prefix_lens) != len(self.q_lens):
            raise ValueError(
                f"prefix_lens {self.prefix_lens} and q_lens {self.q_lens}: one each per request, at least one"
            )
        if min(map(sum, zip(self.prefix_lens, self.q_lens, strict=True))) < 0 or min(self.q_lens) < 0 or self.chunk < 1:
            raise ValueError(
                f"q_lens {self.q_lens}, also with prefix_lens {self.prefix_lens}, must be >= 0, chunk {self.chunk} >= 1"
            )
        check_contents(self.contents)
        if self.dtype != E4M3:
            check_dtype(self.dtype)

    __repr__ = short_repr

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, eq=False)
class RaggedInputs:
    """The tensors of a ragged context call: the query rows, and the keys and values of each request."""

    query: Tensor  # [num_rows, num_qo_heads, head_dim]
    q_lens: tuple[int, ...]
    parts: Parts
    softmax_scale: float  # bmm1_scale before it is multiplied by its factor
    causal: bool = True  # a row does not see keys after its own
    window_left: int = -1  # number of keys before its own position that a row sees; -1 for all
    sinks: Tensor | None = None  # float32 [num_qo_heads]
    shown: Tensor | None = None  # None, because there is no draft mask
    factors: tuple[float, float] = (1.0, 1.0)  # bmm1_scale and bmm2_scale are multiplied by these
    return_lse: bool = False
    with_padding: bool = True  # rows and keys of padding follow the last request

    interface = AttentionCall.RAGGED_CONTEXT
    kv_bound = "max_kv_len"

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(len(keys) for keys, _ in self.parts)

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.query.dtype == E4M3 else self.query.dtype

    @property
    def out_head_dim(self) -> int:
        return self.parts[0][1].shape[-1]

    @property
    def scales(self) -> dict[str, float]:
        return {"bmm1_scale": self.softmax_scale * self.factors[0], "bmm2_scale": self.factors[1]}

    def in_reverse(self) -> "RaggedInputs":
        """Return the inputs with the requests in reverse order. The totals of query rows and keys stay the same."""
        query = torch.cat(self.query.split(list(self.q_lens))[::-1])
        return replace(self, query=query, q_lens=self.q_lens[::-1], parts=self.parts[::-1])

    def arguments(self) -> dict[str, Any]:
        device, q_lens, kv_lens = self.query.device, self.q_lens, self.kv_lens
        sides = (self.query, *(torch.cat(each) for each in zip(*self.parts, strict=True)))
        query, key, value = (padded(side) if self.with_padding and len(side) else side for side in sides)
        arguments = {
            "query": query,
            "key": key,
            "value": value,
            "workspace_buffer": new_workspace(device),
            "seq_lens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
            "max_q_len": max(q_lens),
            "max_kv_len": max(kv_lens),
            **self.scales,
            "o_sf_scale": 1.0,
            "batch_size": len(q_lens),
            "window_left": self.window_left,
            "cum_seq_lens_q": running_sum(q_lens, device),
            "cum_seq_lens_kv": running_sum(kv_lens, device),
            "enable_pdl": None,
            "is_causal": self.causal,
            "return_lse": self.return_lse,
        }
        return arguments if self.sinks is None else arguments | {"attention_sinks": self.sinks}

    def truth(self, **changes: Any) -> Truth:
        given: dict[str, Any] = {
            **self.scales,
            "arithmetic": self.query.dtype,
            "out_dtype": self.out_dtype,
            "window_left": self.window_left,
            "sinks": self.sinks,
            "causal": self.causal,
        }
        return truth_of_requests(self.query, self.parts, list(self.q_lens), Rules(**given | changes))


def build_ragged(case: RaggedCase, device: torch.device) -> RaggedInputs:
    limits = [_limits(case, request) for request in range(len(case.q_lens))]
    needles = limits if case.contents is Contents.NEEDLES else None
    generator, heads = torch.Generator().manual_seed(case.seed), (case.num_heads * case.group, case.num_heads)
    head_dims = case.head_dim, case.v_head_dim
    query, histories = draw_histories(case, generator, needles, *heads, head_dims, case.softmax_scale)
    parts = [(keys.to(device, case.dtype), values.to(device, case.dtype)) for keys, values in histories]
    query = query.to(device, case.dtype)
    return RaggedInputs(query, case.q_lens, parts, case.softmax_scale, window_left=case.window_left)


def padded(rows: Tensor, value: float = PADDED) -> Tensor:
    return torch.cat((rows, torch.full((PADDING, *rows.shape[1:]), value, device=rows.device).to(rows.dtype)))


def _limits(case: RaggedCase, request: int) -> set[int]:
    kv_len, edges = case.kv_lens[request], range(0, case.prefix_lens[request] + 1, case.chunk)
    ends = {near for edge in edges for near in (edge - 1, edge) if 0 <= near < kv_len}
    return ends | set(needle_positions(kv_len, case.q_lens[request], TILE, case.window_left))


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
    """Quantise query and key in blocks of tokens to `dtype` (int8 or e4m3), value to e4m3. The result has no padding rows."""
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
    """Quantise each request's tokens in blocks. Return (dequantised, float64; quantised; scales, NaN for unused blocks)."""
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
