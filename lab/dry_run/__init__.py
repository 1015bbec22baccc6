"""Show which kernel FlashInfer would launch on a GPU that this machine does not have (a dry run).

FlashInfer's trtllm-gen path has two parts. The first is machine code that only SM100 and SM103 run. The second is a launcher in
host C++: it selects a kernel from a table, encodes TMA descriptors and fills the struct `KernelParams`. In a dry run, nvcc
compiles the installed launcher, and the launcher runs on this CPU with a fake CUDA driver and runtime. The fake CUDA answers as
the GPU that `machine` names, checks the descriptors by cuda.h's rules, and records the launches, or the error with which the
launcher refuses the call::

    from lab.dry_run import machine

    with machine("b200") as gpu:
        lab.kernels.trtllm.trtllm_batch_decode_with_kv_cache(...)  # CPU tensors
    gpu.launches[0].name, gpu.launches[0].params.scale_softmax_log2, gpu.launches[0].tma

No kernel runs, so there are no times. The number of clusters that fit on the GPU at once is a guess. XQA and fmha_v2, which run
on SM90, SM120 and SM121, have no such launcher: for these GPUs a dry run shows only which backend FlashInfer chooses.

The launcher selects kernels from the table of flashinfer-cubin 0.6.13, unless a newer flashinfer-cubin is installed
(`lab.dry_run.kernel_table`). The table fits FlashInfer 0.6.13's launcher exactly. To run that launcher, install it next to the
newer FlashInfer with `pip install --no-deps --target FOLDER flashinfer-python==0.6.13`, put FOLDER first in `PYTHONPATH`, and
call FlashInfer's own functions. `tests/dry_run/test_exact_table.py` does so if `LAB_FLASHINFER_0613` names FOLDER: a decode, a
context, an MLA and a ragged call launch the same kernels with the same grids under both versions.
"""

from lab.dry_run.build import NotBuiltError, why_not_built
from lab.dry_run.launches import CompiledCall, Copy, Fill, KernelParams, Launch, LseArguments, TensorMap
from lab.dry_run.machine import GPUS, Gpu, LaunchError, Machine, machine

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
