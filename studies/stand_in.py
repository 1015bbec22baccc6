"""A stand-in for a model, where an experiment is about what happens around a model and not in it."""

import torch

from lab.metadata.engine.capture import capturing
from lab.timing.gpu_time import measure
from lab.timing.work import GpuWork
from studies.arms import WARM

MATRIX_SIZE = 2048  # a product of about 30 µs on an H200: small beside a step, long beside a launch


class MatrixProducts:
    """A graph of as many matrix products as take about `gpu_us`, in place of a model."""

    def __init__(self, gpu_us: float, device: torch.device) -> None:
        # Kept here, because a graph does not keep what it reads and writes.
        self.operands = [torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self.out = torch.empty_like(self.operands[0])
        arguments = dict(zip(("input", "mat2"), self.operands, strict=True)) | {"out": self.out}
        product = GpuWork.of(torch.mm, 3 * self.out.nbytes, 2 * MATRIX_SIZE**3, **arguments)
        self.products = max(1, round(gpu_us / measure(product, WARM).median_us))
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph):
            for _ in range(self.products):
                torch.mm(*self.operands, out=self.out)
