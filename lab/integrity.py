"""Detect whether a kernel has changed the functions and settings by which it is timed and judged.

A kernel runs in the same process as the judge, so it can replace functions, constants and settings of Python modules. Those of
the `WATCHED` modules and of all loaded modules of the lab are recorded before a kernel is loaded, and compared afterwards.
Writes of native code into the process's memory are not detected (docs/evidence/trust.md).
"""

import builtins
import functools
import gc
import importlib
import itertools
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack

WATCHED = (
    "builtins",
    "dataclasses",
    "gc",
    "inspect",
    "json",
    "math",
    "pickle",
    "random",
    "statistics",
    "threading",
    "time",
    "torch",
    "torch._C",
    "torch._tensor",
    "torch.cuda",
    "torch.cuda.graphs",
    "torch.cuda.streams",
    "torch.linalg",
    "torch.nn.functional",
)
# Classes whose methods are watched, in addition to the classes that the modules define.
CLASSES = (torch.Tensor, torch.Generator, torch.cuda.Event, torch.cuda.Stream, torch.cuda.CUDAGraph)
# Operators that expected results and comparisons use; torch.library can replace their kernels.
OPERATORS = """
    _local_scalar_dense _to_copy _unique2 _unsafe_view abs add alias all amax any arange baddbmm_ bitwise_and
    bitwise_not bitwise_or bmm cat clamp clone copy_ cumsum detach div div_ empty eq equal exp exp_ expand
    floor_divide ge gt index index_add index_select isfinite isinf le lift_fresh linalg_vector_norm log log1p lt
    masked_fill masked_fill_ max maximum mean minimum mul mul_ nan_to_num ne neg new_empty new_full new_ones
    new_zeros ones_like pow reciprocal repeat_interleave round scalar_tensor scatter_reduce select slice sort
    split split_with_sizes sqrt squeeze stack sub sub_ sum topk transpose unbind unique_consecutive unsqueeze view
    where zeros zeros_like
"""
OF_CLASSES = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in CLASSES)
# Prefixes of environment variables that change how any kernel is compiled.
COMPILERS = ("TRITON_", "DISABLE_PTXAS", "PTXAS_", "NVCC_", "LLVM_")
SHOWN = 3  # changes that a sentence names
PLAIN = (int, float, str, bytes, bool, type(None), torch.dtype)
# Names whose changes are allowed: Python's own names, and names that torch, Triton or FlashInfer change themselves.
ALLOWED = (
    "__builtins__",
    "__warningregistry__",
    "__annotations__",
    *("__cached__", "__doc__", "__loader__", "__package__", "__spec__"),
    "torch.manual_seed",
    "TRITON_CACHE_DIR",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_PTXAS_BLACKWELL_PATH",  # FlashInfer's import sets it where there is a ptxas
)


class ChangedBindingsError(RuntimeError):
    """A kernel changed functions or settings by which it is timed or judged. All later times and verdicts are invalid."""


Held = tuple[str, Mapping[str, Any], str, Any]  # path, mapping that holds the name, name, object
# A module or class: its path, its names, and the names of Python or of base classes that a new name would hide.
Hiding = tuple[str, Mapping[str, Any], frozenset[str]]
# Names that Python itself adds to a class, when an instance is pickled or copied and when annotations are read.
CACHED = {"__slotnames__", "__annotations__", "__annotations_cache__"}


class Bindings:
    """A record of the functions, constants and settings by which kernels are timed and judged. `bindings` makes it, and
    `changes` compares it with the present state. Each recorded object has a path such as "lab.ranges.dtype_of".
    """

    def __init__(self, held: Sequence[Held], hiding: Sequence[Hiding] = ()) -> None:
        self._held, self._hiding, self._settings = held, hiding, dict(_settings())
        functions = [(path, each) for path, _, _, value in held for each in _functions_in(value)]
        self._functions = [(path, each, each.__code__, each.__defaults__, _inner(each)) for path, each in functions]
        constants = [(path, value) for path, _, _, value in held if path.startswith("lab.") and _is_constant(value)]
        self._constants = [(path, value, _items(value)) for path, value in constants]
        self._sizes = self._sizes_now()

    def is_current(self) -> bool:
        """Return True if nothing changed since the record was made: `changes` is empty, no module of the lab or in `WATCHED`
        (such as "math") was loaded, and no name was added to a recorded module or class.
        """
        return self._sizes == self._sizes_now() and not self.changes()

    def _sizes_now(self) -> tuple[int, ...]:
        return len([*_watched()]), *(len(holder) for _, holder, *_ in self._held if holder is not sys.modules)

    def changes(self) -> list[str]:
        """Return the paths of recorded objects and the names of settings that have changed. A new name is listed in two
        cases: in a module of the lab, if it is a built-in name such as `len`; in a class, if a base class has the name.
        """
        now = dict(_settings())
        return [
            *(path for path, holder, name, value in self._held if holder.get(name) is not value),
            *(
                path
                for path, each, code, defaults, inner in self._functions
                if each.__code__ is not code  # `changes` runs after every judged case: few functions need a call here
                or each.__defaults__ is not defaults
                or ((inner or each.__kwdefaults__ or each.__closure__) and _differ(_inner(each), inner))
            ),
            *(path for path, each, items in self._constants if _items(each) != items),
            *(
                f"{owner}.{name}"
                for owner, names, hidden in self._hiding
                if not hidden.isdisjoint(names)
                for name in hidden.intersection(names)
            ),
            *(name for name, value in self._settings.items() if now[name] != value),
        ]

    def check(self) -> None:
        if changed := self.changes():
            raise ChangedBindingsError(in_words(changed))


