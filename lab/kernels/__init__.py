"""What is measured: FlashInfer's kernels (`trtllm`) and portable Triton ones (`portable`), behind the same names.

Importing this package imports neither: each module brings its own heavy dependency.
"""

import importlib
from types import ModuleType

import torch

from lab.kernels.support import capability_of

FLASHINFER_MAJORS = (9, 10, 12)  # compute capabilities that FlashInfer 0.7.2 has TRT-LLM attention kernels for


def default_implementation(device: torch.device | str | None = None) -> ModuleType:
    """`lab.kernels.trtllm` where FlashInfer has kernels for the GPU, else `lab.kernels.portable`.

    Args:
        device: where it is to run; the GPU if there is one.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    capability = capability_of(where)
    runs_flashinfer = capability is not None and capability[0] in FLASHINFER_MAJORS
    return importlib.import_module("lab.kernels.trtllm" if runs_flashinfer else "lab.kernels.portable")
