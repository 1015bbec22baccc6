"""Copy a batch's lengths from the GPU to the host, and decide whether an engine needs the copy (SGLang's PR 26824)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lab.metadata.engine.forward_batch import INDEX_DTYPES, check_vector


def decide_needs_cpu_seq_lens(
    attn_backends: Iterable[object | None], *, two_batch_overlap: bool = False, ngram: bool = False
) -> bool:
    """Return True if an engine must copy the lengths to the host in each iteration (SGLang 0.5.23): for two-batch overlap,
    NGRAM speculation, or a backend whose attribute ``needs_cpu_seq_lens`` is not False. SGLang 0.5.13 ignores NGRAM, and needs
    the copy also if piecewise CUDA graphs are enabled, which is not modelled.
    """
    if two_batch_overlap or ngram:
        return True
    return any(getattr(backend, "needs_cpu_seq_lens", True) for backend in attn_backends if backend is not None)


class LengthMirror:
    """Copies a batch's lengths to the host, as SGLang does in each iteration if `decide_needs_cpu_seq_lens` returns True. The
    copy runs on a stream of its own, into pinned memory, after the work that is on the current stream when `read` is called.
    """

    def __init__(self, max_batch_size: int, device: torch.device | str = "cuda") -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
        kind = torch.device(device).type
        if kind not in ("cuda", "cpu"):
            raise ValueError(f"device={str(device)!r}: lengths are copied from a CUDA device, or from the CPU")
        self.max_batch_size = max_batch_size
        self._stream = torch.cuda.Stream(device) if kind == "cuda" else None
        self.device = torch.device("cpu") if self._stream is None else self._stream.device
        # A non-blocking copy into memory that is not pinned would block.
        self._buffer = torch.empty(max_batch_size, dtype=torch.int64, pin_memory=self._stream is not None)

    def read(self, seq_lens: Tensor) -> tuple[list[int], int]:
        """Copy lengths, int32 or int64, to the host and wait. Return (list of the lengths, their sum)."""
        check_vector("seq_lens", seq_lens, INDEX_DTYPES)
        if seq_lens.device != self.device:
            raise ValueError(
                f"seq_lens is on {seq_lens.device}, but this mirror copies from {self.device}: make one for that device"
            )
        if seq_lens.shape[0] > self.max_batch_size:
            raise ValueError(
                f"seq_lens has {seq_lens.shape[0]} entries, more than max_batch_size={self.max_batch_size}"
            )
        mirror = self._buffer[: seq_lens.shape[0]]
        if self._stream is None:
            mirror.copy_(seq_lens)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(seq_lens.device))
            with torch.cuda.stream(self._stream):
                mirror.copy_(seq_lens, non_blocking=True)
            # The host waits for the copy, so neither seq_lens nor the buffer is reused while it runs.
            self._stream.synchronize()
        seq_lens_cpu = mirror.tolist()
        return seq_lens_cpu, sum(seq_lens_cpu)
