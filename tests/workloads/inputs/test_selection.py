"""The keys that rows select: within their positions, in the columns in use, as the kind of entries says."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.calls import MLADecodeCall
from lab.calls.problem import AttentionCall
from lab.checks import AttentionCase, Entries, Storage, TableTail
from lab.references import trtllm_batch_decode_with_kv_cache_mla
from lab.workloads.inputs.attention import AttentionInputs, build_attention
from lab.workloads.inputs.selection import selected_positions

CPU = torch.device("cpu")
CASE = AttentionCase(
    *(AttentionCall.MLA_DECODE, (1, 40, 300), (3, 3, 3), 1, 4, 80, 64),
    top_k=132,
    entries=Entries.MIXED,
    storage=Storage(32),
)
Row = tuple[int, list[int]]  # a row's number of keys, and its columns


def rows_of(case: AttentionCase) -> list[Row]:
    found = []
    for selected, kv_len, q_len in zip(selected_positions(case, CPU), case.kv_lens, case.q_lens, strict=True):
        assert selected.shape == (q_len, case.top_k)
        found += [(max(kv_len - q_len + row + 1, 0), columns) for row, columns in enumerate(selected.tolist())]
    return found


@pytest.mark.parametrize("entries", Entries)
@pytest.mark.parametrize("seed", range(4))
def test_a_row_selects_keys_up_to_its_own_in_as_many_columns(entries: Entries, seed: int) -> None:
    for num_keys, columns in rows_of(replace(CASE, entries=entries, seed=seed)):
        used = [position for position in columns if position >= 0]
        assert set(columns[num_keys:]) <= {-1}
        assert max(used, default=-1) < num_keys
        assert entries is Entries.TWICE or len(set(used)) == len(used)
        assert min(columns) >= -1


def of(entries: Entries, seed: int = 0) -> list[Row]:
    return [row for row in rows_of(replace(CASE, entries=entries, seed=seed)) if row[0]]


def test_kinds_of_entries() -> None:
    for num_keys, columns in of(Entries.ORDERED):
        chosen = columns[: min(num_keys, 132)]
        assert chosen == sorted(chosen)
        assert chosen[0] >= 0
    assert [min(columns[: min(num_keys, 132)]) >= 0 for num_keys, columns in of(Entries.SHUFFLED)] == [True] * 7
    assert any(columns[:132] != sorted(columns[:132]) for _, columns in of(Entries.SHUFFLED))
    assert [sum(position >= 0 for position in columns) for _, columns in of(Entries.ONE)] == [1] * 7
    for seed in range(2):
        empty = [max(columns) < 0 for num_keys, columns in rows_of(replace(CASE, entries=Entries.NONE, seed=seed))]
        assert empty[3:] == [(row + seed) % 2 == 0 for _ in range(2) for row in range(3)]
    for num_keys, columns in of(Entries.LATE):
        first = next(column for column, position in enumerate(columns) if position >= 0)
        assert first >= 128 if num_keys > 128 else first == num_keys - 1
    for num_keys, columns in of(Entries.TWICE):
        chosen = columns[: min(num_keys, 132)]
        assert min(chosen) >= 0
        assert len(set(chosen)) == (len(chosen) + 1) // 2
        assert max(map(chosen.count, chosen)) == min(len(chosen), 2)
    for num_keys, columns in of(Entries.EDGES):
        assert all(p == num_keys - 1 or p % 32 in (0, 31) for p in columns if p >= 0)
    assert any(-1 in columns[: min(num_keys, 132)] for num_keys, columns in of(Entries.MIXED))


def test_the_seed_decides() -> None:
    assert of(Entries.MIXED) == of(Entries.MIXED)
    assert of(Entries.MIXED) != of(Entries.MIXED, seed=1)


WITH_LENS = replace(CASE, kv_lens=(3, 40, 300), top_k_lens=True)


@pytest.mark.parametrize("tail", TableTail)
@pytest.mark.parametrize("offsets", [False, True])
def test_places_are_those_of_the_page_table_and_lengths_count_them(tail: TableTail, offsets: bool) -> None:
    case = replace(WITH_LENS, offsets=offsets, storage=Storage(32, table_tail=tail))
    inputs = build_attention(case, CPU)
    arguments = inputs.arguments()
    places, lens = arguments["block_tables"], arguments["sparse_mla_top_k_lens"]
    assert list(places.shape) == ([9, 132] if offsets else [3, 3, 132])
    assert (arguments["sparse_mla_top_k"], places.dtype, lens.dtype) == (132, torch.int32, torch.int32)
    assert int(lens.min()) > 0
    assert inputs.selected is not None
    for row, (positions, used) in enumerate(zip(torch.cat(inputs.selected), lens.tolist(), strict=True)):
        table = inputs.block_tables[row // 3]
        assert int((positions >= 0).sum()) == used
        for column, position in enumerate(positions[:used].tolist()):
            assert int(places.view(9, 132)[row, column]) == int(table[position // 32]) * 32 + position % 32
        rest = places.view(9, 132)[row, used:]
        own = {TableTail.NEGATIVE: -1, TableTail.FAR: 2**30}.get(tail, int(places.view(9, 132)[(row + 1) % 9, 0]))
        assert bool((rest == own).all())


@pytest.mark.parametrize("tail", TableTail)
def test_without_lengths_only_columns_after_a_row_s_position_hold_anything(tail: TableTail) -> None:
    inputs = build_attention(replace(CASE, storage=Storage(32, table_tail=tail)), CPU)
    plain, given = inputs.places(), inputs.arguments()["block_tables"].view(9, 132)
    for row, (num_keys, _) in enumerate(rows_of(CASE)):
        assert given[row, :num_keys].tolist() == plain[row, :num_keys].tolist()
        own = {TableTail.NEGATIVE: -1, TableTail.FAR: 2**30}.get(tail, int(plain[(row + 1) % 9, 0]))
        assert given[row, num_keys:].tolist() == [own] * max(132 - num_keys, 0)


@pytest.mark.parametrize("case", [CASE, WITH_LENS, replace(CASE, entries=Entries.LATE, sinks=True)])
def test_the_truth_is_of_the_selected_keys(case: AttentionCase) -> None:
    inputs = build_attention(case, CPU)
    truth = inputs.truth()
    lse: Any = {"return_lse": True}
    out, lse_log2 = trtllm_batch_decode_with_kv_cache_mla(**inputs.arguments() | lse)
    assert truth.compare(out.flatten(0, 1)).passed
    assert truth.wrong_lse(lse_log2) == ""
    assert truth.request_of_row.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    dense = trtllm_batch_decode_with_kv_cache_mla(**dense_arguments(inputs))
    assert not truth.compare(dense.flatten(0, 1)).passed


def dense_arguments(inputs: AttentionInputs) -> dict[str, Any]:
    case = replace(inputs.case, top_k=0, entries=None, top_k_lens=False)
    return replace(inputs, case=case, selected=None).arguments()


def test_the_pools_first_slot_holds_a_key() -> None:
    for seed in range(3):
        inputs = build_attention(replace(CASE, seed=seed, storage=Storage(32, page_seed=seed)), CPU)
        assert int(inputs.block_tables[0, 0]) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 0}, "top_k=0 must be at least 0, and above it with entries"),
        ({"top_k": -1}, "top_k=-1"),
        ({"entries": None}, "entries=None"),
        ({"top_k": 0, "entries": None, "top_k_lens": True}, "top_k_lens=True"),
        ({"top_k_lens": True}, "leave rows without one"),  # of a request with fewer keys than rows
        ({"top_k_lens": True, "kv_lens": (3, 40, 300), "entries": Entries.LATE}, "Entries.LATE"),
        ({"top_k_lens": True, "kv_lens": (3, 40, 300), "entries": Entries.NONE}, "Entries.NONE"),
        ({"interface": AttentionCall.DECODE, "v_head_dim": None}, "top_k=132 belong to MLA_DECODE"),
    ],
)
def test_what_no_call_has_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(CASE, **changes)


def test_a_case_with_selected_entries_defines_a_checked_problem() -> None:
    problem = MLADecodeCall(**build_attention(CASE, CPU).arguments()).problem()
    assert problem.selected is not None
    problem.check_values()
