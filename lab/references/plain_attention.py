"""Softmax attention over contiguous K/V with checked arguments: `attention` in float64, `eager_attention` in low precision.

`attention` defines the right result of all of FlashInfer's calls.
"""

import torch
from torch import Tensor

from lab.calls.arguments import check_scale, check_tensor, check_vector, dtype_names
from lab.calls.entry import with_own_settings
from lab.calls.problem import E4M3, Scale, Softmax
from lab.references.softmax_attention import rounded, unchecked_attention, unchecked_eager_attention

FLOAT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ARITHMETIC_DTYPES = (torch.float16, torch.bfloat16, E4M3, torch.float32)


@with_own_settings
def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute grouped-query softmax attention in float64.

    Query head h reads K/V head h // (num_qo_heads / num_kv_heads). A sink is a further logit of a head: it increases the
    softmax's denominator and has no value vector. The output of a row that sees no key is zero.

    Args:
        query: [batch, q_len, num_qo_heads, head_dim], any float dtype.
        keys: [batch, kv_len, num_kv_heads, head_dim], dequantised, and finite even where not visible.
        values: [batch, kv_len, num_kv_heads, v_head_dim], dequantised, and finite even where not visible.
        visible: bool [batch, q_len, kv_len], True for the keys that a row sees.
        bmm1_scale, bmm2_scale: factors of Q·K^T and of P·V.
        sinks: [num_qo_heads].

    Returns:
        out, float64 [batch, q_len, num_qo_heads, v_head_dim]; lse_log2, float64 [batch, q_len, num_qo_heads], log2 of
        the denominator (sink included), -inf where that is zero.

    Raises:
        TypeError, ValueError: a type, dtype, shape or device is wrong, or on a CPU a query, sink or scale is NaN.
    """
    terms = Softmax(bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, sinks=sinks)
    check_plain(query, keys, values, visible, terms)
    return unchecked_attention(query, keys, values, visible, terms)


@with_own_settings
def eager_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    arithmetic: torch.dtype,
    out_dtype: torch.dtype,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention in low precision, [batch, q_len, num_qo_heads, v_head_dim] in `out_dtype`. This output is the control:
    the error of a right kernel may be a small multiple of the control's error.

    The query and the softmax's weights are rounded to `arithmetic` before each product; for e4m3 each row is first scaled to
    the dtype's range. Scores, softmax and sums are float32. Wrong arguments raise TypeError or ValueError.

    Args:
        query, keys, values: [batch, tokens, heads, head_dim], any float dtype, dequantised.
        visible: bool [batch, q_len, kv_len], True for the keys that a row sees.
        bmm1_scale, bmm2_scale: factors of Q·K^T and of P·V.
        sinks: [num_qo_heads].
        arithmetic: dtype of the operands of Q·K^T and of P·V: float16, bfloat16, e4m3 or float32.
    """
    check_arithmetic(arithmetic)
    if not isinstance(out_dtype, torch.dtype) or not out_dtype.is_floating_point:
        raise TypeError(f"out_dtype must be a float dtype, got {out_dtype!r}")
    terms = Softmax(bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, sinks=sinks)
    check_plain(query, keys, values, visible, terms)
    return rounded(unchecked_eager_attention(query, keys, values, visible, terms, arithmetic), out_dtype)


def check_arithmetic(arithmetic: object) -> None:
    if arithmetic not in ARITHMETIC_DTYPES:
        raise TypeError(f"arithmetic must be {dtype_names(ARITHMETIC_DTYPES)}, got {arithmetic!r}")


def check_plain(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: Softmax) -> None:
    """Raise TypeError for a wrong type or dtype. Raise ValueError if shapes or devices contradict each other, or if the query,
    the sinks or a scale of `softmax` has NaN on a CPU.
    """
    expected = "[batch, {}, heads, head_dim]"
    for name, tensor, length in (("query", query, "q_len"), ("keys", keys, "kv_len"), ("values", values, "kv_len")):
        if not check_tensor(name, tensor).is_floating_point():
            raise TypeError(f"{name} must be of a float dtype, got {tensor.dtype}; dequantise it first")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be {expected.format(length)}, got shape {list(tensor.shape)}")
    batch, q_len, num_qo_heads, head_dim = query.shape
    if keys.shape[:3] != values.shape[:3] or keys.shape[0] != batch:
        raise ValueError(
            f"keys {list(keys.shape)} and values {list(values.shape)} must have the query's batch, {batch}, and the same "
            "tokens and heads"
        )
    if keys.shape[3] != head_dim:
        raise ValueError(f"keys have head_dim {keys.shape[3]}, but query has {head_dim}: they must agree")
    if keys.shape[2] == 0 or num_qo_heads % keys.shape[2]:
        raise ValueError(
            f"the {num_qo_heads} heads of query do not divide evenly over the {keys.shape[2]} heads of keys"
        )
    if check_tensor("visible", visible).dtype != torch.bool:
        raise TypeError(f"visible must be bool, got {visible.dtype}")
    if visible.shape not in ((batch, q_len, keys.shape[1]), (batch, 1, keys.shape[1])):  # 1: all rows see the same
        raise ValueError(
            f"visible must be [batch, q_len, kv_len] = {[batch, q_len, keys.shape[1]]}, got {list(visible.shape)}"
        )
    if softmax.sinks is not None:
        check_vector("sinks", softmax.sinks, num_qo_heads, FLOAT_DTYPES)
    for name, other in (("keys", keys), ("values", values), ("visible", visible), ("sinks", softmax.sinks)):
        if other is not None and other.device != query.device:
            raise ValueError(f"{name} is on {other.device}, but query is on {query.device}; move it there")
    for name, value in {**softmax.terms(), "query": query}.items():
        is_number = name not in ("query", "sinks")
        if is_number and not isinstance(value, Tensor):
            check_scale(name, value)
        elif is_number and value.numel() != 1:
            raise ValueError(f"{name} as a tensor must have one element, got shape {list(value.shape)}")
        if isinstance(value, Tensor) and value.device.type == "cpu" and bool(value.isnan().any()):
            raise ValueError(f"{name} holds NaN, which would make the output NaN")
