"""SGLang's TRT-LLM MHA backend over a pool of the lab's: its own class and kernels, without the server."""

from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.metadata import ForwardBatch, ForwardMode, KVPool, PagedKVCache
from lab.metadata.engine.graph_inputs import GraphMode, StaticInputs
from lab.metadata.mha.backend import AttentionLayer, CallSettings
from lab.metadata.mha.metadata import MHAGraphMetadata

Load = Callable[[str], ModuleType]

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
    "sglang.srt.mem_cache.layout.paged_view",
)
# Of an engine.
SETTINGS = CallSettings(torch.zeros(64, dtype=torch.uint8), skip_softmax_decode=2.0, skip_softmax_prefill=3.0)


def environment(settings: CallSettings) -> dict[str, object]:
    """Return SGLang's environment variables of these settings, as a stand-in's names."""
    thresholds = {"DECODE": settings.skip_softmax_decode, "PREFILL": settings.skip_softmax_prefill}
    variables = {
        f"SGLANG_SKIP_SOFTMAX_{call}_THRESHOLD_SCALE_FACTOR": SimpleNamespace(get=partial(dict.get, thresholds, call))
        for call in thresholds
    }
    return {"sglang.srt.environ.envs": SimpleNamespace(**variables)}


NAMES = environment(CallSettings()) | {
    "sglang.srt.utils.is_flashinfer_available": lambda: False,
    "sglang.srt.layers.cp.utils.is_cp_active": lambda batch: False,
    "sglang.kernels.ops.attention.utils.canonicalize_stride": lambda tensor: tensor,
}


def new_backend(load: Load, pool: KVPool, **attributes: object) -> Any:
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


def server_batch(load: Load, batch: ForwardBatch, **fields: object) -> Any:
    """Return the fields of SGLang's batch that metadata is built from; slots are padded with the sink, as a runner does.

    Args:
        load: as above.
        batch: of the lab's.
        fields: instead of the lab's, such as a spec_info with a layout.
    """
    padding = batch.num_tokens - batch.out_cache_loc.shape[0]
    is_ragged = batch.forward_mode is ForwardMode.RAGGED_VERIFY
    mode = ForwardMode.TARGET_VERIFY if is_ragged else batch.forward_mode
    lens_cpu = None if batch.seq_lens_cpu is None else torch.tensor(batch.seq_lens_cpu)
    if is_ragged and lens_cpu is not None:
        rows = batch.extend_seq_lens.tolist() if batch.extend_seq_lens_cpu is None else batch.extend_seq_lens_cpu
        lens_cpu += torch.tensor(rows, dtype=torch.int64)  # as `dspark_verify.py` does
    spec_info = None
    if batch.spec_info is not None:
        spec_info = SimpleNamespace(draft_token_num=batch.spec_info.num_draft_tokens, ragged_verify_layout=None)
        if is_ragged:
            spec_info.ragged_verify_layout = ragged_layout(load, batch)
    given = {
        "forward_mode": load(FORWARD_BATCH).ForwardMode[mode.name],
        "batch_size": batch.batch_size,
        "seq_lens": batch.seq_lens,
        "seq_lens_cpu": lens_cpu,
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


def captured(backend: Any, server: Any, *, num_requests: int, num_tokens: int) -> Any:
    """Return the backend's metadata of a graph that is captured with a batch and replayed with it."""
    backend.init_cuda_graph_state(num_requests, num_tokens)
    for in_capture in (True, False):
        backend.init_forward_metadata_out_graph(server, in_capture=in_capture)
    backend.init_forward_metadata_in_graph(server)
    return backend.forward_metadata


def replayed(mode: GraphMode, pool: KVPool, batch: ForwardBatch, size: int, **options: Any) -> tuple[Any, ForwardBatch]:
    """Return the lab's metadata of a replay, and the padded batch over the graph's inputs."""
    inputs, buffers = StaticInputs(mode, size, pool.device), MHAGraphMetadata(mode, pool, size, **options)
    view = inputs.view(size)
    rebuild = buffers.prepare(view)
    inputs.load(batch, size)
    rebuild()
    return buffers.slices(size), view


def ragged_layout(load: Load, batch: ForwardBatch) -> Any:
    """Return SGLang's layout of a ragged verification: with its lengths on the host where the batch has them there."""
    layout = load(RAGGED_VERIFY).RaggedVerifyLayout
    if batch.extend_seq_lens_cpu is None:
        return layout.from_verify_lens_device(verify_lens=batch.extend_seq_lens, graph_num_tokens=batch.num_tokens)
    return layout.from_verify_lens(
        verify_lens_cpu=batch.extend_seq_lens_cpu, device=batch.seq_lens.device, grid=[batch.num_tokens]
    )


def calls_of(
    load: Load,
    backend: Any,
    server: Any,
    layer: AttentionLayer,
    query: Tensor,
    cache: PagedKVCache,
    attn_type: str = "DECODER",
    new: Tensor | None = None,
    **attributes: object,
) -> list[tuple[str, dict[str, Any]]]:
    """Run one layer of a pass whose metadata the backend has built, and return FlashInfer's calls: name and arguments.

    Args:
        load: as above.
        backend: from `new_backend`, after `init_forward_metadata`.
        server: from `server_batch`.
        layer, query, cache: as for `lab.metadata.mha.backend.call_arguments`; the cache is NHD.
        attn_type: a member of SGLang's `AttentionType`.
        new: K, and V, of the new tokens, which are saved; None: they are in the cache.
        attributes: of the backend, instead of those of a cache that is not quantised.
    """
    calls = []

    def recorder(name: str) -> Callable[..., Tensor]:
        def record(*positional: Any, **arguments: Any) -> Tensor:
            arguments.setdefault("query", positional[0][0] if positional else None)
            calls.append((name, arguments))
            return torch.zeros_like(arguments["query"])

        return record

    def recorders(*names: str) -> SimpleNamespace:
        return SimpleNamespace(**{name: recorder(name) for name in names})

    vars(load(BACKEND))["flashinfer"] = SimpleNamespace(
        decode=recorders("trtllm_batch_decode_with_kv_cache"),
        prefill=recorders("trtllm_batch_context_with_kv_cache", "trtllm_fmha_v2_prefill"),
    )
    vars(backend).update(
        token_to_kv_pool=SimpleNamespace(get_kv_buffer=lambda _: tuple(side.flatten(0, 1) for side in cache.storage)),
        data_type=cache.storage.dtype,
        q_data_type=query.dtype,
        decode_seq_len_splits=1,
        _multi_ctas_kv_counter_buffer=SETTINGS.multi_ctas_kv_counter_buffer,
        **dict.fromkeys(("is_nvfp4_kvcache", "decode_uses_native_fp4", "uses_trtllm_gen_native_fp4"), False),
        **dict.fromkeys(("workspace_buffer", "fmha_v2_workspace_buffer", "_xqa_spec_dec_mask")),
    )
    vars(backend).update(attributes)
    if backend._swa_kv_pool is not None:
        backend._swa_kv_pool.layers_mapping = {0: (0, layer.reads_swa_pool)}
    heads = cache.storage.shape[-2]
    theirs = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=query.shape[1],
        tp_k_head_num=heads,
        tp_v_head_num=heads,
        head_dim=query.shape[2],
        scaling=layer.softmax_scale,
        sliding_window_size=layer.window_left,
        attn_type=load("sglang.srt.layers.radix_attention").AttentionType[attn_type],
        k_scale=None,
        v_scale=None,
        k_scale_float=layer.k_scale,
        v_scale_float=layer.v_scale,
    )
    server._attn_output = None
    forward = backend.forward_decode if server.forward_mode.is_decode_or_idle() else backend.forward_extend
    forward(query, new, new, theirs, server, save_kv_cache=new is not None, sinks=layer.sinks)
    return calls


