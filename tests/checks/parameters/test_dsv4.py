"""Cases of DeepSeek-V4's call: what rows select in two pools, what must not matter, and the wrong kernels that are found."""

from typing import Any

import pytest
import torch

from corpus.kernels import MUTANTS
from lab import references
from lab.calls import AttentionCall, DSV4DecodeCall
from lab.checks.case_run import CaseRun
from lab.checks.parameters import dsv4
from lab.checks.parameters.calls import built_call
from lab.checks.parameters.models import Configuration
from lab.checks.properties import mla_modes
from lab.checks.properties.mla_modes import two_pool_cases
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Entries
from lab.workloads.inputs.dsv4 import build_dsv4
from lab.workloads.mla_case import MLACase

DSV4, CPU, WINDOW = AttentionCall.DSV4_DECODE, torch.device("cpu"), 128
SMALL: dict[str, Any] = {"head_dim": 64}


def call_of(**values: Any) -> Any:
    return built_call(Configuration(DSV4, SMALL | values, 1), Ranges(), CPU)


def test_columns_that_a_row_does_not_use_hold_entries_that_would_show() -> None:
    """Ascending entries fill the columns: 128 or as many as there are tokens up to a row, and the compressed ones."""
    given = call_of(q_len=3, window_entries="ordered", compressed_entries="ordered", columns=640).given
    call = DSV4DecodeCall(**given)
    used = call.problem().columns_in_use()
    places = given["sparse_indices"]
    assert (places[used] >= 0).all()
    none = call_of(q_len=2, compressed_entries="none").given
    assert (none["sparse_indices"][DSV4DecodeCall(**none).problem().columns_in_use()] >= 0).all()
    assert (none["sparse_topk_lens"] == WINDOW).any()
    assert given["sparse_topk_lens"].tolist() == [WINDOW + int(row[WINDOW:].sum()) for row in used]
    assert (places[~used] >= 0).any()
    far = call_of(q_len=3, sparse_indices="tail far outside").given
    assert (far["sparse_indices"][~DSV4DecodeCall(**far).problem().columns_in_use()] == 2**30).all()


def test_the_pools_have_other_contents_and_other_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[AttentionCase] = []
    monkeypatch.setattr(dsv4, "build_dsv4", lambda *built: pools.extend(built[:2]) or build_dsv4(*built))
    call_of(window_entries="ordered", compressed_entries="mixed", page_size=64, compressed_page_size=32)
    window, compressed = pools
    assert (window.page_size, compressed.page_size) == (64, 32)
    assert (window.entries, compressed.entries) == (Entries.ORDERED, Entries.MIXED)
    assert window.seed != compressed.seed
    assert window.storage.page_seed != compressed.storage.page_seed


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize("far", ["swa_kv_cache", "compressed_kv_cache"])
def test_rows_read_the_last_page_of_a_pool_whose_pages_are_far_apart(far: str, kv_layout: str) -> None:
    call = call_of(q_len=2, far=far, kv_layout=kv_layout, sparse_indices="tail far outside")
    problem = DSV4DecodeCall(**call.given).problem()
    pool = problem.window_cache if far == "swa_kv_cache" else problem.k_cache
    is_window = torch.arange(problem.selected.shape[1]) < WINDOW
    read = problem.selected[problem.columns_in_use() & (is_window == (far == "swa_kv_cache"))]
    assert int(read.max()) // pool.shape[2] == pool.shape[0] - 1


def test_the_truth_is_of_the_histories_that_places_name() -> None:
    """Each position that a row selects is, at its place, the entry of its request's history."""
    call = call_of(q_len=2, window_entries="shuffled", compressed_entries="mixed", dtypes="bf16/bf16")
    problem, inputs, row = DSV4DecodeCall(**call.given).problem(), call.inputs, 0
    pools = [cache[:, 0].flatten(0, 1) for cache in (problem.window_cache, problem.k_cache)]
    for (keys, _), selected in zip(inputs.histories, inputs.selected, strict=True):
        for positions in selected:
            for column in (positions >= 0).nonzero().flatten().tolist():
                entry = pools[column >= WINDOW][int(problem.selected[row, column])]
                assert torch.equal(entry, keys[positions[column], 0])
            in_use = problem.columns_in_use()[row] & (problem.selected[row] >= 0)
            assert torch.equal(in_use, positions >= 0)
            row += 1
    assert row == problem.num_rows


@pytest.mark.parametrize("case", [*two_pool_cases(4, num_qo_heads=2, kv_lora_rank=32)], ids=str)
def test_a_pass_is_right_with_the_references_and_wrong_without_sinks(case: MLACase) -> None:
    for implementation in (references, MUTANTS["dsv4_sinks_ignored"].implementation()):
        run = CaseRun(implementation, case, CPU, Ranges())
        mla_modes.CHECK.judge(run)
        assert bool(run.wrongs) == (implementation is not references)
