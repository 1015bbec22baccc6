"""The models that wrong kernels change are right, and the model of split keys uses its workspace as a kernel does."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from corpus.models.attention import Attention
from corpus.models.lists import Lists
from corpus.models.metadata import MHABuilder, MLABuilder
from corpus.models.ragged import Ragged
from corpus.models.selected import SelectedSplitKV
from corpus.models.split_kv import SplitKV
from corpus.wrong import MLA
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.checks import judge
from tests.cases import decode_arguments, random_batch
from tests.corpus.test_right import RANGES, declined

CHECKS = ("K1", "K2", "K6", "K16", "K17", "L1", "M3")
MODELS = (Attention, SplitKV, Ragged, Lists, MHABuilder, MLABuilder)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_right(model: type[Any]) -> None:
    report = judge(model(), ranges=replace(RANGES, top_ks=(0,)), only=CHECKS, device="cpu", drawn=0)
    assert report.is_right, str(report)
    assert not declined(report)


def test_the_model_of_selected_entries_is_right_where_rows_select_them() -> None:
    settings: Any = {"device": "cpu", "drawn": 0, "discover": False, "functions": (MLA,)}
    report = judge(SelectedSplitKV(), ranges=RANGES, only=("K1", "K2", "K3", "K4", "K5", "K6"), **settings)
    assert not list(report.wrong), str(report)
    selects = [bool(verdict.case.top_k) for verdict in report.verdicts]
    assert [not verdict.judged.declines for verdict in report.verdicts] == selects
    assert sum(selects) == 6


@pytest.mark.parametrize("contents", [0, 255])
def test_the_workspace_is_used_and_left_in_order(contents: int) -> None:
    """Partial results go to the scratch, whatever it held; counters are zero again."""
    workspace = torch.zeros(SEMAPHORE_BYTES + 2**20, dtype=torch.uint8)
    workspace[SEMAPHORE_BYTES:] = contents
    before = workspace.clone()
    out, lse = torch.full((4, 4, 16), math.nan, dtype=torch.bfloat16), torch.full((4, 4), math.nan)
    arguments = decode_arguments(random_batch([2, 2], [300, 65]), out_dtype=torch.bfloat16)
    expected, _ = SplitKV().trtllm_batch_decode_with_kv_cache(**arguments)
    arguments |= {"out": out, "lse": lse, "workspace_buffer": workspace}
    SplitKV().trtllm_batch_decode_with_kv_cache(**arguments)
    assert torch.equal(out, expected)
    assert lse.isfinite().all()
    assert not workspace[:SEMAPHORE_BYTES].any()
    assert not torch.equal(workspace, before)


def test_a_split_is_not_merged_while_its_counter_is_wrong() -> None:
    """What a kernel does with a workspace that nobody zeroed."""
    workspace = torch.ones(SEMAPHORE_BYTES + 2**20, dtype=torch.uint8)
    out = torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    arguments = decode_arguments(random_batch([1], [100]), out_dtype=None, out=out, workspace_buffer=workspace)
    SplitKV().trtllm_batch_decode_with_kv_cache(**arguments)
    assert not out.any()
