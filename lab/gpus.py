"""Properties of GPUs by compute capability. A new GPU needs a new row of `FAMILIES`.

This module imports only torch and the standard library.
"""

import functools
from dataclasses import dataclass

import torch

Capability = tuple[int, int]  # (major, minor), e.g. (9, 0) for an H200


@dataclass(frozen=True)
class GpuFamily:
    """The properties that the GPUs of one or more compute capabilities share, such as the size of their shared memory."""

    capabilities: tuple[Capability, ...]  #: (major, minor) of the family's GPUs, in ascending order
    #: largest shared memory of one program (CUDA C++ Programming Guide, technical specifications per compute capability)
    shared_memory_kib: int
    has_e4m3: bool = False  #: an instruction converts e4m3, and Triton 3.7 compiles e4m3 (`supported_fp8_dtypes`)
    has_tensor_memory: bool = False  #: accumulators of matrix products are in a separate memory
    overlaps_launches: bool = False  #: a launch may begin while the previous one ends (programmatic dependent launch)
    trtllm_backend: str | None = None  #: FlashInfer 0.7.2's choice for "auto" in TRT-LLM calls; None: no kernels
    fa_backend: str = "fa2"  #: the newest of FlashInfer 0.7.2's own kernels for the family: "fa2" or "fa3"

    @property
    def has_large_shared_memory(self) -> bool:
        """Return True if a program can use 227 KiB of shared memory, as the larger tiles of `lab.kernels.portable` need."""
        return self.shared_memory_kib >= 227


SM80 = GpuFamily(((8, 0), (8, 7)), 163)
SM86 = GpuFamily(((8, 6),), 99)
SM89 = GpuFamily(((8, 9),), 99, has_e4m3=True)
SM90 = GpuFamily(((9, 0),), 227, has_e4m3=True, overlaps_launches=True, trtllm_backend="xqa", fa_backend="fa3")
SM100 = GpuFamily(
    ((10, 0), (10, 3)), 227, has_e4m3=True, has_tensor_memory=True, overlaps_launches=True, trtllm_backend="trtllm-gen"
)
SM120 = GpuFamily(((12, 0), (12, 1)), 99, has_e4m3=True, overlaps_launches=True, trtllm_backend="xqa")
# Unknown GPUs: the features that every GPU since SM90 has.
OTHER = GpuFamily((), 99, has_e4m3=True, overlaps_launches=True)
FAMILIES = (SM80, SM86, SM89, SM90, SM100, SM120, OTHER)
INTERPRETED = SM90  # Triton's interpreter on a CPU runs the code for SM90
OLDEST = SM80.capabilities[0]


@dataclass(frozen=True)
class Datasheet:
    """The memory bandwidth and matrix rate of a GPU, as its vendor states them."""

    bandwidth_gbps: float  #: GB/s, 10**9 bytes per second
    matrix_rate_tflops: float | None  #: dense bf16, in TFLOP/s; None if not stated
    source: str  #: title of the document


# By CUDA's name of the GPU. Rates are without sparsity. A GPU that is not listed has no figures.
DATASHEETS = {
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "NVIDIA A100-SXM4-80GB": Datasheet(2039, 312, "NVIDIA A100 Tensor Core GPU datasheet, SXM4 80 GB"),
    "NVIDIA H100 80GB HBM3": Datasheet(3350, 989, "NVIDIA H100 Tensor Core GPU datasheet, SXM5"),
    "NVIDIA H200": Datasheet(4800, 989, "NVIDIA H200 Tensor Core GPU datasheet, SXM5"),
    "NVIDIA B200": Datasheet(
        8000, 2250, "NVIDIA HGX B200 datasheet, an eighth of the board; other sources state 2380 and 2500 TFLOP/s"
    ),
    # https://www.nvidia.com/en-us/data-center/hgx/: 36 PFLOP/s of bf16 with sparsity for eight, as of HGX B200; 8 TB/s each.
    "NVIDIA B300 SXM6 AC": Datasheet(
        8000, 2250, "NVIDIA HGX B300 datasheet, a sixteenth of the board's rate with sparsity"
    ),
    # https://www.nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000/ for the bandwidth;
    # https://hmc-tech.com/gpu/nvidia-rtx-pro-6000-blackwell-vs-amd-radeon-pro-duo-polaris quotes the white paper's rate.
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": Datasheet(
        1792, 503.8, "NVIDIA RTX Blackwell PRO GPU architecture white paper, Workstation Edition"
    ),
    # https://docs.nvidia.com/dgx/dgx-spark/hardware.html; the only matrix rate there is of FP4 with sparsity.
    "NVIDIA GB10": Datasheet(273, None, "NVIDIA DGX Spark user guide, hardware overview; no dense bf16 rate is stated"),
}


def capability_of(device: torch.device) -> Capability | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.cache
def family_of(capability: Capability | None) -> GpuFamily | None:
    """Return the family of a GPU; None for a CPU and for a GPU before SM80. A capability that no family lists belongs to the
    family of the next lower capability with the same major number. If there is none, return `OTHER`: an unknown GPU.
    """
    if capability is None or capability < OLDEST:
        return None
    known = {each: family for family in FAMILIES for each in family.capabilities}
    earlier = [each for each in known if each[0] == capability[0] and each <= capability]
    return known[max(earlier)] if earlier else OTHER


def trtllm_backend_of(capability: Capability | None, backend: str = "auto") -> str | None:
    """Return the backend that FlashInfer's TRT-LLM calls use on a GPU: `backend`, or FlashInfer's choice if `backend` is
    "auto". None means that FlashInfer has no such kernels for this GPU.
    """
    if backend != "auto":
        return backend
    family = family_of(capability)
    return None if family is None else family.trtllm_backend


def family_that_runs(capability: Capability | None) -> GpuFamily:
    """Return the family whose tiles a Triton kernel uses: the GPU's own, SM80 for an older GPU, SM90 for a CPU (None)."""
    return family_of(capability) or (INTERPRETED if capability is None else SM80)


def names_of(families: tuple[GpuFamily, ...]) -> str:
    """Return the GPUs of these families as text: "SM90, SM120 and SM121", or "SM80 and later" for all families."""
    if families == FAMILIES:
        return f"{sm_name(OLDEST)} and later"
    *names, last = [sm_name(capability) for family in families for capability in family.capabilities]
    return f"{', '.join(names)} and {last}" if names else last


def sm_name(capability: Capability) -> str:
    return f"SM{capability[0]}{capability[1]}"
