"""Softmax attention by plain low-precision torch operations (the control), and the weights that skip-softmax may leave out."""

import math

import torch
from torch import Tensor

from lab.calls.problem import E4M3, Softmax

# With a threshold above 1 all weights may be left out, and the result may be anything finite
LARGEST_SHARE = 1 - 2.0**-40
SKIP_ROUNDING = 1.01  # a kernel may round a weight by this factor before it compares it with the threshold


def unchecked_eager_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: Softmax, arithmetic: torch.dtype
) -> Tensor:
    """Compute `lab.references.eager_attention` of checked arguments, and return it in float32, not rounded."""
    weights, denominator = _weights(query, keys, visible, softmax, arithmetic)
    values = values.to(torch.float32).transpose(1, 2)
    sums = _of_each_group(_as_operand(weights, arithmetic), values)
    return (sums / denominator * float(softmax.bmm2_scale)).transpose(1, 2)


def skippable(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    softmax: Softmax,
    arithmetic: torch.dtype,
    threshold: float,
    out: Tensor,
) -> Tensor:
    """Return how much an output and an LSE may differ if a kernel leaves out any of the weights below `threshold` times a row's
    largest weight. `AttentionProblem.skip_softmax` has the rule.

    If the weights left out are the share s of the denominator, the output's error is (s * out - sum(weight * value)) / (1 - s).
    Its size is at most (s * ‖out‖ + sum(weight * ‖value‖)) / (1 - s), for these weights and for any part of them.

    Args:
        query, keys, values, visible, softmax, arithmetic: as in `unchecked_eager_attention`.
        threshold: of a weight; 0: nothing is left out.
        out: the exact output, float64 [batch, q_len, num_qo_heads, v_head_dim].

    Returns:
        float64 [batch, q_len, num_qo_heads, 2]: the share of the denominator, and the relative L2 error of the output.
    """
    if not threshold:
        return out.new_zeros(*out.shape[:3], 2)
    weights, denominator = _weights(query, keys, visible, softmax, arithmetic)
    weights = weights.to(torch.float64)
    largest = weights.amax(dim=-1, keepdim=True) if weights.shape[-1] else weights
    left_out = weights * (weights < SKIP_ROUNDING * threshold * largest)
    lengths = values.to(torch.float64).norm(dim=-1, keepdim=True).transpose(1, 2)
    share, sums = left_out.sum(dim=-1, keepdim=True) / denominator, _of_each_group(left_out, lengths) / denominator
    share = share.clamp(max=LARGEST_SHARE).transpose(1, 2)
    sums = (sums * float(softmax.bmm2_scale)).abs().transpose(1, 2)
    size = out.norm(dim=-1, keepdim=True)
    error = (share * size + sums) / ((1 - share) * size)
    return torch.cat((share, error.nan_to_num(nan=0.0, posinf=math.inf)), dim=-1)


def _weights(
    query: Tensor, keys: Tensor, visible: Tensor, softmax: Softmax, arithmetic: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the weights of the keys before they are divided, float32 [batch, num_qo_heads, q_len, kv_len], and the
    denominators, the sinks included, with 1 where a row sees no key.
    """
    keys = keys.to(torch.float32).transpose(1, 2)
    rows = _as_operand(query.to(torch.float32), arithmetic).transpose(1, 2)  # [batch, num_qo_heads, q_len, head_dim]
    scores = _of_each_group(rows, keys.transpose(2, 3)).mul_(float(softmax.bmm1_scale))
    scores = scores.masked_fill_(~visible.unsqueeze(1), -math.inf)
    if scores.shape[-1] == 0:  # no key at all
        return scores, scores.new_ones(*scores.shape[:3], 1)
    if softmax.sinks is not None:
        sink_logits = softmax.sinks.to(torch.float32).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink_logits), dim=-1)
    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(torch.where(largest.isfinite(), largest, 0.0)).exp_()
    denominator = weights.sum(dim=-1, keepdim=True)
    return weights[..., : keys.shape[2]], torch.where(denominator == 0, 1.0, denominator)


def _of_each_group(rows: Tensor, side: Tensor) -> Tensor:
    """Multiply the rows of each query head by its K/V head's matrix, query heads of one K/V head together."""
    q_len = rows.shape[2]
    by_head = rows.unflatten(1, (side.shape[1], -1)).flatten(2, 3) @ side
    return (
        by_head.unflatten(2, (-1, q_len)).flatten(1, 2) if q_len else by_head.new_zeros(*rows.shape[:3], side.shape[3])
    )


def _as_operand(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != E4M3 or values.shape[-1] == 0:
        return values.to(dtype).to(torch.float32)
    largest = values.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / torch.finfo(dtype).max, torch.ones_like(largest))
    return (values / scale).to(dtype).to(torch.float32) * scale
