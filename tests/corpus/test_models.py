"""The models that wrong kernels change are right, and the model of split keys uses its workspace as a kernel does."""

from dataclasses import replace
from typing import Any

import pytest

from corpus.models.attention import Attention
from corpus.models.lists import Lists
from corpus.models.metadata import MHABuilder, MLABuilder
from corpus.models.ragged import Ragged, SelectedSplitKV
from corpus.models.split_kv import SplitKV
from corpus.wrong import MLA
from lab.checks import judge
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
