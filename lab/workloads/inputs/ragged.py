"""A ragged context call made concrete: rows, keys and values of requests end to end, with large values after the last."""

from typing import Any

import torch
from torch import Tensor

from lab.references.truth import Rules, Truth
from lab.workloads.attention_case import Contents
from lab.workloads.inputs.attention import new_workspace, running_sum
from lab.workloads.inputs.expected import truth_of_requests
from lab.workloads.inputs.needles import draw_histories, needle_positions
from lab.workloads.ragged_case import RaggedCase

TILE = 64  # keys or rows that kernels take at a time, where a length of one more or less shows
PADDING = 3  # rows and keys after the last request's
PADDED = 1e4  # what they hold: large, and finite in float16

Parts = list[tuple[Tensor, Tensor]]  # each request's keys and values, [kv_len, num_heads, head_dim or v_head_dim]


def draw_ragged(case: RaggedCase, device: torch.device) -> tuple[Tensor, Parts]:
    """Return the query, [sum(q_lens), num_heads, head_dim], and each request's keys and values."""
    needles = [_limits(case, request) for request in range(len(case.q_lens))]
    query, histories = draw_histories(
        case,
        torch.Generator().manual_seed(case.seed),
        needles if case.contents is Contents.NEEDLES else None,
        case.num_heads,
        case.num_heads,
        (case.head_dim, case.v_head_dim),
        case.softmax_scale,
    )
    stored = [(keys.to(device, case.dtype), values.to(device, case.dtype)) for keys, values in histories]
    return query.to(device, case.dtype), stored


def ragged_arguments(case: RaggedCase, query: Tensor, parts: Parts, *, causal: bool) -> dict[str, Any]:
    """Return the arguments of the call over each request's keys and values, with padding after the last."""
    kv_lens = tuple(len(keys) for keys, _ in parts)
    key, value = (padded(torch.cat(sides)) for sides in zip(*parts, strict=True))
    return arguments_of(padded(query), key, value, case.q_lens, kv_lens, case.softmax_scale, causal=causal)


def arguments_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    softmax_scale: float,
    *,
    causal: bool,
) -> dict[str, Any]:
    """Return the arguments of the call over these tensors, of requests of these rows and keys."""
    device = query.device
    return {
        "query": query,
        "key": key,
        "value": value,
        "workspace_buffer": new_workspace(device),
        "seq_lens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "max_q_len": max(q_lens),
        "max_kv_len": max(kv_lens),
        "bmm1_scale": softmax_scale,
        "bmm2_scale": 1.0,
        "o_sf_scale": 1.0,
        "batch_size": len(q_lens),
        "window_left": -1,
        "cum_seq_lens_q": running_sum(q_lens, device),
        "cum_seq_lens_kv": running_sum(kv_lens, device),
        "enable_pdl": None,
        "is_causal": causal,
        "return_lse": False,
    }


def padded(rows: Tensor) -> Tensor:
    """Return the rows, and large ones after them; none where there are none."""
    return torch.cat((rows, torch.full_like(rows[:1], PADDED).expand(PADDING, -1, -1))) if len(rows) else rows


def truth_of_ragged(case: RaggedCase, query: Tensor, parts: Parts, **rules: Any) -> Truth:
    """Return the truth of a call over these keys and values; `rules` are fields of `Rules`."""
    given: dict[str, Any] = {
        "bmm1_scale": case.softmax_scale,
        "bmm2_scale": 1.0,
        "arithmetic": case.dtype,
        "out_dtype": case.dtype,
    }
    return truth_of_requests(query, parts, list(case.q_lens), Rules(**given | rules))


def _limits(case: RaggedCase, request: int) -> set[int]:
    """Return the positions at the limits of what a request's rows see, and at both ends of each chunk of its prefix."""
    kv_len, edges = case.kv_lens[request], range(0, case.prefix_lens[request] + 1, case.chunk)
    ends = {near for edge in edges for near in (edge - 1, edge) if 0 <= near < kv_len}
    return ends | set(needle_positions(kv_len, case.q_lens[request], TILE))
