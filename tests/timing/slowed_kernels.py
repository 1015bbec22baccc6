"""A pytest plugin that makes FlashInfer's decode calls about a tenth slower, to see the gate trip.

    python -m pytest -p tests.timing.slowed_kernels tests/benchmarks --benchmark-only

Beside each call an elementwise kernel moves a tenth of the bytes that the call itself must move.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab.kernels import trtllm

SHARE = 0.1


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(
        trtllm,
        "prepare_trtllm_batch_decode_with_kv_cache",
        slowed(trtllm.prepare_trtllm_batch_decode_with_kv_cache),
    )
    config.add_cleanup(patch.undo)


def slowed(prepare: Callable[..., Callable[[], Any]]) -> Callable[..., Callable[[], Any]]:
    def prepare_slowed(**arguments: Any) -> Callable[[], Any]:
        call, keys = prepare(**arguments), arguments["kv_cache"][0]
        bytes_of_kv = 2 * int(arguments["seq_lens"].sum()) * keys.shape[1] * keys.shape[3] * keys.element_size()
        source = torch.zeros(int(SHARE * bytes_of_kv) // 8, device=keys.device)
        target = torch.empty_like(source)

        def call_slowed() -> Any:
            torch.neg(source, out=target)
            return call()

        return call_slowed

    return prepare_slowed
