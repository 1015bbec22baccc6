"""Kernels that try to get a false time for the decode call on a GPU.

If a kernel does the work, it calls `lab.kernels.portable`.
"""

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from corpus.dishonest import DECODE, dishonest
from corpus.dishonest.impatient import decode_unless_written
from lab.references.errors import Comparison
from lab.timing import sampling

WRONG = "output vectors are wrong"
Call = Callable[[], torch.Tensor]


def prepared(**arguments: Any) -> Call:
    """Return the prepared call of the honest kernel."""
    from lab.kernels import portable, prepare

    return prepare(portable, DECODE, **arguments)


def is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


class Portable:
    """The honest kernel, in the form that prepares its calls. Subclasses change the prepared call."""

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        honest = prepared(**arguments)
        return lambda: self.call(honest, arguments)

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> torch.Tensor:
        return self.prepare_trtllm_batch_decode_with_kv_cache(**arguments)()

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        return honest()


@dishonest(WRONG, needs_gpu=True)
class SideStreamAtCapture(Portable):
    """Does the work on another stream during the graph's capture, so that the graph has only a fill of a few bytes."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if not is_capturing():
            return honest()
        self.side = getattr(self, "side", None) or torch.cuda.Stream()
        self.bytes = getattr(self, "bytes", torch.zeros(8, device="cuda"))
        with torch.cuda.stream(self.side):
            honest()
        self.bytes.zero_()
        return arguments["out"]


@dishonest(WRONG, needs_gpu=True)
class CachedByPointer(Portable):
    """Copies its earlier output for tensors at the same addresses (flashinfer-bench-starter-kit issue 21)."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[int, ...], torch.Tensor] = {}

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        key = tuple(arguments[name].data_ptr() for name in ("query", "block_tables", "seq_lens"))
        if key not in self.outputs and not is_capturing():
            self.outputs[key] = honest().clone()
        return arguments["out"].copy_(self.outputs[key])


def computed_now(**arguments: Any) -> Call:
    """Return a call that copies the honest kernel's present result."""
    output = prepared(**arguments)().clone()
    return lambda: arguments["out"].copy_(output)


@dishonest(WRONG, needs_gpu=True)
class PrepareDoesTheWork(Portable):
    """Computes the output when the call is prepared, and copies it in each call."""

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        return computed_now(**arguments)


@dishonest(WRONG, needs_gpu=True)
class PlanDoesTheWork(Portable):
    """Computes the output when the call is planned, and copies it in each call."""

    def plan_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        return computed_now(**arguments)


@dishonest(WRONG, needs_gpu=True)
class KnowsTheScenario(Portable):
    """Builds the timed scenario in advance, since its seed is known, and returns its result."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if not hasattr(self, "output"):
            from lab.workloads import scenario
            from lab.workloads.inputs.forward_pass import build_forward

            forward = build_forward(scenario("decode/llama-3.1-8b/8q1s1k", None), torch.device("cuda"))
            self.output = forward.new_out()
            forward.run(Portable(), self.output)
        return arguments["out"].copy_(self.output)


@dishonest("The second is SLOWER", needs_gpu=True)
class ReturnsWhereWritten(Portable):
    """Returns early if the output already holds a number. No output does before a timed call, so the kernel's full time is
    measured.
    """

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        return lambda: decode_unless_written(**arguments)


@dishonest(r"it changed torch\.cuda\.graphs\.CUDAGraph\.replay", needs_gpu=True)
class PatchesReplay(Portable):
    """Patches CUDA graphs so that a replay does nothing after the capture."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if is_capturing():
            torch.cuda.CUDAGraph.replay = lambda self: None
        return honest()


@dishonest(r"it changed torch\.cuda\.(streams\.Event\.elapsed_time|synchronize)", needs_gpu=True)
class PatchesTheClock(Portable):
    """Patches CUDA events so that they report a tenth of the time, and removes waits."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if not hasattr(self, "elapsed"):
            self.elapsed = elapsed = torch.cuda.Event.elapsed_time
            torch.cuda.Event.elapsed_time = lambda start, end: elapsed(start, end) / 10
            torch.cuda.synchronize = lambda *_: None
        return honest()


@dishonest(r"it changed time\.perf_counter_ns|it changed lab\.timing\.sampling", needs_gpu=True)
class PatchesTheHostsClock(Portable):
    """Patches both clocks so that they report a tenth of the time, in their modules and in the lab's references to them."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if not hasattr(self, "now"):
            self.now, elapsed = now, _ = time.perf_counter_ns, sampling._elapsed_ms
            time.perf_counter_ns = sampling._now_ns = lambda: now() // 10
            sampling._elapsed_ms = lambda start, end: elapsed(start, end) / 10
        return honest()


