"""Check the arguments of `lab.references.attention`: shapes, dtypes and, on a CPU, NaN."""

import torch
from torch import Tensor

from lab.calls.arguments import check_scale, check_tensor, check_vector
from lab.calls.problem import Softmax

FLOAT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_plain(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: Softmax) -> None:
    """Raise an error if `lab.references.attention` does not support the arguments.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices contradict each other, or on a CPU query, sinks or a scale contain NaN.
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
