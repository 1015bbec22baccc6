"""Stand-ins for a model and for its requests, where an experiment is about what happens around a model and not in it."""

import torch
from torch import Tensor

from lab.experiments.arms import WARM
from lab.metadata.engine.capture import capturing
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing.gpu_time import measure
from lab.timing.work import GpuWork
from lab.workloads.requests import admit, forward_batch, new_pool

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


class VerifyRequests:
    """Equal requests that verify drafts, and the batch of any lengths that they grow to.

    Args:
        batch_size, num_draft_tokens, seq_len: requests, query rows of each, their tokens at the start.
        longest: tokens that each has slots for.
        page_size, max_context_len: of their pool, which has no more pages than they need.
        generator: draws how many tokens each request accepts, in every iteration as many.
        device: where all of it is.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        num_draft_tokens: int,
        seq_len: int,
        longest: int,
        page_size: int,
        max_context_len: int,
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        # An engine gives requests their slots before it knows which drafts are accepted; here all at once.
        lens = (longest,) * batch_size
        self.pool = new_pool(lens, page_size=page_size, max_context_len=max_context_len, device=device)
        self.rows = torch.tensor(admit(self.pool, lens, (0,) * batch_size).rows, device=device)
        self.q_lens = (num_draft_tokens,) * batch_size
        self.first_seq_lens = torch.full((batch_size,), seq_len, device=device)
        self.accepted = torch.randint(1, num_draft_tokens + 1, (batch_size,), generator=generator).to(device)
        self._draft_positions = torch.arange(num_draft_tokens, device=device)

    def batch(self, seq_lens: Tensor) -> ForwardBatch:
        """Return the target-verify pass over requests of these lengths, [batch_size] int64, made on the device."""
        positions = seq_lens[:, None] + self._draft_positions
        slots = self.pool.req_to_token[self.rows[:, None], positions].flatten().to(torch.int64)
        return forward_batch(ForwardMode.TARGET_VERIFY, self.rows, seq_lens, self.q_lens, slots)