def in_words(changed: list[str]) -> str:
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return f"the kernel is dishonest: it changed {', '.join(changed[:SHOWN])}{more}, by which it is timed and judged"


def bindings() -> Bindings:
    """Record the functions and settings by which kernels are timed and judged. Call this before a kernel is loaded."""
    held: list[Held] = []
    hiding: list[Hiding] = []
    classes: list[type[Any]] = [*CLASSES]
    for name in WATCHED:
        importlib.import_module(name)
    for name, module in _watched():
        held += [(name, sys.modules, name, module), *_held_by(name, module)]
        if _is_lab(name):
            hiding.append((name, vars(module), frozenset(vars(builtins)) - vars(module).keys()))
            classes += [own for own in vars(module).values() if isinstance(own, type) and own.__module__ == name]
    for cls in classes:
        path, inherited = f"{cls.__module__}.{cls.__qualname__}", frozenset(itertools.chain(*map(dir, cls.__bases__)))
        held += _held_by(path, cls)
        hiding.append((path, vars(cls), inherited - vars(cls).keys() - CACHED))
    return Bindings(tuple(held), tuple(hiding))


def _is_lab(path: str) -> bool:
    return path.partition(".")[0] == "lab"


def _watched() -> Iterator[tuple[str, types.ModuleType]]:
    for name, module in list(sys.modules.items()):
        if (name in WATCHED or _is_lab(name)) and isinstance(module, types.ModuleType):
            yield name, module


def _held_by(owner: str, holder: Any) -> list[Held]:
    # Objects other than functions in modules outside the lab are state, which may change.
    names, is_lab = vars(holder), _is_lab(owner)
    return [
        (f"{owner}.{name}", names, name, value)
        for name, value in names.items()
        if name not in ALLOWED
        and f"{owner}.{name}" not in ALLOWED
        and (is_lab or callable(value) or owner in OF_CLASSES)
    ]


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    if not isinstance(value, types.ModuleType):
        inner = (getattr(value, name, None) for name in ("fget", "fset", "__func__", "func", "__wrapped__"))
        yield from (each for each in (*inner, value) if isinstance(each, types.FunctionType))


def _inner(function: types.FunctionType) -> list[Any]:
    """Return the names and defaults of a function's keyword-only arguments, and the functions in its closure."""
    cells = map(_contents, function.__closure__ or ())
    keywords = (part for pair in (function.__kwdefaults__ or {}).items() for part in pair)
    return [*keywords, *(each for each in cells if isinstance(each, types.FunctionType))]


def _differ(now: list[Any], before: list[Any], is_same: Callable[..., bool] = operator.is_) -> bool:
    return len(now) != len(before) or not all(map(is_same, now, before))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _is_constant(value: Any) -> bool:
    """Return True for a list or dict of plain values. Other lists and dicts are caches, whose contents may change."""
    if isinstance(value, dict):
        return all(isinstance(each, PLAIN) for each in (*value, *value.values()))
    return isinstance(value, list) and all(isinstance(each, PLAIN) for each in value)


def _items(constant: Any) -> tuple[Any, ...]:
    return tuple(constant.items() if isinstance(constant, dict) else constant)


def _settings() -> Iterator[tuple[str, Any]]:
    yield "torch's default dtype", torch.get_default_dtype()
    yield "torch's default device", str(torch.get_default_device())
    yield "torch's grad mode", torch.is_grad_enabled()
    yield "torch's inference mode", torch.is_inference_mode_enabled()
    yield "torch's precision of float32 products", torch.get_float32_matmul_precision()
    yield "torch.backends.cuda.matmul.allow_tf32", torch.backends.cuda.matmul.allow_tf32
    yield "torch's autocast", torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    yield "torch's deterministic algorithms", torch.are_deterministic_algorithms_enabled()
    yield "torch's stack of function modes", _len_torch_function_stack()
    yield "torch's stack of dispatch modes", _len_torch_dispatch_stack()
    yield "sys.settrace", sys.gettrace()
    yield "sys.setprofile", sys.getprofile()
    monitoring: Any = getattr(sys, "monitoring", None)  # in Python 3.12 and newer
    # Events stay active when their tool gives its number back.
    events: dict[str, int] = getattr(monitoring, "_all_events", dict)()
    yield "sys.monitoring", [events, *(monitoring.get_tool(each) for each in range(6))] if monitoring else []
    yield "threading.settrace", threading.gettrace()
    yield "threading.setprofile", threading.getprofile()
    yield (
        "environment variables of compilers",
        {name: value for name, value in os.environ.items() if name.startswith(COMPILERS) and name not in ALLOWED},
    )
    yield "gc.callbacks", list(gc.callbacks)
    yield "sys.meta_path", tuple(map(id, sys.meta_path))
    for name in OPERATORS.split():
        # Dispatch tables, with the source line that registered each kernel.
        yield f"torch's operator aten::{name}", "".join(map(torch._C._dispatch_dump, _overloads(name)))


@functools.cache
def _overloads(name: str) -> list[str]:
    """Return the names of an operator's overloads that have kernels. Overloads that only TorchScript uses have none."""
    overloads = getattr(torch.ops.aten, name).overloads()
    names = [f"aten::{name}" if each == "default" else f"aten::{name}.{each}" for each in overloads]
    return [each for each in names if torch._C._dispatch_has_kernel(each)]
