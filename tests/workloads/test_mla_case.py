"""What a pass of latent attention must move and compute, by hand."""

from typing import Any

import pytest
import torch

from lab.metadata import ForwardMode
from lab.metadata.engine.lengths import DraftAttention
from lab.workloads.mla_case import MLACase

ROW_BYTES = 3 * (32 + 16) * 2  # the query and the output of one row: 3 heads, 32 + 16 elements of 2 bytes
PAIR_OPERATIONS = 2 * 3 * (32 + 16)
DECODE = ForwardMode.DECODE
WHOLE: dict[str, Any] = {"qk_rope_head_dim": 0}  # of DeepSeek-V4


def case(mode: ForwardMode, prefix_lens: tuple[int, ...], q_lens: tuple[int, ...], **changes: Any) -> MLACase:
    """Entries of 16 + 16 elements, 3 heads."""
    sizes: dict[str, Any] = {"num_qo_heads": 3, "kv_lora_rank": 16, "qk_rope_head_dim": 16}
    return MLACase(mode, prefix_lens, q_lens, **sizes | changes)


@pytest.mark.parametrize(
    ("example", "entries", "pairs", "rows"),
    [
        (case(DECODE, (4, 9), (1, 1)), 5 + 10, 5 + 10, 2),
        (case(ForwardMode.TARGET_VERIFY, (4, 0), (3, 3)), 7 + 3, (5 + 6 + 7) + (1 + 2 + 3), 6),
        (case(ForwardMode.DRAFT_EXTEND, (4, 9), (2, 1)), 6 + 10, (5 + 6) + 10, 3),
        # A draft step of SGLang's sees the prefix alone, with an offset the drafted tokens too.
        (case(DECODE, (4, 0), (1, 1), draft_step=2), 4, 4, 2),
        (case(DECODE, (4, 0), (1, 1), draft_step=2, attention=DraftAttention.MLA_WITH_OFFSET), 7 + 3, 7 + 3, 2),
        # Rows of a request may select the same entries: those of its last row are sure to be read.
        (case(ForwardMode.TARGET_VERIFY, (4, 0), (3, 3), index_topk=6), 6 + 3, 5 + 6 + 6 + 6, 6),
        (case(ForwardMode.EXTEND, (4, 0), (1, 3), index_topk=2), 2 + 2, 2 + 1 + 2 + 2, 4),
    ],
    ids=repr,
)
def test_each_entry_moves_once_and_each_visible_pair_is_computed(
    example: MLACase, entries: int, pairs: int, rows: int
) -> None:
    assert example.visible_pairs == pairs
    assert example.operations == pairs * PAIR_OPERATIONS
    assert example.bytes_moved == entries * 32 * 2 + rows * ROW_BYTES


@pytest.mark.parametrize(
    ("example", "entries", "pairs"),
    [
        # 128 tokens of each row and, of two per entry, at most 3 entries; the window of both rows.
        (
            case(ForwardMode.TARGET_VERIFY, (198, 2), (2, 2), compress_ratio=2, index_topk=3, **WHOLE),
            (129 + 3) + (4 + 2),
            131 + 131 + (3 + 1) + (4 + 2),
        ),
        (case(DECODE, (299,), (1,), compress_ratio=128, **WHOLE), 128 + 2, 128 + 2),
        (case(DECODE, (299,), (1,), compress_ratio=0, **WHOLE), 128, 128),
    ],
    ids=repr,
)
def test_a_row_sees_its_window_and_compressed_entries(example: MLACase, entries: int, pairs: int) -> None:
    assert (example.visible_keys, example.visible_pairs) == (entries, pairs)


def test_an_e4m3_entry_is_half_as_large_and_the_rows_are_not() -> None:
    example = case(DECODE, (4, 9), (1, 1), kv_dtype=torch.float8_e4m3fn)
    assert example.bytes_moved == 15 * 32 + 2 * ROW_BYTES
    assert example.operations == 15 * PAIR_OPERATIONS


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    [
        (ForwardMode.TARGET_VERIFY, {"num_draft_tokens": 3}, "draft_tokens=3 would be ignored.*only .*RAGGED"),
        (ForwardMode.TARGET_VERIFY, {"dcp_size": 2}, "dcp_size=2 would be ignored.*without index_topk only .*DECODE"),
        (ForwardMode.RAGGED_VERIFY, {"num_padding_requests": 1}, "as many rows for every.*; leave it 0"),
        (DECODE, {"num_padding_requests": 1, "dcp_size": 2}, "num_padding_requests=1 would be .* without dcp_size"),
        (DECODE, {"index_topk": 0}, "index_topk=0 must be at least 1"),
        (DECODE, {"index_topk": 8, "dcp_size": 2, "draft_step": 0}, "no context parallelism in draft models"),
        (ForwardMode.DRAFT_EXTEND_V2, {"index_topk": 8, "dcp_size": 2}, "no context parallelism in draft models"),
        (DECODE, {"compress_ratio": 128, "dcp_size": 2} | WHOLE, "or in DeepSeek-V4's"),
        (DECODE, {"index_topk": 8, "draft_step": 0, "attention": DraftAttention.MLA_WITH_OFFSET}, "goes with it"),
        (ForwardMode.DRAFT_EXTEND, {"index_topk": 8}, "is no mode of DSA"),
        (ForwardMode.DRAFT_EXTEND, {"compress_ratio": 0} | WHOLE, "is no mode of DSV4"),
        (DECODE, {"compress_ratio": 3} | WHOLE, "compress_ratio=3 must be one of"),
        (DECODE, {"compress_ratio": 0}, "qk_rope_head_dim 0"),
        (DECODE, {"compress_ratio": 4} | WHOLE, "index_topk=None with compress_ratio=4"),
        (DECODE, {"compress_ratio": 128, "index_topk": 8} | WHOLE, "index_topk=8 with compress_ratio=128"),
        (DECODE, {"compress_ratio": 128, "draft_step": 0} | WHOLE, "compress_ratio=128: a draft model has 0"),
        (DECODE, {"compress_ratio": 0, "virtual_slots": True} | WHOLE, "slots are not virtual with DSV4"),
        (ForwardMode.EXTEND, {}, "computes no attention on the MLA decode kernel"),
        (ForwardMode.IDLE, {}, "ForwardMode.IDLE computes no attention"),
        (DECODE, {"num_padding_rows": 1}, "num_padding_rows=1 would be ignored in .*: only RAGGED_VERIFY"),
        (DECODE, {"query_dtype": torch.float8_e4m3fn}, "an engine casts to e4m3, over an e4m3 cache"),
    ],
)
def test_what_means_nothing_in_a_mode_is_refused(mode: ForwardMode, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case(mode, (4, 9), (1, 1), **changes)
