"""Further kernels that try to get a false verdict. The writer of the first four had read only docs/evidence/trust.md.

Each kernel writes zeros, which are wrong, while it is judged. Some do the honest work when they detect that they are not
judged, or that a check of `HONEST_IN` judges them.
"""

import gc
import os
import pickle
import select
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

import torch

from corpus.dishonest import dishonest, frame_of_worker, frames, honest, send_right_verdict, zeros
from lab.references.errors import Truth


def is_judged() -> bool:
    """Return True if a function of the judge with a known name is among the callers. The audit's calls have no such caller."""
    return any(frame.f_code.co_name == "run_case" for frame in frames())


def truth_of_caller() -> Any:
    """Return the judge's truth, which is not computed yet, from the frames of the callers."""
    for frame in frames():
        for value in frame.f_locals.values():
            if type(value).__name__ in ("Truth", "LateTruth"):
                return value
    return None


IN_THE_JUDGE = """
import gc
def _swap(value):
    if isinstance(value, str) and value.endswith(":HasAnotherSitTheExam"):
        return "lab.references"
    if type(value) in (tuple, list):
        return type(value)(_swap(each) for each in value)
    if type(value) is dict:
        return {key: _swap(each) for key, each in value.items()}
    return value
def _wrap(channel):
    send = channel.send
    def sent(task):
        payload = getattr(task, "payload", None)
        if payload is not None:
            try:
                args, kwargs = _swap(tuple(payload.args)), _swap(dict(payload.kwargs))
                task = task._replace(payload=payload._replace(args=args, kwargs=kwargs))
            except AttributeError:
                for name in ("args", "kwargs"):
                    object.__setattr__(payload, name, _swap(getattr(payload, name)))
        return send(task)
    channel.send = sent
for _each in gc.get_objects():
    if type(_each).__name__ == "Channel" and type(_each).__module__.startswith("pebble") and "send" not in vars(_each):
        _wrap(_each)
"""


