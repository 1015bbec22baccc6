"""The passes of vLLM 0.33.0's FlashInfer backend: a decode call and a context call for each layer.

Lines are of ``vllm/v1/attention/backends/flashinfer.py`` unless another file is named. A batch begins with the requests that
the decode call computes. Its tensors are those of SGLang's metadata; what differs is which requests each call gets, the bounds,
and padding. A CUDA graph's unused requests have no keys (``seq_lens`` 0) and page 0, the null block
(``v1/worker/gpu_model_runner.py`` 2146, 2309). The metadata of such a graph is SGLang's with padding of length 0.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_cache import PagedKVCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import exclusive_cumsum, host_lengths, num_pages, query_lens
from lab.metadata.mha.calls import AttentionLayer, PlannedCall, call_arguments
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata
from lab.named_enum import NamedEnum


class Engine(NamedEnum):
    """The engine that makes a pass's calls. vLLM calls XQA on SM90 and SM120, trtllm-gen on SM100 and SM103 (line 1302)."""

    SGLANG = "SGLang"
    VLLM = "vLLM"
    VLLM_XQA = "vLLM with XQA"


@dataclass(frozen=True, eq=False)
class VLLMBackend:
    """Make the calls of vLLM's FlashInfer backend, with any implementation of FlashInfer's calls.

    vLLM calls XQA as ``flashinfer_xqa_batch_decode_with_kv_cache``. This backend makes the equal decode call. On XQA's GPUs
    vLLM prefills with FlashInfer's own wrapper (``vllm/utils/flashinfer.py`` 690). This backend makes a context call in its
    place.
    """

    #: any object with FlashInfer's decode and context functions; None if only metadata is built
    implementation: Any = None
    #: most query rows of a request that the decode call computes: 1 and the number of speculative tokens
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
        max_context_len: int,  # the largest of any request, which vLLM passes at a capture alone
        out: Tensor,
    ) -> Callable[[], Tensor]:
        """Prepare one layer's attention (see `Backend.prepare_attention`). The length of the longest request is the bound."""
        prefixes = host_lengths(batch, "extend_prefix_lens_cpu")
        longest = max(map(operator.add, prefixes, query_lens(batch)))
        calls = []
        for planned in self.plan_calls(batch):
            arguments = call_arguments(planned, batch, metadata, layer, query, cache, longest)
            arguments |= {"out": out[planned.rows], "workspace_buffer": None}
            if planned.call is AttentionCall.DECODE:
                arguments |= self._decode_width(planned, batch, metadata)
            else:
                unit = 1 if self.uses_xqa else cache.page_size
                arguments |= _context_offsets(planned, batch, arguments, unit)
            calls.append(prepare(self.implementation, planned.call.value, **arguments))

        def run() -> Tensor:
            for call in calls:
                call()
            return out

        return run

    def plan_calls(self, batch: ForwardBatch, *_: Any) -> list[PlannedCall]:
        """Return the calls of one layer: first the decode call, which gets the padding rows if it has all requests, then the
        context call (``split_decodes_and_prefills`` of ``utils.py``).

        trtllm-gen's decode call has requests of equally many rows, and padding requests without rows; XQA's may differ.
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
        """Return the arguments that say how many rows each request has (``_compute_decode_query_lens``, line 1310).

        With padding requests, trtllm-gen gets offsets in which they have no rows; XQA, and a decode of one row each, as many
        rows as the others, although they have no keys.
        """
        lens = query_lens(batch)[: planned.num_requests]
        widest, offsets = max(lens), metadata.cu_seqlens_q[: planned.num_requests + 1]
        padded = {rows for rows in lens if rows} if self.uses_xqa or widest == 1 else set(lens)
        if len(padded) == 1 and planned.num_rows == planned.num_requests * widest:
            return {"q_len_per_req": widest, "cum_seq_lens_q": None, "max_q_len": None}
        return {"q_len_per_req": None, "cum_seq_lens_q": offsets, "max_q_len": widest}


def _context_offsets(
    planned: PlannedCall, batch: ForwardBatch, arguments: Mapping[str, Any], unit: int
) -> dict[str, Any]:
    """Return the offsets and the bound of the context call's requests. ``cum_seq_lens_kv`` counts units of so many keys: for
    trtllm-gen pages (line 1763), else keys, from which fmha_v2 takes the lengths.
    """
    offsets = arguments["cum_seq_lens_q"]
    return {
        "max_q_len": max(query_lens(batch)[planned.first_request :]),
        "cum_seq_lens_q": offsets - offsets[0],
        "cum_seq_lens_kv": exclusive_cumsum(num_pages(arguments["seq_lens"], unit)),
    }
