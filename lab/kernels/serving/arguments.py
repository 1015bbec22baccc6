"""Checks and constants that the metadata kernels share. This module needs no Triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.calls.arguments import check_tensor

INDEX_DTYPES = (torch.int32, torch.int64)
# A pass whose requests all have n query rows tells the kernel n >= 1. These two values stand for the other passes:
PRESET_ROWS = 0  # leave `cu_seqlens_q` as the caller preset it
CUMULATIVE_ROWS = -1  # sum `cu_seqlens_q` from a tensor that holds each request's query rows


def check_matrix(name: str, value: object, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return the value after checking that it is a tensor [rows, columns] with contiguous rows. There may be gaps between rows.

    Raises:
        TypeError: the value is not a tensor, or its dtype is not in `dtypes`.
        ValueError: it does not have two dimensions, or a row is not contiguous.
    """
    tensor = check_tensor(name, value, dtypes)
    if tensor.ndim != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(
            f"{name} must have two dimensions and contiguous rows, got shape {list(tensor.shape)} with stride "
            f"{tensor.stride()}"
        )
    return tensor
