"""What every test needs before anything is imported, and the options of the benchmarks."""

import gc
import importlib
import os
from collections.abc import Generator, Iterator

from tests.gpus import WORKER, take_own_gpu, visible_gpus

take_own_gpu()  # before anything of CUDA
if WORKER in os.environ and not visible_gpus():  # workers share the cores; OpenMP reads this when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # what modules hold stays; looking through it again and again is a quarter of the time of importing it

import pytest  # noqa: E402
import torch  # noqa: E402

# Triton decides when it is imported; without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from lab.interpreter import INTERPRETER, quicken

    importlib.import_module(INTERPRETER)
    quicken()

# The lab's own plugin where the lab is not installed; and pytest's for tests of plugins.
pytest_plugins = ("lab.pytest_plugin", "pytester")


@pytest.fixture(scope="session", autouse=True)
def _no_watch_of_operators() -> Iterator[None]:
    """Leave out the comparison of torch's operators, a third of a small case's time. Workers and `test_integrity` make it."""
    from lab import integrity

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integrity, "_overloads", lambda name: [])
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread: where cases are small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage again, of what tests make: also in the process that collects no tests and shares them out."""
    gc.freeze()
    gc.enable()


if torch.cuda.is_available():

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
        """Skip a test of the CPU that comes to a Triton kernel: Triton compiles for the GPU here, and interprets nothing."""
        try:
            return (yield)
        except NotImplementedError as error:
            if "only in Triton's interpreter" in str(error) and item.get_closest_marker("gpu") is None:
                pytest.skip(f"it is a test of the CPU: {error}")
            raise


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which is not everywhere
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: a worker for each GPU; xdist's own number where there is none."""
    return len(visible_gpus()) or None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lab", "the lab's benchmarks")
    group.addoption("--lab-clock", default="graph", help="what reads GPU time: graph, cupti or events")
    group.addoption("--lab-l2", default="cold", help="what the L2 cache holds when a call starts: cold or warm")
    group.addoption("--lab-scenario", action="append", help="time this scenario, such as decode/llama-3.1-8b/64q1s4k")
    group.addoption(
        "--lab-calls", help="time the calls of this folder, which were recorded in an engine; FOLDER#3: one"
    )
    group.addoption("--whole-corpus", action="store_true", help="judge every wrong kernel, and not a sample: hours")
    group.addoption(
        "--lab-implementation",
        action="append",
        help="time this module, and judge what is timed; several, which take turns: repeat; all: every one this machine has",
    )
    group.addoption(
        "--lab-trace", help="a Mooncake (.jsonl) or Azure (.csv) trace to draw batches from, instead of the lab's own"
    )
