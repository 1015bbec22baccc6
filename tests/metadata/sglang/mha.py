"""SGLang's TRT-LLM MHA backend over a pool of the lab's: its own class and kernels, without the server."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.metadata import ForwardBatch, ForwardMode, KVPool

BACKEND = "sglang.srt.layers.attention.trtllm_mha_backend"
FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info"
RAGGED_VERIFY = "sglang.srt.speculative.ragged_verify"
REAL = (
    BACKEND,
    FORWARD_BATCH,
    RAGGED_VERIFY,
    "sglang.kernels.ops.attention.trtllm_mha_graph_metadata",
    "sglang.kernels.ops.attention.trtllm_mha_page_table",
    "sglang.kernels.ops.speculative.ragged_verify_kernels",
    "sglang.srt.layers.radix_attention",
    "sglang.srt.mem_cache.kv_loc_plan",
)
NAMES = {
    "sglang.srt.utils.is_flashinfer_available": lambda: False,
    "sglang.srt.layers.cp.utils.is_cp_active": lambda batch: False,
}


def new_backend(load: Callable[[str], ModuleType], pool: KVPool, **attributes: object) -> Any:
    """Make the backend without its constructor, which wants a model runner: what building metadata reads is set here.

    Args:
        load: from `sglang_modules(*REAL, names=NAMES)`.
        pool: whose tables and map it reads.
        attributes: of the backend, instead of those of a decoder without speculation.
    """
    cls = load(BACKEND).TRTLLMHAAttnBackend
    backend = cls.__new__(cls)
    swa = pool.full_to_swa
    translator = SimpleNamespace(
        is_translating=False,
        read_table=lambda plan, **_: SimpleNamespace(is_translated=False),
        write_ids=lambda batch, kind: pool.swa_slots(batch.out_cache_loc),
    )
    vars(backend).update(
        page_size=pool.page_size,
        max_context_len=pool.max_context_len,
        max_num_pages=pool.block_table_width,
        req_to_token=pool.req_to_token,
        device=pool.device,
        is_xqa_impl=False,
        use_fmha_v2=False,
        expand_encoder_only_verify=False,
        speculative_step_id=0,
        speculative_num_draft_tokens=None,
        kv_index_translator=translator,
        use_sliding_window_kv_pool=swa is not None,
        _swa_kv_pool=None if swa is None else SimpleNamespace(full_to_swa_index_mapping=swa),
        _swa_full_to_swa_mapping=swa,
    )
    vars(backend).update(attributes)
    return backend


def server_batch(load: Callable[[str], ModuleType], batch: ForwardBatch, **fields: object) -> Any:
    """Return the fields of SGLang's batch that metadata is built from; slots are padded with the sink, as a runner does.

    Args:
        load: as above.
        batch: of the lab's.
        fields: instead of the lab's, such as a spec_info with a layout.
    """
    padding = batch.num_tokens - batch.out_cache_loc.shape[0]
    is_ragged = batch.forward_mode is ForwardMode.RAGGED_VERIFY
    mode = ForwardMode.TARGET_VERIFY if is_ragged else batch.forward_mode
    spec_info = None
    if batch.spec_info is not None:
        spec_info = SimpleNamespace(draft_token_num=batch.spec_info.num_draft_tokens, ragged_verify_layout=None)
        if is_ragged:
            spec_info.ragged_verify_layout = load(RAGGED_VERIFY).RaggedVerifyLayout.from_verify_lens_device(
                verify_lens=batch.extend_seq_lens, graph_num_tokens=batch.num_tokens
            )
    given = {
        "forward_mode": load(FORWARD_BATCH).ForwardMode[mode.name],
        "batch_size": batch.batch_size,
        "seq_lens": batch.seq_lens,
        "seq_lens_cpu": None if batch.seq_lens_cpu is None else torch.tensor(batch.seq_lens_cpu),
        "seq_lens_sum": None,
        "req_pool_indices": batch.req_pool_indices,
        "out_cache_loc": torch.nn.functional.pad(batch.out_cache_loc, (0, padding)),
        "input_ids": torch.zeros(batch.num_tokens, dtype=torch.int64),
        "positions": torch.zeros(batch.num_tokens, dtype=torch.int64),
        "extend_seq_lens": batch.extend_seq_lens,
        "extend_seq_lens_cpu": batch.extend_seq_lens_cpu,
        "extend_prefix_lens": batch.extend_prefix_lens,
        "extend_prefix_lens_cpu": batch.extend_prefix_lens_cpu,
        "spec_info": spec_info,
        "kv_loc_plan": None,
    }
    return SimpleNamespace(**given | fields)


def assert_same(ours: Any, theirs: Any, page_size: int) -> None:
    """Hold the lab's metadata to SGLang's: every vector, and the live pages of each table."""
    assert ours.max_seq_len_q == theirs.max_seq_len_q
    for name in ("cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "swa_out_cache_loc"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and a.tolist() == b.tolist()), name
    lengths = ours.cache_seqlens_int32.tolist()
    for name in ("page_table", "swa_page_table"):
        assert_same_live_pages(name, getattr(ours, name), getattr(theirs, name), lengths, page_size)


def assert_same_live_pages(
    name: str, ours: Tensor | None, theirs: Tensor | None, lengths: list[int], page_size: int
) -> None:
    assert (ours is None) == (theirs is None), name
    if ours is None or theirs is None:
        return
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
    for request, length in enumerate(lengths):
        live = max(0, -(-length // page_size))
        assert ours[request, :live].tolist() == theirs[request, :live].tolist(), f"{name} of request {request}"
