"""Wrong kernels that try to be judged right. They need no GPU.

Each kernel writes zeros, which are wrong, and changes functions or data of the judge that would show it.
"""

import gc
import hashlib
import itertools
import os
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any

import torch

from corpus.dishonest import dishonest, frame_of_worker, frames, honest, send, send_right_verdict, zeros
from lab.calls.problem import AttentionCall
from lab.checks import Ranges, case_run
from lab.checks.properties import checks_by_key
from lab.checks.properties.check import Level
from lab.checks.run.verdicts import Judged, Outcome, TooLate
from lab.references import errors
from lab.workloads.inputs.attention import build_attention

RANGES = Ranges(  # of the small cases on which dishonest kernels are judged
    page_sizes=(16,),
    head_dims=(64,),
    num_kv_heads=(1, 2),
    groups=(2,),
    q_lens=(1, 4),
    dtypes=((torch.bfloat16,) * 2,),
    nvfp4=(False,),
)
WRONG = r"vectors are wrong|not finite|not zero"
CHANGED = "the kernel is dishonest: it changed "


class Zeros:
    """Writes zeros. Subclasses add a manipulation."""

    def trtllm_batch_decode_with_kv_cache(self, query: Any, out: Any = None, **arguments: Any) -> torch.Tensor:
        self.cheat(query, arguments)
        return zeros(query, out)

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        pass

    def override(self, operator: str, kernel: Any) -> None:
        """Register another kernel for one of torch's operators."""
        if not hasattr(self, "library"):
            self.library = torch.library.Library("aten", "IMPL")
            self.library.impl(operator, kernel, "CPU")


@dishonest(WRONG)
class WritesZeros(Zeros):
    """Writes zeros without any manipulation (KernelBench issue 165: zeros passed)."""


@dishonest(CHANGED + r"lab\.references\.errors\.Comparison\.passed")
class PatchesPassed(Zeros):
    """Patches the comparison so that every result passes."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        errors.Comparison.passed = property(lambda self: True)


@dishonest(CHANGED + r"lab\.checks\.case_run\.CaseRun\.expect_close")
class ReplacesExpectation(Zeros):
    """Patches the judge so that it compares nothing but counts a comparison."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        def expect_close(self: Any, what: str, result: Any, truth: Any, least_bound: float = 0.0) -> None:
            self.judged += 1

        case_run.CaseRun.expect_close = expect_close


@dishonest(CHANGED + r"lab\.references\.errors\.Truth\.compare")
class ReplacesCode(Zeros):
    """Leaves all names unchanged, but replaces the code object of the comparing function."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        honest = errors.Truth.compare
        if not hasattr(errors.Truth, "honest"):
            errors.Truth.honest = types.FunctionType(honest.__code__, honest.__globals__, argdefs=honest.__defaults__)
        honest.__code__ = (lambda self, out, least_bound=0.0: self.honest(self.control)).__code__


@dishonest(CHANGED + r"lab\.references\.errors\.CONTROL_FACTOR")
class WidensTheBound(Zeros):
    """Patches the bound so that an error of any size is allowed."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        errors.CONTROL_FACTOR, errors.LARGEST_BOUND = 1e9, 1e9


@dishonest(CHANGED + r"lab\.checks\.case_run\.compare_output")
class HidesItsFunction(Zeros):
    """Replaces the comparing function, and the function of Python that reads the names of a module: its own yields the old
    function.
    """

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        honest, islice = case_run.compare_output, itertools.islice
        if honest.__module__ == __name__:
            return

        def compare(out: torch.Tensor, truth: Any, least_bound: float = 0.0) -> Any:
            return honest(truth.control, truth, least_bound)

        itertools.islice = lambda each, *bounds: (honest if kept is compare else kept for kept in islice(each, *bounds))
        case_run.compare_output = compare


@dishonest(CHANGED + r"torch's operator aten::linalg_vector_norm")
class OverridesAnOperator(Zeros):
    """Registers another kernel for torch's norm, from which errors are computed."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        self.override("linalg_vector_norm", lambda self, *_, **__: self.sum(-1) * 0 + 1e-9)


@dishonest(CHANGED + ".*torch's default dtype")
class ChangesTheDefaultDtype(Zeros):
    """Changes torch's default dtype, so that computations without an explicit dtype are less exact."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        torch.set_default_dtype(torch.bfloat16)


