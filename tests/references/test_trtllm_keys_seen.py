"""Which keys a row sees with a draft mask, against the definition; `test_every_call.py` has the other rules."""

from typing import Any

import pytest
import torch

from lab.references import trtllm_batch_decode_with_kv_cache
from tests.cases import Batch, coded_batch, decode_arguments, keys_seen, pack_mask, seen_keys


def seen(batch: Batch, **changes: Any) -> list[set[int]]:
    """Return the keys that each row of a coded batch sees."""
    return seen_keys(*trtllm_batch_decode_with_kv_cache(**decode_arguments(batch, **changes)))


def tree(q_len: int, parents: Any) -> list[list[bool]]:
    """Row j sees itself and its ancestors."""
    mask = [[False] * q_len for _ in range(q_len)]
    for row in range(q_len):
        token = row
        while token >= 0:
            mask[row][token] = True
            token = parents(token)
    return mask


MASKS = {
    "causal": lambda q_len: [[token <= row for token in range(q_len)] for row in range(q_len)],
    "full": lambda q_len: [[True] * q_len for _ in range(q_len)],
    "none": lambda q_len: [[False] * q_len for _ in range(q_len)],
    "itself": lambda q_len: [[token == row for token in range(q_len)] for row in range(q_len)],
    "binary tree": lambda q_len: tree(q_len, lambda token: (token - 1) // 2 if token else -1),
    "star": lambda q_len: tree(q_len, lambda token: 0 if token else -1),
}


@pytest.mark.parametrize("q_len", [1, 2, 8, 16, 17, 32, 33, 40])
@pytest.mark.parametrize("kind", MASKS)
def test_mask(kind: str, q_len: int) -> None:
    """Also of a request that is shorter than its rows."""
    batch = coded_batch([q_len] * 4, [q_len, q_len + 3, 50, max(q_len - 2, 0)])
    masks = [MASKS[kind](q_len)] * 4
    assert seen(batch, mask=pack_mask(masks)) == keys_seen(batch, masks=masks)


def test_each_request_has_its_own_mask_and_a_window_applies_beside_it() -> None:
    masks = [MASKS["full"](5), MASKS["binary tree"](5), MASKS["star"](5)]
    batch = coded_batch([5] * 3, [5, 17, 40])
    assert seen(batch, mask=pack_mask(masks), window_left=3) == keys_seen(batch, masks=masks, window_left=3)


def test_mask_bits_by_hand() -> None:
    mask = torch.zeros(1, 18, 2, dtype=torch.int32)
    mask[0, 0, 0] = 1 << 3 | 1 << 15
    mask[0, 17, 1] = 1 << 1
    rows = seen(coded_batch([18], [20]), mask=mask.to(torch.uint16))
    assert rows[0] == {0, 1, 5, 17}
    assert rows[17] == {0, 1, 19}
