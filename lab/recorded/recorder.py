"""Record the attention calls of an engine while it runs, in the lab's own form.

The functions are replaced by wrappers (`lab.recorded.wrapping`). In a CUDA graph, a wrapper holds the tensors of a call, so
that their memory is not reused. After each replay the call is recorded like an eager one. An argument that the engine itself
overwrites later in the same graph is recorded as it is after the replay.
"""

import functools
import inspect
import itertools
import json
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lab.calls import AttentionCall
from lab.calls.problem import E4M3
from lab.provenance import version_of
from lab.recorded import own_form
from lab.recorded.call import DAMAGED, RESULTS
from lab.recorded.wrapping import Wrapping
from lab.references.assertion import assert_close_to_reference

ENVIRONMENT = "LAB_RECORD"  # settings of the recorder of a process that `lab record` started, as JSON
FLASHINFER = ("flashinfer",)
PACKAGES = {name: name for name in ("torch", "triton", "sglang", "vllm", "transformers")} | {
    "flashinfer": "flashinfer-python"
}
MOST_CALLS, MOST_BYTES = 1000, 20 * 10**9
MOST_FRAMES = 12  # callers that are searched for the layer
# What may go wrong in recording a call; the engine must not see it.
ERRORS = (*DAMAGED, MemoryError)
_LOG = logging.getLogger("lab.recorded")


@dataclass(frozen=True)
class Triggers:
    """Which calls are kept: those for which all of these hold.

    Attributes:
        every: each n-th call (and replay of a captured call) of the layers and the time below.
        layers: calls of these layers; () for all. The layer is an attribute `layer_id` or `layer_idx`, or the number in
            `layer_name`, of a caller's `layer`, `module` or `self`.
        from_s, until_s: calls in this span of seconds after the recorder's start.
        longest: calls whose longest request has at least so many keys.
        non_finite: calls with NaN or infinity in the output or the LSE. The GPU checks this, and each call waits for the GPU.
        shadow: if not 0, each n-th call (instead of `every`) is judged at once on the same device, and kept if it is wrong or
            cannot be judged because its arguments are invalid.
        e4m3_arithmetic: the bound of shadow is that of kernels that round weights to e4m3 over an e4m3 cache.
    """

    every: int = 1
    layers: tuple[int, ...] = ()
    from_s: float = 0.0
    until_s: float = float("inf")
    longest: int = 0
    non_finite: bool = False
    shadow: int = 0
    e4m3_arithmetic: bool = False

    def __post_init__(self) -> None:
        if self.every < 1 or self.shadow < 0:
            raise ValueError(f"every={self.every} must be at least 1, and shadow={self.shadow} at least 0")


@dataclass(frozen=True)
class _Call:
    """A call that the recorder may keep; `given` has the arguments by name. `out` is None until the call returns."""

    function: AttentionCall
    given: Mapping[str, Any]
    number: int
    layer: int | None
    replay: int = 0
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    def returning(self, returned: Any) -> "_Call":
        out, lse = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (returned, None)
        return replace(
            self,
            out=self.given.get("out") if out is None else out,
            lse=self.given.get("lse") if lse is None else lse,
        )


@dataclass
class _Graph:
    calls: list[_Call] = field(default_factory=list)
    replays: int = 0


class _OfThread(threading.local):
    is_busy = False  # inside a recorded call: the calls that it makes are its own business
    graph: Any = None  # the graph that is being captured


