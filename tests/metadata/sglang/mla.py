"""SGLang's TRT-LLM MLA backend over a pool of the lab's: its own class and kernels, without the server."""

from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.metadata import KVPool, TRTLLMMLADecodeMetadata
from tests.metadata.served import HEADS, LAYER, RANK, ROPE
from tests.metadata.sglang import mha

BACKEND = "sglang.srt.layers.attention.trtllm_mla_backend"
CUTE_DSL = "sglang.srt.layers.attention.cutedsl_mla_backend"
VERIFY_MASK = "sglang.srt.layers.attention.verify_mask"
PREFIX_CHUNKS = "sglang.srt.model_executor.forward_batch_deepseek_mha_mixin"
REAL = (
    BACKEND,
    CUTE_DSL,
    PREFIX_CHUNKS,
    VERIFY_MASK,
    mha.FORWARD_BATCH,
    mha.RAGGED_VERIFY,
    "sglang.kernels.ops.attention.dcp_kernels",
    "sglang.kernels.ops.attention.kv_indices",
    "sglang.kernels.ops.attention.pad",
    "sglang.kernels.ops.attention.utils",
    "sglang.kernels.ops.speculative.ragged_verify_kernels",
    "sglang.srt.layers.dcp.layout",
)


class Parallel:
    """The place of this rank, and the pool, which SGLang's functions ask for at each use."""

    def __init__(self) -> None:
        self.dcp_size, self.dcp_rank = 1, 0
        self.pool: KVPool | None = None
        self.chunk_capacity = 0

    @property
    def dcp_enabled(self) -> bool:
        return self.dcp_size > 1


class MLATokenToKVPool:
    """SGLang's pool of latent entries, of which nothing is read."""


class TreeMaskMode(IntEnum):
    FULL_MASK = 0
    QLEN_ONLY = 1


def names(parallel: Parallel) -> dict[str, object]:
    """Return the parts of the server that the backend calls."""
    no_graph = "sglang.srt.model_executor.runner_backend_utils"
    context, translator = (
        "sglang.srt.model_executor.forward_context",
        SimpleNamespace(reads_are_translated=False, translate_dcp_read_ids=lambda ids: ids),
    )
    return {
        f"{context}.get_attn_backend": lambda: SimpleNamespace(kv_index_translator=translator),
        f"{context}.get_req_to_token_pool": lambda: parallel.pool,
        f"{context}.get_token_to_kv_pool": MLATokenToKVPool,
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool": MLATokenToKVPool,
        "sglang.srt.environ.envs": SimpleNamespace(
            SGLANG_MAX_KV_CHUNK_CAPACITY=SimpleNamespace(get=lambda: parallel.chunk_capacity),
            SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR=SimpleNamespace(get=lambda: None),
        ),
        "sglang.srt.utils.is_flashinfer_available": lambda: False,
        "sglang.srt.utils.is_float4_e2m1fn_x2": lambda dtype: False,
        "sglang.srt.runtime_context.get_parallel": lambda: parallel,
        f"{no_graph}.breakable_cuda_graph.is_in_breakable_cuda_graph": lambda: False,
        f"{no_graph}.tc_piecewise_cuda_graph.is_in_tc_piecewise_cuda_graph": lambda: False,
        "sglang.srt.mem_cache.layout.paged_view.paged_row_view": lambda rows, page_size: rows.unflatten(
            0, (-1, page_size)
        ),
        "sglang.srt.speculative.eagle_utils.TreeMaskMode": TreeMaskMode,
        "sglang.srt.speculative.eagle_utils.default_tree_mask_mode": lambda: TreeMaskMode.FULL_MASK,
    }


def new_backend(load: Callable[[str], ModuleType], pool: KVPool, **attributes: object) -> Any:
    """Make the backend without its constructor, which wants a model runner: what metadata and calls read is set here.

    Its kernel is replaced: each call's arguments are kept in ``calls``, and its output is that of ``kernel``.

    Args:
        load: from `sglang_modules(*REAL, names=names(...))`.
        pool: whose tables it reads.
        attributes: of the backend, instead of those of a decoder without speculation.
    """
    cls = load(BACKEND).TRTLLMMLABackend
    backend = cls.__new__(cls)
    vars(backend).update(
        page_size=pool.page_size,
        max_context_len=pool.max_context_len,
        req_to_token=pool.req_to_token,
        device=pool.device,
        num_draft_tokens=None,
        kv_index_translator=SimpleNamespace(is_translating=False, full_v2p_table=None),
        disable_chunked_prefix_cache=False,
        decode_cuda_graph_metadata={},
        forward_prefill_metadata=None,
        forward_decode_metadata=None,
        padded_q_buffer=None,
        unpad_output_buffer=None,
        _kv_shard_pool=None,
        _fused_set_kv_concat_q=False,
        _fused_set_kv_concat_q_fp8=False,
        data_type=torch.float64,
        calls=[],
    )
    vars(backend).update(attributes)

    def run(**arguments: Any) -> Tensor:
        backend.calls.append(arguments)
        return backend.kernel(**arguments)

    backend._run_decode_kernel = run
    return backend


def attend(backend: Any, batch: Any, query: Tensor, pool_rows: Tensor, rope: Tensor | None = None) -> Tensor:
    """Run SGLang's own ``forward_extend``, or ``forward_decode``, on rows ``[num_tokens, HEADS, RANK + ROPE]``.

    With `rope`, of the keys, the rotary parts are handed over apart, as a quantised cache needs them.
    """
    layer = SimpleNamespace(
        tp_q_head_num=HEADS,
        tp_k_head_num=1,
        v_head_dim=RANK,
        head_dim=RANK + ROPE,
        scaling=LAYER.softmax_scale,
        layer_id=0,
    )
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer_id: pool_rows)
    forward = backend.forward_decode if batch.forward_mode.is_decode_or_idle() else backend.forward_extend
    parts: dict[str, Tensor] = {}
    key = None
    if rope is not None:
        parts, key = {"q_rope": query[..., RANK:].contiguous(), "k_rope": rope}, torch.zeros_like(rope)
        query = query[..., :RANK].contiguous()
    out: Tensor = forward(query, key, None, layer, batch, save_kv_cache=False, **parts)
    return out.view(-1, HEADS, RANK)


def assert_same(ours: TRTLLMMLADecodeMetadata, theirs: Any, page_size: int, lengths: list[int]) -> None:
    """Hold the lab's metadata to SGLang's: every vector, and the pages of so many tokens of each request."""
    assert ours.max_seq_len_k == theirs.max_seq_len_k, (ours.max_seq_len_k, theirs.max_seq_len_k)
    assert (ours.seq_lens_k.dtype, ours.seq_lens_k.tolist()) == (theirs.seq_lens_k.dtype, theirs.seq_lens_k.tolist())
    for name in ("max_seq_len_q", "sum_seq_lens_q", "cu_seqlens_q", "seq_lens_q"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if b is not None:  # SGLang keeps them for draft extend alone
            assert a.tolist() == b.tolist() if isinstance(b, Tensor) else a == b, name
    mha.assert_same_live_pages("block_kv_indices", ours.block_kv_indices, theirs.block_kv_indices, lengths, page_size)
