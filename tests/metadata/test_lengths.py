"""Rows and keys of a batch's requests, worked out by hand where a rule begins."""

import pytest
import torch

from lab.metadata import ForwardBatch, ForwardMode, SpecInfo
from lab.metadata.engine.lengths import max_query_rows, pad_requests


def batch_of(
    mode: ForwardMode, count: int, rows: int, host_rows: list[int] | None = None, most: int | None = 2
) -> ForwardBatch:
    """A batch of `count` requests and `rows` query rows; `most` is its ``num_draft_tokens``."""
    slots = sum(host_rows) if host_rows is not None else rows
    return ForwardBatch(
        mode,
        torch.arange(1, count + 1),
        torch.full((count,), 20),
        torch.arange(100, 100 + slots),
        num_tokens=rows,
        extend_seq_lens_cpu=host_rows,
        spec_info=None if most is None else SpecInfo(num_draft_tokens=most),
    )


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (batch_of(ForwardMode.DECODE, 3, 3), 1),
        # The rows that there are, which padding may have made more than those drafted.
        (batch_of(ForwardMode.TARGET_VERIFY, 1, 3), 3),
        (batch_of(ForwardMode.TARGET_VERIFY, 2, 6, most=None), 3),
        (batch_of(ForwardMode.TARGET_VERIFY, 0, 0), 2),
        (batch_of(ForwardMode.RAGGED_VERIFY, 2, 3, [1, 2], most=4), 2),
        (batch_of(ForwardMode.RAGGED_VERIFY, 2, 3, most=4), 4),
        (batch_of(ForwardMode.RAGGED_VERIFY, 0, 0, [], most=4), 4),
        (batch_of(ForwardMode.EXTEND, 2, 7, [5, 1]), 5),
        (batch_of(ForwardMode.EXTEND, 0, 0, []), 0),
    ],
)
def test_the_most_rows_of_a_request(batch: ForwardBatch, expected: int) -> None:
    assert max_query_rows(batch) == expected


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND])
def test_rows_that_nothing_tells_are_an_error(mode: ForwardMode) -> None:
    missing = "num_draft_tokens" if mode is ForwardMode.TARGET_VERIFY else "extend_seq_lens_cpu"
    with pytest.raises(ValueError, match=missing):
        max_query_rows(batch_of(mode, 0, 0, most=None))


def test_a_batch_is_padded_to_its_own_size_or_more() -> None:
    batch = batch_of(ForwardMode.TARGET_VERIFY, 2, 6)
    same, more = pad_requests(batch, 2), pad_requests(batch, 3)
    assert (same.batch_size, same.num_tokens, same.out_cache_loc.tolist()) == (2, 6, list(range(100, 106)))
    assert (more.batch_size, more.num_tokens, more.out_cache_loc.tolist()) == (3, 9, [*range(100, 106), 0, 0, 0])
    assert (more.req_pool_indices.tolist(), more.seq_lens.tolist()) == ([1, 2, 0], [20, 20, 1])
    for unpadded, size in ((batch, 1), (batch_of(ForwardMode.EXTEND, 2, 7, [5, 2]), 3)):
        with pytest.raises(ValueError, match=f"of 2 requests is not padded to {size}"):
            pad_requests(unpadded, size)
