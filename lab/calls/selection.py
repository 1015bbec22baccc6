"""The entries that a sparse call selects for each query row, as cells of its index tensor.

A cell contains a *place*: the index of an entry in the flattened pool, page * page_size + offset in the page. Row i of
a request with q rows and L keys is at position p = L - q + i. Without lengths the row uses its first p + 1 columns,
because there are p + 1 tokens up to position p. With lengths it uses the number of columns that its length states. A
cell of a used column is an entry if it is not negative. An entry in two columns counts twice.

DSV4's call has two pools. Its first `WINDOW_COLUMNS` columns are places in the pool of recent tokens, and a row uses at most
p + 1 of them. The other columns are places in the pool of compressed tokens. Lengths count all columns.

Sources in FlashInfer 0.7.2: a negative cell in any column is no entry (`trace/templates/attention.py` 4141; for DSV4's call
`mla/_core.py` 2019, of the backend cake); lengths are per query row (`mla/_core.py` 4046); the bound by position is documented
for the 128 window columns of DSV4's call (`mla/_core.py` 2018). SGLang 0.5.23 passes one row per request, and -1 after the last
entry (`dsa_backend.py` 920). According to SGLang, trtllm-gen reads a -1 before the last used column as a key of zeros
(`deepseek_v4_backend.py` 591), so the judge passes no such -1 in DSV4's call.
"""

from typing import NamedTuple

import torch
from torch import Tensor

WINDOW_COLUMNS = 128  # of DSV4's call: entries of its window pool (FlashInfer 0.7.2, mla/_core.py 1967)


class Names(NamedTuple):
    """The names of a sparse call's arguments in error messages, and the smallest number of columns that a row may use."""

    table: str = "block_tables"  #: the tensor of selected entries
    lens: str = "sparse_mla_top_k_lens"  #: the tensor of the number of columns that each row uses
    columns: str = "sparse_mla_top_k"  #: the number of columns
    least: int = 0  #: smallest allowed element of the tensor `lens`


TOP_K_NAMES = Names()


def columns_in_use(
    selected: Tensor, lens: Tensor | None, seq_lens: Tensor, row_offsets: list[int], num_window: int = 0
) -> Tensor:
    """Return which columns of `selected` each row uses, bool [num_rows, num_columns]. Padding rows use none.

    Args:
        selected: int32 [num_rows, num_columns], indices of entries in the pool.
        lens: int32 [num_rows], number of first columns that each row uses; None: a row at position p uses p + 1 columns.
        row_offsets: first row of each request, followed by the end of the last one.
        num_window: number of columns for recent tokens (DeepSeek-V4) at the start of `selected`. Of these, a row at position p
            uses at most the first p + 1, also with `lens`.
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
    """Raise ValueError if an element of `lens` (if given) is below `names.least` or exceeds the number of columns, or if
    `selected` has an index of at least `num_entries`, the pool's size. Only elements of `selected` where the mask `cells`, bool
    [num_rows, num_columns], is True are checked.
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
