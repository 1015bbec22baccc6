"""Detect whether a kernel has changed the functions and settings by which it is timed and judged.

A kernel runs in the process that judges it, where Python lets it replace functions, constants and settings. So the functions of
`WATCHED` modules and of all loaded modules of the lab are recorded before a kernel is loaded, and compared afterwards. A
replaced function, code, constant, hook, default or operator of torch is a change. Writes of native code into the process's
memory are not detected (docs/evidence/trust.md).
"""

import functools
import gc
import importlib
import itertools
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
# Operators that comparisons use; torch.library can replace their kernels.
OPERATORS = (
    "abs",
    "all",
    "any",
    "clone",
    "copy_",
    "div",
    "eq",
    "gt",
    "isfinite",
    "linalg_vector_norm",
    "max",
    "mul",
    "sub",
)
OF_CLASSES = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in CLASSES)
# Prefixes of environment variables that change how any kernel is compiled.
COMPILERS = ("TRITON_", "DISABLE_PTXAS", "PTXAS_", "NVCC_", "LLVM_")
SHOWN = 3  # changes that a sentence names
PLAIN = (int, float, str, bytes, bool, type(None), torch.dtype)
# Names that change without a kernel's doing: Python's own names, and names that torch.compile wraps.
PASSING = (
    "__builtins__",
    "__warningregistry__",
    "__annotations__",
    "torch.manual_seed",
    "TRITON_CACHE_DIR",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_PTXAS_BLACKWELL_PATH",  # FlashInfer's import sets it where there is a ptxas
)


class ChangedBindingsError(RuntimeError):
    """A kernel changed functions or settings by which it is timed or judged, so all later times and verdicts are invalid."""


@dataclass(frozen=True, eq=False)
class Bindings:
    """The recorded functions and settings, by a path such as "lab.references.errors.relative_l2"."""

    held: tuple[tuple[str, Mapping[str, Any], str, Any], ...]  # path, mapping that holds the name, name, object
    functions: tuple[tuple[str, types.FunctionType, tuple[Any, ...]], ...]  # path, function, its replaceable parts
    constants: tuple[tuple[str, Any, tuple[Any, ...]], ...]  # path, a list or dict of plain values, its items
    settings: Mapping[str, Any]  # settings of the process by name
    # Names and values of all mappings in `held` as views, the numbers of entries of the views, and all entries.
    _together: tuple[list[Collection[Any]], list[int], list[Any]] = field(init=False)
    # Functions with no other parts than code and defaults, and these parts and the None in place of keyword defaults.
    _plain: tuple[list[types.FunctionType], list[Any]] = field(init=False)
    _others: list[tuple[types.FunctionType, tuple[Any, ...]]] = field(init=False)  # the other ones, and their parts

    def __post_init__(self) -> None:
        # Every case is followed by a comparison, so that it goes over all entries together, and over each function once.
        holders = {id(holder): holder for _, holder, _, _ in self.held}.values()
        views: list[Collection[Any]] = [view for each in holders for view in (each.keys(), each.values())]
        views.append([object()])  # which moves if an entry before it is gone
        object.__setattr__(self, "_together", (views, [*map(len, views)], [*itertools.chain.from_iterable(views)]))
        functions = {id(each): (each, parts) for _, each, parts in self.functions}.values()
        is_plain = [len(parts) == 2 and each.__kwdefaults__ is None for each, parts in functions]
        plain = [*itertools.compress(functions, is_plain)]
        parts_of_plain = [part for _, parts in plain for part in (*parts, None)]
        object.__setattr__(self, "_plain", ([each for each, _ in plain], parts_of_plain))
        object.__setattr__(self, "_others", [*itertools.compress(functions, map(operator.not_, is_plain))])

    def changes(self) -> list[str]:
        """Return the paths of recorded objects, and the names of settings, that have changed. New objects do not count."""
        now = dict(_settings())
        (views, sizes, entries), (functions, parts_of_plain) = self._together, self._plain
        are_entries_same = _are_same(entries, views, sizes)
        are_functions_same = _are_same(parts_of_plain, functions, parts=_PARTS) and not any(
            _differs(*each) for each in self._others
        )
        return [
            *(
                path
                # Names too: a kernel may put an old object under a new name, and its own object under the old name.
                for path, holder, name, value in (() if are_entries_same else self.held)
                if holder.get(name) is not value
            ),
            *(path for path, each, parts in (() if are_functions_same else self.functions) if _differs(each, parts)),
            *(path for path, constant, items in self.constants if _items(constant) != items),
            *(name for name, value in self.settings.items() if now[name] != value),
        ]

    def check(self) -> None:
        """Raise ChangedBindingsError if a function, constant or setting has changed since `bindings` recorded it."""
        if changed := self.changes():
            raise ChangedBindingsError(in_words(changed))


def in_words(changed: list[str]) -> str:
    """Return a sentence that names the first `SHOWN` changes, and how many more there are."""
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return f"the kernel is dishonest: it changed {', '.join(changed[:SHOWN])}{more}, by which it is timed and judged"


