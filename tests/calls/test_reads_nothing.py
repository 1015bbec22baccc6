"""A call on a device is posed without a look at its tensors' contents, so that a CUDA graph can capture it."""

import pytest
import torch

from lab.calls import CALL_TYPES, AttentionCall
from tests.cases import Arguments
from tests.kernels.adapter_calls import SINKS, TWO_SINKS, context, decode, mla, ragged
from tests.kernels.held import on
from tests.kernels.test_dsv4 import arguments_of as dsv4

CALLS: list[tuple[AttentionCall, Arguments]] = [
    (AttentionCall.DECODE, decode(2, sinks=SINKS)),
    (AttentionCall.DECODE, decode((4, 1, 2), sinks=SINKS)),
    (AttentionCall.CONTEXT, context(sinks=SINKS)),
    (AttentionCall.MLA_DECODE, mla(2, sinks=TWO_SINKS)),
    (AttentionCall.MLA_DECODE, mla((4, 1, 2), sinks=TWO_SINKS)),
    (AttentionCall.RAGGED_CONTEXT, ragged(attention_sinks=TWO_SINKS)),
    (AttentionCall.DSV4_DECODE, dsv4() | {"sinks": torch.zeros(8)}),
]


@pytest.mark.parametrize(("call", "arguments"), CALLS)
def test_no_call_reads_contents(call: AttentionCall, arguments: Arguments) -> None:
    given = arguments | {name: torch.ones(1) for name in ("bmm1_scale", "bmm2_scale")}
    CALL_TYPES[call](**{name: on("meta", value) for name, value in given.items()}).problem()
