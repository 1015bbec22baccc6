"""The workspace's first 8 MiB are counters, and the rest is scratch."""

import pytest
import torch

from lab.calls.workspace import counts_in_workspace, semaphores_and_scratch


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_counters_are_the_first_eight_mib(dtype: torch.dtype) -> None:
    workspace = torch.zeros(8_388_608 + 64, dtype=torch.uint8).view(dtype)
    counters, scratch = semaphores_and_scratch(workspace)
    assert (counters.nbytes, scratch.nbytes) == (8_388_608, 64)
    assert counters.data_ptr() == workspace.data_ptr()
    assert scratch.data_ptr() == workspace.data_ptr() + 8_388_608


@pytest.mark.parametrize(("backend", "counts"), [("auto", True), ("xqa", True), ("trtllm-gen", False)])
def test_trtllm_gen_alone_does_not_count_there(backend: str, counts: bool) -> None:
    assert counts_in_workspace(backend, torch.device("cpu")) is counts
