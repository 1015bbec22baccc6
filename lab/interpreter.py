"""Speed up Triton's interpreter, and tell errors that the interpreter causes from errors of a kernel.

Triton 3.7's interpreter searches for the functions of `triton.language` at every call of a `@triton.jit` function, which is
half of the time of a kernel with many helpers. The lab makes this search once per launch. The lab also turns off two other
costs: each sum and product of integers was computed again in 64 bits for `device_assert`, and a table of NumPy dtypes was built
for each lookup.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np

INTERPRETER = "triton.runtime.interpreter"  # Triton imports it only if its kernels are interpreted


class LanguagePatches:
    """Replacements for two functions of Triton's interpreter, `launch` and `patch_language`. With them, the interpreter patches
    `triton.language` in a module once per launch, and not at every call of a `@triton.jit` function.
    """

    def __init__(self, launch: Callable[..., Any], patch_language: Callable[..., Any]) -> None:
        self._launch = launch
        self._patch_language = patch_language
        self._modules: set[str] | None = None  # None: no launch is running

    def launch(self, executor: Any, *args: Any, **kwargs: Any) -> None:
        self._modules = set()
        try:
            self._launch(executor, *args, **kwargs)
        finally:
            self._modules = None

    def patch_language(self, fn: Callable[..., Any]) -> Any:
        """Patch `triton.language` in the module of `fn`. Return an object that undoes the patch, or None if the current launch
        has already patched this module.
        """
        if self._modules is None:
            return self._patch_language(fn)
        if fn.__module__ in self._modules:
            return None
        self._modules.add(fn.__module__)
        return self._patch_language(fn)


def by_scalar_name(np_dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a version of `np_dtype_of` (Triton type to NumPy dtype) that caches results by the name of the element type."""
    known: dict[str, Any] = {}

    def looked_up(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar  # itself, or the type of a block's elements
        if scalar.name not in known:
            known[scalar.name] = np_dtype_of(scalar)
        return known[scalar.name]

    return looked_up


def quicken() -> None:
    """Replace functions of Triton's interpreter by faster ones, if the interpreter is imported. Because this changes Triton for
    the whole process, call it only in processes of the lab.
    """
    interpreter = sys.modules.get(INTERPRETER)
    if interpreter is not None:
        _change(interpreter)


@functools.cache  # once in a process
def _change(interpreter: Any) -> None:
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if builder is not None and options is not None and not options.debug:
        builder.options = replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = by_scalar_name(interpreter._get_np_dtype)
    if hasattr(interpreter, "GridExecutor") and hasattr(interpreter, "_patch_lang"):
        patches = LanguagePatches(interpreter.GridExecutor.__call__, interpreter._patch_lang)
        interpreter._patch_lang = patches.patch_language
        interpreter.GridExecutor.__call__ = lambda self, *args, **kwargs: patches.launch(self, *args, **kwargs)


# Class of the interpreter -> its methods that compute on the bit patterns of bf16 values as if they were integers.
COMPUTING = {
    "InterpreterBuilder": "binary_op ternary_op unary_op create_fma create_dot create_rsqrt create_atomic_rmw",
    "ReduceOps": "apply_impl",
    "ScanOps": "apply_impl",
}
OTHERWISE_THAN_A_GPU = (
    "Triton's interpreter computes bf16 otherwise than a GPU: judge the rest with --dtypes fp16/fp16, and bf16 on a GPU"
)


@dataclass
class Bf16:
    """Whether a kernel used bf16 such that Triton's interpreter and a GPU give different results. Set by `noting_bf16`."""

    computes: bool = False  #: computed on the bit patterns of bf16 values: errors of any size
    truncates: bool = False  #: truncated float32 to bf16, where a GPU rounds: errors of a few roundings


@contextmanager
def noting_bf16() -> Iterator[Bf16]:
    """Yield a `Bf16`, and set its fields during the `with` block. Both fields stay False if the kernel does no arithmetic in
    bf16, converts bf16 only from and to float32, and converts to bf16 only numbers that bf16 represents exactly.
    """
    found, interpreter = Bf16(), sys.modules.get(INTERPRETER)
    methods = [
        (getattr(interpreter, name, None), each) for name, of_class in COMPUTING.items() for each in of_class.split()
    ]
    methods += [(getattr(interpreter, "InterpreterBuilder", None), "cast_impl")]
    held = [(owner, name, getattr(owner, name)) for owner, name in methods if hasattr(owner, name)]
    for owner, name, method in held:
        setattr(owner, name, _noting(found, name, method))
    try:
        yield found
    finally:
        for owner, name, method in held:
            setattr(owner, name, method)


def _noting(found: Bf16, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(self: Any, *given: Any, **named: Any) -> Any:
        operands = given[0] if given and isinstance(given[0], tuple) else given
        dtypes = [_dtype_of(each) for each in operands]
        if name == "cast_impl":
            source, target = dtypes[0], given[1].scalar.name
            is_cut = (source, target) == ("fp32", "bf16")
            found.truncates |= is_cut and bool((np.asarray(given[0].data).view(np.uint32) & 0xFFFF).any())
            found.computes |= "bf16" in (source, target) and {source, target} != {"fp32", "bf16"}
        elif np.where not in given:  # which only chooses
            found.computes |= "bf16" in dtypes
        return method(self, *given, **named)

    return noted


def _dtype_of(operand: Any) -> str:
    return getattr(getattr(getattr(operand, "dtype", None), "scalar", None), "name", "")


def limit_of(error: BaseException) -> str:
    """Return a sentence if a kernel failed because Triton's interpreter does not support what the kernel does, such as inline
    assembly. Return "" for an error that the kernel may have caused.
    """
    cause, seen = error, {error}
    while cause.__cause__ is not None and cause.__cause__ not in seen:  # an error may be its own cause
        cause = cause.__cause__
        seen.add(cause)
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    is_own = module == INTERPRETER and not isinstance(cause, ValueError)  # it raises ValueError for a kernel's mistake
    is_alias = module.startswith("triton.") and ("@triton.jit" in str(cause) or "InterpreterBuilder" in str(cause))
    if INTERPRETER not in sys.modules or not (is_own or is_alias):
        return ""
    return f"not judged here, for Triton's interpreter cannot run it ({type(cause).__name__}: {cause}): {_cure()}"


def _cure() -> str:
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return "the interpreter of Triton before 3.7 needs NumPy before 2.4: pip install 'numpy<2.4'"
    return "judge it on a GPU"
