"""The memory that the adapter hands each backend: XQA its semaphores, trtllm-gen scratch and counters, of one workspace."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.calls.workspace import SEMAPHORE_BYTES, semaphores_and_scratch
from lab.gpus import Capability
from lab.kernels import trtllm
from tests.cases import CONTEXT, DECODE, MLA, RAGGED, Arguments
from tests.kernels.adapter_calls import SM90, SM100, SM120, context, decode, mla, ragged
from tests.kernels.conftest import Simulate

SCRATCH = 4 * 2**20
CALLS: dict[str, Callable[..., Arguments]] = {
    DECODE: partial(decode, 1, (20, 33)),
    CONTEXT: partial(context, (5, 3), (20, 33)),
    MLA: partial(mla, 1, (70, 90), heads=128),  # page tables of whole 128 tokens, which XQA takes too
    RAGGED: partial(ragged, (4, 6), (4, 6)),
}
COUNTING = (DECODE, CONTEXT, MLA)  # the ragged call has no counters
WITH_XQA = [(DECODE, SM90), (DECODE, SM120), (MLA, SM120)]
On = Callable[..., "FlashInfer"]


class FlashInfer:
    """Functions that keep what they are called with, and write it as their kernel does: XQA its scratch, trtllm-gen all."""

    def __init__(self, lacks: str = "") -> None:
        self.calls: list[Arguments] = []
        self.lacks = lacks  # a parameter of all functions

    def installed(self, module: str, name: str) -> tuple[Any, inspect.Signature]:
        def function(**arguments: Any) -> Tensor:
            self.calls.append(arguments)
            workspace = arguments["workspace_buffer"].view(torch.uint8)
            if "multi_ctas_kv_counter_buffer" in arguments or name not in COUNTING:
                workspace.fill_(0xFF)
            else:
                semaphores, scratch = semaphores_and_scratch(workspace)
                assert not semaphores.any(), "XQA's semaphores must be zero at each launch"
                scratch.fill_(0xFF)
            return torch.empty(0)

        signature = inspect.signature(getattr(references, name))
        kept = [each for each in signature.parameters.values() if each.name != self.lacks]
        return function, signature.replace(parameters=kept)


@pytest.fixture
def on(simulate: Simulate) -> On:
    """FlashInfer on a GPU of some capability."""
    return lambda capability, lacks="": simulate(capability, FlashInfer(lacks))


def new_workspace() -> Tensor:
    return torch.zeros(SEMAPHORE_BYTES + SCRATCH, dtype=torch.uint8)


def place(part: Tensor, workspace: Tensor) -> tuple[int, int]:
    """Where a part of a workspace begins, and how many bytes it has."""
    return part.data_ptr() - workspace.data_ptr(), part.nbytes


@pytest.mark.parametrize("name", CALLS)
def test_trtllm_gen_gets_the_scratch_and_counts_in_the_zeros(on: On, name: str) -> None:
    flashinfer, workspace, counters = on(SM100), new_workspace(), torch.zeros(1024, dtype=torch.int32)
    getattr(trtllm, name)(**posed(name, workspace))
    assert not workspace[:SEMAPHORE_BYTES].any()
    assert place(flashinfer.calls[0]["workspace_buffer"], workspace) == (SEMAPHORE_BYTES, SCRATCH)
    if name in COUNTING:
        assert place(flashinfer.calls[0]["multi_ctas_kv_counter_buffer"], workspace) == (0, SEMAPHORE_BYTES)
        getattr(trtllm, name)(**CALLS[name](multi_ctas_kv_counter_buffer=counters))
        assert flashinfer.calls[1]["multi_ctas_kv_counter_buffer"] is counters


def posed(name: str, workspace: Tensor) -> Arguments:
    """A call with this workspace; in a ragged one every row sees a key, which one tensor of offsets says."""
    arguments = CALLS[name](workspace_buffer=workspace)
    return arguments | ({"cum_seq_lens_kv": arguments["cum_seq_lens_q"]} if name == RAGGED else {})


@pytest.mark.parametrize(("name", "capability"), WITH_XQA)
def test_xqa_is_handed_all_of_it_and_no_counters(on: On, name: str, capability: Capability) -> None:
    flashinfer, workspace = on(capability), new_workspace()
    counters = torch.zeros(1024, dtype=torch.uint8)
    getattr(trtllm, name)(**CALLS[name](workspace_buffer=workspace, multi_ctas_kv_counter_buffer=counters))
    (call,) = flashinfer.calls
    assert call["workspace_buffer"] is workspace
    assert "multi_ctas_kv_counter_buffer" not in call


@pytest.mark.parametrize("is_own", [True, False], ids=["the lab's own", "given"])
@pytest.mark.parametrize("name", COUNTING)
def test_xqa_meets_zeros_after_trtllm_gen_on_one_workspace(on: On, name: str, is_own: bool) -> None:
    flashinfer, workspace = on(SM100), None if is_own else new_workspace()
    for _ in range(2):
        getattr(trtllm, name)(**CALLS[name](workspace_buffer=workspace))
        trtllm.trtllm_batch_decode_with_kv_cache(**CALLS[DECODE](workspace_buffer=workspace, backend="xqa"))
    first, xqa, again, _ = flashinfer.calls
    assert place(first["workspace_buffer"], xqa["workspace_buffer"]) == (SEMAPHORE_BYTES, SCRATCH)
    for memory in ("workspace_buffer", "multi_ctas_kv_counter_buffer"):
        assert first[memory].data_ptr() == again[memory].data_ptr()


def test_a_decode_s_partial_results_have_room_after_its_statistics(on: On) -> None:
    """The launcher looks at the room for statistics alone: 2 float32 of 256 rows for each request and head, and 1 MiB."""
    flashinfer = on(SM100)
    statistics_bytes = 2 * 4 * 256 * 8 + 2**20
    enough = torch.zeros(SEMAPHORE_BYTES + statistics_bytes + 4096, dtype=torch.uint8)
    assert CALLS[DECODE]()["query"].shape[:2] == (2, 4)
    trtllm.trtllm_batch_decode_with_kv_cache(**CALLS[DECODE](workspace_buffer=enough, return_lse=True))
    trtllm.trtllm_batch_decode_with_kv_cache(**CALLS[DECODE](workspace_buffer=enough, lse=torch.empty(2, 4)))
    assert len(flashinfer.calls) == 2
    with pytest.raises(ValueError, match=rf"has {enough.nbytes - 16} bytes.*{statistics_bytes + 4096} of scratch"):
        trtllm.trtllm_batch_decode_with_kv_cache(**CALLS[DECODE](workspace_buffer=enough[16:], return_lse=True))
    trtllm.trtllm_batch_decode_with_kv_cache(**CALLS[DECODE](workspace_buffer=enough[16:]))


@pytest.mark.parametrize(("name", "capability"), [*((name, SM100) for name in CALLS), (MLA, SM120)])
def test_a_workspace_without_scratch_is_refused(on: On, name: str, capability: Capability) -> None:
    flashinfer = on(capability)
    with pytest.raises(ValueError, match=r"less than.*pass None for the lab's own"):
        getattr(trtllm, name)(**CALLS[name](workspace_buffer=torch.zeros(SEMAPHORE_BYTES + 4095, dtype=torch.uint8)))
    assert not flashinfer.calls


@pytest.mark.parametrize("name", CALLS)
def test_an_older_flashinfer_counts_at_the_start_of_the_whole_workspace(name: str, on: On) -> None:
    """As 0.6.13, whose functions have no counter buffer: zeros first, then statistics and scratch."""
    flashinfer, workspace = on(SM100, lacks="multi_ctas_kv_counter_buffer"), new_workspace()
    getattr(trtllm, name)(**posed(name, workspace))
    (made,) = flashinfer.calls
    assert place(made["workspace_buffer"], workspace) == (0, workspace.nbytes)
    assert "multi_ctas_kv_counter_buffer" not in made
