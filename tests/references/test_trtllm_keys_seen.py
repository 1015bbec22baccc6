"""Which keys a row sees in each call, against the definition."""

from typing import Any

import pytest
import torch

from lab import references
from tests.cases import CONTEXT, DECODE, MLA, RAGGED, Batch, arguments_of, coded_batch, keys_seen, pack_mask, seen_keys

P = 16


def seen(function: str, batch: Batch, **changes: Any) -> list[set[int]]:
    """Return the keys that each row of a coded batch sees. MLA's values are the keys' latent part."""
    if function == MLA:
        batch = Batch(batch.queries, batch.values, batch.values)
    if function == RAGGED and "causal" in changes:
        changes["is_causal"] = changes.pop("causal")
    out, lse = getattr(references, function)(**arguments_of(function, batch, **changes))
    return seen_keys(out.flatten(0, -3), lse)


LENGTHS = {
    "page edges": ([1] * 8, [0, 1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1]),
    **{f"{q_len} rows": ([q_len] * 4, [max(q_len - 2, 0), q_len, 41, 50]) for q_len in (1, 2, 3, 4, 5, 8, 33, 40)},
    "several widths": ([5, 0, 1, 40, 0, 33, 8, 3, 2, 0], [5, 7, 17, 40, 0, 50, 16, 2, 0, 9]),
    "no row": ([0, 0], [7, 0]),
}
RULES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # and the calls that have them
    "causal": ((DECODE, CONTEXT, MLA, RAGGED), {}),
    "not causal": ((CONTEXT, RAGGED), {"causal": False}),
    **{
        f"window of {window_left}": ((DECODE, CONTEXT, RAGGED), {"window_left": window_left})
        for window_left in (0, 4, P, 49, 1000)
    },
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("function", "rule"), [(name, rule) for rule, (calls, _) in RULES.items() for name in calls])
def test_rows_see_the_keys_of_the_definition(function: str, rule: str, lengths: str) -> None:
    batch, (_, changes) = coded_batch(*LENGTHS[lengths]), RULES[rule]
    assert seen(function, batch, **changes) == keys_seen(batch, **changes)


# Draft masks


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
    assert seen(DECODE, batch, mask=pack_mask(masks)) == keys_seen(batch, masks=masks)


def test_each_request_has_its_own_mask_and_a_window_applies_beside_it() -> None:
    masks = [MASKS["full"](5), MASKS["binary tree"](5), MASKS["star"](5)]
    batch = coded_batch([5] * 3, [5, 17, 40])
    assert seen(DECODE, batch, mask=pack_mask(masks), window_left=3) == keys_seen(batch, masks=masks, window_left=3)


def test_mask_bits_by_hand() -> None:
    mask = torch.zeros(1, 18, 2, dtype=torch.int32)
    mask[0, 0, 0] = 1 << 3 | 1 << 15
    mask[0, 17, 1] = 1 << 1
    rows = seen(DECODE, coded_batch([18], [20]), mask=mask.to(torch.uint16))
    assert rows[0] == {0, 1, 5, 17}
    assert rows[17] == {0, 1, 19}
