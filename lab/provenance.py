"""Describe the machine and the software on which something is measured: GPU, driver, clocks, versions and commit."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PEERS = ("flash-attn-4", "sgl-flash-mla", "sglang", "vllm")
PACKAGES = ("torch", "triton", "flashinfer-python", "pytest-benchmark", "numpy", "scipy", "cupti-python", *PEERS)
GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")
# The GPU follows by its UUID, because nvidia-smi numbers all GPUs, and torch only those in CUDA_VISIBLE_DEVICES.
NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader", "-i")


def environment() -> dict[str, Any]:
    """Return a description of this machine and its software as JSON data. It has fields of the GPU only if there is one."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "commit": commit(),
    }
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "capability": list(torch.cuda.get_device_capability(device)),
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "nvidia_smi": dict(
                zip(GPU_FIELDS, output_of([*NVIDIA_SMI, f"GPU-{properties.uuid}"]).split(", "), strict=False)
            ),
        }
    return facts


def commit() -> str | None:
    """Return the git commit of the lab's checkout, with "-dirty" if tracked files were changed. If the lab is not in a
    checkout, return the environment variable `LAB_COMMIT`, or None if it is not set.
    """
    here = str(Path(__file__).parent)
    if not output_of(["git", "-C", here, "ls-files", Path(__file__).name]):  # another project's checkout, or none
        return os.environ.get("LAB_COMMIT")
    return output_of(["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"])


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(command: list[str]) -> str:
    """Return the output of a command without the final newline; "" if the program is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