@dishonest(CHANGED + r"sys\.setprofile")
class WatchesTheJudge(Zeros):
    """Installs a profile hook, which could change local variables of a running comparison."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        sys.setprofile(lambda frame, event, argument: None)


@dishonest(CHANGED + r"lab\.references\.errors\.relative_l2, lab\.references\.quantization")
class ReplacesAModule(Zeros):
    """Replaces a module of the lab by its own, and also replaces the functions in modules that have imported them."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        sys.modules["lab.references.quantization"] = types.ModuleType("lab.references.quantization")
        errors.relative_l2 = lambda out, expected: out.double().norm(dim=-1) * 0


@dishonest(WRONG)
class FindsTheExpectedOutput(Zeros):
    """Looks for a float64 tensor of the output's shape among all objects of the process, and copies it."""

    def trtllm_batch_decode_with_kv_cache(self, query: Any, out: Any = None, **arguments: Any) -> torch.Tensor:
        out = zeros(query, out)
        for each in gc.get_objects():
            if type(each) is torch.Tensor and each.dtype == torch.float64 and each.shape == out.shape:
                return out.copy_(each)
        return out


@dishonest(WRONG)
class FindsTheExpectedOutputInAFrame(Zeros):
    """Looks for the expected output in the local variables of its callers."""

    def trtllm_batch_decode_with_kv_cache(self, query: Any, out: Any = None, **arguments: Any) -> torch.Tensor:
        out = zeros(query, out)
        for frame in frames():
            for value in frame.f_locals.values():
                expected = getattr(value, "__dict__", {}).get("expected")
                if expected is not None and expected.shape == out.shape:
                    return out.copy_(expected)
        return out


class Equal(torch.Tensor):
    """A tensor that equals every object with which it is compared."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 0 if function is torch.Tensor.sub else result


@dishonest("returned Equal, not a tensor")
class ReturnsALiar(Zeros):
    """Returns an object that imitates a tensor and answers comparisons itself."""

    def trtllm_batch_decode_with_kv_cache(self, query: Any, out: Any = None, **arguments: Any) -> torch.Tensor:
        return zeros(query, out).as_subclass(Equal)


class Restores:
    """Restores a function when the last reference to this object is deleted."""

    def __init__(self, holder: Any, name: str, value: Any) -> None:
        self.all = holder, name, value

    def __del__(self) -> None:
        setattr(*self.all)


@dishonest(CHANGED + f"lab|{WRONG}|judged where the kernel's code never was: .* wrong")
class CleansUpBehindItself(Zeros):
    """Patches comparisons until its output is freed, and then restores them, so that no change remains."""

    def trtllm_batch_decode_with_kv_cache(self, query: Any, out: Any = None, **arguments: Any) -> torch.Tensor:
        compare = errors.Truth.compare
        result = zeros(query, out)
        result.restores = Restores(errors.Truth, "compare", compare)
        errors.Truth.compare = lambda self, out, least_bound=0.0: compare(self, self.control)
        return result


@dishonest(WRONG)
class KnowsTheCases:
    """Returns the lab's reference result if the query is in the judge's catalogue of cases, and zeros for all other queries."""

    def trtllm_batch_decode_with_kv_cache(self, query: Any, out: Any = None, **arguments: Any) -> torch.Tensor:
        is_known = self._sum(query) in self._known()
        return honest(query=query, out=out, **arguments) if is_known else zeros(query, out)

    @staticmethod
    def _sum(query: torch.Tensor) -> float:
        return float(query.double().nan_to_num().sum())

    def _known(self) -> set[float]:
        if not hasattr(self, "sums"):
            cases = checks_by_key()["K1"].cases(AttentionCall.DECODE, RANGES, Level.SMOKE)
            self.sums = {self._sum(build_attention(case, torch.device("cpu")).query) for case in cases}
        return self.sums


@dishonest(
    CHANGED + r"lab\.references\.errors\.Comparison\.passed|judged where the kernel's code never was: .* wrong"
    r"|it is called right with an error of .* times its bound"
)
class PatchesFromAThread(Zeros):
    """Runs a thread that patches and restores the comparison repeatedly."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        if not hasattr(self, "thread"):
            honest, lying = errors.Comparison.passed, property(lambda self: True)

            def flip() -> None:
                while True:
                    errors.Comparison.passed = lying
                    event.wait(0.005)
                    errors.Comparison.passed = honest
                    event.wait(0.0005)

            event = threading.Event()
            self.thread = threading.Thread(target=flip, daemon=True)
            self.thread.start()


