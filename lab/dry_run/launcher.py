"""Load FlashInfer's compiled launcher together with a fake CUDA that simulates one GPU."""

import ctypes
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.dry_run import build, kernel_table
from lab.dry_run.arithmetic import HostMemory, compute
from lab.dry_run.launches import Launch, events
from lab.gpus import Capability, family_that_runs


@dataclass(frozen=True)
class Gpu:
    """A GPU to simulate, with the properties that the fake CUDA reports to FlashInfer's launcher."""

    name: str  #: common name
    cuda_name: str  #: CUDA's name, a key of `lab.gpus.DATASHEETS`
    capability: Capability  #: (major, minor)
    multiprocessors: int  #: number of multiprocessors
    #: guessed numbers. The launcher queries how many clusters fit on the GPU at once, and selects a kernel without clusters if
    #: they do not fit. Nothing else depends on these numbers.
    multiprocessors_per_gpc: int = 16
    gpcs: int = 8


# Numbers of multiprocessors: flashinfer-ai/flashinfer#4445 for B200 and B300, NVIDIA's datasheets for the other GPUs.
GPUS = {
    "b200": Gpu("B200", "NVIDIA B200", (10, 0), 148, multiprocessors_per_gpc=18),
    "b300": Gpu("B300", "NVIDIA B300 SXM6 AC", (10, 3), 148, multiprocessors_per_gpc=18),
    "rtx-pro-6000": Gpu("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188, gpcs=12),
    "spark": Gpu("DGX Spark", "NVIDIA GB10", (12, 1), 48, gpcs=3),
    "h200": Gpu("H200", "NVIDIA H200", (9, 0), 132),
    "a100": Gpu("A100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, gpcs=7),
}


def gpu_named(name: str) -> Gpu:
    if name not in GPUS:
        raise ValueError(f"there is no dry run of {name!r}; known are {', '.join(GPUS)}")
    return GPUS[name]


class LaunchError(RuntimeError):
    """FlashInfer's launcher or the fake CUDA driver refused a call. The message is that of the launcher or of the driver."""


class Launcher:
    """FlashInfer's compiled launcher with a fake CUDA. Each GPU has a copy, because the launcher caches GPU properties."""

    def __init__(self, gpu: Gpu) -> None:
        import tvm_ffi

        self.table = kernel_table.newest()
        with tempfile.TemporaryDirectory() as folder:
            # The library is copied, because a file that is already loaded would not be loaded again.
            copied = shutil.copy(build.library(self.table), Path(folder) / f"{gpu.name.replace(' ', '_')}.so")
            self.module = tvm_ffi.load_module(str(copied))
            self._library = ctypes.CDLL(str(copied))
        for function in ("dry_run_log", "dry_run_take_faults"):
            getattr(self._library, function).restype = ctypes.c_char_p
        shared_memory_bytes = family_that_runs(gpu.capability).shared_memory_kib * 1024
        shape = (gpu.multiprocessors, shared_memory_bytes, gpu.multiprocessors_per_gpc, gpu.gpcs)
        self._library.dry_run_set_gpu(*gpu.capability, *shape)
        # The name of a kernel replaces its machine code, which is not run.
        self._give_cubin = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(
            lambda name, _sha256: self._library.FlashInferSetCurrentCubin(name, len(name))
        )
        self._library.FlashInferSetCubinCallback(self._give_cubin)
        self.computes = False  # if True, each call also computes the outputs of its launches before it returns

    def log(self) -> list[dict[str, Any]]:
        """Return the CUDA calls that the launcher has made since the last `clear`, in order."""
        return list(json.loads(self._library.dry_run_log()))

    def clear(self) -> None:
        self._library.dry_run_clear()

    def zeroed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record in `log` that FlashInfer's Python code has filled `tensor` with zeros, and return `tensor`."""
        self._library.cudaMemsetAsync(ctypes.c_void_p(tensor.data_ptr()), 0, ctypes.c_size_t(tensor.nbytes), None)
        return tensor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self.module, name)

        def call(*arguments: Any) -> Any:
            before = len(self.log()) if self.computes else 0
            self._library.dry_run_take_faults()
            self._library.dry_run_begin_capture()
            failure: Exception | None = None
            try:
                result = function(*arguments)
            except RuntimeError as error:
                failure = error
            finally:
                self._library.dry_run_end_capture()
            faults = self._library.dry_run_take_faults().decode()
            if failure is not None or faults:  # FlashInfer only prints some errors of the driver
                message = "" if failure is None else str(failure).strip()
                raise LaunchError("; ".join(filter(None, (faults, message)))) from failure
            if self.computes:
                made = (each for each in events(self.log()[before:]) if isinstance(each, Launch))
                compute(made, HostMemory.of(each for each in arguments if isinstance(each, torch.Tensor)))
            return result

        return call
