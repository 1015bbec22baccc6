"""The entries that a sparse call selects for each query row, as cells of its index tensor.

A cell holds a *place*: the index of an entry in the flattened pool, page * page_size + offset in the page. Row i of a request
with q rows and L keys is at position p = L - q + i. It uses its first p + 1 columns, because it cannot have more entries than
there are tokens up to its own; with lengths it uses as many columns as they say. Of the columns in use those are entries that
are not negative. An entry that stands in two columns counts twice.

Sources, of FlashInfer 0.7.2: a negative cell is no entry, in any column (`trace/templates/attention.py` 4141); lengths are per
query row (`mla/_core.py` 4046); the bound by position is documented for the 128 window columns of DSV4's call (`mla/_core.py`
2018). That a column which several readings treat alike decides nothing else is the lab's choice: SGLang 0.5.23 passes one row
per request, and -1 after the last entry (`dsa_backend.py` 920).
"""

import torch
from torch import Tensor


def columns_in_use(selected: Tensor, lens: Tensor | None, seq_lens: Tensor, row_offsets: list[int]) -> Tensor:
    """Return bool [num_rows, num_columns]: the columns that each row uses. Rows after the last request's rows use none.

    Args:
        selected: int32 [num_rows, num_columns], places.
        lens: int32 [num_rows], columns in use; None: as many as the row's position allows.
        seq_lens: [batch_size], keys of each request.
        row_offsets: first row of each request, followed by the end of the last one.
    """
    device, end = selected.device, row_offsets[-1]
    offsets = torch.tensor(row_offsets, device=device)
    used = offsets.new_zeros(len(selected))
    if lens is None:
        distance = seq_lens.to(torch.int64) - offsets[1:]  # from a row's index to the number of keys up to its position
        used[:end] = torch.arange(1, end + 1, device=device) + distance.repeat_interleave(offsets.diff())
    else:
        used[:end] = lens[:end]
    return torch.arange(selected.shape[1], device=device) < used.unsqueeze(1)


def check_selection(selected: Tensor, lens: Tensor | None, cells: Tensor, num_entries: int) -> None:
    """Check the places and lengths of a selection.

    Args:
        selected: as in `columns_in_use`.
        lens: the lengths of the requests' rows, or None.
        cells: the cells that are entries, bool [num_rows, num_columns].
        num_entries: number of entries of the pool.

    Raises:
        ValueError: a length is negative or exceeds the number of columns, or an entry is outside the pool.
    """
    if lens is not None:
        for row in ((lens < 0) | (lens > selected.shape[1])).nonzero()[:1].flatten().tolist():
            raise ValueError(
                f"sparse_mla_top_k_lens[{row}] = {int(lens[row])} must lie between 0 and sparse_mla_top_k = "
                f"{selected.shape[1]}"
            )
    for row, column in (cells & (selected >= num_entries)).nonzero()[:1].tolist():
        raise ValueError(
            f"block_tables: entry {int(selected[row, column])} of row {row}, column {column} is outside the pool of "
            f"{num_entries} entries: an entry is page * page_size + offset in the page, and -1 is none"
        )
