"""Make FlashInfer and the lab treat CPU tensors as tensors of an absent GPU, by a fake CUDA that simulates one GPU."""

import ctypes
import functools
import importlib
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import lab.gpus
from lab.dry_run import build, kernel_table
from lab.dry_run.arithmetic import HostMemory, compute
from lab.dry_run.launches import CompiledCall, Copy, Fill, Launch, events
from lab.gpus import SM100, Capability, family_of, family_that_runs

Function = Callable[..., Any]
# FlashInfer's functions that check the GPU, and the compute capabilities for which they return True. They are replaced, because
# they also read torch's CUDA version, which a CPU build does not have.
SUPPORTED = {
    "is_sm90a_supported": ((9, 0),),
    "is_sm100a_supported": ((10, 0), (10, 3)),
    "is_sm100f_supported": ((10, 0), (10, 3)),
    "is_sm110a_supported": ((11, 0),),
    "is_sm120a_supported": ((12, 0),),
    "is_sm120f_supported": ((12, 0), (12, 1)),
    "is_sm121a_supported": ((12, 1),),
    "is_sm12x_supported": ((12, 0), (12, 1)),
}


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


_launcher_for = functools.cache(Launcher)
ENTRIES = ("utils", "decode", "prefill", "mla", "xqa")  # the modules of FlashInfer's TRT-LLM calls


class Machine:
    """A simulated GPU, and the CUDA calls that FlashInfer has made for it.

    Attributes:
        gpu: the GPU whose properties the fake CUDA reports.
        compiled_calls: the calls of XQA and fmha_v2 since the last `clear`. FlashInfer compiles these kernels; none was run.
    """

    def __init__(self, gpu: Gpu, computes: bool = False) -> None:
        self.gpu = gpu
        self._computes = computes
        self.compiled_calls: tuple[CompiledCall, ...] = ()
        self._launcher: Launcher | None = None

    @property
    def launcher(self) -> Launcher:
        """Return trtllm-gen's launcher. It is compiled at the first access, which may raise NotBuiltError."""
        if self._launcher is None:
            self._launcher = _launcher_for(self.gpu)
            self._launcher.computes = self._computes
            self._launcher.clear()
        return self._launcher

    @property
    def table_lacks(self) -> tuple[str, ...]:
        """Return the columns that the launcher reads and the kernel table lacks. The launcher gets false for them."""
        return self.launcher.table.lacks(build.launcher_members())

    @property
    def events(self) -> tuple[Launch | Fill | Copy, ...]:
        """Return the kernel launches, memsets and copies that the launcher has made since the last `clear`, in order."""
        return () if self._launcher is None else events(self._launcher.log())

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(each for each in self.events if isinstance(each, Launch))

    @property
    def fills(self) -> tuple[Fill, ...]:
        return tuple(each for each in self.events if isinstance(each, Fill))

    def clear(self) -> None:
        self.compiled_calls = ()
        if self._launcher is not None:
            self._launcher.clear()


@contextmanager
def machine(gpu: str | Gpu, computes: bool = False) -> Iterator[Machine]:
    """In the `with` block, make FlashInfer's and the lab's TRT-LLM functions accept CPU tensors as if they were on a GPU.

    FlashInfer's launcher runs with a fake CUDA library. XQA and fmha_v2 are not compiled: their calls are only recorded. The
    recorded calls can be read after the block, until a `Machine` of the same GPU is made again. Use one machine at a time, in
    one thread.

    Args:
        gpu: a name in `GPUS`, or a `Gpu`.
        computes: each call also computes the outputs of its launches (`lab.dry_run.arithmetic`).

    Raises:
        ValueError: the GPU is unknown.
        lab.dry_run.build.NotBuiltError: the launcher cannot be compiled here.
    """
    gpu = gpu_named(gpu) if isinstance(gpu, str) else gpu
    made = Machine(gpu, computes)
    if family_of(gpu.capability) is SM100:
        _ = made.launcher  # compiled here, so that an error is raised before any call
    answers = {**_flashinfer_answers(made), lab.gpus.capability_of: lambda device: gpu.capability}
    _forget_cached()
    modules, holders = len(sys.modules), _holding(tuple(answers))
    for module, name, original in holders:
        setattr(module, name, answers[original])
    try:
        yield made
    finally:
        originals = {answer: original for original, answer in answers.items()}
        if len(sys.modules) != modules:  # modules imported inside hold the replacements
            holders += _holding(tuple(originals))
        for module, name, _ in holders:
            here: Any = getattr(module, name, None)
            if here in originals:
                setattr(module, name, originals[here])
        _forget_cached()


