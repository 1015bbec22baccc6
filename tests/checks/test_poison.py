"""Values that must not matter: beside what rows read, and in buffers that a call must write."""

from typing import Any

import pytest
import torch

from corpus.kernels import kernel
from lab.calls.problem import E4M3, AttentionCall
from lab.checks.parameters.models import Configuration
from lab.checks.properties import checks_by_key
from lab.checks.run.judging import run_case
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.contents import unwritten
from lab.workloads.inputs.views import GAP, apart

CPU = torch.device("cpu")
WINDOW = AttentionCase(AttentionCall.DECODE, (60, 9), (2, 2), window_left=20)  # page 2 has 6 tokens before the window


@pytest.mark.parametrize("lse", ["given", "given alone", "strided", "rows apart", None])
def test_what_any_given_lse_holds_is_huge_too(lse: str | None) -> None:
    key = "K18" if lse else "K5"
    check = checks_by_key()[key]
    case: Any = Configuration(WINDOW.interface, {"lse": lse}) if lse else WINDOW
    judged = run_case(kernel("lse_kept_if_larger").implementation(), check, case, CPU, Ranges())
    assert "1e+30" in judged.wrongs[0], judged.wrongs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3])
def test_a_buffer_to_write_has_nan_and_huge_values_of_both_signs_in_turn(dtype: torch.dtype) -> None:
    buffer = torch.zeros(4, 3, dtype=dtype)
    found = unwritten(buffer.T)
    assert found.data_ptr() == buffer.data_ptr()
    nan, huge, minus = found.float().flatten()[:3].tolist()
    assert nan != nan
    assert huge == -minus > 400
    assert torch.equal(found.float().isnan().flatten(), torch.arange(12) % 3 == 0)


def test_gaps_between_floats_hold_nan_and_large_values_in_turn() -> None:
    for dtype in (torch.bfloat16, torch.float16, E4M3, torch.float32):
        tensor = apart(torch.zeros(2, 3, 4).to(dtype), axis=1, gap=GAP)
        gap = tensor.as_strided((GAP,), (1,), 4).float()
        assert int(gap.isnan().sum()) == GAP // 2
        assert bool((gap[~gap.isnan()] > 100).all())
        assert bool((tensor.float() == 0).all())
    table = apart(torch.zeros(2, 4, dtype=torch.int32), axis=-2, gap=3)
    assert table.as_strided((3,), (1,), 4).tolist() == [0x7B7B7B7B] * 3


def test_a_wrong_case_is_also_judged_without_page_tails() -> None:
    """A kernel that also reads the tail of the last page is right if the pages of all requests are full."""
    case = AttentionCase(AttentionCall.DECODE, (60, 9), (2, 2))
    what = "dead cells of NAN, but no page tails"
    for name, wrong in (("length_rounded_up_to_page", [False]), ("lse_kept_if_larger", [])):
        judged = run_case(kernel(name).implementation(), checks_by_key()["K4"], case, CPU, Ranges())
        assert [each.wrong for each in judged.results if each.name == what and each.held == "output"] == wrong
