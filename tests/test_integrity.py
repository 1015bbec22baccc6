"""What is noted before a kernel is loaded, and what counts as a change of it."""

import builtins
import copyreg
import ctypes
import gc
import inspect
import itertools
import operator
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import lab.integrity
import lab.references.errors
import lab.workloads.inputs.contents
from lab.calls.problem import AttentionCall, AttentionProblem
from lab.checks.parameters.models import Configuration
from lab.checks.properties import checks
from lab.checks.run.verdicts import compare_lse, compare_output
from lab.integrity import OPERATORS, Bindings, ChangedBindingsError, bindings, in_words
from lab.metadata.engine.kv_cache import NVFP4KVCache, PagedKVCache
from lab.references.errors import Comparison
from lab.timing.staging import TooSmallError
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import build_attention
from lab.workloads.inputs.expected import SavedTensor, made
from tests.devices import Operations

OVERLOADS = lab.integrity._overloads  # the tests of other modules leave them out


@pytest.fixture(scope="module", autouse=True)
def noted() -> Iterator[Bindings]:
    """What is noted of all that the judge loads; each change of it is taken back."""
    checks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab.integrity, "_overloads", OVERLOADS)
        yield bindings()


def callback(*arguments: Any) -> None:
    pass


@dataclass
class Setting:
    """A setting that functions read and write, with an attribute in their place."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    value = property(lambda self: self.read(), lambda self, value: self.write(value))


def write_names_of_errors(names: dict[str, Any]) -> None:
    vars(lab.references.errors).clear()
    vars(lab.references.errors).update(names)


def write_callbacks(callbacks: list[Any]) -> None:
    gc.callbacks[:] = callbacks


# All values of a module in their order, but one under a new name, and another value under its name.
MOVED = {"moved" if name == "regress" else name: value for name, value in vars(lab.references.errors).items()}
# By the path that is named: an object or a mapping, the name of an attribute or a key, and its new value.
CHANGES: dict[str, tuple[Any, Any, Any]] = {
    "lab.references.errors.Comparison.passed": (Comparison, "passed", property(lambda self: True)),
    "lab.references.errors.relative_l2": (lab.references.errors.relative_l2, "__code__", callback.__code__),
    "lab.references.errors.regress": (
        Setting(lambda: dict(vars(lab.references.errors)), write_names_of_errors),
        "value",
        MOVED | {"regress": callback},
    ),
    "lab.references.errors.CONTROL_FACTOR": (lab.references.errors, "CONTROL_FACTOR", 1e9),
    "lab.workloads.inputs.contents.fill": (lab.workloads.inputs.contents.fill, "__defaults__", (0.0,)),
    "lab.calls.problem.AttentionProblem.__init__": (AttentionProblem.__init__.__kwdefaults__, "bmm1_scale", 2.0),
    "torch.cuda.memory_cached": (
        next(each for each in torch.cuda.memory_cached.__closure__ if callable(each.cell_contents)),
        "cell_contents",
        callback,
    ),
    "lab.workloads.inputs.contents.POISON": (lab.workloads.inputs.contents.POISON, torch.float16, 1.0),
    "torch.cuda.synchronize": (torch.cuda, "synchronize", lambda device=None: None),
    "torch.cuda.graphs.CUDAGraph.replay": (torch.cuda.CUDAGraph, "replay", lambda self: None),
    "torch.cuda.streams.Event.elapsed_time": (torch.cuda.Event, "elapsed_time", lambda self, end: 1.0),
    "torch.Tensor.norm": (torch.Tensor, "norm", lambda self, **_: self),
    "builtins.all": (builtins, "all", lambda _: True),
    "builtins.map": (builtins, "map", lambda *_: iter(())),
    "time.perf_counter_ns": (time, "perf_counter_ns", lambda: 0),
    "torch's default dtype": (Setting(torch.get_default_dtype, torch.set_default_dtype), "value", torch.float16),
    "torch's grad mode": (Setting(torch.is_grad_enabled, torch.set_grad_enabled), "value", False),
    "torch's deterministic algorithms": (
        Setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        "value",
        True,
    ),
    "environment variables of compilers": (os.environ, "DISABLE_PTXAS_OPT", "1"),
    "gc.callbacks": (Setting(gc.callbacks.copy, write_callbacks), "value", [callback]),
    "threading.setprofile": (Setting(threading.getprofile, threading.setprofile), "value", callback),
}


def change(name: str, patch: pytest.MonkeyPatch) -> None:
    holder, key, value = CHANGES[name]
    (patch.setitem if isinstance(holder, MutableMapping) else patch.setattr)(holder, key, value)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_until_it_is_taken_back(name: str, noted: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted.changes() == []
    change(name, monkeypatch)
    changed = noted.changes()
    monkeypatch.undo()
    assert name in changed
    assert noted.changes() == []


@pytest.mark.parametrize("name", ["lab.calls.problem.AttentionProblem.__init__", "torch.cuda.memory_cached"])
def test_a_change_is_named_if_python_s_own_comparison_is_replaced_too(
    name: str, noted: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(name, monkeypatch)
    monkeypatch.setattr(operator, "is_", lambda *_: True)
    monkeypatch.setattr(ctypes, "string_at", lambda *_: b"")
    assert name in noted.changes()


def test_a_change_is_named_if_python_s_own_lookups_are_replaced_too(
    noted: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = lab.references.errors.regress
    monkeypatch.setattr(lab.references.errors, "regress", callback)
    monkeypatch.setattr(operator, "itemgetter", lambda *_: lambda _: (own,))
    monkeypatch.setattr(itertools, "chain", types.SimpleNamespace(from_iterable=lambda _: iter((own,))))
    assert "lab.references.errors.regress" in noted.changes()


def test_another_module_in_the_place_of_the_labs_is_a_change(noted: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lab.references.errors", types.ModuleType("lab.references.errors"))
    assert noted.changes() == ["lab.references.errors"]


@pytest.fixture
def library() -> Iterator[Any]:
    yield (library := torch.library.Library("aten", "IMPL"))
    library._destroy()


@pytest.mark.filterwarnings("ignore:Warning only once")
def test_another_kernel_of_an_operator_is_a_change(library: Any, noted: Bindings) -> None:
    library.impl("linalg_vector_norm", lambda self, *_, **__: self.sum(-1), "CPU")
    assert noted.changes() == ["torch's operator aten::linalg_vector_norm"]


def test_every_operator_of_an_expected_result_and_its_comparison_is_watched() -> None:
    case = AttentionCase(AttentionCall.DECODE, (20, 33), (1, 1), window_left=16, sinks=True)
    expected = build_attention(case, torch.device("cpu")).truth()
    nan = torch.full_like(made(expected).control, float("nan"))
    with Operations() as operations:
        truth = made(expected)
        for out in (truth.control, torch.zeros_like(nan), nan):
            compare_output(out, truth)
        compare_lse(truth.lse_log2, truth)
        SavedTensor.of(truth.control).tensor()
    names = {name.split(".")[1] for name in operations.names}  # of such as aten.add.Tensor
    assert len(names) > 50
    assert names <= {*OPERATORS.split()}


@pytest.mark.parametrize("frees_its_number", [False, True])
def test_a_tool_that_monitors_python_is_a_change(monkeypatch: pytest.MonkeyPatch, frees_its_number: bool) -> None:
    tools: dict[int, str] = {}
    events: dict[str, int] = {}
    monitoring = types.SimpleNamespace(get_tool=tools.get, _all_events=lambda: dict(events))
    monkeypatch.setattr(sys, "monitoring", monitoring, raising=False)
    noted = bindings()
    if frees_its_number:
        events["PY_START"] = 1 << 5  # its callback goes on
    else:
        tools[5] = "a kernel's"
    assert noted.changes() == ["sys.monitoring"]


@pytest.mark.parametrize(
    ("holder", "name", "path"),
    [
        (lab.references.errors, "max", "lab.references.errors.max"),
        (Comparison, "__getattribute__", "lab.references.errors.Comparison.__getattribute__"),
        (TooSmallError, "__str__", "lab.timing.staging.TooSmallError.__str__"),
        (torch.Tensor, "to", "torch.Tensor.to"),
    ],
)
def test_a_new_name_that_hides_another_is_a_change(
    holder: Any, name: str, path: str, noted: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, name, getattr(holder, name, max), raising=False)
    assert noted.changes() == [path]
    monkeypatch.undo()
    assert noted.changes() == []


def test_a_copied_instance_and_read_annotations_of_a_subclass_are_no_change() -> None:
    copyreg._slotnames(PagedKVCache)  # type: ignore[attr-defined]
    noted = bindings()
    copyreg._slotnames(NVFP4KVCache)  # type: ignore[attr-defined]
    assert Configuration.__annotations__ is not None
    assert noted.changes() == []


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A new module of the lab, which has no names yet."""
    module = types.ModuleType("lab.added")
    monkeypatch.setitem(sys.modules, "lab.added", module)
    return module


