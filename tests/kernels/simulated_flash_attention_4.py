"""FlashAttention-4's `_flash_attn_fwd` by simulation: what 4.0.0b36 makes of its arguments, on a CPU, one key at a time.

Its parameters, checks and shapes are those of `flash_attn/cute/interface.py`; the package itself need not be there.
"""

import inspect
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels.simulated import attend_request, paged


@dataclass
class SimulatedFlashAttention4:
    """Stands in for `_flash_attn_fwd`."""

    major: int = 9  # of the GPU's capability
    calls: list[dict[str, Any]] = field(default_factory=list)  # arguments as passed

    def installed_function(self, part: str, name: str, written_for: str, keywords: frozenset[str]) -> Any:
        """Stand in for `lab.kernels.flashinfer_call.installed_function`."""
        assert name == "flash_attn.cute.interface._flash_attn_fwd"
        inspect.signature(self._forward).bind(**dict.fromkeys(keywords))
        return self

    def __call__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        return self._forward(**arguments)

    def _forward(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        seqused_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        page_table: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size_left: int | None,
        learnable_sink: Tensor | None,
        num_splits: int,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        assert num_splits == 1 or self.major != 9, "SplitKV not supported on SM 9.0"
        assert k.dtype == v.dtype == q.dtype == out.dtype
        assert page_table.stride(-1) == 1
        assert seqused_k.dtype == torch.int32
        batch_size, (heads, head_dim) = len(page_table), q.shape[-2:]
        if cu_seqlens_q is None:
            assert q.ndim == 4
            assert len(q) == batch_size
            offsets, lse_shape = [q.shape[1] * request for request in range(batch_size + 1)], (batch_size, heads, -1)
        else:
            assert q.ndim == 3
            offsets, lse_shape = cu_seqlens_q.tolist(), (heads, -1)
        rows, written = q.reshape(-1, heads, head_dim), out.view(-1, heads, head_dim)
        log2 = torch.full((len(rows), heads), math.nan)
        assert max(last - first for first, last in itertools.pairwise(offsets)) <= max_seqlen_q
        assert int(seqused_k.max()) <= max_seqlen_k
        window_left = -1 if window_size_left is None else window_size_left
        rule = {"causal": causal, "window_left": window_left, "sinks": learnable_sink}
        for request, kv_len in enumerate(seqused_k.tolist()):
            keys, values = (paged(cache.transpose(1, 2), page_table[request], kv_len) for cache in (k, v))
            own = range(*offsets[request : request + 2])
            attend_request(rows, own, keys, values, (softmax_scale, 1.0), written, log2, **rule)
        if lse is not None:
            assert lse.is_contiguous()
            assert lse.dtype == torch.float32
            by_request = log2.view(len(q), -1, heads).mT if q.ndim == 4 else log2.T
            assert lse.shape == by_request.shape == lse.view(lse_shape).shape
            lse.copy_(by_request * math.log(2.0))
