"""Equivalent forms: changes of a call's arguments that leave the expected result as it is, such as no `max_kv_len`. A call
that a kernel refuses is made again with such changes, so that the kernel can be judged nevertheless.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES
from lab.calls.problem import AttentionCall
from lab.workloads.inputs.masks import packed_mask

Arguments = dict[str, Any]  # of a call, by name


@dataclass(frozen=True)
class EquivalentForm:
    """A change of a call's arguments that keeps the expected result."""

    name: str  # words for "judged with ... instead"
    # Returns whether the change is possible and useful, given the function, the arguments and the sentence of the refusal.
    applies: Callable[[AttentionCall, Arguments, str], bool]
    change: Callable[[AttentionCall, Arguments], Arguments]  # returns the changed arguments
    by_engines: bool = False  # only for calls of an engine's pass; elsewhere a check wants the argument itself judged
    omits: bool = False  # it removes an argument on which no result depends


def _has_no_mask(interface: AttentionCall, arguments: Arguments, refusal: str) -> bool:
    several = (arguments.get("q_len_per_req") or 1) > 1
    takes_mask = interface is AttentionCall.DECODE and not arguments.get("enable_block_sparse_attention")
    return takes_mask and several and arguments.get("mask") is None


def _with_causal_mask(interface: AttentionCall, arguments: Arguments) -> Arguments:
    q_len, device = arguments["q_len_per_req"], arguments["query"].device
    return arguments | {"mask": _causal_mask(len(arguments["seq_lens"]), q_len, device)}


@functools.cache  # a CUDA graph cannot build a mask during capture, and reads the same mask in each replay
def _causal_mask(batch_size: int, q_len: int, device: torch.device) -> Tensor:
    causal = torch.ones(q_len, q_len, dtype=torch.bool).tril()
    return packed_mask(causal.expand(batch_size, -1, -1)).to(device)


def _with_out(interface: AttentionCall, arguments: Arguments) -> Arguments:
    query, problem = arguments["query"], CALL_TYPES[interface](**arguments).problem()
    shape = (*query.shape[:-1], problem.v_head_dim)
    return arguments | {"out": query.new_full(shape, float("nan"), dtype=problem.out_dtype)}


def _names(name: str, refusal: str) -> bool:
    return re.search(rf"\b{name}\b", refusal) is not None


def _left_out(argument: str, words: str, by_engines: bool = False) -> EquivalentForm:
    return EquivalentForm(
        words,
        lambda interface, arguments, refusal: arguments.get(argument) is not None and _names(argument, refusal),
        lambda interface, arguments: {name: value for name, value in arguments.items() if name != argument},
        by_engines,
        omits=not by_engines,
    )


FORMS = (
    # Arguments on which no result depends.
    *(
        _left_out(name, f"no {name}")
        for name in ("workspace_buffer", "multi_ctas_kv_counter_buffer", "max_seq_len", "max_kv_len")
    ),
    _left_out("out", "its result copied into the output", by_engines=True),
    EquivalentForm(
        "an output handed out",
        lambda interface, arguments, refusal: arguments.get("out") is None and _names("out", refusal),
        _with_out,
    ),
    EquivalentForm("the causal mask of its rows", _has_no_mask, _with_causal_mask),
)