@dishonest(r"it changed lab\.references\.errors\.Comparison\.passed", needs_gpu=True)
class WritesZerosAndPatchesPassed(Portable):
    """Writes zeros, and patches the comparison so that every result passes."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        Comparison.passed = property(lambda self: True)
        return arguments["out"].zero_()


@dishonest(WRONG, needs_gpu=True)
class WritesZeros(Portable):
    """Does no attention at all (KernelBench issue 165)."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        return arguments["out"].zero_()


@dishonest("captur", needs_gpu=True)
class NeverJoins(Portable):
    """Does the work on another stream, which it forks from the captured one and never joins."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        self.side = getattr(self, "side", None) or torch.cuda.Stream()
        if not is_capturing():
            return honest()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            return honest()


@dishonest("by the host's, between two waits|" + WRONG, needs_gpu=True)
class EagerOnAnotherStream(Portable):
    """Does the work of each eager call on another stream, which the CUDA events around the call do not see; for the events
    clock.

    The work takes longer than the 150 µs by which the events clock and the host's clock may differ.
    """

    clock = "events"
    scenario = "decode/llama-3.1-8b/64q1s4k"

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if is_capturing():
            return honest()
        self.side = getattr(self, "side", None) or torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            return honest()


@dishonest(WRONG, needs_gpu=True)
class HonestWhileChecked(Portable):
    """Does the work in its first calls, which are checked, and copies their output in later calls; for the events clock."""

    clock = "events"

    def __init__(self) -> None:
        self.calls = 0

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        self.calls += 1
        if self.calls < 4:
            self.output = honest().clone()
            return self.output
        return arguments["out"].copy_(self.output)


@dishonest(WRONG, needs_gpu=True)
class EveryOtherBuffer(Portable):
    """Does the work in every second captured call, and nothing in the remaining calls."""

    def __init__(self) -> None:
        self.captures = 0

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if is_capturing():
            self.captures += 1
            if self.captures > 1 and self.captures % 2:
                return arguments["out"][:1].zero_()
        return honest()


@dishonest(WRONG, needs_gpu=True)
class StaleLengths(Portable):
    """Reads the lengths when the call is prepared, and ignores later changes."""

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        return super().prepare_trtllm_batch_decode_with_kv_cache(
            **arguments | {"seq_lens": arguments["seq_lens"].clone()}
        )


@dishonest(WRONG, needs_gpu=True)
class StalePages(Portable):
    """Copies the page table when the call is prepared, and ignores later changes."""

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        own = {"block_tables": arguments["block_tables"].clone()}
        return super().prepare_trtllm_batch_decode_with_kv_cache(**arguments | own)


@dishonest(WRONG, needs_gpu=True)
class StaleKeys(Portable):
    """Copies the cache to a narrower dtype when the call is prepared, so that each call reads only half of the bytes."""

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        narrow = tuple(side.contiguous().to(torch.float8_e4m3fn) for side in arguments["kv_cache"])
        return super().prepare_trtllm_batch_decode_with_kv_cache(**arguments | {"kv_cache": narrow})


@dishonest(WRONG, needs_gpu=True)
class KeepsWhatItsKeysGave(Portable):
    """Stores its result with the first key of the cache, and copies the stored result while the first key is unchanged."""

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        rows, heads, dim = arguments["out"].shape
        kept = arguments["out"].new_zeros(rows * heads * (dim + 1))
        return lambda: decode_unless_written(kept, **arguments)


@dishonest(WRONG, needs_gpu=True)
class FindsAnothersOutput(Portable):
    """Searches all objects of the process for the output of the other implementation, and copies it."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if not is_capturing():
            return honest()
        out = arguments["out"]
        for each in gc.get_objects():
            alike = type(each) is torch.Tensor and each.is_cuda and each.shape == out.shape and each.dtype == out.dtype
            if alike and each.data_ptr() not in (out.data_ptr(), arguments["query"].data_ptr()):
                return out.copy_(each)
        return honest()


@dishonest(r"it changed|by the host's, between two waits|a thread runs .* while kernels are timed", needs_gpu=True)
class PatchesFromAThread(Portable):
    """Runs a thread that patches CUDA events from time to time so that they report a tenth of the time."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if not hasattr(self, "thread"):
            honest_ms = sampling._elapsed_ms

            def flip() -> None:
                while True:
                    sampling._elapsed_ms = lambda start, end: honest_ms(start, end) / 10
                    time.sleep(0.01)
                    sampling._elapsed_ms = honest_ms
                    time.sleep(0.0001)

            self.thread = threading.Thread(target=flip, daemon=True)
            self.thread.start()
        return honest()