def test_the_last_name_of_a_module_that_is_gone_is_a_change(added: Any) -> None:
    added.last = print
    noted = bindings()
    del added.last
    assert noted.changes() == ["lab.added.last"]


def test_what_is_new_and_what_is_only_used_is_no_change(noted: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.references.errors, "new", 1, raising=False)
    torch.manual_seed(torch.initial_seed())
    with torch.no_grad():
        torch.randn(3).norm()
    assert noted.changes() == []


def keyword_default_added(function: Any) -> None:
    function.__kwdefaults__["first"] = 1


def cell_emptied(function: Any) -> None:
    del next(cell for cell in function.__closure__ if inspect.isfunction(cell.cell_contents)).cell_contents


def class_in_a_cell_replaced(function: Any) -> None:
    next(cell for cell in function.__closure__ if cell.cell_contents is int).cell_contents = lambda: 1


@pytest.mark.parametrize("change", [keyword_default_added, cell_emptied, class_in_a_cell_replaced])
def test_a_part_of_a_function_that_is_new_or_gone_is_a_change(change: Callable[[Any], None], added: Any) -> None:
    def own() -> None:
        pass

    number = int

    def function(*, first: int, second: int = 2) -> None:
        own()
        number()

    added.function = function
    noted = bindings()
    assert noted.changes() == []
    change(function)
    assert noted.changes() == ["lab.added.function"]


