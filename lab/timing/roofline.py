"""Measure the rates that this GPU's memory and matrix units reach, and compute the least time of a call at those rates. A
kernel that only reads can be a little faster than the measured negation; e4m3 products are faster than the bf16 product.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from lab.gpus import DATASHEETS, Datasheet
from lab.timing.gpu_time import measure
from lab.timing.method import L2, Clock, Method
from lab.timing.work import GpuWork

# A time is refused if its rate is above a measured rate times these factors. A kernel that only reads is faster than a copy:
# FA2's decode by 5.1 % on an H200 (results/nvidia-h200/timings.json). The power limit slows a large product: the datasheet's
# rate is 1.26 times the 788 TFLOP/s that an H200 reaches. A warm L2 delivers data faster than memory.
READING_OVER_COPY = 1.10
PRODUCT_OVER_MEASURED = 1.30
L2_OVER_MEMORY = 4.0
# Rates of narrower products as multiples of the measured bf16 rate, by the cache's dtype.
RATE_BY_DTYPE = {"float8_e4m3fn": 2.0, "uint8": 4.0}
COPY_BYTES = 2**32  # bytes read plus written: far more than any L2; takes about a millisecond
MATRIX_SIZE = 8192
CEILING_METHOD = Method(Clock.GRAPH, L2.WARM)


@dataclass(frozen=True)
class Ceilings:
    """The rates that large simple kernels reached on this GPU in this run: GB/s (10**9) of bytes read plus written, and TFLOP/s
    of a bf16 matrix product on random data. `datasheet` has the vendor's rates.
    """

    bandwidth_gbps: float
    matrix_rate_tflops: float
    datasheet: Datasheet | None = None

    def facts(self) -> dict[str, Any]:
        stated = ("bandwidth_gbps", "matrix_rate_tflops", "source")
        return {
            "bandwidth_gbps": round(self.bandwidth_gbps, 1),
            "matrix_rate_tflops": round(self.matrix_rate_tflops, 1),
            "matrix_dtype": "bfloat16",
            "method": str(CEILING_METHOD),
            **{f"datasheet_{name}": getattr(self.datasheet, name, None) for name in stated},
        }


@dataclass(frozen=True)
class Roofline:
    """A measured time, compared with the least time in which the GPU can move the bytes and do the operations."""

    bandwidth_gbps: float  #: 10**9 bytes per second
    rate_tflops: float
    bandwidth_percent: float  #: of the bandwidth measured on this GPU in this run
    matrix_rate_percent: float  #: of the matrix rate measured on this GPU in this run
    floor_us: float  #: the longer of bytes over measured bandwidth and operations over measured matrix rate
    floor_bound: str  #: "memory" or "matrix": the part of the work that sets the floor
    floor_percent: float  #: floor over median in percent; 100 at the limit

    def facts(self) -> dict[str, Any]:
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


def roofline(median_us: float, bytes_moved: int, operations: int, ceilings: Ceilings) -> Roofline:
    memory_us, matrix_us = least_us(bytes_moved, operations, ceilings)
    floor_us = max(memory_us, matrix_us)
    return Roofline(
        bandwidth_gbps=bytes_moved / median_us / 1e3,
        rate_tflops=operations / median_us / 1e6,
        bandwidth_percent=100 * memory_us / median_us,
        matrix_rate_percent=100 * matrix_us / median_us,
        floor_us=floor_us,
        floor_bound="memory" if memory_us >= matrix_us else "matrix",
        floor_percent=100 * floor_us / median_us,
    )


def why_impossible(bandwidth_percent: float, matrix_rate_percent: float, *, is_cold: bool, kv_dtype: str = "") -> str:
    """Return a sentence that says why this GPU cannot reach these percentages of its measured rates; "" if it can. `is_cold`:
    the inputs were not in L2. `kv_dtype`: torch's name of the cache's dtype; "float8_e4m3fn" and "uint8" permit a higher rate.
    """
    reads = "where a kernel that only reads reaches" if is_cold else "where a warm L2 reaches"
    over_memory = READING_OVER_COPY if is_cold else L2_OVER_MEMORY
    over_matrix = PRODUCT_OVER_MEASURED * RATE_BY_DTYPE.get(kv_dtype, 1.0)
    for percent, most, what, rate, which in (
        (bandwidth_percent, 100 * over_memory, "move its bytes", "bandwidth", reads),
        (matrix_rate_percent, 100 * over_matrix, "compute", "matrix rate", "whose units reach"),
    ):
        if percent > most:
            return (
                f"it would {what} at {percent:,.0f} % of the {rate} measured on this GPU, {which} {most:.0f} % at most: "
                "it does not do the work, or its time is wrong"
            )
    return ""


def least_us(bytes_moved: int, operations: int, rates: Ceilings | Datasheet) -> tuple[float, float]:
    """Return the least times in µs to move the bytes, and to do the operations, at these rates; 0 for an unknown rate."""
    matrix_rate_tflops = rates.matrix_rate_tflops
    matrix_us = 0.0 if matrix_rate_tflops is None else operations / matrix_rate_tflops / 1e6
    return bytes_moved / rates.bandwidth_gbps / 1e3, matrix_us


def measure_ceilings(device: torch.device) -> Ceilings:
    bandwidth_gbps = COPY_BYTES / measure(negation(COPY_BYTES, device), CEILING_METHOD).median_us / 1e3
    # The data is random, because zeros are faster than any real data (H200: 894 against 788 TFLOP/s).
    left, right = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    operations = 2 * MATRIX_SIZE**3
    product = GpuWork.of(torch.mm, 3 * left.nbytes, operations, input=left, mat2=right, out=torch.empty_like(left))
    rate_tflops = operations / measure(product, CEILING_METHOD).median_us / 1e6
    return Ceilings(bandwidth_gbps, rate_tflops, DATASHEETS.get(torch.cuda.get_device_name(device)))


def negation(size_bytes: int, device: torch.device) -> GpuWork:
    """Return a call of torch.neg that reads half of `size_bytes` and writes the other half. A copy would be slower, because
    inside a graph it runs on a copy engine: 2.8 TB/s on an H200, whose kernels reach 4.2 TB/s.
    """
    source = torch.randn(size_bytes // 8, device=device)
    return GpuWork.of(torch.neg, size_bytes, input=source, out=torch.empty_like(source))
