"""Show which kernel FlashInfer would launch on a GPU that this machine does not have (a dry run).

FlashInfer's trtllm-gen path has two parts: machine code, which only SM100 and SM103 run, and a launcher in host C++. The
launcher selects a kernel from a table, encodes TMA descriptors, fills `KernelParams` and calls the driver. In a dry run, nvcc
compiles the installed launcher, which runs on this CPU. A fake CUDA driver and runtime answer like the GPU that `machine`
names, check the descriptors by cuda.h's rules, and record the launches. So a dry run shows which kernel a call launches, with
which grid and arguments, or the error with which the launcher refuses the call::

    from lab.dry_run import machine

    with machine("b200") as gpu:
        lab.kernels.trtllm.trtllm_batch_decode_with_kv_cache(...)  # CPU tensors
    gpu.launches[0].name, gpu.launches[0].params.scale_softmax_log2, gpu.launches[0].tma

A dry run shows no outputs of kernels and no times, because no kernel runs. The number of clusters that fit on the GPU at once
is guessed. XQA and fmha_v2, which run on SM90, SM120 and SM121, are compiled for each shape and have no such launcher: for
these GPUs a dry run shows only FlashInfer's choice of backend.

The launcher selects kernels from the table of flashinfer-cubin 0.6.13, unless a newer flashinfer-cubin is installed
(`lab.dry_run.kernel_table`). The launcher of a later FlashInfer then selects from a table that is older than its own.

The table of 0.6.13 fits FlashInfer 0.6.13's launcher exactly. To run this launcher, install FlashInfer 0.6.13 next to the other
FlashInfer with `pip install --no-deps --target FOLDER flashinfer-python==0.6.13`, and put FOLDER first in `PYTHONPATH`. Call
FlashInfer's own functions then, because the lab's adapters are written for 0.7.2. `tests/dry_run/test_exact_table.py` does this
if the environment variable `LAB_FLASHINFER_0613` names FOLDER: a decode, a context, an MLA and a ragged call launch the same
kernels with the same grids under both versions.
"""

from lab.dry_run.build import NotBuiltError, why_not_built
from lab.dry_run.launcher import GPUS, Gpu, LaunchError
from lab.dry_run.launches import CompiledCall, Copy, Fill, KernelParams, Launch, LseArguments, TensorMap
from lab.dry_run.machine import Machine, machine

__all__ = [
    "GPUS",
    "CompiledCall",
    "Copy",
    "Fill",
    "Gpu",
    "KernelParams",
    "Launch",
    "LaunchError",
    "LseArguments",
    "Machine",
    "NotBuiltError",
    "TensorMap",
    "machine",
    "why_not_built",
]
