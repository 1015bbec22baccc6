"""Make FlashInfer and the lab treat CPU tensors as tensors of an absent GPU."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lab.gpus
from lab.dry_run import build
from lab.dry_run.launcher import Gpu, Launcher, gpu_named
from lab.dry_run.launches import CompiledCall, Copy, Fill, Launch, events
from lab.gpus import SM100, family_of

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
            answers[getattr(utils, name)] = _answer(gpu.capability in capabilities)
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


def _answer(value: Any) -> Function:
    return lambda *arguments, **named: value


def _noting(made: Machine, backend: str, compiles: Function) -> Function:
    """Return a replacement for `compiles`, a function that compiles a kernel module: calls of the module are only recorded."""
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
