"""The judge, over calls that are made on a B200 that is not there."""

from typing import Any

import pytest
import torch

from lab.calls.problem import AttentionCall
from lab.checks import Outcome, Ranges, Report, judge
from lab.dry_run import b200
from lab.dry_run.sweep_points import SWEPT
from tests.dry_run.on_a_b200 import NEEDS_A_LAUNCHER

pytestmark = [NEEDS_A_LAUNCHER, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

RANGES = Ranges(
    dtypes=((torch.bfloat16, torch.bfloat16),),
    groups=(3,),
    num_kv_heads=(2,),
    q_lens=(1, 3),
    head_dims=(64,),
    page_sizes=(64,),
    windows=(False,),  # of which the ragged call has none
    nvfp4=(False,),
    mla_head_dims=((576, 512),),
    mla_heads=(16,),
    mla_page_sizes=(64,),
)


def judged(implementation: Any, function: str) -> Report:
    of_call = {AttentionCall.RAGGED_CONTEXT.value: "M3", AttentionCall.DSV4_DECODE.value: "K9"}
    check = of_call.get(function, "K3")
    return judge(implementation, only=check, functions=[function], ranges=RANGES, device="cpu", drawn=0, discover=False)


@pytest.mark.parametrize("function", [each.value for each in SWEPT])
def test_the_judge_finds_the_calls_right(function: str) -> None:
    outcomes = {verdict.outcome for verdict in judged(b200, function).verdicts}
    assert {Outcome.RIGHT} <= outcomes <= {Outcome.RIGHT, Outcome.DECLINED, Outcome.KNOWN}


def test_and_a_wrong_one_wrong() -> None:
    class Wrong:
        @staticmethod
        def trtllm_batch_decode_with_kv_cache(**arguments: Any) -> Any:
            return b200.trtllm_batch_decode_with_kv_cache(**arguments | {"seq_lens": arguments["seq_lens"] - 1})

    assert judged(Wrong, "trtllm_batch_decode_with_kv_cache").wrong
