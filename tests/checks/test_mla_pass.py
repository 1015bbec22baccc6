"""The truth of a pass with many entries is made of a few heads at once."""

import pytest
import torch

from lab.checks import MLACase
from lab.checks.mla_pass import build_mla_pass
from lab.metadata import ForwardMode
from lab.references import truth


@pytest.mark.parametrize("limit", [1, 2 * 12 * 48, 2**26])
def test_few_heads_at_once_give_the_same_truth(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 entries of 32 + 16 elements: one head, two and then one, or all three."""
    case = MLACase(ForwardMode.TARGET_VERIFY, (9, 4), (3, 3), num_qo_heads=3, kv_lora_rank=16, qk_rope_head_dim=16)
    forward = build_mla_pass(case, torch.device("cpu"))
    whole = forward.truth()
    seen: list[int] = []

    def counted(query: torch.Tensor, *others: object) -> object:
        seen.append(query.shape[1])
        return of_heads(query, *others)

    of_heads = truth._heads
    monkeypatch.setattr(truth, "_heads", counted)
    monkeypatch.setattr(truth, "piece_elements", lambda device: limit)
    in_parts = forward.truth()
    assert seen == {1: [1, 1, 1], 2 * 12 * 48: [2, 1], 2**26: [3]}[limit]
    torch.testing.assert_close(in_parts.expected, whole.expected)
    torch.testing.assert_close(in_parts.control, whole.control)
    torch.testing.assert_close(in_parts.lse_log2, whole.lse_log2)
    assert in_parts.request_of_row.tolist() == [0, 0, 0, 1, 1, 1]
