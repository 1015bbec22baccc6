"""One GPU for each pytest-xdist worker. Imports nothing that could have made up its mind about GPUs before."""

import os
from collections.abc import MutableMapping

import pynvml

VISIBLE = "CUDA_VISIBLE_DEVICES"
WORKER = "PYTEST_XDIST_WORKER"


def visible_gpus(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them; by UUID, all of the host's, where it is not set."""
    if VISIBLE in environment:
        return [name for name in environment[VISIBLE].split(",") if name]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return []
    try:
        return [
            pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
    finally:
        pynvml.nvmlShutdown()


def take_own_gpu(environment: MutableMapping[str, str] = os.environ) -> None:
    """In a worker, leave it one GPU: what it compiles, times and captures is then its own. Before CUDA is initialised."""
    gpus = visible_gpus(environment)
    if WORKER in environment and gpus:
        number = int(environment[WORKER].removeprefix("gw"))  # of gw0, gw1, …
        environment[VISIBLE] = gpus[number % len(gpus)]  # in turn, where there are more workers
