"""Record an engine's attention calls. A call in a CUDA graph is recorded after each replay, with its tensors at that time."""

import atexit
import functools
import importlib
import inspect
import itertools
import json
import logging
import math
import os
import random
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lab.calls import AttentionCall
from lab.calls.arguments import RESULTS, overwritten
from lab.calls.problem import E4M3
from lab.recorded import own_form
from lab.recorded.call import DAMAGED, RECORDED_CALLS, RecordedCall, RecordingError, fault_of
from lab.wording import counted

ENVIRONMENT = "LAB_RECORD"  # settings of the recorder in a process that `lab record` started, as JSON
TIME = "%Y%m%d_%H%M%S_%f"
MOST_FRAMES = 12  # number of callers in whose variables the layer is searched
MOST_LOGGED = 20  # number of different sentences about calls that are not recorded or not judged
FOLLOWED = ("capture_begin", "capture_end", "replay", "reset")  # methods of a CUDA graph that the recorder follows
_LOG = logging.getLogger("lab.recorded")


@dataclass(frozen=True)
class Triggers:
    """Conditions that choose the calls to be recorded. A call is recorded if it meets all of them. A call that raises an error
    need not meet `longest` and `non_finite`, and is recorded without being judged, even if `shadow` requests a judgement.
    """

    every: int = 1  #: record one random call, or replay, of each `every` that meet `layers`, `from_s` and `until_s`
    #: record calls of these layers; () stands for all. The layer is the attribute `layer_id` or `layer_idx`, or the number in
    #: `layer_name`, of a caller's local variable `layer`, `module` or `self`.
    layers: tuple[int, ...] = ()
    from_s: float = 0.0  #: record calls from this number of seconds after the start of the recorder on
    until_s: float = math.inf  #: record calls until this number of seconds after the start of the recorder
    longest: int = 0  #: record calls whose longest request has at least this number of keys
    non_finite: bool = False  #: record calls with NaN or infinity in the output. Checking the output waits for the GPU.
    #: if not 0, it replaces `every`: one call at random among each `shadow` calls is judged at once on its device, and recorded
    #: if it is wrong or its arguments are invalid. Requests that see a non-finite key are not judged.
    shadow: int = 0
    e4m3_arithmetic: bool = False  #: `shadow` judges with the error bound for kernels that round their operands to e4m3

    def __post_init__(self) -> None:
        if self.every < 1 or self.shadow < 0:
            raise ValueError(f"every={self.every} must be at least 1, and shadow={self.shadow} at least 0")
        if self.shadow and self.every != 1:
            raise ValueError(f"shadow={self.shadow} takes the place of every={self.every}: leave one of them out")
        if self.until_s <= self.from_s:
            raise ValueError(f"until_s={self.until_s:g} must be after from_s={self.from_s:g}")


class _OfThread(threading.local):
    is_busy = False  # True inside a recorded call: the calls that it makes itself are not recorded
    graph: Any = None  # the CUDA graph that is being captured