def test_keyword_defaults_and_cells_of_any_function_are_compared(added: Any) -> None:
    held: Any = 3

    def with_keyword(*, first: int = 1) -> None: ...
    def plain(*, first: int) -> None: ...
    def with_cell() -> Any:
        return held

    added.with_keyword, added.plain, added.with_cell = with_keyword, plain, with_cell
    noted = bindings()
    assert noted.changes() == []
    with_keyword.__kwdefaults__ = None  # type: ignore[assignment]
    plain.__kwdefaults__ = {"first": 1}
    held = with_keyword
    assert noted.changes() == ["lab.added.with_keyword", "lab.added.plain", "lab.added.with_cell"]


def test_an_item_that_moves_from_one_constant_to_the_next_is_a_change(added: Any) -> None:
    added.first, added.second = ["x", "y"], ["z"]
    noted = bindings()
    added.second.insert(0, added.first.pop())
    assert noted.changes() == ["lab.added.first", "lab.added.second"]


def test_a_record_is_current_until_a_name_changes_or_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("lab.added")
    noted = bindings()
    assert noted.is_current()
    with monkeypatch.context() as patched:
        patched.setattr(lab.references.errors, "CONTROL_FACTOR", 1e9)
        assert not noted.is_current()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "added", module)  # which is no module of the lab
        assert noted.is_current()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "lab.added", module)
        assert not noted.is_current()
        with_module = bindings()
        module.__dict__["new"] = print
        assert with_module.changes() == []
        assert not with_module.is_current()
    assert noted.is_current()


def test_a_name_that_is_gone_is_a_change_and_a_new_one_is_none() -> None:
    names = {"alone": callback}
    noted = Bindings([("module.alone", names, "alone", callback)])
    names["new"] = change
    assert noted.changes() == []
    del names["alone"]
    assert noted.changes() == ["module.alone"]


def test_the_sentence_names_three_and_counts_the_others(noted: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it changed a, b, c and 2 more, by which" in in_words(list("abcde"))
    change("torch's default dtype", monkeypatch)
    with pytest.raises(ChangedBindingsError, match="torch's default dtype"):
        noted.check()
