"""A GPU that is not there: the host code chooses a Triton kernel for it, and Triton compiles the kernel, as on that GPU.

Tensors have no contents and say that they are on a GPU; every launch compiles, with the specialisation that Triton makes of its
arguments, and launches nothing. A process of Triton's interpreter compiles nothing: run this without TRITON_INTERPRET.
"""

import contextlib
import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from lab.gpus import Capability, family_that_runs
from lab.kernels.portable.tiles import ProgramTile

# Multiprocessors of a GPU of each capability: A100, A40, L40, H200, B200, B300, RTX PRO 6000, DGX Spark (vendors' datasheets).
MULTIPROCESSORS = {
    (8, 0): 108,
    (8, 6): 84,
    (8, 9): 142,
    (9, 0): 132,
    (10, 0): 148,
    (10, 3): 148,
    (12, 0): 188,
    (12, 1): 48,
}
# Of a multiprocessor, by the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and for tensor
# memory PTX ISA, "Tensor Memory".
REGISTERS = 65536
TENSOR_MEMORY_COLUMNS = 512
RESERVED_KIB = 1  # of shared memory for each program; a multiprocessor has this much more than one program may have
MATRIX_INSTRUCTIONS = {"mma.sync": r"\bmma\.sync", "wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma"}
GPU = torch.device("cuda", 0)


@dataclass(frozen=True)
class Compiled:
    """A kernel as compiled for a target, and what it takes of a multiprocessor."""

    kernel: str  # name of the Triton function
    tile: dict[str, Any] | None  # of an attention kernel, by field; None for others
    num_warps: int
    num_stages: int
    shared_bytes: int  # of a program
    tensor_memory_columns: int  # of SM100's tensor memory
    registers: int  # of a thread, as are the next three
    spill_store_bytes: int  # as ptxas counts them in the code
    spill_load_bytes: int
    stack_bytes: int  # spilled registers included
    matrix: tuple[str, ...]  # the matrix instructions in its PTX
    fit: int  # programs for which a multiprocessor has the shared memory, registers and tensor memory
    ptx_sha256: str  # 16 digits; the PTX has no line numbers and no file names in it


class _OnGpu(torch.Tensor):
    """A tensor without contents that says that it is on a GPU."""

    device = GPU


class _Allocate(TorchFunctionMode):
    """Every new tensor is one without contents that says that it is on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs or func is torch.empty:
            kwargs["device"] = "meta"
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and not isinstance(result, _OnGpu):
            return result.as_subclass(_OnGpu)
        return result


class _Driver:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, capability: Capability) -> None:
        self._sm = 10 * capability[0] + capability[1]

    def get_current_device(self) -> int:
        return self._sm  # Triton keeps what it has compiled by the device's number

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._sm, 32)


@contextlib.contextmanager
def gpu_target(capability: Capability) -> Iterator[list[Compiled]]:
    """Make tensors and launches of the block those of a GPU of this capability; the list gets what each launch compiled."""
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            built = run(kernel, *args, grid=grid, warmup=True, **options)
        compiled.append(_described(built, log.getvalue(), options.get("TILE"), capability))

    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS[capability])
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (JITFunction, "run", compile_only),
            (torch.cuda, "get_device_capability", lambda _device=None: capability),
            (torch.cuda, "get_device_properties", lambda _device=None: properties),
            (torch.cuda, "device", lambda _device=None: contextlib.nullcontext()),
            (driver, "_active", _Driver(capability)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for group in (knobs.cache, knobs.compilation, knobs.nvidia):
            stack.enter_context(group.scope())
        # Kernels next to the log of ptxas, as no other code keeps them.
        knobs.cache.dir = str(Path(knobs.cache.dir, "gpu_target"))
        knobs.compilation.disable_line_info = True
        knobs.nvidia.dump_ptxas_log = True
        stack.enter_context(_Allocate())
        yield compiled


def forget_line_numbers(*modules: Any) -> None:
    """Let Triton's cache, and the PTX, not depend on the lines where the modules' kernels stand."""
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.starting_line_number = 1


def _described(built: Any, log: str, tile: ProgramTile | None, capability: Capability) -> Compiled:
    """Return what a compiled kernel is; `log` is that of ptxas, empty where Triton's cache had the kernel."""
    cache = get_cache_manager(built.hash)
    if "registers" in log:
        cache.put(log, "ptxas.log", binary=False)
    else:
        log = Path(cache.get_file("ptxas.log")).read_text()
    ptx = built.asm["ptx"]
    registers = _number(r"Used (\d+) registers", log)
    columns = getattr(built.metadata, "tmem_size", 0) or 0
    shared, warps = built.metadata.shared, built.metadata.num_warps
    return Compiled(
        built.metadata.name,
        None if tile is None else tile._asdict(),
        warps,
        built.metadata.num_stages,
        shared,
        columns,
        registers,
        _number(r"(\d+) bytes spill stores", log),
        _number(r"(\d+) bytes spill loads", log),
        _number(r"(\d+) bytes stack frame", log),
        tuple(name for name, pattern in MATRIX_INSTRUCTIONS.items() if re.search(pattern, ptx)),
        programs_that_fit(capability, shared, registers, warps, columns),
        hashlib.sha256(ptx.encode()).hexdigest()[:16],
    )


def programs_that_fit(capability: Capability, shared_bytes: int, registers: int, num_warps: int, columns: int) -> int:
    """Return the programs for which a multiprocessor has the shared memory, registers and tensor memory.

    Registers are given to a warp in units of 256 (CUDA Occupancy Calculator).
    """
    per_multiprocessor = (family_that_runs(capability).shared_memory_kib + RESERVED_KIB) * 1024
    fit = [
        per_multiprocessor // (shared_bytes + RESERVED_KIB * 1024),
        REGISTERS // (-(-registers * 32 // 256) * 256 * num_warps),
    ]
    if columns:
        fit.append(TENSOR_MEMORY_COLUMNS // columns)
    return min(fit)


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found.group(1)) if found else 0
