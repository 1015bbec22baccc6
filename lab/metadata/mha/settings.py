"""The arguments that an engine passes in all its MHA calls, and the conditions for splitting a mixed batch (SGLang 0.5.23)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls.arguments import check_int
from lab.calls.problem import E4M3, AttentionCall
from lab.metadata.mha.decode_split import DecodeSplit

TAIL_DTYPES = (torch.float16, torch.bfloat16, E4M3)


@dataclass(frozen=True, eq=False)
class CallSettings:
    """The arguments that have the same values in all calls of an engine (`trtllm_mha_backend.py`).

    Attributes:
        multi_ctas_kv_counter_buffer: passed to decode calls only. `lab.metadata.allocate_multi_ctas_kv_counters` makes it;
            SGLang passes that function ``(max_running_requests + 1) * max(1, speculative_num_draft_tokens)`` requests and the
            model's number of query heads.
        skip_softmax_decode, skip_softmax_prefill: ``skip_softmax_threshold_scale_factor`` of each call, from
            ``SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR`` and ``SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR``;
            None skips nothing. Skipping is an approximation: `AttentionProblem.skip_softmax` says what it may leave out.
        decode_splits: into how many calls a decode call is divided at most, with requests sorted by length
            (``SGLANG_TRTLLM_MHA_DECODE_SEQ_LEN_SPLITS``); see `lab.metadata.mha.decode_split`.

    Raises:
        TypeError, ValueError: `decode_splits` is not an int, or below 1.
    """

    multi_ctas_kv_counter_buffer: Tensor | None = None
    skip_softmax_decode: float | None = None
    skip_softmax_prefill: float | None = None
    decode_splits: int = 1

    def __post_init__(self) -> None:
        check_int("decode_splits", self.decode_splits, 1, "1 leaves a decode call whole")

    def implementation(self, implementation: Any) -> Any:
        """Return the implementation; if decode calls are to be divided, wrapped in `DecodeSplit`."""
        return implementation if self.decode_splits == 1 else DecodeSplit(implementation, self.decode_splits)

    def arguments(self, call: AttentionCall) -> dict[str, Any]:
        """Return the keyword arguments that these settings add to a DECODE or CONTEXT call. Settings that are None add none."""
        is_decode = call is AttentionCall.DECODE
        threshold = self.skip_softmax_decode if is_decode else self.skip_softmax_prefill
        counters = self.multi_ctas_kv_counter_buffer if is_decode else None
        given = {"skip_softmax_threshold_scale_factor": threshold, "multi_ctas_kv_counter_buffer": counters}
        return {name: value for name, value in given.items() if value is not None}


def splits_mixed_tail(
    query_dtype: torch.dtype, kv_dtype: torch.dtype, *, prefills_with_fmha_v2: bool = False, is_decoder: bool = True
) -> bool:
    """Return True if an engine computes the last one-token requests of an extend by a decode call (`forward_extend`).

    Args:
        query_dtype: dtype of the call's query; e4m3 if the engine casts it for an e4m3 cache.
        kv_dtype: dtype of the cache. A call over NVFP4 (uint8) is never split.
        prefills_with_fmha_v2: the GPU is SM90 or SM120, whose prefill kernel is fmha_v2.
        is_decoder: the layer is causal self-attention (``AttentionType.DECODER``), not an encoder layer and not
            cross-attention.
    """
    return not prefills_with_fmha_v2 and is_decoder and query_dtype == kv_dtype and kv_dtype in TAIL_DTYPES
