"""The small cases on which dishonest kernels are judged. One of the kernels has memorised them."""

from collections.abc import Iterable
from typing import Any

import torch

from lab.calls.problem import AttentionCall
from lab.checks import Ranges
from lab.checks.properties import checks
from lab.checks.properties.check import Level

RANGES = Ranges(
    page_sizes=(16,),
    head_dims=(64,),
    num_kv_heads=(1, 2),
    groups=(2,),
    q_lens=(1, 4),
    dtypes=((torch.bfloat16,) * 2,),
    nvfp4=(False,),
)


def small_cases() -> Iterable[Any]:
    """Return the cases of K1 for the decode call at the smoke level."""
    (oracle,) = (check for check in checks() if check.key == "K1")
    return oracle.cases(AttentionCall.DECODE, RANGES, Level.SMOKE)
