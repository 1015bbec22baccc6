"""What is drawn of a forward pass: its artists, held against the definition of each mode's metadata."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from lab.metadata import ForwardBatch, ForwardMode, KVPool, build_mha_metadata
from lab.references.forward_metadata import forward_metadata
from lab.workloads import ForwardCase
from lab.workloads.inputs.forward_pass import ForwardPass, build_forward
from studies.pictures.forward_modes import reading_figure
from tests.reports.pictures.figures import gids, words

P = 4
# Mode, tokens before the pass, query rows, draft step.
PASSES: dict[str, tuple[ForwardMode, tuple[int, ...], tuple[int, ...], int | None]] = {
    "decode": (ForwardMode.DECODE, (8, 5), (1, 1), None),
    "draft_decode": (ForwardMode.DECODE, (9, 6), (1, 1), 2),
    "target_verify": (ForwardMode.TARGET_VERIFY, (9, 0), (4, 4), None),
    "draft_extend_v1": (ForwardMode.DRAFT_EXTEND, (9, 6), (3, 1), None),
    "draft_extend_v2": (ForwardMode.DRAFT_EXTEND_V2, (9, 6), (4, 4), None),
    "extend": (ForwardMode.EXTEND, (0, 7), (6, 5), None),
    "mixed": (ForwardMode.MIXED, (7, 9, 4), (5, 1, 1), None),
}


def a_pass(name: str, **changes: Any) -> ForwardPass:
    mode, prefix_lens, q_lens, draft_step = PASSES[name]
    case = ForwardCase(mode, "tiny", prefix_lens, q_lens, draft_step=draft_step, page_size=P)
    case = replace(case, **changes)
    return build_forward(case, torch.device("cpu"))


def drawn(forward: ForwardPass, **changes: Any) -> Figure:
    return reading_figure(forward.batch, forward.pool, replace(forward.metadata, **changes))


def cells(figure: Figure) -> set[tuple[str, int, int]]:
    """Kind, query row and position of the cells beneath the tokens."""
    return {(kind, int(row), int(position)) for kind, row, position in map(str.split, gids(figure))}


def visible_pairs(name: str) -> Iterator[tuple[str, int, int]]:
    """What each row sees, from the case's numbers alone."""
    _, prefix_lens, q_lens, draft_step = PASSES[name]
    drafted = draft_step or 0
    row = 0
    for prefix_len, q_len in zip(prefix_lens, q_lens, strict=True):
        for j in range(q_len):
            for position in range(prefix_len + drafted + j + 1):
                yield "new" if position >= prefix_len else "cached", row, position
            row += 1


@pytest.mark.parametrize("name", PASSES)
def test_each_row_reads_the_keys_up_to_its_own(name: str) -> None:
    assert cells(drawn(a_pass(name))) == set(visible_pairs(name))


@pytest.mark.parametrize("name", PASSES)
def test_lengths_and_pages_are_named(name: str) -> None:
    forward = a_pass(name)
    said = words(drawn(forward))
    expected = forward_metadata(forward.batch, forward.pool)
    for engine_len, kernel_len in zip(forward.batch.seq_lens.tolist(), expected.cache_seqlens, strict=True):
        assert f"engine's seq_lens {engine_len}" in said
        added = f" = {engine_len} + {kernel_len - engine_len}" if kernel_len > engine_len else ""
        assert f"kernel's seq_lens {kernel_len}{added}" in said
    pages = [page for row in expected.page_table for page in row]
    assert [word for word in said if word.startswith("page ")] == [f"page {page}" for page in pages]
    (offsets,) = (word for word in said if word.startswith("cu_seqlens_q"))
    assert str(forward.metadata.cu_seqlens_q.tolist()) in offsets
    assert any(word.startswith(forward.plan[0].call.value) for word in said)


def test_an_empty_batch_says_so() -> None:
    pool = KVPool(num_requests=1, max_context_len=16, page_size=P, num_pages=2)
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(ForwardMode.IDLE, nothing, nothing, nothing, num_tokens=0)
    figure = reading_figure(batch, pool, build_mha_metadata(batch, pool))
    assert cells(figure) == set()
    assert any(word.startswith("no request") for word in words(figure))


def test_rulers_are_the_lengths_and_dots_the_rows_own_tokens() -> None:
    lines = [line.get_xdata() for line in drawn(a_pass("target_verify")).axes[0].lines]
    assert [end for _, end in (line for line in lines if len(line) == 2)] == [9, 13, 0, 4]
    assert [line[0] for line in lines if len(line) == 1] == [9.5, 10.5, 11.5, 12.5, 0.5, 1.5, 2.5, 3.5]


def test_a_forgotten_offset_is_keys_missed() -> None:
    forward = a_pass("target_verify")
    right = cells(drawn(forward))
    figure = drawn(forward, cache_seqlens_int32=forward.batch.seq_lens.to(torch.int32))
    missed = {(row, position) for kind, row, position in cells(figure) if kind == "missed"}
    last = {row: max(position for _, other, position in right if other == row) for row in range(8)}
    assert missed == {(row, p) for row in range(8) for p in range(max(0, last[row] - 3), last[row] + 1)}
    assert words(figure).count("not in the table") == 2  # 9 tokens of 13 on 3 pages of 4, and none of 4 on none of 1
    assert "key missed" in words(figure)
    assert "key missed" not in words(drawn(forward))


def test_a_second_offset_is_keys_that_are_not_the_rows() -> None:
    forward = a_pass("draft_extend_v2")
    batch = replace(forward.batch, seq_lens=forward.batch.seq_lens + 4)
    figure = reading_figure(forward.batch, forward.pool, build_mha_metadata(batch, forward.pool))
    surplus = {(row, position) for kind, row, position in cells(figure) if kind == "surplus"}
    assert surplus == {(row, own + k) for row, own in enumerate([*range(9, 13), *range(6, 10)]) for k in range(1, 5)}
    assert {entry for entry in cells(figure) if entry[0] != "surplus"} == set(visible_pairs("draft_extend_v2"))
