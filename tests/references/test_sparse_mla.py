"""The MLA decode reference with selected entries: by the dense formula on the entries, and what must not matter."""

import math
import random

import pytest
import torch

from lab.calls import MLADecodeCall
from lab.calls.entries import selections_of
from lab.references import trtllm_batch_decode_with_kv_cache_mla as mla
from lab.references.assertion import histories_of
from tests.cases import Batch, assert_same, expected, latent_batch, of_entries, selected_batch, sparse_arguments


def drawn(batch: Batch, top_k: int, seed: int = 0) -> list[list[int]]:
    """Columns of each row: positions up to its own, in any order, also twice, with -1 anywhere in the columns in use."""
    rng = random.Random(seed)
    columns = []
    for q_len, kv_len in zip(batch.q_lens, batch.kv_lens, strict=True):
        for position in range(kv_len - q_len, kv_len):
            used = max(min(top_k, position + 1), 0)
            chosen = rng.choices(range(position + 1), k=rng.randint(0, used)) if used else []
            chosen += [-1] * (used - len(chosen))
            rng.shuffle(chosen)
            columns.append(chosen + [-1] * (top_k - used))
    return columns


ENTRIES = [[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [6.0, 0.0, 0.0]]


def test_a_row_uses_the_columns_up_to_its_position() -> None:
    """Two rows over three keys: row 0, at position 1, uses two columns, row 1 three, of four."""
    batch = of_entries([torch.zeros(2, 1, 3)], [torch.tensor(ENTRIES)], rank=2)
    got, got_lse = mla(**sparse_arguments(batch, [[1, 0, 2, 2], [1, 0, 2, 2]], 2))
    assert got[..., 0].flatten().tolist() == pytest.approx([1.5, 3.0])
    assert got_lse.flatten().tolist() == pytest.approx([1.0, math.log2(3.0)])


def test_lengths_replace_the_rule_of_the_position() -> None:
    batch = of_entries([torch.zeros(2, 1, 3)], [torch.tensor(ENTRIES)], rank=2)
    got, _ = mla(**sparse_arguments(batch, [[0, 1, 2, 2], [2, -1, 1, 0]], 2, lens=[3, 2]))
    assert got[..., 0].flatten().tolist() == pytest.approx([3.0, 6.0])


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("width", [0, 40])
def test_random_selections(page_size: int, q_len: int, width: int) -> None:
    kv_dtype = torch.float8_e4m3fn if width else torch.bfloat16
    batch = latent_batch([q_len] * 6, [0, 1, 2, 20, 64, 130], kv_dtype=kv_dtype)
    columns, rules = drawn(batch, 33), {"bmm1_scale": 0.25, "bmm2_scale": 0.5}
    rules |= {"sinks": torch.tensor([0.0, 0.5, -1.0, 3.0])} if q_len > 1 else {}
    arguments = sparse_arguments(batch, columns, page_size, width=width, poison=math.nan, **rules)
    assert_same(mla(**arguments), expected(selected_batch(batch, columns), **rules))


@pytest.mark.parametrize("lens", [False, True])
@pytest.mark.parametrize("max_q_len", [4, None])
def test_requests_of_several_widths_and_rows_of_padding(max_q_len: int | None, lens: bool) -> None:
    batch = latent_batch([0, 3, 1, 4, 0], [5, 20, 1, 2, 9])
    columns = drawn(batch, 8)
    used = [3, 0, 8, 8, 1, 7, 2, 5] if lens else None
    seen = columns if used is None else [row[:count] for row, count in zip(columns, used, strict=True)]
    arguments = sparse_arguments(batch, columns, ragged=True, lens=used, max_q_len=max_q_len)
    assert_same(mla(**arguments), expected(selected_batch(batch, seen)))
    padded = {name: torch.cat((arguments[name], arguments[name][:2])) for name in ("query", "out", "block_tables")}
    padded["block_tables"][-2:] = 2**30
    if used is not None:
        padded["sparse_mla_top_k_lens"] = torch.tensor([*used, 2**30, -1], dtype=torch.int32)
    out, lse = mla(**arguments | padded)
    assert_same((out[:-2], lse[:-2]), expected(selected_batch(batch, seen)))
    assert not out[-2:].any()
    assert bool((lse[-2:] == -math.inf).all())


def test_a_cache_that_is_a_view_of_a_wider_pool() -> None:
    batch = latent_batch([1, 1], [9, 30])
    columns = drawn(batch, 8)
    arguments = sparse_arguments(batch, columns, 4)
    cache = arguments["kv_cache"]
    wide = torch.cat((cache, torch.full_like(cache, math.nan)), dim=2)[:, :, :4]
    assert_same(mla(**arguments | {"kv_cache": wide}), expected(selected_batch(batch, columns)))


def test_the_table_of_pages_is_not_in_the_problem() -> None:
    batch = latent_batch([2, 2], [9, 30])
    arguments = sparse_arguments(batch, drawn(batch, 8), width=11)
    problem = MLADecodeCall(**arguments).problem()
    assert problem.k_block_tables.shape == (2, 0)
    assert problem.selected is not None
    assert problem.selected.data_ptr() == arguments["block_tables"].data_ptr()
    assert problem.selected.stride() == (11, 1)
    assert problem.batch_size == 2


def test_a_requests_entries_are_its_places_once_each_and_rows_index_them() -> None:
    """Three rows of a request of 9 keys, of which the last row uses 9 columns, and two rows of a request of 2."""
    arguments = sparse_arguments(latent_batch([3, 2], [9, 2]), [[0] * 4] * 5, 16, ragged=True)
    arguments["block_tables"] = torch.tensor(
        [[7, 0, -1, 7], [3, -1, 0, 0], [-1, -1, -1, -1], [5, 6, 7, 8], [9, 0, 7, 8]], dtype=torch.int32
    )
    problem = MLADecodeCall(**arguments).problem()
    (first, of_first), (second, of_second) = selections_of(problem, [0, 1])
    assert (first.tolist(), second.tolist()) == ([0, 3, 7], [0, 5, 9])
    assert of_first.tolist() == [[2, 0, -1, 2], [1, -1, 0, 0], [-1, -1, -1, -1]]
    assert of_second.tolist() == [[1, -1, -1, -1], [2, 0, -1, -1]]
    (keys, values), _ = histories_of(problem)
    entries = problem.k_cache.transpose(1, 2).flatten(0, 1)[[0, 3, 7]]
    assert torch.equal(keys, entries)
    assert torch.equal(values, entries[..., : problem.v_head_dim])
