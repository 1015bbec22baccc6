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
    """Return the value if it is a tensor [rows, columns] of one of `dtypes` with contiguous rows, perhaps with gaps between.

    Raises:
        TypeError, ValueError: it is not.
    """
    tensor = check_tensor(name, value, dtypes)
    if tensor.ndim != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(
            f"{name} must have two dimensions and contiguous rows, got shape {list(tensor.shape)} with stride "
            f"{tensor.stride()}"
        )
    return tensor
