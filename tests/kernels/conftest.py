"""Where the tests of this room run: a real device, or a GPU of some capability with simulated kernels."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lab.gpus import Capability
from lab.kernels import flashinfer_call, support
from lab.kernels.peers import flash_attention_4, flashinfer_mla, flashinfer_paged, flashinfer_ragged
from lab.kernels.portable import key_shares, merge, mla_decode, paged, partial_results
from lab.kernels.portable.key_shares import Shares
from lab.kernels.portable.triton_call import new_scratch
from tests.devices import DEVICES
from tests.kernels.portable_calls import PortableKernel
from tests.kernels.simulated import MEBIBYTE
from tests.kernels.simulated_flash_attention_4 import SimulatedFlashAttention4
from tests.kernels.simulated_flashinfer import SimulatedFlashInfer

# `merge.MERGE_PROGRAMS` in the interpreter, which runs one program after the other. Calls of few rows still have one for each.
INTERPRETED_PROGRAMS = 64

Simulate = Callable[..., Any]
Split = Callable[..., None]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Split:
    """Share the keys of all calls out: a number of shares that cuts most requests, or 1, which cuts none; or `shares`.

    Whatever lay in the memory of partial results must not show: it is full of NaN and of wrong shares.
    """

    def full_of_nan(*arguments: Any) -> list[torch.Tensor]:
        return [part.fill_(math.nan if part.is_floating_point() else 1) for part in new_scratch(*arguments)]

    def share_out(count: int = 1, shares: Shares | None = None) -> None:
        shares = Shares(16 * count) if count > 1 else shares
        monkeypatch.setattr(partial_results, "new_scratch", full_of_nan)
        monkeypatch.setattr(paged, "shares_of", lambda *_: shares)  # None: a program for all keys of a block of rows
        monkeypatch.setattr(mla_decode, "choose_shares", lambda *_: shares or Shares(1))

    if not torch.cuda.is_available():
        monkeypatch.setattr(merge, "MERGE_PROGRAMS", INTERPRETED_PROGRAMS)
    return share_out


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """132 multiprocessors."""
    monkeypatch.setattr(key_shares, "num_multiprocessors", lambda device: 132)


@pytest.fixture
def kernel(request: pytest.FixtureRequest, device: str, split: Split) -> PortableKernel:
    """The kernel that `tests.kernels.portable_calls.kernels` names."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton compiles e4m3 for SM89 and later")
    function, count = request.param
    split(count)
    return PortableKernel(function, device)


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulate]:
    """Put simulations of FlashInfer and FlashAttention-4 on a GPU of some capability in the place of the installed packages.

    The lab's own workspace is small.
    """

    def start(capability: Capability = (9, 0), stand_in: Any = None) -> Any:
        simulated = stand_in or SimulatedFlashInfer(capability[0])
        for module in (flashinfer_call, flash_attention_4, support):
            monkeypatch.setattr(module, "capability_of", lambda device: capability)
        simulated.fa4 = SimulatedFlashAttention4(capability[0])
        monkeypatch.setattr(flash_attention_4, "installed_function", simulated.fa4.installed_function)
        monkeypatch.setattr(flashinfer_call, "SCRATCH_BYTES", 4 * MEBIBYTE)
        monkeypatch.setattr(flashinfer_call, "LEAST_SCRATCH_BYTES", 4096)
        for module in (flashinfer_call, flashinfer_mla, flashinfer_paged, flashinfer_ragged):
            monkeypatch.setattr(module, "installed", simulated.installed)
        forget()
        return simulated

    yield start
    forget()


def forget() -> None:
    """Forget what the adapters keep: their workspace, and which function takes which keywords."""
    flashinfer_call.workspace_of.cache_clear()
    flashinfer_call.installed_taking.cache_clear()
