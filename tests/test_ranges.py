"""The judge's axes as options: every field of `Ranges` has one, and options and axes are the same thing in two spellings."""

import shlex
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.calls.problem import E4M3
from lab.ranges import OPTIONS, Ranges, options_of, ranges_of
from tests.checks.small import SMALL


def read(options: str) -> Ranges:
    chosen: dict[str, Any] = {}
    words = shlex.split(options)
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        if name.startswith("no_"):
            chosen[name.removeprefix("no_")] = False
        elif OPTIONS[name].is_switch:
            chosen[name] = True
        else:
            option, text = OPTIONS[name], words.pop(0)
            chosen[name] = option.values(text) if option.is_several else option.kind.read(text)
    return ranges_of(chosen)


@pytest.mark.parametrize(
    "ranges",
    [Ranges(), SMALL, Ranges(dtypes=((E4M3, E4M3),), e4m3_arithmetic=True), replace(SMALL, mla_head_dims=((9, 8),))],
)
def test_options_make_the_same_axes_again(ranges: Ranges) -> None:
    assert read(options_of(ranges)) == ranges


def test_options_are_short_and_spelt_as_people_do() -> None:
    ranges = Ranges(dtypes=((torch.bfloat16, torch.float8_e4m3fn),), head_dims=(64, 128), sinks=(False,), longest=90)
    assert options_of(ranges) == "--dtypes bf16/e4m3 --head-dims 64,128 --no-sinks --longest 90"
    assert options_of(Ranges()) == ""
    assert options_of(Ranges(page_sizes=(64,)), "--lab-") == "--lab-page-sizes 64"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("head_dims", "64,0", "0 is not a whole number of at least 2"),
        ("head_dims", "", "'' is not a whole number of at least 2"),
        ("head_dims", "64,x", "x is not a whole number of at least 2"),
        ("page_sizes", "48", "48 is not a power of two"),
        ("mla_head_dims", "576", "576 is not two whole numbers of at least 2 such as 576/512"),
        ("mla_head_dims", "64/80", "64/80 is not two whole numbers"),
        ("kv_layouts", "NDH", "NDH is not one of HND, NHD"),
        ("dtypes", "bf16", "bf16 is not one of bf16/bf16, fp16/fp16, bf16/e4m3, fp16/e4m3, e4m3/e4m3"),
        ("dtypes", "e4m3/bf16", "e4m3/bf16 is not one of"),
        ("geometries", "llama", "llama is not one of llama-3.1-8b, "),
    ],
)
def test_a_value_that_is_none_is_refused_in_a_sentence(name: str, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OPTIONS[name].values(text)


def test_values_beyond_a_field_are_of_its_default_alone() -> None:
    assert Ranges().widened("head_dims") == (64, 128, 256, 80, 96, 192, 512)
    assert Ranges(head_dims=(64,)).widened("head_dims") == (64,)
    assert Ranges().widened("dtypes")[-1] == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert Ranges().widened("long_requests") == Ranges().long_requests


def test_no_torch_is_imported_with_the_options() -> None:
    code = "import sys, lab.ranges; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
