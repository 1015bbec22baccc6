"""Checks and constants that the metadata kernels share. This module needs no Triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.calls.arguments import check_tensor

INDEX_DTYPES = (torch.int32, torch.int64)
# The kernel's number of query rows per request is n >= 1 if all requests of a pass have n rows. For other passes it is:
PRESET_ROWS = 0  # `cu_seqlens_q` is not written
CUMULATIVE_ROWS = -1  # `cu_seqlens_q` is the running sum of a tensor with the query rows of each request


def check_matrix(name: str, value: object, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return `value` if it is a tensor [rows, columns] with contiguous rows; else raise TypeError or ValueError."""
    tensor = check_tensor(name, value, dtypes)
    if tensor.ndim != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(
            f"{name} must have two dimensions and contiguous rows, got shape {list(tensor.shape)} with stride "
            f"{tensor.stride()}"
        )
    return tensor
