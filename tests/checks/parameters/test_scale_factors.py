"""K18 sees a kernel that writes to the scale factors of an NVFP4 cache."""

from typing import Any

import pytest
import torch

from lab.checks import Configuration, Interface, Outcome
from lab.checks.properties import checks
from lab.checks.run.workers import run_case
from lab.ranges import Ranges
from lab.references import trtllm_batch_decode_with_kv_cache
from tests.checks.small import decoding

CHECK = next(check for check in checks() if check.key == "K18")
CASE = Configuration(Interface.DECODE, {"dtypes": "bf16/nvfp4", "group": 2, "head_dim": 64, "page_size": 16})


def writing(side: int) -> Any:
    def kernel(**arguments: Any) -> Any:
        returned = trtllm_batch_decode_with_kv_cache(**arguments)
        arguments["kv_cache_sf"][side].view(torch.uint8).add_(1)
        return returned

    return decoding(kernel)


@pytest.mark.parametrize("side", [0, 1])
def test_a_write_to_scale_factors_is_wrong(side: int) -> None:
    judged = run_case(writing(side), CHECK, CASE, torch.device("cpu"), Ranges())
    assert judged.outcome is Outcome.WRONG
    assert any(f"kv_cache_sf[{side}]" in sentence for sentence in judged.wrongs)