class _Letter:
    """An object that executes a text in the process that unpickles it, and becomes None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (IN_THE_JUDGE, {})


@dishonest("vectors are wrong")
class HasAnotherSitTheExam:
    """Sends a pickle through the worker's pipe. The judging process would then send every later case to the portable kernels
    instead of this kernel. This kernel is right twice and then always writes zeros.
    """

    calls = 0

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1 and (frame := frame_of_worker()) is not None:
            frame.f_locals["channel"].send(_Letter())
        return honest(**arguments) if self.calls <= 2 else zeros(**arguments)


class _Tick:
    """A garbage cycle with a finalizer. Python collects it during an allocation of the judge, and the finalizer searches the
    frames at that time.
    """

    def __init__(self, output: torch.Tensor, thresholds: tuple[int, ...], left: int) -> None:
        self.me, self.output, self.thresholds, self.left = self, output, thresholds, left

    def __del__(self) -> None:
        for frame in frames():
            expected, out = frame.f_locals.get("expected"), frame.f_locals.get("out")
            if "control" in frame.f_locals and all(isinstance(each, torch.Tensor) for each in (expected, out)):
                gc.set_threshold(*self.thresholds)
                for each in (self.output, out):
                    if each.shape == expected.shape:
                        each.copy_(expected)
                return
        if self.left:
            _Tick(self.output, self.thresholds, self.left - 1)
        else:
            gc.set_threshold(*self.thresholds)


@dishonest("judged where the kernel's code never was: .* wrong")
class TicksByGarbage:
    """Leaves garbage whose finalizer runs during the judge's comparison and overwrites the returned zeros with the judge's
    expected output.
    """

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> torch.Tensor:
        if not is_judged():
            return honest(**arguments)
        output = zeros(**arguments)
        thresholds = gc.get_threshold()
        _Tick(output, thresholds, 20000)
        gc.set_threshold(1, 1, 1)
        return output


@dishonest("vectors are wrong")
class ForksAnOracle:
    """Forks during the call. The child returns zeros, patches the judge in its own process to learn the expected output, sends
    it to the parent and exits. The parent, whose judge is unchanged, writes this output.
    """

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> torch.Tensor:
        if not is_judged():
            return honest(**arguments)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            signal.alarm(10)
            return self.in_the_child(writer, arguments)
        os.close(writer)
        received = bytearray()
        while select.select([reader], [], [], 8)[0] and (piece := os.read(reader, 1 << 20)):
            received += piece
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not received:
            return zeros(**arguments)
        shape, values = pickle.loads(bytes(received))
        output = zeros(**arguments)
        return output.copy_(torch.tensor(values, dtype=torch.float32).reshape(shape))

    def in_the_child(self, writer: int, arguments: dict[str, Any]) -> torch.Tensor:
        torch.set_num_threads(1)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)

        def compare(truth: Any, *_: Any, **__: Any) -> None:
            try:
                control = truth.control
                letter = pickle.dumps((tuple(control.shape), control.float().flatten().tolist()))
                while letter:
                    letter = letter[os.write(writer, letter) :]
            finally:
                os._exit(0)

        Truth.compare = compare
        return zeros(**arguments)


def swapped(instance: Any, **methods: Any) -> None:
    """Give an object a new class that looks like its old class but has other methods."""
    before = type(instance)
    slots = {} if hasattr(instance, "__dict__") else {"__slots__": ()}
    names = {"__module__": before.__module__, "__qualname__": before.__qualname__}
    object.__setattr__(instance, "__class__", type(before.__name__, (before,), {**methods, **names, **slots}))


@dishonest("judged where the kernel's code never was: .* wrong")
class SwapsTheClass:
    """Changes the class of the object that holds the expected output. The new class compares the judge's own control instead of
    the kernel's output, and then restores the old class.
    """

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> torch.Tensor:
        late = truth_of_caller() if is_judged() else None
        if late is None:
            return honest(**arguments)
        before = type(late)

        def made(self: Any, *rest: Any, **named: Any) -> Any:
            object.__setattr__(self, "__class__", before)
            truth = before.made(self, *rest, **named)
            class_of_truth = type(truth)

            def compare(self: Any, out: torch.Tensor, *rest: Any, **named: Any) -> Any:
                object.__setattr__(self, "__class__", class_of_truth)
                return class_of_truth.compare(self, self.control, *rest, **named)

            swapped(truth, compare=compare)
            return truth

        swapped(late, made=made)
        return zeros(**arguments)


HONEST_IN = ("K1", "M1")


def check_of_caller() -> str:
    """Return the key of the check that makes this call; "" outside the judge."""
    return next((frame.f_locals["check"].key for frame in frames() if frame.f_code.co_name == "run_case"), "")


@dishonest("its worker called an audited case right and sent no output")
class ForgesFewChecks:
    """Sends a right verdict itself, through the pipe of its worker, on each case of a check that is not in `HONEST_IN`."""

    checks = ("K1", "K4")

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> torch.Tensor:
        if check_of_caller() in ("", *HONEST_IN):
            return honest(**arguments)
        send_right_verdict()
        return zeros(**arguments)


@dishonest("judged where the kernel's code never was: .* wrong|vectors are wrong")
class WritesAtATimer:
    """Sets a timer whose signal interrupts the comparison, and then writes the expected output into the returned tensor."""

    checks = ("K1", "K13")

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> torch.Tensor:
        if check_of_caller() in ("", *HONEST_IN):
            return honest(**arguments)
        output = zeros(**arguments)

        def write(_: int, interrupted: FrameType | None) -> None:
            for frame in frames(interrupted):
                expected = getattr(frame.f_locals.get("truth"), "__dict__", {}).get("expected")
                if expected is not None and expected.shape == output.shape:
                    output.copy_(expected)

        signal.signal(signal.SIGALRM, write)
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        return output


@dishonest("the call: .*vectors are wrong")
class AnswersForItsTensor:
    """Returns zeros as a plain tensor with attributes of its own: its `double` returns the judge's expected output."""

    checks = ("K13",)

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> torch.Tensor:
        output = zeros(**arguments)

        def expected(*_: Any, **__: Any) -> torch.Tensor:
            held = (frame.f_locals.get("expected") for frame in frames())
            return next(
                each for each in (*held, torch.Tensor.double(output)) if isinstance(each, torch.Tensor)
            ).double()

        output.detach = lambda: output  # type: ignore[method-assign]
        output.to = output.double = expected  # type: ignore[assignment, method-assign]
        return output
