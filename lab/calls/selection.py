"""The entries that a sparse call selects for each query row, as cells of its index tensor.

A cell holds a *place*: the index of an entry in the flattened pool, page * page_size + offset in the page. Row i of a request
with q rows and L keys is at position p = L - q + i. It uses its first p + 1 columns, because it cannot have more entries than
there are tokens up to its own; with lengths it uses as many columns as they say. Of the columns in use those are entries that
are not negative. An entry that stands in two columns counts twice.

DSV4's call has two pools. The places of its first `WINDOW_COLUMNS` columns lie in the pool of recent tokens, and of these
columns a row never uses more than p + 1. The other columns lie in the pool of compressed tokens, and lengths count all columns.

Sources, of FlashInfer 0.7.2: a negative cell is no entry, in any column (`trace/templates/attention.py` 4141; for DSV4's call
`mla/_core.py` 2019, of the backend cake); lengths are per query row (`mla/_core.py` 4046); the bound by position is documented
for the 128 window columns of DSV4's call (`mla/_core.py` 2018). That a column which several readings treat alike decides
nothing else is the lab's choice: SGLang 0.5.23 passes one row per request, and -1 after the last entry (`dsa_backend.py` 920).
It says that to trtllm-gen a -1 before the last column in use is a key of zeros (`deepseek_v4_backend.py` 591), and so the judge
passes none in DSV4's call.
"""

from typing import NamedTuple

import torch
from torch import Tensor

WINDOW_COLUMNS = 128  # of DSV4's call: entries of its window pool (FlashInfer 0.7.2, mla/_core.py 1967)


class Names(NamedTuple):
    """A call's names of its index tensor, of the lengths and of the number of columns; and the smallest length."""

    table: str = "block_tables"
    lens: str = "sparse_mla_top_k_lens"
    columns: str = "sparse_mla_top_k"
    least: int = 0


TOP_K_NAMES = Names()


def columns_in_use(
    selected: Tensor, lens: Tensor | None, seq_lens: Tensor, row_offsets: list[int], num_window: int = 0
) -> Tensor:
    """Return bool [num_rows, num_columns]: the columns that each row uses. Rows after the last request's rows use none.

    Args:
        selected: int32 [num_rows, num_columns], places.
        lens: int32 [num_rows], columns in use; None: as many as the row's position allows.
        seq_lens: [batch_size], keys of each request.
        row_offsets: first row of each request, followed by the end of the last one.
        num_window: of its first `num_window` columns a row uses no more than its position allows, with lengths too.
    """
    device, end = selected.device, row_offsets[-1]
    offsets = torch.tensor(row_offsets, device=device)
    up_to_row, used = offsets.new_zeros(2, len(selected))
    distance = seq_lens.to(torch.int64) - offsets[1:]  # from a row's index to the number of keys up to its position
    up_to_row[:end] = torch.arange(1, end + 1, device=device) + distance.repeat_interleave(offsets.diff())
    used[:end] = up_to_row[:end] if lens is None else lens[:end]
    columns = torch.arange(selected.shape[1], device=device)
    return (columns < used.unsqueeze(1)) & ((columns >= num_window) | (columns < up_to_row.unsqueeze(1)))


def check_selection(
    selected: Tensor, lens: Tensor | None, cells: Tensor, num_entries: int, names: Names = TOP_K_NAMES
) -> None:
    """Check the places and lengths of a selection. Raise ValueError for a length below `names.least` or above the number of
    columns, and for an entry outside the pool of `num_entries`. The cells that are entries are `cells`, bool [num_rows,
    num_columns]; `names` are the call's names, for the messages.
    """
    if lens is not None:
        for row in ((lens < names.least) | (lens > selected.shape[1])).nonzero()[:1].flatten().tolist():
            raise ValueError(
                f"{names.lens}[{row}] = {int(lens[row])} must lie between {names.least} and {names.columns} = "
                f"{selected.shape[1]}"
            )
    for row, column in (cells & (selected >= num_entries)).nonzero()[:1].tolist():
        raise ValueError(
            f"{names.table}: entry {int(selected[row, column])} of row {row}, column {column} is outside the pool of "
            f"{num_entries} entries: an entry is page * page_size + offset in the page, and -1 is none"
        )
