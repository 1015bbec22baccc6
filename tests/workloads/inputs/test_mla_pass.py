"""The truth of a pass with many entries is made of a few rows at once."""

from typing import Any

import pytest
import torch

from lab.checks import MLACase
from lab.metadata import ForwardMode
from lab.references import softmax_attention
from lab.workloads.inputs.expected import made
from lab.workloads.inputs.mla_pass import build_mla_pass


@pytest.mark.parametrize(("limit", "rows"), [(1, [1] * 6), (2 * 3 * 12, [2, 1, 3]), (2**26, [3, 3])])
def test_few_rows_at_once_give_the_same_truth(limit: int, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads over 12 and over 7 entries: one row at once, two of the longer request's, or all three."""
    case = MLACase(ForwardMode.TARGET_VERIFY, (9, 4), (3, 3), num_qo_heads=3, kv_lora_rank=16, qk_rope_head_dim=16)
    forward = build_mla_pass(case, torch.device("cpu"))
    whole = made(forward.truth())
    seen: list[int] = []

    def counted(rows: range, *others: Any, **rules: Any) -> Any:
        seen.append(len(rows))
        return of_rows(rows, *others, **rules)

    of_rows = softmax_attention.visible_to
    monkeypatch.setattr(softmax_attention, "visible_to", counted)
    monkeypatch.setitem(softmax_attention.PIECE_ELEMENTS, "cpu", limit)
    in_parts = made(forward.truth())
    assert seen == rows
    torch.testing.assert_close(in_parts.expected, whole.expected)
    torch.testing.assert_close(in_parts.control, whole.control)
    torch.testing.assert_close(in_parts.lse_log2, whole.lse_log2)
    assert in_parts.request_of_row.tolist() == [0, 0, 0, 1, 1, 1]