def bindings() -> Bindings:
    """Record the functions and settings by which kernels are timed and judged. Call it before a kernel is loaded."""
    held: list[tuple[str, Mapping[str, Any], str, Any]] = []
    for name in WATCHED:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        is_lab = name.partition(".")[0] == "lab"
        if isinstance(module, types.ModuleType) and (is_lab or name in WATCHED):
            held += [(name, sys.modules, name, module), *_held_by(name, module)]
            for own in vars(module).values() if is_lab else ():
                if isinstance(own, type) and own.__module__ == name:
                    held += _held_by(f"{name}.{own.__qualname__}", own)
    for cls in CLASSES:
        held += _held_by(f"{cls.__module__}.{cls.__qualname__}", cls)
    functions = [(path, each, _parts(each)) for path, _, _, value in held for each in _functions_in(value)]
    constants = [
        (path, value, _items(value)) for path, _, _, value in held if path.startswith("lab.") and _is_constant(value)
    ]
    return Bindings(tuple(held), tuple(functions), tuple(constants), dict(_settings()))


def _held_by(owner: str, holder: Any) -> list[tuple[str, Mapping[str, Any], str, Any]]:
    # Objects other than functions in modules outside the lab are state, which may change.
    names, is_lab = vars(holder), owner.partition(".")[0] == "lab"
    return [
        (f"{owner}.{name}", names, name, value)
        for name, value in names.items()
        if name not in PASSING
        and f"{owner}.{name}" not in PASSING
        and (is_lab or callable(value) or owner in OF_CLASSES)
    ]


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions in a value: itself, or those inside a property, a method object, a partial or a wrapper."""
    if isinstance(value, types.ModuleType):
        return
    if isinstance(value, property):
        inner = [value.fget, value.fset]
    elif isinstance(value, staticmethod | classmethod):
        inner = [value.__func__]
    else:
        inner = [getattr(value, "func", None), getattr(value, "__wrapped__", None), value]
    yield from (each for each in inner if isinstance(each, types.FunctionType))


def _parts(function: types.FunctionType) -> tuple[Any, ...]:
    """Return what determines a function's behaviour: its code, its defaults, and the functions that its closure holds."""
    keywords = (function.__kwdefaults__ or {}).items()
    cells = [held for cell in function.__closure__ or () if isinstance(held := _contents(cell), types.FunctionType)]
    return function.__code__, function.__defaults__, *(part for pair in keywords for part in pair), *cells


_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


def _are_same(
    before: list[Any],
    *of_each: Iterable[Any],
    parts: Callable[..., Iterable[Any]] = itertools.islice,  # bound here, before a kernel can replace Python's own
    every: Callable[..., bool] = all,
    pairs: Callable[..., Any] = map,
    is_same: Callable[..., bool] = operator.is_,
    joined: Callable[..., Any] = itertools.chain.from_iterable,
) -> bool:
    """Return True if the parts of all objects, one object's after another's, are the objects in `before`, in the same order."""
    return every(pairs(is_same, joined(pairs(parts, *of_each)), before))


def _differs(function: types.FunctionType, parts: tuple[Any, ...], is_same: Callable[..., bool] = operator.is_) -> bool:
    code, defaults, *rest = parts
    if function.__code__ is not code or function.__defaults__ is not defaults:
        return True
    if not rest and not function.__kwdefaults__:  # most functions: the check runs around every case
        return False
    now = _parts(function)
    return len(now) != len(parts) or not all(map(is_same, now, parts))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _is_constant(value: Any) -> bool:
    """Return True for a list or dict of plain values. Other lists and dicts are caches and registries, which grow."""
    if isinstance(value, dict):
        return all(isinstance(each, PLAIN) for each in (*value, *value.values()))
    return isinstance(value, list) and all(isinstance(each, PLAIN) for each in value)


def _items(constant: Any) -> tuple[Any, ...]:
    return tuple(constant.items() if isinstance(constant, dict) else constant)


def _settings() -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the settings of this process and thread that can change a result, such as allow_tf32."""
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
    yield "threading.settrace", threading.gettrace()
    yield "threading.setprofile", threading.getprofile()
    yield (
        "environment variables of compilers",
        {name: value for name, value in os.environ.items() if name.startswith(COMPILERS) and name not in PASSING},
    )
    yield "gc.callbacks", list(gc.callbacks)
    yield "sys.meta_path", tuple(map(id, sys.meta_path))
    for name in OPERATORS:
        yield f"torch's operator aten::{name}", _kernels_of(name)


def _kernels_of(name: str) -> str:
    """Return torch's dispatch tables of an aten operator as text. It says at which source line each kernel was registered."""
    return "".join(map(torch._C._dispatch_dump, _overloads(name)))


@functools.cache
def _overloads(name: str) -> list[str]:
    overloads = getattr(torch.ops.aten, name).overloads()
    return [f"aten::{name}" if each == "default" else f"aten::{name}.{each}" for each in overloads]
