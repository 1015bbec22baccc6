"""Calls for which the host code of `lab.kernels` chooses every kernel and every tile that it has."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lab.gpus import Capability, family_that_runs
from lab.kernels import generate_draft_decode_kv_indices, portable
from lab.kernels.serving.draft_decode_kv_indices import Schedule
from lab.kernels.serving.forward_metadata import PassBuffers, write_forward_metadata

BF16, FP16, E4M3, FLOAT32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", E4M3: "e4m3"}
GROUP, KV_HEADS, REQUESTS, PAGES = 8, 4, 64, 4096
Call = Callable[[], object]


def every_choice(capability: Capability) -> dict[str, Call]:
    """Return calls by a description; each is made within `tests.kernels.gpu_target.gpu_target`."""
    described = [*_decodes(), *_prefills(), *_mla(), *_ragged(), *_metadata()]
    has_e4m3 = family_that_runs(capability).has_e4m3
    return {text: call for text, call in described if has_e4m3 or "e4m3" not in text}


def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _pool(head_dim: int, page_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (tensor(PAGES, KV_HEADS, page_size, head_dim, dtype=dtype) for _ in range(2))
    return k, v


def decode(
    q_len: int,
    head_dim: int = 128,
    q: torch.dtype = BF16,
    kv: torch.dtype = BF16,
    page_size: int = 64,
    requests: int = REQUESTS,
    **options: Any,
) -> object:
    """Decode, verify or draft extend of `q_len` tokens for each request: 8 packed rows for each token."""
    given = {"bmm1_scale": 0.1, "out_dtype": BF16} | {
        name: make() if callable(make) else make for name, make in options.items()
    }
    usual = {"block_tables": tensor(requests, 4096 // page_size), "seq_lens": tensor(requests)}
    return portable.trtllm_batch_decode_with_kv_cache(
        tensor(requests * q_len, KV_HEADS * GROUP, head_dim, dtype=q),
        _pool(head_dim, page_size, kv),
        None,
        max_seq_len=4096,
        q_len_per_req=q_len,
        **usual | given,
    )


def context(
    q_len: int,
    kv_len: int,
    head_dim: int = 128,
    kv: torch.dtype = BF16,
    page_size: int = 64,
    causal: bool = True,
    decodes: int = 0,
    window_left: int = -1,
) -> object:
    """Extend: as many keys as rows make a prefill, in which each block of rows has a program; `decodes` have one row each."""
    requests = 8 + decodes
    query = tensor(8 * q_len + decodes, KV_HEADS * GROUP, head_dim, dtype=BF16)
    tables, lengths = tensor(requests, kv_len // page_size), (tensor(requests), q_len, kv_len)
    scales, offsets = (0.1, 1.0), (tensor(requests + 1), tensor(requests + 1))
    return portable.trtllm_batch_context_with_kv_cache(
        *(query, _pool(head_dim, page_size, kv), None, tables, *lengths, *scales, requests, *offsets, window_left),
        causal=causal,
    )


def mla(
    heads: int,
    q: torch.dtype = BF16,
    kv: torch.dtype = BF16,
    page_size: int = 64,
    q_len: int = 1,
    rope: int = 64,
    top_k: int = 0,
    **options: Any,
) -> object:
    """Latent attention of DeepSeek-V3's sizes; with `top_k`, of so many entries for each row, as DeepSeek-V3.2 has it."""
    query, pool = tensor(REQUESTS, q_len, heads, 512 + rope, dtype=q), tensor(PAGES, 1, page_size, 512 + rope, dtype=kv)
    table = tensor(REQUESTS, q_len, top_k) if top_k else tensor(REQUESTS, 4096 // page_size)
    lengths = (tensor(REQUESTS), 65536 if top_k else 4096)
    return portable.trtllm_batch_decode_with_kv_cache_mla(
        *(query, pool, None, 128, 512, rope, table, *lengths),
        sparse_mla_top_k=top_k,
        bmm1_scale=0.1,
        **{name: make() for name, make in options.items()},
    )


sparse_mla = partial(mla, top_k=2048)


def ragged(q_len: int, dims: tuple[int, int] = (192, 128), dtype: torch.dtype = BF16, causal: bool = True) -> object:
    """A prefill before absorption."""
    requests, heads = 4, 16
    query, key = (tensor(requests * 4096, heads, dims[0], dtype=dtype) for _ in range(2))
    value, offsets = tensor(requests * 4096, heads, dims[1], dtype=dtype), tensor(requests + 1)
    lengths = (tensor(requests), q_len, 4096)
    scales, window_left, enable_pdl = (0.1, 1.0, 1.0), -1, None
    return portable.trtllm_ragged_attention_deepseek(
        *(query, key, value, None, *lengths, *scales, requests, window_left, offsets, offsets, enable_pdl, causal),
        return_lse=True,
    )


def _decodes() -> Iterator[tuple[str, Call]]:
    for kv in (BF16, E4M3):
        for head_dim in (64, 128, 256):
            for q_len in (1, 4, 8, 16):
                text = f"decode, {8 * q_len} rows, heads of {head_dim}, bf16 over {NAMES[kv]}"
                yield text, partial(decode, q_len, head_dim, kv=kv)
    for kv in (BF16, E4M3):
        for head_dim in (64, 128, 256):
            text = f"decode of few requests, heads of {head_dim}, bf16 over {NAMES[kv]}"
            yield f"{text}, 8 rows, merged at once", partial(decode, 1, head_dim, kv=kv, requests=4)
            yield f"{text}, 32 rows, merged by a launch", partial(decode, 4, head_dim, kv=kv, requests=1)
        for q_len in (1, 4):
            text = f"decode in a window, {8 * q_len} rows, bf16 over {NAMES[kv]}"
            yield text, partial(decode, q_len, kv=kv, window_left=127)
    for dtype in (FP16, E4M3):
        for q_len in (1, 8):
            yield f"decode, {8 * q_len} rows, {NAMES[dtype]}", partial(decode, q_len, q=dtype, kv=dtype)
    for kv in (BF16, E4M3):
        yield f"decode, 8 rows, pages of 16, bf16 over {NAMES[kv]}", partial(decode, 1, kv=kv, page_size=16)
        for q_len in (8, 16):
            mask = partial(tensor, REQUESTS, q_len, 2, dtype=torch.uint16)
            yield f"verify by a mask, {8 * q_len} rows, bf16 over {NAMES[kv]}", partial(decode, q_len, kv=kv, mask=mask)
        by_head = {
            "block_tables": partial(tensor, KV_HEADS, REQUESTS, 32),
            "seq_lens": partial(tensor, KV_HEADS, REQUESTS),
            "enable_block_sparse_attention": True,
        }
        yield f"block-sparse decode, 8 rows, bf16 over {NAMES[kv]}", partial(decode, 1, kv=kv, **by_head)
    yield "decode, 128 rows, pages of 16", partial(decode, 16, page_size=16)
    scale = partial(tensor, 1, dtype=FLOAT32)
    everything = {"sinks": partial(tensor, KV_HEADS * GROUP, dtype=FLOAT32), "return_lse": True, "bmm2_scale": scale}
    yield "decode, 8 rows, with sinks, LSE and scales in tensors", partial(decode, 1, **everything, bmm1_scale=scale)


def _prefills() -> Iterator[tuple[str, Call]]:
    for kv in (BF16, E4M3):
        for head_dim in (64, 128, 256):
            yield f"prefill, heads of {head_dim}, bf16 over {NAMES[kv]}", partial(context, 4096, 4096, head_dim, kv=kv)
    for head_dim in (64, 128):
        yield f"prefill in a window, heads of {head_dim}", partial(context, 4096, 4096, head_dim, window_left=127)
    yield "prefill, pages of 16", partial(context, 4096, 4096, page_size=16)
    yield "prefill, not causal", partial(context, 4096, 4096, causal=False)
    yield "extend of a long prefix, one share", partial(context, 8192, 65536)
    for kv in (BF16, E4M3):
        yield f"prefill beside decodes, bf16 over {NAMES[kv]}", partial(context, 2048, 4096, kv=kv, decodes=56)
    yield "extend of a long prefix beside decodes", partial(context, 512, 65536, decodes=56)


def _mla() -> Iterator[tuple[str, Call]]:
    for q, kv in ((BF16, BF16), (BF16, E4M3), (E4M3, E4M3), (FP16, FP16)):
        for heads in (16, 32, 128):
            if q is not FP16 or heads == 128:
                yield f"MLA, {heads} rows, {NAMES[q]} over {NAMES[kv]}", partial(mla, heads, q, kv)
    for heads in (16, 128):
        for kv in (BF16, E4M3):
            yield f"MLA of selected entries, {heads} rows, bf16 over {NAMES[kv]}", partial(sparse_mla, heads, kv=kv)
        lens = {"rope": 0, "sparse_mla_top_k_lens": partial(tensor, REQUESTS)}
        yield f"MLA of selected entries without a rotary part, {heads} rows", partial(sparse_mla, heads, **lens)
    yield "MLA, 16 rows, pages of 32", partial(mla, 16, page_size=32)
    yield "MLA, 128 rows, pages of 32", partial(mla, 128, page_size=32)


def _ragged() -> Iterator[tuple[str, Call]]:
    for dtype in (BF16, E4M3):
        for q_len in (16, 32, 64, 4096):
            yield f"ragged, {q_len} rows, {NAMES[dtype]}", partial(ragged, q_len, dtype=dtype)
        yield f"ragged, heads of 256 and 256, {NAMES[dtype]}", partial(ragged, 4096, (256, 256), dtype)
    yield "ragged, heads of 128 and 128, bf16", partial(ragged, 4096, (128, 128))
    yield "ragged, a chunk of a prefix, bf16", partial(ragged, 4096, causal=False)


def _metadata() -> Iterator[tuple[str, Call]]:
    for schedule in Schedule:
        for topk in (1, 4):
            yield f"kv_indices, {schedule.value}, topk {topk}", partial(kv_indices, schedule, topk)
        window = {"window_size": 4096, "sink_size": 64, "entry_page_size": 64, "v2p": tensor(4096)}
        yield f"kv_indices, {schedule.value}, virtual pages in a window", partial(kv_indices, schedule, 1, **window)
    yield "forward metadata, one pass", lambda: metadata([_pass()])
    yield "forward metadata, sliding window", lambda: metadata([_pass(swa=True)], tensor(4096, dtype=torch.int64))
    five = [{"seq_len_offset": step, "query_rows": step} for step in range(1, 6)]
    yield "forward metadata, five passes", lambda: metadata([_pass(**numbers) for numbers in five])


def kv_indices(schedule: Schedule, topk: int, requests: int = 16, steps: int = 3, **options: Any) -> None:
    """The ragged K/V lists of a draft."""
    generate_draft_decode_kv_indices(
        tensor(requests),
        tensor(64, 8192),
        tensor(requests),
        tensor(steps, 2**16),
        tensor(steps, requests * topk + 1),
        tensor(requests * topk),
        topk=topk,
        page_size=64,
        schedule=schedule,
        **options,
    )


def metadata(passes: list[PassBuffers], full_to_swa: torch.Tensor | None = None) -> None:
    """The metadata of passes over 16 requests."""
    write_forward_metadata(
        passes,
        req_pool_indices=tensor(16, dtype=torch.int64),
        seq_lens=tensor(16, dtype=torch.int64),
        req_to_token=tensor(64, 8192),
        page_size=64,
        full_to_swa=full_to_swa,
    )


def _pass(swa: bool = False, **numbers: Any) -> PassBuffers:
    locations = {name: tensor(16, dtype=torch.int64) for name in ("out_cache_loc", "swa_out_cache_loc")}
    return PassBuffers(
        tensor(16),
        tensor(17),
        tensor(17),
        tensor(16, 128),
        tensor(16, 128) if swa else None,
        **({"query_rows": 1} | numbers | (locations if swa else {})),
    )
