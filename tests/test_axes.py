"""The judge's axes as options: every field of `Ranges` has one, and options and axes are the same thing in two spellings."""

import shlex
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from lab.axes import SEVERAL, SOME, options_of, ranges_of
from lab.checks import Ranges
from tests.checks.small import SMALL


def test_every_axis_is_an_option() -> None:
    assert {axis.name for axis in fields(Ranges)} == {*SEVERAL, *SOME, "longest", "e4m3_arithmetic", "seed"}


def read(options: str) -> Ranges:
    """As a command line would."""
    chosen: dict[str, Any] = {}
    words = shlex.split(options)
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        if name.startswith("no_"):
            chosen[name.removeprefix("no_")] = False
        elif name in SOME or name == "e4m3_arithmetic":
            chosen[name] = True
        else:
            text = words.pop(0)
            chosen[name] = SEVERAL[name].values(text) if name in SEVERAL else int(text)
    return ranges_of(chosen)


@pytest.mark.parametrize(
    "ranges", [Ranges(), SMALL, Ranges(e4m3_arithmetic=True), replace(SMALL, mla_head_dims=((9, 8),))]
)
def test_options_make_the_same_axes_again(ranges: Ranges) -> None:
    assert read(options_of(ranges)) == ranges


def test_options_are_short_and_spelt_as_people_do() -> None:
    ranges = Ranges(dtypes=((torch.bfloat16, torch.float8_e4m3fn),), head_dims=(64, 128), sinks=(False,), longest=90)
    assert options_of(ranges) == "--dtypes bf16/e4m3 --head-dims 64,128 --no-sinks --longest 90"
    assert options_of(Ranges()) == ""
    assert options_of(Ranges(page_sizes=(64,)), "--lab-") == "--lab-page-sizes 64"


@pytest.mark.parametrize(
    ("axis", "text", "says"),
    [
        ("head_dims", "64,0", "0 is not a whole number of at least 1"),
        ("mla_head_dims", "576", "is not a whole number"),
        ("kv_layouts", "NDH", "'NDH' is neither HND nor NHD"),
        ("dtypes", "bf16", "no pair such as bf16/e4m3, of fp16, bf16, e4m3"),
        ("geometries", "llama", "no geometry 'llama'; there are "),
    ],
)
def test_a_value_that_is_none_is_refused_in_a_sentence(axis: str, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SEVERAL[axis].values(text)