def _holding(functions: tuple[Function, ...]) -> tuple[tuple[Any, str, Function], ...]:
    """Return each module attribute of FlashInfer and the lab that is one of `functions`: (module, attribute name, function)."""
    by_id = {id(function): function for function in functions}
    packages = [each for name, each in list(sys.modules.items()) if name.partition(".")[0] in ("flashinfer", "lab")]
    return tuple(
        (module, name, by_id[id(value)])
        for module in packages
        for name, value in list(vars(module).items())
        if id(value) in by_id
    )


def _flashinfer_answers(made: Machine) -> dict[Function, Function]:
    """Return {original: replacement} for FlashInfer's functions that query the GPU or compile a module."""
    utils, decode, prefill, mla, xqa = _flashinfer_modules()
    gpu = made.gpu
    answers: dict[Function, Function] = {
        utils.get_compute_capability: lambda device: gpu.capability,
        utils.get_device_sm_count: lambda device: gpu.multiprocessors,
        utils.device_support_pdl: lambda device: gpu.capability >= (9, 0),
        decode.gen_trtllm_gen_fmha_module: lambda: SimpleNamespace(
            build_and_load=lambda: made.launcher, get_library_paths=lambda: ()
        ),
        xqa.get_xqa_module: _noting(made, "xqa", xqa.get_xqa_module),
        xqa.get_xqa_module_mla: _noting(made, "xqa_mla", xqa.get_xqa_module_mla),
    }
    if hasattr(prefill, "get_trtllm_fmha_v2_module"):  # from 0.6.7 on
        compiles = prefill.get_trtllm_fmha_v2_module
        answers[compiles] = _noting(made, "fmha_v2", compiles)
    for module in (decode, prefill, mla):
        answers[module.get_trtllm_gen_fmha_module] = lambda: made.launcher
    for name, capabilities in SUPPORTED.items():
        if hasattr(utils, name):
            answers[getattr(utils, name)] = functools.partial(
                lambda is_in, *_, **__: is_in, gpu.capability in capabilities
            )
    tuning = sys.modules.get("flashinfer.cute_dsl.utils")  # FlashInfer 0.6.13's MLA call queries it too
    if hasattr(tuning, "get_num_sm"):
        answers[tuning.get_num_sm] = lambda device: gpu.multiprocessors  # type: ignore[union-attr]
    counters = getattr(utils, "_get_trtllm_gen_multi_ctas_kv_counter_buffer", None)
    if counters is not None:
        answers[counters] = lambda *arguments, **named: made.launcher.zeroed(counters(*arguments, **named))
    return answers


def _flashinfer_modules() -> list[Any]:
    modules = [importlib.import_module(f"flashinfer.{name}") for name in ENTRIES]
    return [getattr(module, "_core", module) for module in modules]  # since 0.6.8 `mla` has its functions in `_core`


def _noting(made: Machine, backend: str, compiles: Function) -> Function:
    """Return a replacement for `compiles`, a function that compiles a kernel module. It compiles nothing, and records calls."""
    signature = inspect.signature(compiles)

    def module_for(*arguments: Any, **named: Any) -> Any:
        key = tuple(signature.bind(*arguments, **named).arguments.items())

        def note(function: str, *given: Any) -> None:
            made.compiled_calls += (CompiledCall(backend, key, function, given),)

        return _NotedModule(note)

    return module_for


class _NotedModule:
    def __init__(self, note: Function) -> None:
        self._note = note

    def __getattr__(self, function: str) -> Function:
        return functools.partial(self._note, function)


def _forget_cached() -> None:
    for module in _flashinfer_modules():
        for name, value in vars(module).items():
            if name.startswith(("is_sm", "get_trtllm_gen")) and hasattr(value, "cache_clear"):
                value.cache_clear()
