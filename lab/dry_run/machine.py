"""A GPU that is not there: FlashInfer's own launcher runs against the fake CUDA, and its launches are recorded.

with machine("b200") as gpu:
    lab.kernels.trtllm.trtllm_batch_decode_with_kv_cache(...)  # CPU tensors
print(gpu.launches[0].name)
"""

import ctypes
import functools
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import lab.gpus
from lab.dry_run import build, kernel_table
from lab.dry_run.arithmetic import compute
from lab.dry_run.host_memory import HostMemory
from lab.dry_run.launches import Copy, Fill, Launch, events
from lab.gpus import Capability


@dataclass(frozen=True)
class Gpu:
    """A GPU that the fake CUDA answers as.

    Attributes:
        name: as a person calls it.
        cuda_name: as CUDA calls it, a key of `lab.gpus.DATASHEETS`.
        capability: (major, minor).
        multiprocessors: how many it has.
        shared_memory_optin_bytes: most shared memory of one thread block (CUDA C++ Programming Guide, technical
            specifications per compute capability).
        multiprocessors_per_gpc, gpcs: the clusters that run at once are guessed from these; nothing else rests on them.
    """

    name: str
    cuda_name: str
    capability: Capability
    multiprocessors: int
    shared_memory_optin_bytes: int
    multiprocessors_per_gpc: int
    gpcs: int


KIB = 1024
GPUS = {
    "b200": Gpu("B200", "NVIDIA B200", (10, 0), 148, 227 * KIB, 18, 8),
    "b300": Gpu("B300", "NVIDIA B300 SXM6 AC", (10, 3), 148, 227 * KIB, 18, 8),
    "rtx-pro-6000": Gpu(
        "RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188, 99 * KIB, 16, 12
    ),
    "spark": Gpu("DGX Spark", "NVIDIA GB10", (12, 1), 48, 99 * KIB, 16, 3),
    "h200": Gpu("H200", "NVIDIA H200", (9, 0), 132, 227 * KIB, 16, 8),
    "a100": Gpu("A100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * KIB, 16, 7),
}


class LaunchError(RuntimeError):
    """FlashInfer's launcher, or the fake CUDA's driver that it called, refused a call; the text is theirs."""


class Machine:
    """What ran on a GPU that is not there, from `machine`.

    Attributes:
        gpu: what the fake CUDA answers as.
        table: where the table of kernels is from, such as "flashinfer-cubin 0.6.13".
        table_lacks: the members of a kernel's row that the launcher reads and that table has not; they are false.
    """

    def __init__(self, gpu: Gpu, launcher: "Launcher") -> None:
        self.gpu = gpu
        self.table = launcher.table.source
        self.table_lacks = launcher.table.lacks(build.launcher_members())
        self._launcher = launcher

    @property
    def events(self) -> tuple[Launch | Fill | Copy, ...]:
        """What the launcher asked of CUDA since the last `clear`, in its order."""
        return events(self._launcher.log())

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernels that were launched since the last `clear`, in their order."""
        return tuple(each for each in self.events if isinstance(each, Launch))

    @property
    def fills(self) -> tuple[Fill, ...]:
        """The memsets since the last `clear`, in their order."""
        return tuple(each for each in self.events if isinstance(each, Fill))

    def clear(self) -> None:
        """Forget what was launched, filled and copied."""
        self._launcher.clear()


class Launcher:
    """FlashInfer's compiled launcher with a fake CUDA of its own: it keeps the first GPU's answers, so each GPU has one."""

    def __init__(self, library: Path, table: kernel_table.KernelTable, gpu: Gpu) -> None:
        import tvm_ffi

        self.table = table
        with (
            tempfile.TemporaryDirectory() as folder
        ):  # a copy is loaded anew, where the same file would be the same library
            copied = shutil.copy(library, folder)
            self.module = tvm_ffi.load_module(str(copied))
            self._library = ctypes.CDLL(str(copied))
        self._library.dry_run_log.restype = ctypes.c_char_p
        self._library.dry_run_set_gpu(
            *gpu.capability,
            gpu.multiprocessors,
            gpu.shared_memory_optin_bytes,
            gpu.multiprocessors_per_gpc,
            gpu.gpcs,
        )
        self._give_cubin = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(self._name_for_machine_code)
        self._library.FlashInferSetCubinCallback(self._give_cubin)

    def _name_for_machine_code(self, name: bytes, _sha256: bytes) -> None:
        self._library.FlashInferSetCurrentCubin(name, len(name))

    def log(self) -> list[dict[str, Any]]:
        """Return what was asked of the fake CUDA."""
        return list(json.loads(self._library.dry_run_log()))

    def clear(self) -> None:
        """Empty the log."""
        self._library.dry_run_clear()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return one of the module's functions, whose failure is a `LaunchError` with all that was said."""
        function = getattr(self.module, name)

        def call(*arguments: Any) -> Any:
            before = len(self.log())
            self._library.dry_run_begin_capture()
            try:
                result = function(*arguments)
            except Exception as error:
                raise LaunchError("; ".join([*self._faults(before), str(error).strip()])) from error
            finally:
                self._library.dry_run_end_capture()
            faults = self._faults(before)
            if faults:  # FlashInfer prints the driver's error and goes on
                raise LaunchError("; ".join(faults))
            return result

        return call

    def _faults(self, before: int) -> list[str]:
        return [each["text"] for each in self.log()[before:] if each["event"] == "fault"]


class _Computing:
    """A launcher after each of whose calls its launches are computed, while the call's tensors are there."""

    def __init__(self, launcher: Launcher, there: Machine) -> None:
        self._launcher, self._there = launcher, there

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._launcher, name)

        def call(*arguments: Any) -> Any:
            before = len(self._there.launches)
            result = function(*arguments)
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            compute(self._there.launches[before:], HostMemory.of(tensors))
            return result

        return call