class Recorder:
    """Records calls of this process to a folder. `record` makes one.

    Attributes:
        out: the folder.
        kept: number of files that were written.
        judged, wrong: number of calls that shadow judged, and that were wrong.
        kept_bytes: the bytes of the tensors in the files.
        has_ended: True after the end or after a limit; no call is recorded then.
    """

    def __init__(
        self,
        out: Path,
        triggers: Triggers,
        functions: Sequence[ModuleType | str],
        most_calls: int,
        most_bytes: int,
        before: bool,
    ) -> None:
        self.out, self.triggers = out, triggers
        self.kept = self.judged = self.wrong = self.kept_bytes = 0
        self.has_ended = False
        self._most_calls, self._most_bytes, self._writes_before = most_calls, most_bytes, before
        self._start, self._said = time.monotonic(), set[str]()
        self._numbers, self._matching = itertools.count(1), itertools.count(1)
        self._lock, self._of_thread = threading.RLock(), _OfThread()
        self._graphs: weakref.WeakKeyDictionary[Any, _Graph] = weakref.WeakKeyDictionary()
        self._wrapping = Wrapping(self._wrapper, [each.value for each in AttentionCall], functions)
        self._of_graphs: dict[str, Callable[..., Any]] = {}

    def start(self) -> None:
        """Wrap the functions and the methods of CUDA graphs."""
        self.out.mkdir(parents=True, exist_ok=True)
        graph = torch.cuda.CUDAGraph
        hooks = {"capture_begin": self._begin, "capture_end": self._end, "replay": self._replayed, "reset": self._reset}
        for name, hook in hooks.items():
            self._of_graphs[name] = getattr(graph, name)
            setattr(graph, name, _followed(self._of_graphs[name], hook))
        self._wrapping.install()

    def stop(self) -> None:
        """Put back all that `start` replaced."""
        self.has_ended = True
        self._wrapping.remove()
        for name, method in self._of_graphs.items():
            setattr(torch.cuda.CUDAGraph, name, method)
        self._graphs.clear()

    def _wrapper(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        function, names = AttentionCall(name), list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.has_ended or self._of_thread.is_busy:
                return original(*args, **kwargs)
            number = next(self._numbers)
            is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            if not is_captured and not self._chooses(_layer_of_caller):
                return original(*args, **kwargs)
            call = _Call(function, dict(zip(names, args, strict=False)) | kwargs, number, _layer_of_caller())
            run = functools.partial(original, *args, **kwargs)
            return self._captured(call, run) if is_captured else self._eager(call, run)

        return recorded

    def _chooses(self, layer: Callable[[], int | None]) -> bool:
        """Return True if a call is one of those that may be kept, as far as can be known without its tensors."""
        triggers = self.triggers
        if not triggers.from_s <= time.monotonic() - self._start <= triggers.until_s:
            return False
        if triggers.layers and layer() not in triggers.layers:
            return False
        return next(self._matching) % (triggers.shadow or triggers.every) == 0

    def _eager(self, call: _Call, run: Callable[[], Any]) -> Any:
        record = None
        with self._surviving():
            call = replace(call, given=_before_it_is_overwritten(call.given, torch.Tensor.clone))
            if self._writes_before and self._may_be_long(call):
                record = self._record_of(call)
                own_form.write(self._path(call, record), record)
        self._of_thread.is_busy = True
        try:
            returned = run()
        except BaseException:
            with self._surviving():
                self._keep(call, record)
            raise
        finally:
            self._of_thread.is_busy = False
        with self._surviving():
            self._consider(call.returning(returned), record)
        return returned

    def _captured(self, call: _Call, run: Callable[[], Any]) -> Any:
        self._of_thread.is_busy = True
        try:
            returned = run()
        finally:
            self._of_thread.is_busy = False
        if (graph := self._of_thread.graph) is not None:
            lost = own_form.unkept("the call overwrote it, in a CUDA graph")
            given = _before_it_is_overwritten(call.given, lambda _: lost)
            self._graphs[graph].calls.append(replace(call, given=given).returning(returned))
        return returned

    def _begin(self, graph: Any) -> None:
        self._of_thread.graph, self._graphs[graph] = graph, _Graph()

    def _end(self, graph: Any) -> None:
        self._of_thread.graph = None

    def _reset(self, graph: Any) -> None:
        self._graphs.pop(graph, None)

    def _replayed(self, graph: Any) -> None:
        of_graph = self._graphs.get(graph)
        if of_graph is None or self.has_ended:
            return
        of_graph.replays += 1
        for call in of_graph.calls:
            if self._chooses(functools.partial(getattr, call, "layer")):
                with self._surviving():
                    self._consider(replace(call, replay=of_graph.replays), None)

    def _consider(self, call: _Call, record: dict[str, Any] | None) -> None:
        """Keep a call that returned, if all triggers hold."""
        results = [each for each in (call.out, call.lse) if each is not None]
        if (
            self._may_be_long(call)
            and (not self.triggers.non_finite or not all(map(_is_finite, results)))
            and (not self.triggers.shadow or self._is_wrong(call))
        ):
            self._keep(call, record)
        elif record is not None:
            self._path(call, record).unlink(missing_ok=True)

    def _may_be_long(self, call: _Call) -> bool:
        longest = self.triggers.longest
        if not longest:
            return True
        bound = call.given.get("max_seq_len", call.given.get("max_kv_len", longest))
        return bound >= longest and max(call.given["seq_lens"].tolist(), default=0) >= longest

    def _is_wrong(self, call: _Call) -> bool:
        """Judge a call on its device. Say so, and return True, if it is wrong or its arguments are invalid."""
        arguments = {name: value for name, value in call.given.items() if name != "lse"}
        assert call.out is not None
        is_rounded = self.triggers.e4m3_arithmetic and _kv_dtype(call) == E4M3
        self.judged += 1
        try:
            assert_close_to_reference(call.out, call.lse, arithmetic=E4M3 if is_rounded else None, **arguments)
        except NotImplementedError as error:
            self._say_once(f"{call.function.value} is not judged: {error}")
            return False
        except AssertionError as error:
            self.wrong += 1
            _LOG.warning("lab record: call %d%s is wrong: %s", call.number, _where(call), error)
        except (TypeError, ValueError) as error:
            _LOG.warning("lab record: call %d%s cannot be judged: %s", call.number, _where(call), error)
        return True

    def _keep(self, call: _Call, record: dict[str, Any] | None) -> None:
        """Write a call to its file, unless that exceeds a limit."""
        with self._lock:
            if self.has_ended:
                return
            record = self._record_of(call) if record is None else record
            record = own_form.with_results(record, out=call.out, lse=call.lse)
            size = own_form.size_bytes(record)
            if self.kept_bytes + size > self._most_bytes:
                self._give_up(f"the next call would exceed {self._most_bytes / 1e9:g} GB")
                return
            own_form.write(self._path(call, record), record)
            self.kept, self.kept_bytes = self.kept + 1, self.kept_bytes + size
            if self.kept == self._most_calls:
                self._give_up(f"{self.kept} calls are recorded")

    def _give_up(self, why: str) -> None:
        self.has_ended = True
        self._graphs.clear()
        _LOG.warning("lab record: %s, and no further call of process %d is recorded in %s", why, os.getpid(), self.out)

    def _record_of(self, call: _Call) -> dict[str, Any]:
        query = call.given["query"]
        about = {
            "time": datetime.now().strftime("%Y%m%d_%H%M%S_%f"),
            "process": os.getpid(),
            "number": call.number,
            "layer": call.layer,
            "replay": call.replay,
            "versions": _versions(),
            "gpu": torch.cuda.get_device_name(query.device) if query.device.type == "cuda" else "",
        }
        return own_form.record_of(call.function, call.given, about)

    def _path(self, call: _Call, record: Mapping[str, Any]) -> Path:
        return self.out / own_form.name_of(record)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            _LOG.warning("lab record: %s", sentence)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Say what went wrong in recording, in place of raising it into the engine. A full disk ends the recording."""
        try:
            yield
        except OSError as error:
            self._give_up(f"a call cannot be written: {error}")
        except ERRORS as error:
            self._say_once(f"a call is not recorded: {type(error).__name__}: {error}")


@contextmanager
def record(
    out: Path | str,
    *,
    triggers: Triggers | None = None,
    functions: Sequence[ModuleType | str] = FLASHINFER,
    most_calls: int = MOST_CALLS,
    most_bytes: int = MOST_BYTES,
    before: bool = False,
) -> Iterator[Recorder]:
    """Record calls of FlashInfer's four functions that this process makes in the block.

    The functions are replaced in all modules that imported them, and put back at the end. Calls that `torch.compile` traces are
    not recorded. An error of the recorder is logged, and never raised into the engine.

    Args:
        out: the folder for the files, which `lab judge --calls` reads. It is made if it does not exist.
        triggers: which calls are kept; None: all.
        functions: modules, or names of packages, whose functions are recorded: those with the names of FlashInfer's four
            functions. A package need not be imported yet.
        most_calls, most_bytes: the most files that are written, and the most bytes of their tensors.
        before: write the inputs before each call, so that they stay if the process crashes in the call.
    """
    recorder = Recorder(Path(out), triggers or Triggers(), functions, most_calls, most_bytes, before)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()


def start_from_environment() -> None:
    """Record to the end of this process, as the settings in the environment variable LAB_RECORD say."""
    settings = json.loads(os.environ[ENVIRONMENT])
    triggers = settings.pop("triggers")
    triggers["layers"] = tuple(triggers["layers"])
    Recorder(Path(settings.pop("out")), Triggers(**triggers), **settings).start()


def _followed(method: Callable[..., Any], hook: Callable[[Any], None]) -> Callable[..., Any]:
    """Return a method of a CUDA graph that calls the hook with the graph after it has succeeded."""

    @functools.wraps(method)
    def call(graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(graph, *args, **kwargs)
        hook(graph)
        return result

    return call


def _before_it_is_overwritten(given: Mapping[str, Any], saved: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """Return arguments, with `saved(tensor)` in place of tensors that lie in the memory of `out` or `lse`."""
    written = [_span(given[name]) for name in RESULTS if isinstance(given.get(name), torch.Tensor)]
    return {
        name: saved(value)
        if isinstance(value, torch.Tensor)
        and name not in RESULTS
        and any(start < _span(value)[1] and _span(value)[0] < end for start, end in written)
        else value
        for name, value in given.items()
    }


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool((tensor.to(torch.float32) if tensor.dtype == E4M3 else tensor).isfinite().all())


def _kv_dtype(call: _Call) -> torch.dtype:
    kv = call.given.get("kv_cache", call.given.get("key"))
    dtype: torch.dtype = (kv[0] if isinstance(kv, tuple | list) else kv).dtype
    return dtype


def _where(call: _Call) -> str:
    layer = "" if call.layer is None else f" of layer {call.layer}"
    return layer + (f", replay {call.replay}" if call.replay else "")


@functools.cache
def _versions() -> dict[str, str]:
    return {name: version for name, package in PACKAGES.items() if (version := version_of(package))}


def _layer_of_caller() -> int | None:
    """Return the number of the layer that makes a call, from the local variables of the callers; None if none has it."""
    frame = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        for name in ("layer", "module", "self"):
            holder = frame.f_locals.get(name)
            for attribute in ("layer_id", "layer_idx", "layer_name"):
                value = getattr(holder, "__dict__", {}).get(attribute)
                if isinstance(value, int):
                    return value
                if isinstance(value, str) and (found := re.search(r"\d+", value)):
                    return int(found[0])
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
