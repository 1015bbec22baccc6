"""A GPU that is not there: FlashInfer's own trtllm-gen launcher, run on this CPU against a fake CUDA.

FlashInfer's trtllm-gen path is host C++ around machine code that only SM100 and SM103 run: a launcher selects a kernel from a
table, encodes TMA descriptors, fills `KernelParams` and calls the driver. Here nvcc compiles that launcher as it is
installed, and a fake driver and runtime answer it as the GPU that `machine` names, check its descriptors by cuda.h's rules,
and record what it would launch. So a dry run shows which kernel a call comes to, with which grid and arguments, or the
launcher's refusal::

    from lab.dry_run import machine

    with machine("b200") as gpu:
        lab.kernels.trtllm.trtllm_batch_decode_with_kv_cache(...)  # CPU tensors
    gpu.launches[0].name, gpu.launches[0].params.scale_softmax_log2, gpu.launches[0].tma

What it does not show: anything that machine code computes, or a time. No kernel runs, outputs keep what was in them, and the
number of clusters that fit at once is guessed. XQA and fmha_v2, which run on SM90, SM120 and SM121, are compiled for each
shape and have no such launcher: there a dry run shows FlashInfer's choice of backend alone.

The table is that of flashinfer-cubin 0.6.13, unless a newer one is installed (`lab.dry_run.kernel_table`): what a later
FlashInfer's launcher selects from it rests on the table of 0.6.13.

FlashInfer 0.6.13's launcher reads exactly that table. It is installed next to another FlashInfer with `pip install --no-deps
--target FOLDER flashinfer-python==0.6.13` and FOLDER first in `PYTHONPATH`. The lab's adapters are written for 0.7.2, so
there FlashInfer's own functions are called. `tests/dry_run/test_exact_table.py` does so where `LAB_FLASHINFER_0613` names
FOLDER: a decode, a context, an MLA and a ragged call launch the same kernels with the same grids under both.
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
