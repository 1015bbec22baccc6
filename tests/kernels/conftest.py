"""Where the tests of this room run: a real device, or a GPU of some capability with simulated kernels."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lab.gpus import Capability
from lab.kernels import flashinfer_call, support
from lab.kernels.peers import flashinfer_mla, flashinfer_paged, flashinfer_ragged
from lab.kernels.portable import mla_decode, paged
from lab.kernels.portable.key_shares import Shares
from tests.devices import DEVICES
from tests.kernels.portable_calls import PortableKernel
from tests.kernels.simulated import MEBIBYTE
from tests.kernels.simulated_flashinfer import SimulatedFlashInfer

Simulate = Callable[..., Any]
Split = Callable[..., None]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Split:
    """Share the keys of all calls out: a number of shares that cuts most requests, or 1, which cuts none; or `shares`."""

    def share_out(count: int = 1, shares: Shares | None = None) -> None:
        shares = Shares(16 * count) if count > 1 else shares
        monkeypatch.setattr(paged, "shares_of", lambda *_: shares)  # None: a program for all keys of a block of rows
        monkeypatch.setattr(mla_decode, "choose_shares", lambda *_: shares or Shares(1))

    return share_out


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
    """Put a simulated FlashInfer on a GPU of some capability in the place of the installed one; the workspace is small."""

    def start(capability: Capability = (9, 0), stand_in: Any = None, **options: Any) -> Any:
        simulated = stand_in or SimulatedFlashInfer(capability[0], **options)
        for module in (flashinfer_call, support):
            monkeypatch.setattr(module, "capability_of", lambda device: capability)
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
