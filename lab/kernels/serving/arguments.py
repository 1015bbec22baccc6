"""Checks that the metadata kernels share, and numbers by which their arguments speak of query rows. It needs no Triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.calls.arguments import check_tensor, dtype_names

INDEX_DTYPES = (torch.int32, torch.int64)
# In place of a number of query rows of every request: `cu_seqlens_q` stays as it was preset, or sums the rows of each.
PRESET_ROWS = 0
CUMULATIVE_ROWS = -1


def check_table(name: str, table: object, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return a table, [rows, columns] with contiguous rows; raise TypeError or ValueError where it is none of `dtypes`."""
    tensor = check_tensor(name, table)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {dtype_names(dtypes)}, got {tensor.dtype}")
    if tensor.ndim != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(
            f"{name} must have two dimensions and contiguous rows, got shape {list(tensor.shape)} with stride "
            f"{tensor.stride()}"
        )
    return tensor
