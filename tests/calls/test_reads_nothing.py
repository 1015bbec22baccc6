"""A call on a device is posed without a look at its tensors' contents, so that a CUDA graph can capture it."""

from typing import Any

import pytest
import torch

from lab.calls import ContextCall, DecodeCall
from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import AttentionCall
from lab.calls.ragged_context import RaggedContextCall
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import build_attention
from lab.workloads.inputs.ragged import RaggedCase, build_ragged
from lab.workloads.interfaces import Interface

SIZES: dict[Interface, dict[str, Any]] = {
    AttentionCall.DECODE: {},
    AttentionCall.CONTEXT: {},
    AttentionCall.MLA_DECODE: {"num_kv_heads": 1, "head_dim": 80, "v_head_dim": 64},
}
CALLS = {AttentionCall.DECODE: DecodeCall, AttentionCall.CONTEXT: ContextCall, AttentionCall.MLA_DECODE: MLADecodeCall}


def unreadable(value: Any) -> Any:
    """Return an argument with tensors whose contents nobody can read."""
    if isinstance(value, tuple):
        return tuple(map(unreadable, value))
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("interface", CALLS)
def test_no_paged_call_reads_contents(interface: Interface, offsets: bool) -> None:
    offsets = offsets and interface is not AttentionCall.CONTEXT
    case = AttentionCase(interface, (20, 5), (2, 2), sinks=True, offsets=offsets, **SIZES[interface])
    arguments = build_attention(case, torch.device("cpu")).arguments()
    arguments |= {name: torch.ones(1) for name in ("bmm1_scale", "bmm2_scale")}
    CALLS[interface](**{name: unreadable(value) for name, value in arguments.items()}).problem()


def test_no_ragged_call_reads_contents() -> None:
    case = RaggedCase((18, 3), (2, 2))
    arguments = build_ragged(case, torch.device("cpu")).arguments()
    arguments |= {name: torch.ones(1) for name in ("bmm1_scale", "bmm2_scale")} | {"attention_sinks": torch.zeros(2)}
    RaggedContextCall(**{name: unreadable(value) for name, value in arguments.items()}).problem()
