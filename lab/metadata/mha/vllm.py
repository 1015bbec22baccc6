"""The forward passes of vLLM 0.33.0's FlashInfer backend: a decode call and a context call for each layer.

Line numbers refer to ``vllm/v1/attention/backends/flashinfer.py`` unless another file is named. A batch begins with the
requests that the decode call computes. The metadata is SGLang's (`build_mha_metadata`). vLLM's calls differ in which requests
they compute, in the upper bounds of lengths, and in padding: padding requests of a CUDA graph have no keys (``seq_lens`` 0) and
page 0, the null block (``v1/worker/gpu_model_runner.py`` 2146, 2309).
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.backend import in_turn
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_cache import PagedKVCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import exclusive_cumsum, host_lengths, num_pages, query_lens
from lab.metadata.mha.backend import AttentionLayer, PlannedCall, call_arguments
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata
from lab.named_enum import NamedEnum


class Engine(NamedEnum):
    """The engine whose calls are modelled: SGLang, or vLLM with trtllm-gen (SM100, SM103) or with XQA (SM90, SM120)."""

    SGLANG = "SGLang"
    VLLM = "vLLM"  # with trtllm-gen. The GPU determines the kernel (vLLM's flashinfer.py 1302)
    VLLM_XQA = "vLLM with XQA"


@dataclass(frozen=True, eq=False)
class VLLMBackend:
    """Makes the attention calls of vLLM's FlashInfer backend, with any implementation of FlashInfer's calls.

    On XQA's GPUs vLLM calls ``flashinfer_xqa_batch_decode_with_kv_cache`` and FlashInfer's prefill wrapper
    (``vllm/utils/flashinfer.py``, line 690). This backend makes the equivalent decode and context calls instead.
    """

    #: any object with FlashInfer's decode and context functions; None if only metadata is built
    implementation: Any = None
    #: largest number of query rows of a request in the decode call: 1 plus the number of speculative tokens
    decode_threshold: int = 1
    uses_xqa: bool = False  #: the decode kernel is XQA, not trtllm-gen

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return build_mha_metadata(batch, pool)

    def prepare_attention(
        self,
        batch: ForwardBatch,
        metadata: TRTLLMMHAMetadata,
        layer: AttentionLayer,
        query: Tensor,
        cache: PagedKVCache,
        *,
        max_context_len: int,
        out: Tensor,
    ) -> Callable[[], Tensor]:
        """Return a function that computes one layer's attention by a decode and a context call and writes `out`. It ignores
        `max_context_len`: vLLM bounds lengths by its longest request's length, except when it captures a CUDA graph.
        """
        prefixes = host_lengths(batch, "extend_prefix_lens_cpu")
        longest = max(map(operator.add, prefixes, query_lens(batch)))
        calls = []
        for planned in self.plan_calls(batch):
            arguments = call_arguments(planned, batch, metadata, layer, query, cache, longest)
            arguments |= {"out": out[planned.rows], "workspace_buffer": None}
            if planned.call is AttentionCall.DECODE:
                arguments |= self._decode_width(planned, batch, metadata)
            else:
                page_size = 1 if self.uses_xqa else cache.page_size  # cum_seq_lens_kv counts pages (flashinfer.py 1763)
                offsets = arguments["cum_seq_lens_q"]
                arguments |= {
                    "max_q_len": max(query_lens(batch)[planned.first_request :]),
                    "cum_seq_lens_q": offsets - offsets[0],
                    "cum_seq_lens_kv": exclusive_cumsum(num_pages(arguments["seq_lens"], page_size)),
                }
            calls.append(prepare(self.implementation, planned.call.value, **arguments))
        return in_turn(calls, out)

    def plan_calls(self, batch: ForwardBatch, *_: Any) -> list[PlannedCall]:
        """Return the calls of one layer: the decode call, then the context call (``split_decodes_and_prefills`` of
        ``utils.py``). If there is no context call, the decode call includes the padding rows. With trtllm-gen, all requests of
        the decode call have the same number of query rows, except padding requests, which may have 0.
        """
        lens = query_lens(batch)
        permitted: Sequence[int] = range(self.decode_threshold + 1)
        if not self.uses_xqa and self.decode_threshold > 1 and lens and lens[0] in permitted:
            permitted = (0, lens[0])
        decodes = len(list(takewhile(lambda rows: rows in permitted, lens)))
        rows = batch.num_tokens if decodes == len(lens) else sum(lens[:decodes])
        calls = [
            PlannedCall(AttentionCall.DECODE, 0, decodes, 0, rows),
            PlannedCall(AttentionCall.CONTEXT, decodes, len(lens) - decodes, rows, batch.num_tokens - rows),
        ]
        return [call for call in calls if call.num_requests]

    def _decode_width(self, planned: PlannedCall, batch: ForwardBatch, metadata: TRTLLMMHAMetadata) -> dict[str, Any]:
        lens = query_lens(batch)[: planned.num_requests]
        widest, offsets = max(lens), metadata.cu_seqlens_q[: planned.num_requests + 1]
        # As vLLM's `_compute_decode_query_lens`. Padding requests have 0 rows.
        padded = {rows for rows in lens if rows} if self.uses_xqa or widest == 1 else set(lens)
        if len(padded) == 1 and planned.num_rows == planned.num_requests * widest:
            return {"q_len_per_req": widest, "cum_seq_lens_q": None, "max_q_len": None}
        return {"q_len_per_req": None, "cum_seq_lens_q": offsets, "max_q_len": widest}