def assert_same_calls(ours: list[tuple[str, dict[str, Any]]], theirs: list[tuple[str, dict[str, Any]]]) -> None:
    """Compare the lab's calls with SGLang's: as many, of the same functions, each of the lab's arguments the same."""
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (function, mine), (_, others) in zip(ours, theirs, strict=True):
        defaults = {"q_len_per_req": 1, "causal": True}
        must = ("q_len_per_req", "max_q_len", "cum_seq_lens_q", "causal", "multi_ctas_kv_counter_buffer")
        for name in {*mine, *(each for each in must if each in others)}:
            pairs = [each.get(name, defaults.get(name)) for each in (mine, others)]
            if name == "block_tables":
                lengths, size = mine["seq_lens"].tolist(), mine["kv_cache"][0].shape[2]
                assert_same_live_pages(name, pairs[0], pairs[1], lengths, size)
            elif name == "kv_cache":
                a, b = ([(side.data_ptr(), side.shape, side.stride()) for side in sides] for sides in pairs)
                assert a == b, name
            elif isinstance(pairs[0], Tensor):
                assert torch.equal(*pairs), f"{name} of {function}"
            else:
                assert pairs[0] == pairs[1], f"{name} of {function}"


def assert_same(ours: Any, theirs: Any, page_size: int) -> None:
    """Hold the lab's metadata to SGLang's: every vector, and the live pages of each table."""
    assert ours.max_seq_len_q == theirs.max_seq_len_q
    for name in ("cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "swa_out_cache_loc", "encoder_cache_seqlens"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and a.tolist() == b.tolist()), name
    lengths = ours.cache_seqlens_int32.tolist()
    for name in ("page_table", "swa_page_table"):
        assert_same_live_pages(name, getattr(ours, name), getattr(theirs, name), lengths, page_size)
    lengths = [] if ours.encoder_cache_seqlens is None else ours.encoder_cache_seqlens.tolist()
    assert_same_live_pages("encoder_page_table", ours.encoder_page_table, theirs.encoder_page_table, lengths, page_size)


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
