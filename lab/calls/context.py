"""FlashInfer's TRT-LLM context call as data: its parameters, and the paged attention problem that it defines."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lab.calls import arguments
from lab.calls.arguments import Unmodelled
from lab.calls.paged import KVCache, pose_paged
from lab.calls.problem import AttentionCall, PagedAttention, Scale


@dataclass(frozen=True, eq=False)
class ContextCall:
    """The arguments of FlashInfer 0.7.2's `trtllm_batch_context_with_kv_cache`: same names, order and defaults.

    `DecodeCall` documents which keys rows see, which memory may hold anything, how tensors lie in memory, and all other
    attributes.

    Attributes:
        max_q_len, max_kv_len: upper bounds of the query and key lengths on the host; 0 for an empty batch.
        cum_seq_lens_q, cum_seq_lens_kv: int32 [batch_size + 1] offsets of the query rows and of the keys. Query rows after the
            last offset are padding, as in a CUDA graph with room for more rows. They may hold anything, including NaN, and
            their output is undefined.
        causal: False: every row sees every key of its request. False cannot be combined with a window.
    """

    function: ClassVar[AttentionCall] = AttentionCall.CONTEXT
    module: ClassVar[str] = "flashinfer.prefill"

    query: torch.Tensor
    kv_cache: KVCache
    workspace_buffer: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_q_len: int
    max_kv_len: int
    bmm1_scale: Scale
    bmm2_scale: Scale
    batch_size: int
    cum_seq_lens_q: torch.Tensor
    cum_seq_lens_kv: torch.Tensor
    window_left: int = -1
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | str | None = None
    o_sf_scale: Unmodelled[float | None] = None
    o_sf_vec_size: Unmodelled[int | None] = None
    kv_layout: str = "HND"
    enable_pdl: bool | None = None
    sinks: torch.Tensor | None = None
    kv_cache_sf: KVCache | None = None
    skip_softmax_threshold_scale_factor: Unmodelled[float | None] = None
    uses_shared_paged_kv_idx: bool = True
    causal: bool = True
    lse: torch.Tensor | None = None
    return_lse: bool = False
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None
    use_fp16_softmax: Unmodelled[bool | None] = None
    uses_spcompress: Unmodelled[bool | None] = None
    backend: str = "trtllm-gen"

    def problem(self) -> PagedAttention:
        """Check the arguments and return the attention problem that they define. Raises the errors of `DecodeCall.problem`."""
        arguments.check_modelled(self, ("trtllm-gen",))
        arguments.check_query(self.query)
        arguments.check_int("batch_size", self.batch_size, 0, "it counts the requests")
        if arguments.batch_size_of(self.block_tables, self.uses_shared_paged_kv_idx) != self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} but block_tables has {self.block_tables.shape[0]} rows: "
                "one row per request is needed"
            )
        for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
            arguments.check_tensor(name, getattr(self, name))
        arguments.check_bool("causal", self.causal)
        if not self.causal and self.window_left >= 0:
            raise NotImplementedError(
                f"causal=False with window_left={self.window_left}: FlashInfer has no such kernel; pass window_left=-1"
            )
        return pose_paged(
            self,
            kv_bound="max_kv_len",
            max_q_len=arguments.check_int("max_q_len", self.max_q_len, 0, "it bounds the rows of one request"),
            max_kv_len=self.max_kv_len,
            causal=self.causal,
            cum_seq_lens_kv=self.cum_seq_lens_kv,
        )
