"""Further kernels that try to get a false time, by a writer who had read only docs/evidence/trust.md."""

import os
import threading
import time
from typing import Any

import torch

from corpus.dishonest import dishonest
from corpus.dishonest.timing import WRONG, Call, Portable, is_capturing, prepared

THREAD = "a thread runs .* while kernels are timed"


@dishonest(WRONG, needs_gpu=True)
class FirstCallDoesAll(Portable):
    """Does the work of all calls of a replay in the first call, concurrently on streams that it joins; the remaining calls do
    nothing.
    """

    def __init__(self) -> None:
        self.all: list[Call] = []
        self.captured = 0

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        honest = prepared(**arguments)
        self.all.append(honest)
        return lambda: self.call(honest, arguments)

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if not is_capturing():
            return honest()
        self.captured += 1
        here = torch.cuda.current_stream()
        if honest is self.all[0]:
            for each in self.all:
                side = torch.cuda.Stream()
                side.wait_stream(here)
                with torch.cuda.stream(side):
                    each()
                here.wait_stream(side)
        return arguments["out"]


@dishonest("it changed environment variables of compilers", needs_gpu=True)
class SpoilsTheCompiler(Portable):
    """Sets an environment variable of Triton so that kernels that are compiled later are not optimised."""

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        honest = prepared(**arguments)
        honest()
        os.environ["DISABLE_PTXAS_OPT"] = "1"
        return honest


@dishonest(THREAD + "|during capture", needs_gpu=True)  # the thread's work can end the capture of a graph
class CrowdsTheOther(Portable):
    """Runs a thread that copies memory, so that the other implementation of the comparison is slow."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if not hasattr(self, "thread") and not is_capturing():
            self.thread = threading.Thread(target=self.crowd, daemon=True)
            self.thread.start()
        return honest()

    def crowd(self) -> None:
        side, source = torch.cuda.Stream(), torch.zeros(2**20, device="cuda")
        with torch.cuda.stream(side):
            while True:
                source.clone()
                time.sleep(0.0005)


@dishonest(THREAD + "|" + WRONG + "|by the host's", needs_gpu=True)
class WorksInTheWait(Portable):
    """Runs a thread that does the work of all calls repeatedly; a call only copies the thread's last result."""

    def __init__(self) -> None:
        self.works: list[tuple[Call, torch.Tensor]] = []

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        own = torch.empty_like(arguments["out"])
        work = prepared(**arguments | {"out": own})
        work()
        self.works.append((work, own))
        if not hasattr(self, "thread"):
            self.thread = threading.Thread(target=self.ahead, daemon=True)
            self.thread.start()
        return lambda: arguments["out"].copy_(own)

    def ahead(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while True:
                if not is_capturing():
                    for work, _ in list(self.works):
                        work()
                time.sleep(0.0005)