@dataclass(eq=False)
class Recorder:
    """A context manager that records this process's calls of FlashInfer's functions, except calls that `torch.compile` traces.
    Errors of the recorder itself are logged; they do not reach the engine.
    """

    out: Path | str  #: the folder for the files, which `lab judge --calls` reads. It is made if it does not exist.
    _: KW_ONLY
    triggers: Triggers = Triggers()  #: conditions that choose the calls
    #: modules, or names of packages, which are imported. Their functions with FlashInfer's names are recorded.
    functions: Sequence[ModuleType | str] = ("flashinfer",)
    most_calls: int = 1000  #: the recording ends when this number of files is written
    most_bytes: int = 20 * 10**9  #: the recording ends when the files have this number of bytes
    #: write the inputs before each call, so that they are recorded if the process crashes in the call
    before: bool = False
    kept: int = field(default=0, init=False)  #: number of the written files
    kept_bytes: int = field(default=0, init=False)
    judged: list[int] = field(default_factory=list, init=False)  #: numbers of the calls that `Triggers.shadow` judged
    wrong: list[int] = field(default_factory=list, init=False)  #: numbers of the judged calls that were wrong
    has_ended: bool = field(default=False, init=False)  #: True if no further call is recorded

    def __post_init__(self) -> None:
        self._folder, self._start, self._logged = Path(self.out), time.monotonic(), set[str]()
        self._dice, self._place = random.Random(0), 0  # seeded, so that all ranks of a server choose the same calls
        self._numbers, self._matching = itertools.count(1), itertools.count()
        self._versions = own_form.versions()  # read once, because it reads files
        self._lock, self._of_thread = threading.Lock(), _OfThread()
        self._graphs: WeakKeyDictionary[Any, list[RecordedCall]] = WeakKeyDictionary()
        self._wrappers = dict[int, Any]()  # by the id of the function

    def __enter__(self) -> "Recorder":
        self._folder.mkdir(parents=True, exist_ok=True)
        packages = [each if isinstance(each, str) else each.__name__ for each in self.functions]
        for package in packages:
            importlib.import_module(package)
        for name, module in list(sys.modules.items()):
            if any(f"{name}.".startswith(f"{package}.") for package in packages):
                for function in RECORDED_CALLS:
                    if callable(original := _variables(module).get(function.value)):
                        self._wrappers[id(original)] = self._wrapper(function, original)
        for name in FOLLOWED:
            setattr(torch.cuda.CUDAGraph, name, self._following(name))
        _replace_everywhere(self._wrappers)
        return self

    def __exit__(self, *_: object) -> None:
        self.has_ended = True
        _replace_everywhere({id(wrapper): wrapper.__wrapped__ for wrapper in self._wrappers.values()})
        for name in FOLLOWED:
            setattr(torch.cuda.CUDAGraph, name, getattr(torch.cuda.CUDAGraph, name).__wrapped__)
        self._graphs.clear()

    def summary(self) -> str:
        """Return a text such as "2 of 9 calls recorded in DIR". Call this at the end: it adds 1 to the number of calls."""
        words = [f"{self.kept or 'none'} of {counted(next(self._numbers) - 1, 'call')} recorded in {self._folder}"]
        words += [f"{len(self.judged)} judged, {len(self.wrong)} wrong"] if self.triggers.shadow else []
        return "; ".join([*words, *sorted(self._logged)])

    def _wrapper(self, function: AttentionCall, original: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.has_ended or self._of_thread.is_busy:
                return original(*args, **kwargs)
            number = next(self._numbers)
            is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            layer = _layer_of_caller() if self.triggers.layers else None
            if not self._chooses(layer, is_captured):
                return original(*args, **kwargs)
            call = path = None  # if it cannot be recorded
            with self._surviving():
                given = dict(zip(names, args, strict=False)) | kwargs
                for _, name in overwritten(given):
                    if isinstance(given[name], torch.Tensor) and name not in RESULTS:
                        lost = RecordingError("a tensor that the call overwrote in a CUDA graph")
                        given[name] = lost if is_captured else torch.clone(given[name])
                layer = layer if self.triggers.layers else _layer_of_caller()
                call = RecordedCall(function, given, versions=self._versions, module=original.__module__)
                call = replace(call, time=datetime.now().strftime(TIME), number=number, layer=layer)
                if self.before and not is_captured and self._is_long(call):
                    path = own_form.write(self._folder, call)
            self._of_thread.is_busy = True
            try:
                returned = original(*args, **kwargs)
            except BaseException as error:
                with self._surviving():
                    if call and not is_captured:
                        self._keep(replace(call, raised=f"{type(error).__name__}: {error}"))
                raise
            finally:
                self._of_thread.is_busy = False
            with self._surviving():
                if call:
                    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
                    results = dict(zip(RESULTS, returned if is_pair else (returned, None), strict=True))
                    results = {name: given.get(name) if each is None else each for name, each in results.items()}
                    call = replace(call, **results)
                if call and not is_captured:
                    self._consider(call, path)
                elif call and self._of_thread.graph in self._graphs:
                    self._graphs[self._of_thread.graph].append(call)
            return returned

        return recorded

    def _chooses(self, layer: int | None, is_captured: bool = False) -> bool:
        triggers, now_s = self.triggers, time.monotonic() - self._start
        if triggers.layers and layer not in triggers.layers:
            return False
        if is_captured:  # each replay is chosen by itself
            return True
        if self.has_ended or not triggers.from_s <= now_s <= triggers.until_s:
            return False
        count = triggers.shadow or triggers.every
        place = next(self._matching) % count
        if place == 0:  # draw one of the next `count` calls: each n-th call might always be of the same layer
            self._place = self._dice.randrange(count)
        return place == self._place

    def _following(self, name: str) -> Callable[..., Any]:
        method = getattr(torch.cuda.CUDAGraph, name)

        @functools.wraps(method)
        def followed(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(graph, *args, **kwargs)
            if name == "capture_begin":
                self._of_thread.graph, self._graphs[graph] = graph, []
            elif name == "capture_end":
                self._of_thread.graph = None
            elif name == "reset":
                self._graphs.pop(graph, None)
            elif name == "replay":
                calls = self._graphs.get(graph, [])
                for place, call in enumerate(calls):
                    calls[place] = replace(call, replay=call.replay + 1, time=datetime.now().strftime(TIME))
                    if self._chooses(call.layer):
                        with self._surviving():
                            self._consider(calls[place])
            return result

        return followed

    def _consider(self, call: RecordedCall, path: Path | None = None) -> None:
        layer = "" if call.layer is None else f" of layer {call.layer}"
        name = f"call {call.number}{layer}{f', replay {call.replay}' if call.replay else ''}"
        assert call.out is not None, f"{name} returned no output"
        is_kept = self._is_long(call) and not (self.triggers.non_finite and bool(call.out.float().isfinite().all()))
        if is_kept and self.triggers.shadow:
            self.judged.append(call.number)
            fault, function = None, call.function.value
            try:
                fault = fault_of(call, call.out, call.lse, E4M3 if self.triggers.e4m3_arithmetic else None)
            except RecordingError as error:
                self._log_once(f"{function} is not judged: {error}")
            if fault is not None:
                self.wrong.append(call.number)
                _LOG.warning("lab record: %s, %s: %s: %s", name, function, fault.reason.value, fault.sentence)
            is_kept = fault is not None
        if is_kept:
            self._keep(call)
        elif path is not None:  # the file with the inputs alone
            path.unlink()

    def _is_long(self, call: RecordedCall) -> bool:
        longest, given = self.triggers.longest, call.given
        bound = given.get("max_seq_len", given.get("max_kv_len", longest))  # known without waiting for the GPU
        return not longest or (bound >= longest and max(given["seq_lens"].flatten().tolist(), default=0) >= longest)

    def _keep(self, call: RecordedCall) -> None:
        with self._lock:
            if self.has_ended:
                return
            path = own_form.write(self._folder, call)
            self.kept, self.kept_bytes = self.kept + 1, self.kept_bytes + path.stat().st_size
            if self.kept == self.most_calls or self.kept_bytes >= self.most_bytes:
                self._end(f"{self.kept} calls of {self.kept_bytes / 1e9:.3g} GB are recorded, which is the limit")

    def _end(self, why: str) -> None:
        self.has_ended = True
        self._logged.add(why)
        self._graphs.clear()
        _LOG.warning("lab record: %s; process %d records no further call in %s", why, os.getpid(), self._folder)

    def _log_once(self, sentence: str) -> None:
        if sentence not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(sentence)
            _LOG.warning("lab record: %s", sentence)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # such as a full disk
            self._end(f"a call cannot be written: {error}")
        except (*DAMAGED, AssertionError) as error:
            self._log_once(f"a call is not recorded: {type(error).__name__}: {error}")


def start_from_environment() -> None:
    """Record until this process ends. The settings are in the environment variable LAB_RECORD."""
    settings = json.loads(os.environ[ENVIRONMENT])
    for package in [*settings["functions"]]:
        try:
            importlib.import_module(package)
        except Exception as error:  # of any kind: it must not reach the server, nor end the recording of other packages
            print(f"lab record: no call of {package} is recorded: {type(error).__name__}: {error}", file=sys.stderr)
            settings["functions"].remove(package)
    recorder = Recorder(**settings | {"triggers": Triggers(**settings["triggers"])}).__enter__()
    atexit.register(lambda: print(f"lab record: process {os.getpid()}: {recorder.summary()}", file=sys.stderr))


def _layer_of_caller() -> int | None:
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), MOST_FRAMES):
        for holder in ("layer", "module", "self"):
            attributes = _variables(frame.f_locals.get(holder))
            for name in ("layer_id", "layer_idx", "layer_name"):
                if name in attributes and (found := re.search(r"\d+", str(attributes[name]))):
                    return int(found[0])
    return None


def _replace_everywhere(new: Mapping[int, Callable[..., Any]]) -> None:
    for module in list(sys.modules.values()):
        for name, value in list(_variables(module).items()):
            if id(value) in new:
                _variables(module)[name] = new[id(value)]


def _variables(of: Any) -> dict[str, Any]:
    return getattr(of, "__dict__", {})
