"""What the tests of a draft model's pass and of its graphs share: where they run, and a small model with room for requests."""

import functools
import importlib
from types import ModuleType

import pytest

from lab.kernels import default_implementation
from lab.workloads.requests import new_pool
from studies.stand_in_model import TINY_SIZES, StandInModel, StandInSizes
from tests.devices import IN_INTERPRETER, ON_GPU

PAGE_SIZE = 16
MAX_CONTEXT_LEN = 100


def _runs_flashinfer() -> bool:
    return default_implementation().__name__ == "lab.kernels.trtllm"


# (device, module) of every place that a model's attention is tested in.
PLACES = [
    pytest.param("cpu", "lab.kernels.portable", marks=IN_INTERPRETER, id="portable interpreted"),
    pytest.param("cuda", "lab.kernels.portable", marks=ON_GPU, id="portable"),
    pytest.param(
        "cuda",
        "lab.kernels.trtllm",
        marks=(
            pytest.mark.gpu,
            pytest.mark.skipif(not _runs_flashinfer(), reason="needs a GPU that FlashInfer has kernels for"),
        ),
        id="FlashInfer",
    ),
]

# The same for claims about a graph's buffers, which no kernel decides: on a CPU the references are the fastest.
BUFFER_PLACES = [pytest.param("cpu", "lab.references", marks=IN_INTERPRETER, id="references"), *PLACES[1:]]


@functools.cache
def implementation(name: str) -> ModuleType:
    """The module of that name."""
    return importlib.import_module(name)


def new_model(
    device: str, num_requests: int = 8, *, sliding_window: bool = False, sizes: StandInSizes = TINY_SIZES
) -> StandInModel:
    """A model whose cache is full of large numbers until something is written, and a pool for so many long requests."""
    lens, of_window = (MAX_CONTEXT_LEN,) * num_requests, 0 if sliding_window else None
    pool = new_pool(
        lens,
        page_size=PAGE_SIZE,
        max_context_len=MAX_CONTEXT_LEN,
        spare_pages=3,
        swa_spare_pages=of_window,
        device=device,
    )
    model = StandInModel(sizes, pool, sliding_window=sliding_window)
    model.cache.storage.fill_(1e30)
    return model