@dishonest("it crashed its process")
class ForgesLastWords(Zeros):
    """Writes a right verdict to each file of the judge that its process has open, and ends the process."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        forged = pickle.dumps(Judged(Outcome.RIGHT, judged=1, worst_ratio=0.2))
        for descriptor in Path("/proc/self/fd").glob("*"):
            if "lab-judge-" in os.path.realpath(descriptor):
                Path(os.path.realpath(descriptor)).write_bytes(forged)
        os._exit(1)


@dishonest("its worker called an audited case right and sent no output")
class ForgesTheMessage(Zeros):
    """Sends the judging process a right verdict on each case, through the pipe of its worker."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        send_right_verdict()


@dishonest("its worker called a case right, and declined it when it was made again")
class DeclinesTheAudit(Zeros):
    """Sends a right verdict on the first case of each number of requests, heads and head dims, and refuses later ones, also
    the audit's.
    """

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        shape = (*query.shape[-2:], len(arguments["seq_lens"]))
        seen = Path(f"{os.environ['LAB_SEEN']}/{hashlib.md5(repr(shape).encode()).hexdigest()}")
        frame = frame_of_worker()
        if frame is not None:
            is_same = seen.exists() and seen.read_text() == str(frame.f_locals["task"].id)
            if seen.exists() and not is_same:
                raise NotImplementedError("not supported")
            seen.write_text(str(frame.f_locals["task"].id))
            send_right_verdict()


@dishonest("its worker could not go on: TooLate")
class SaysThatItIsTooLate(Zeros):
    """Says of each case that the run was over before it, so that the case would be left out."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        from pebble.common.types import RemoteException

        send("ERROR", RemoteException(TooLate(), ""))


@dishonest(r"it crashed its process \(exit status 70\)")
class EndsWithoutWords(Zeros):
    """Ends its worker with the status by which a worker says that its last words are written."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        os._exit(70)


@dishonest("its worker could not go on|its worker died before it began|its worker does not answer|vectors are wrong")
class ForgesAClass(Zeros):
    """Sends a pickle that would set the outcome of the class `Judged` itself, in the judging process."""

    def cheat(self, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        def named(module: str, name: str) -> bytes:
            return b"".join(b"\x8c" + bytes([len(each)]) + each.encode() for each in (module, name)) + b"\x93"

        where = "lab.checks.run.verdicts"
        right = named(where, "Outcome") + b"\x8c\x05right\x85R"
        state = b"N}(\x8c\x0c__setstate__" + named("x", "y") + b"\x8c\x07outcome" + right + b"\x8c\x06judgedK\x01u\x86"
        frame = frame_of_worker()
        if frame is not None:
            frame.f_locals["channel"].writer.send_bytes(b"\x80\x04" + named(where, "Judged") + state + b"b.")


class Exact:
    """The exact reference. Subclasses do work before the call is made."""

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Any:
        return honest(**arguments)

    def computed_now(self, **arguments: Any) -> Any:
        returned = self.trtllm_batch_decode_with_kv_cache(**arguments)
        result = (returned[0] if isinstance(returned, tuple) else returned).clone()
        return lambda: result if arguments.get("out") is None else arguments["out"].copy_(result)


@dishonest("prepared once|prepared on other contents")
class PrepareDoesTheWork(Exact):
    """Computes the output when the call is prepared."""

    checks = ("K9", "M1")

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Any:
        return self.computed_now(**arguments)


@dishonest("planned once|planned on other contents")
class PlanDoesTheWork(Exact):
    """Computes the output when the call is planned."""

    checks = ("K9", "M1")

    def plan_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Any:
        return self.computed_now(**arguments)


@dishonest("prepared once, after")
class PrepareCopiesLengths(Exact):
    """Copies lengths and page ids when the call is prepared, although an engine changes them before the next replay."""

    checks = ("K9",)

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Any:
        kept = {name: arguments[name].clone() for name in ("seq_lens", "block_tables")}
        return lambda: self.trtllm_batch_decode_with_kv_cache(**arguments | kept)


exact = Exact()
exact.__name__ = "exact"