@functools.cache
def launcher_for(gpu: Gpu) -> Launcher:
    """Return the launcher of a GPU, built and loaded once; raises `lab.dry_run.build.NotBuiltError`."""
    table = kernel_table.newest()
    return Launcher(build.library(table), table, gpu)


@contextmanager
def machine(name: str, computes: bool = False) -> Iterator[Machine]:
    """Let FlashInfer's TRT-LLM functions and the lab's take CPU tensors, as if they lay on a GPU.

    Inside, `lab.gpus.capability_of` gives this GPU's capability for every device, and so does FlashInfer's own; trtllm-gen's
    launcher is the compiled one. All of it is undone on exit. One thread at a time, and no machine within another.

    Args:
        name: one of `GPUS`.
        computes: each call also computes what it launches (`lab.dry_run.arithmetic`), and so fills its results.

    Raises:
        ValueError: no such GPU.
        lab.dry_run.build.NotBuiltError: the launcher cannot be compiled here.
    """
    if name not in GPUS:
        raise ValueError(f"there is no dry run of {name!r}; known are {', '.join(GPUS)}")
    gpu = GPUS[name]
    launcher = launcher_for(gpu)
    launcher.clear()
    there = Machine(gpu, launcher)
    called = _Computing(launcher, there) if computes else launcher
    with ExitStack() as stack:
        for module, attribute, answer in [*_flashinfer_answers(gpu, called), *_lab_answers(gpu)]:
            stack.enter_context(mock.patch.object(module, attribute, answer))
        yield there


FLASHINFER_MODULES = ("utils", "decode", "prefill", "mla", "mla._core", "xqa")


def _flashinfer_answers(gpu: Gpu, launcher: "Launcher | _Computing") -> Iterator[tuple[Any, str, Any]]:
    """Yield (module, name, what it is inside a machine) for FlashInfer's questions about the GPU."""
    answers: dict[str, Any] = {
        "get_compute_capability": lambda device: gpu.capability,
        "get_device_sm_count": lambda device: gpu.multiprocessors,
        "device_support_pdl": lambda device: gpu.capability >= (9, 0),
        "is_sm100a_supported": lambda device: gpu.capability[0] == 10,
        "is_sm110a_supported": lambda device: gpu.capability[0] == 11,
        "is_sm12x_supported": lambda device: gpu.capability[0] == 12,
        "get_trtllm_gen_fmha_module": lambda: launcher,
    }
    for module_name in FLASHINFER_MODULES:
        module = importlib.import_module(f"flashinfer.{module_name}")
        for name, answer in answers.items():
            if hasattr(module, name):
                yield module, name, answer


def _lab_answers(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    """Yield the same for the lab's modules, of those that are imported."""
    original = lab.gpus.capability_of
    for name, module in list(sys.modules.items()):
        if name.startswith("lab.") and getattr(module, "capability_of", None) is original:
            yield module, "capability_of", lambda device: gpu.capability
