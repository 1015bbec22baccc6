"""What every test needs before anything is imported, and the options of the benchmarks."""

import os

import pytest
import torch

# Triton decides when it is imported; without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lab", "the lab's benchmarks")
    group.addoption("--lab-clock", default="graph", help="what reads GPU time: graph, cupti or events")
    group.addoption("--lab-l2", default="cold", help="what the L2 cache holds when a call starts: cold or warm")
    group.addoption("--lab-scenario", action="append", help="time this scenario, such as decode/llama-3.1-8b/64q1s4k")
    group.addoption("--whole-matrix", action="store_true", help="judge every mutant by every check, and compare")
    group.addoption(
        "--lab-implementation", "--implementation", action="append", help="time and judge this module; several: repeat"
    )
    group.addoption(
        "--lab-trace", help="a Mooncake (.jsonl) or Azure (.csv) trace to draw batches from, instead of the lab's own"
    )
