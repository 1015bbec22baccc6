"""The expected results of rows that see selected keys of their request, instead of all keys up to their position."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lab.references.errors import Truth
from lab.references.quantization import indexed
from lab.references.softmax_attention import Rules, truth_of_requests


def truth_of_selected(
    query: Tensor, histories: Sequence[tuple[Tensor, Tensor]], selected: Sequence[Tensor], rules: Rules
) -> Truth:
    """Return the expected results of the rows of consecutive requests. Each row attends to the keys that it selects, as if it
    were a request with no other keys.

    Args:
        query: [num_rows, num_qo_heads, head_dim].
        histories: (K, V) of each request, [kv_len, num_kv_heads, head_dim].
        selected: for each request the positions of keys that its rows select, int64 [q_len, num_columns]. A negative number is
            no key; a key that is selected twice counts twice.
        rules: scales, sinks and dtypes.
    """
    of_rows = [
        (indexed(keys, row[row >= 0]), indexed(values, row[row >= 0]))
        for (keys, values), rows in zip(histories, selected, strict=True)
        for row in rows
    ]
    truth = truth_of_requests(query[: len(of_rows)], of_rows, [1] * len(of_rows), rules)
    widths = torch.tensor([len(rows) for rows in selected], device=query.device)
    return replace(truth, request_of_row=torch.arange(len(widths), device=query.device).repeat_interleave(widths))
