"""Ways to break a good call, and the one thing that is asked of a broken one: words that help, and nothing written."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import Unpack

from tests.cases import Arguments

POISON = 7.0
SHARED = torch.zeros(19)

Breaks = Callable[[Arguments], Arguments]  # from good arguments to those that replace them
Bad = tuple[
    Breaks, type[Exception], Unpack[tuple[str, ...]]
]  # what breaks the good call, the error, words of its message


def value(**changes: Any) -> Breaks:
    return lambda good: changes


def tensor(name: str, change: Callable[[Tensor], Any]) -> Breaks:
    return lambda good: {name: change(good[name])}


def entry(name: str, index: tuple[int, ...], number: int) -> Breaks:
    def breaks(good: Arguments) -> Arguments:
        changed = good[name].clone()
        changed[index] = number
        return {name: changed}

    return breaks


def together(*parts: Breaks) -> Breaks:
    def breaks(good: Arguments) -> Arguments:
        changes: Arguments = {}
        for part in parts:
            changes |= part(good | changes)
        return changes

    return breaks


def in_one_memory(name: str, result: str) -> Breaks:
    """Let the first element of a result lie in the last bytes of an argument."""

    def breaks(good: Arguments) -> Arguments:
        given, written = good[name], good[result]
        memory = torch.zeros(given.nbytes + written.nbytes - written.itemsize, dtype=torch.uint8)
        argument, place = memory[: given.nbytes], memory[-written.nbytes :]
        return {
            name: argument.view(given.dtype).view(given.shape).copy_(given),
            result: place.view(written.dtype).view(written.shape),
        }

    return breaks


def to(where: torch.dtype | str) -> Callable[[Tensor], Tensor]:
    return lambda given: given.to(where)


def stretched(given: Tensor) -> Tensor:
    """Same values, every other element of the last dimension of a tensor twice as wide."""
    return given.repeat_interleave(2, dim=-1)[..., ::2]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def bad_of_every_call(sinks: str = "sinks", has_lse: bool = True) -> list[Bad]:
    """Bad values of the arguments that every call has; `sinks` is the call's name of them, and DSV4's call has no LSE."""
    skip = "skip_softmax_threshold_scale_factor"
    of_lse: list[Bad] = [
        (value(lse=torch.zeros(4, 4).double()), TypeError, "lse must be float32", "float64"),
        (value(lse=[]), TypeError, "lse must be a torch.Tensor", "list"),
        (value(lse=torch.zeros(4, 4, device="meta")), ValueError, "lse is on meta"),
        (value(lse=SHARED[:16].view(4, 4), **{sinks: SHARED[15:19]}), ValueError, f"lse shares memory with {sinks}"),
        (value(return_lse=None), TypeError, "return_lse", "None"),
        (value(**{skip: -1.0}), ValueError, skip, "at least 0", "-1.0"),
        (value(**{skip: math.nan}), ValueError, skip, "finite"),
        (value(**{skip: "1"}), TypeError, skip, "'1'"),
        (value(**{skip: torch.ones(1)}), TypeError, skip, "tensor"),
    ]
    of_scales: list[Bad] = [
        row
        for name in ("bmm1_scale", "bmm2_scale")
        for row in (
            (value(**{name: "1"}), TypeError, name, "'1'"),
            (value(**{name: None}), TypeError, name, "None"),
            (value(**{name: math.nan}), ValueError, name, "nan", "finite"),
            (value(**{name: math.inf}), ValueError, name, "inf", "finite"),
            (value(**{name: torch.tensor([math.nan])}), ValueError, f"{name} must be finite, got nan"),
            (value(**{name: torch.tensor(math.inf)}), ValueError, f"{name} must be finite, got inf"),
            (value(**{name: torch.ones(1).double()}), TypeError, name, "float32", "float64"),
            (value(**{name: torch.ones(4)}), TypeError, name, "one element", "[4]"),
            (value(**{name: torch.ones(1, device="meta")}), ValueError, f"{name} is on meta"),
            (value(**{name: torch.ones(1).to_sparse()}), TypeError, f"{name} must be a dense tensor"),
        )
    ]
    return [
        (value(query=[1.0]), TypeError, "query must be a torch.Tensor", "list"),
        (tensor("query", to(torch.int32)), TypeError, "query must be", "bfloat16", "int32"),
        (tensor("query", stretched), ValueError, "query", "contiguous", "stride 2"),
        (tensor("query", lambda q: q[..., :0, :]), ValueError, "query needs at least one head", "0, "),
        (value(seq_lens=[20, 5]), TypeError, "seq_lens must be a torch.Tensor", "list"),
        (tensor("seq_lens", to(torch.int64)), TypeError, "seq_lens must be int32", "int64"),
        (tensor("seq_lens", lambda n: n.repeat(2)[:3]), ValueError, "seq_lens must have shape [2]", "[3]"),
        (entry("seq_lens", (1,), -3), ValueError, "seq_lens[1] = -3", "negative"),
        *of_scales,
        (value(**{sinks: torch.zeros(4).bfloat16()}), TypeError, "sinks must be float32", "bfloat16"),
        (value(**{sinks: torch.zeros(3)}), ValueError, "sinks must have shape [4]", "[3]"),
        (value(**{sinks: torch.zeros(2, 2)}), ValueError, "sinks must have shape [4]", "[2, 2]"),
        (value(**{sinks: 1.0}), TypeError, "sinks must be a torch.Tensor", "float"),
        (value(**{sinks: torch.tensor([0, math.nan, 0, 0])}), ValueError, f"{sinks}[1] is nan"),
        (value(**{sinks: torch.tensor([-math.inf, 0, math.inf, 0])}), ValueError, f"{sinks}[2] is inf", "minus inf"),
        (value(**{sinks: torch.zeros(4, device="meta")}), ValueError, "sinks is on meta", "cpu"),
        (value(out=[]), TypeError, "out must be a torch.Tensor", "list"),
        (tensor("out", to(torch.int32)), TypeError, "out must be", "bfloat16", "int32"),
        (tensor("out", stretched), ValueError, "out must be contiguous", "2)"),
        (tensor("out", lambda out: out[:1]), ValueError, "out must be [", "[1, "),
        (in_one_memory("query", "out"), ValueError, "out shares memory with query", "another tensor"),
        *elsewhere("query", "seq_lens", "out"),
        *(of_lse if has_lse else ()),
        (value(backend="fa3"), ValueError, "backend='fa3' is unknown", "trtllm-gen"),
        (value(an_argument_of_no_call=3), TypeError, "an_argument_of_no_call"),
    ]


def bad_offsets(change: Callable[..., Breaks] = value) -> list[Bad]:
    """Bad row offsets of two requests with two rows each; `change` makes a call that has offsets of these arguments."""
    good, name = int32(0, 2, 4), "cum_seq_lens_q"
    return [
        (change(cum_seq_lens_q=[0, 2, 4]), TypeError, f"{name} must be a torch.Tensor", "list"),
        (change(cum_seq_lens_q=good.long()), TypeError, f"{name} must be int32", "int64"),
        (change(cum_seq_lens_q=int32(0, 4)), ValueError, f"{name} must have shape [3]", "[2]"),
        (change(cum_seq_lens_q=int32(0, 5, 4)), ValueError, name, "decreases"),
        (change(cum_seq_lens_q=int32(1, 2, 4)), ValueError, name, "start at 0"),
        (change(cum_seq_lens_q=int32(0, 2, 5)), ValueError, name),
        (change(cum_seq_lens_q=good.to("meta")), ValueError, f"{name} is on meta", "cpu"),
        (change(max_q_len=1), ValueError, "max_q_len = 1", "2 rows"),
        (change(max_q_len=-1), ValueError, "max_q_len", "-1"),
        (change(max_q_len=2.0), TypeError, "max_q_len", "2.0"),
    ]


def elsewhere(*names: str) -> list[Bad]:
    """Tensors on another device than the others."""
    return [(tensor(name, to("meta")), ValueError, f"{name} is on meta", "cpu") for name in names]


def not_modelled(**arguments: Any) -> list[Bad]:
    """Values of arguments that FlashInfer takes and the lab refuses, with a reason and what to pass."""
    return [
        (value(**{name: given}), NotImplementedError, f"{name}=", "not modelled", "pass")
        for name, given in arguments.items()
    ]


def each_of(bad: list[Bad]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", bad, ids=[" ".join(row[2:]) for row in bad])


def assert_refused(function: Callable[..., Any], good: Arguments, row: Bad) -> None:
    """Break the good call: the error has the words, and neither `out` nor `lse` is written."""
    breaks, error, *says = row
    out = good["out"]
    lse = torch.full((4, 4), POISON)
    with pytest.raises(error) as raised:
        function(**good | {"lse": lse} | breaks(good))
    missing = [words for words in says if words not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"
    assert (out == POISON).all()
    assert (lse == POISON).all()
