"""The memory that the adapter hands each backend: XQA its semaphores, trtllm-gen scratch and counters, of one workspace."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.calls.workspace import SEMAPHORE_BYTES, semaphores_and_scratch
from lab.kernels import flashinfer_call, support, trtllm
from tests import cases
from tests.cases import context_arguments, decode_arguments, random_batch

SM90, SM100, SM103, SM120 = (9, 0), (10, 0), (10, 3), (12, 0)
SCRATCH = 4 * 2**20
BF16 = torch.bfloat16
PLAIN = {"out_dtype": None, "return_lse": False}

Arguments = dict[str, Any]
On = Callable[..., "FlashInfer"]


def decode(**changes: Any) -> Arguments:
    return decode_arguments(random_batch((1, 1), (20, 33), head_dim=64, dtype=BF16), **PLAIN | changes)


def context(**changes: Any) -> Arguments:
    return context_arguments(random_batch((5, 3), (20, 33), head_dim=64, dtype=BF16), **PLAIN | changes)


def mla(**changes: Any) -> Arguments:
    """Page tables of whole 128 tokens and 128 heads, which XQA takes too."""
    batch = cases.latent_batch((1, 1), (70, 90), heads=128, rank=512, rope=64, dtype=BF16)
    usual = {"out": None, "return_lse": False, "return_lse_base": None, "bmm1_scale": 0.05}
    return cases.mla_arguments(batch, 64, **usual | changes)


def ragged(**changes: Any) -> Arguments:
    batch = cases.ragged_batch((4, 6), (4, 6), heads=(2, 2), dims=(192, 128), dtype=BF16)
    return cases.ragged_arguments(batch, **{"out": None, "return_lse": False, "bmm1_scale": 0.05} | changes)


CALLS = {
    "trtllm_batch_decode_with_kv_cache": decode,
    "trtllm_batch_context_with_kv_cache": context,
    "trtllm_batch_decode_with_kv_cache_mla": mla,
    "trtllm_ragged_attention_deepseek": ragged,
}
COUNTING = tuple(CALLS)[:3]  # the ragged call has no counters
WITH_XQA = [
    ("trtllm_batch_decode_with_kv_cache", SM90),
    ("trtllm_batch_decode_with_kv_cache", SM120),
    ("trtllm_batch_decode_with_kv_cache_mla", SM120),
]


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
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[On]:
    """FlashInfer on a GPU of some capability."""

    def start(capability: tuple[int, int], lacks: str = "") -> FlashInfer:
        for module in (flashinfer_call, support):
            monkeypatch.setattr(module, "capability_of", lambda device: capability)
        monkeypatch.setattr(flashinfer_call, "SCRATCH_BYTES", SCRATCH)
        monkeypatch.setattr(flashinfer_call, "LEAST_SCRATCH_BYTES", 4096)
        flashinfer = FlashInfer(lacks)
        monkeypatch.setattr(flashinfer_call, "installed", flashinfer.installed)
        forget()
        return flashinfer

    yield start
    forget()


def forget() -> None:
    flashinfer_call.workspace_of.cache_clear()
    flashinfer_call.installed_taking.cache_clear()


def new_workspace() -> Tensor:
    return torch.zeros(SEMAPHORE_BYTES + SCRATCH, dtype=torch.uint8)


def place(part: Tensor, workspace: Tensor) -> tuple[int, int]:
    """Where a part of a workspace begins, and how many bytes it has."""
    return part.data_ptr() - workspace.data_ptr(), part.nbytes


@pytest.mark.parametrize("capability", [SM100, SM103])
@pytest.mark.parametrize("name", COUNTING)
def test_trtllm_gen_is_handed_the_scratch_and_counts_in_the_zeros(
    on: On, name: str, capability: tuple[int, int]
) -> None:
    flashinfer, workspace = on(capability), new_workspace()
    getattr(trtllm, name)(**CALLS[name](workspace_buffer=workspace))
    (call,) = flashinfer.calls
    assert place(call["workspace_buffer"], workspace) == (SEMAPHORE_BYTES, SCRATCH)
    assert place(call["multi_ctas_kv_counter_buffer"], workspace) == (0, SEMAPHORE_BYTES)
    assert not workspace[:SEMAPHORE_BYTES].any()


def test_the_ragged_call_is_handed_the_scratch(on: On) -> None:
    flashinfer, workspace = on(SM100), new_workspace()
    trtllm.prepare_trtllm_ragged_attention_deepseek(**new_tokens(workspace))()
    assert place(flashinfer.calls[0]["workspace_buffer"], workspace) == (SEMAPHORE_BYTES, SCRATCH)
    assert not workspace[:SEMAPHORE_BYTES].any()


def new_tokens(workspace: Tensor) -> Arguments:
    """A ragged call in which every row sees a key, which one tensor of offsets says."""
    arguments = ragged(workspace_buffer=workspace)
    return arguments | {"cum_seq_lens_kv": arguments["cum_seq_lens_q"]}


@pytest.mark.parametrize(("name", "capability"), WITH_XQA)
def test_xqa_is_handed_all_of_it_and_no_counters(on: On, name: str, capability: tuple[int, int]) -> None:
    flashinfer, workspace = on(capability), new_workspace()
    counters = torch.zeros(1024, dtype=torch.uint8)
    getattr(trtllm, name)(**CALLS[name](workspace_buffer=workspace, multi_ctas_kv_counter_buffer=counters))
    (call,) = flashinfer.calls
    assert call["workspace_buffer"] is workspace
    assert "multi_ctas_kv_counter_buffer" not in call


@pytest.mark.parametrize("name", COUNTING)
def test_counters_that_are_given_are_handed_on(on: On, name: str) -> None:
    flashinfer, counters = on(SM100), torch.zeros(1024, dtype=torch.int32)
    getattr(trtllm, name)(**CALLS[name](multi_ctas_kv_counter_buffer=counters))
    assert flashinfer.calls[0]["multi_ctas_kv_counter_buffer"] is counters


@pytest.mark.parametrize("is_own", [True, False], ids=["the lab's own", "given"])
@pytest.mark.parametrize("name", COUNTING)
def test_xqa_meets_zeros_after_trtllm_gen_on_one_workspace(on: On, name: str, is_own: bool) -> None:
    flashinfer, workspace = on(SM100), None if is_own else new_workspace()
    for _ in range(2):
        getattr(trtllm, name)(**CALLS[name](workspace_buffer=workspace))
        trtllm.trtllm_batch_decode_with_kv_cache(**decode(workspace_buffer=workspace, backend="xqa"))
    first, xqa, again, _ = flashinfer.calls
    assert place(first["workspace_buffer"], xqa["workspace_buffer"]) == (SEMAPHORE_BYTES, SCRATCH)
    for memory in ("workspace_buffer", "multi_ctas_kv_counter_buffer"):
        assert first[memory].data_ptr() == again[memory].data_ptr()


def test_a_decode_s_partial_results_have_room_after_its_statistics(on: On) -> None:
    """The launcher looks at the room for statistics alone: 2 float32 of 256 rows for each request and head, and 1 MiB."""
    flashinfer = on(SM100)
    statistics_bytes = 2 * 4 * 256 * 8 + 2**20
    enough = torch.zeros(SEMAPHORE_BYTES + statistics_bytes + 4096, dtype=torch.uint8)
    assert decode()["query"].shape[:2] == (2, 4)
    trtllm.trtllm_batch_decode_with_kv_cache(**decode(workspace_buffer=enough, return_lse=True))
    trtllm.trtllm_batch_decode_with_kv_cache(**decode(workspace_buffer=enough, lse=torch.empty(2, 4)))
    assert len(flashinfer.calls) == 2
    with pytest.raises(ValueError, match=rf"has {enough.nbytes - 16} bytes.*{statistics_bytes + 4096} of scratch"):
        trtllm.trtllm_batch_decode_with_kv_cache(**decode(workspace_buffer=enough[16:], return_lse=True))
    trtllm.trtllm_batch_decode_with_kv_cache(**decode(workspace_buffer=enough[16:]))


@pytest.mark.parametrize("name", COUNTING)
def test_a_small_workspace_is_refused_for_trtllm_gen(on: On, name: str) -> None:
    flashinfer = on(SM100)
    with pytest.raises(ValueError, match=r"less than.*pass None for the lab's own"):
        getattr(trtllm, name)(**CALLS[name](workspace_buffer=torch.zeros(SEMAPHORE_BYTES + 4095, dtype=torch.uint8)))
    assert not flashinfer.calls


@pytest.mark.parametrize("name", CALLS)
def test_an_older_flashinfer_counts_at_the_start_of_the_whole_workspace(name: str, on: On) -> None:
    """As 0.6.13, whose functions have no counter buffer: zeros first, then statistics and scratch."""
    flashinfer = on(SM100, lacks="multi_ctas_kv_counter_buffer")
    workspace = new_workspace()
    arguments = CALLS[name](workspace_buffer=workspace) if name in COUNTING else new_tokens(workspace)
    getattr(trtllm, name)(**arguments)
    (made,) = flashinfer.calls
    assert place(made["workspace_buffer"], workspace) == (0, workspace.nbytes)
    assert "multi_ctas_kv_counter_buffer" not in made
