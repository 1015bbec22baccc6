"""For each mutant a few calls that tell it from the right model, and the calls' special conditions by name."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.checks.mutants import Mutant
from lab.checks.mutants.mutant import CONTEXT, DECODE, DRAFT_INDICES, MHA_METADATA, MLA_DECODE
from lab.checks.mutants.split_kv import COUNTER_BYTES
from lab.metadata import ForwardMode, TRTLLMMHAMetadata
from lab.problem import NVFP4_BLOCK
from tests.cases import Batch, context_arguments, decode_arguments, pack_mask, random_batch
from tests.metadata.mha_cases import Case, build
from tests.references import test_trtllm_mla as mla_cases

# Calls of one implementation, one after the other: the function's name and its arguments. "before" is what to do first.
Calls = list[tuple[str, dict[str, Any]]]
GUARD = 64  # elements before and behind a guarded tensor
SINKS = torch.tensor([3.0, -2.0, 0.5, 9.0])
LENS = (300, 66, 135, 17)


def guarded(tensor: Tensor, fill: float, size: int = GUARD) -> Tensor:
    """A copy of a tensor with `size` elements of `fill` before it and behind it in one allocation."""
    whole = torch.full((tensor.numel() + 2 * size,), fill).to(tensor.dtype)
    part = whole[size:-size].view(tensor.shape)
    part.copy_(tensor)
    return part


def decode(kv_lens: tuple[int, ...] = LENS, q_len: int = 1, **how: Any) -> Calls:
    """One decode call; `how` goes to `random_batch` and `decode_arguments`."""
    return [(DECODE, decode_arguments(drawn([q_len] * len(kv_lens), kv_lens, how), **how))]


def context(kv_lens: tuple[int, ...] = LENS, q_lens: tuple[int, ...] = (70, 66, 3, 1), **how: Any) -> Calls:
    return [(CONTEXT, context_arguments(drawn(q_lens, kv_lens, how), **how))]


def mla(kv_lens: tuple[int, ...] = LENS, q_len: int = 1, page_size: int = 16, **how: Any) -> Calls:
    """One MLA decode call; `how` goes to its `random_batch` and `mla_arguments`."""
    of_batch = {name: how.pop(name) for name in ("heads", "kv_dtype") if name in how}
    batch = mla_cases.random_batch([q_len] * len(kv_lens), kv_lens, **of_batch)
    usual = {"bmm1_scale": 0.4, "bmm2_scale": 2.0, "out": None}
    return [(MLA_DECODE, mla_cases.mla_arguments(batch, page_size, **usual | how))]


def drawn(q_lens: Any, kv_lens: Any, how: dict[str, Any]) -> Batch:
    """A random batch; leaves in `how` what the arguments need."""
    of_batch = {name: how.pop(name) for name in ("heads", "head_dim", "kv_dtype", "magnitude") if name in how}
    for name, usual in (("out_dtype", torch.bfloat16), ("bmm1_scale", 0.4), ("bmm2_scale", 2.0)):
        how.setdefault(name, usual)
    return random_batch(q_lens, kv_lens, **of_batch)


def changed(calls: Calls, **changes: Any) -> Calls:
    """A call again, with other arguments; its tensors are the very ones."""
    return [(name, arguments | changes) for name, arguments in calls]


def rewritten(name: str, change: Callable[[Tensor], Tensor], calls: Calls) -> Calls:
    """A call, and the same after a tensor of it (of two: the first) was written in place."""
    [(function, arguments)] = calls
    tensor = arguments[name] if isinstance(arguments[name], Tensor) else arguments[name][0]
    return [*calls, (function, arguments | {"before": lambda: tensor.copy_(change(tensor))})]


def masks(q_len: int, requests: int = len(LENS)) -> Tensor:
    generator = torch.Generator().manual_seed(q_len)
    shown = torch.rand(requests, q_len, q_len, generator=generator) < 0.5
    return pack_mask((shown | torch.eye(q_len, dtype=torch.bool)).tolist())


def low() -> Calls:
    """All logits at -200,000 and below."""
    [(name, arguments)] = decode()
    arguments["query"] = torch.full_like(arguments["query"], 100.0)
    k, v = arguments["kv_cache"]
    return [(name, arguments | {"kv_cache": (-500.0 - k.abs(), v)})]


def peaked() -> Calls:
    """A first key that outweighs any other, and not all of them together."""
    [(name, arguments)] = decode((700,), heads=(4, 1))
    query = torch.zeros_like(arguments["query"])
    query[..., 0] = 1.0
    k, v = arguments["kv_cache"]
    k = torch.zeros_like(k)
    k[int(arguments["block_tables"][0, 0]), :, 0, 0] = 15.0
    return [(name, arguments | {"query": query, "kv_cache": (k, v)})]


def row_strides(name: str, calls: Calls) -> Calls:
    """Rows of a tensor with gaps between them."""
    [(function, arguments)] = calls
    tensor = arguments[name]
    return [(function, arguments | {name: torch.cat((tensor, tensor.flip(0)), dim=1)[:, : tensor.shape[1]]})]


def unlike_strides() -> Calls:
    """K and V of one shape and other strides."""
    [(name, arguments)] = decode()
    k, v = arguments["kv_cache"]
    return [(name, arguments | {"kv_cache": (k, torch.cat((v, v), dim=1)[:, : v.shape[1]])})]


def unlike_nvfp4_strides() -> Calls:
    """An NVFP4 cache whose data have gaps between pages and whose scale factors have none."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (30, 4, 2, 16, 16), generator=generator, dtype=torch.uint8)
    factors = (torch.rand(2, 30, 2, 16, 32 // NVFP4_BLOCK, generator=generator) + 0.5).to(torch.float8_e4m3fn)
    arguments = {
        "query": torch.randn(2, 4, 32, generator=generator).to(torch.bfloat16),
        "kv_cache": (packed[:, 0], packed[:, 2]),
        "kv_cache_sf": (factors[0], factors[1]),
        "workspace_buffer": None,
        "block_tables": torch.randperm(30, generator=generator).view(2, 15).to(torch.int32),
        "seq_lens": torch.tensor([200, 33], dtype=torch.int32),
        "max_seq_len": 240,
        "bmm1_scale": 0.1,
        "backend": "xqa",
    }
    return [(DECODE, arguments)]


def far_page(first_byte: int) -> Calls:
    """One page of e4m3 that begins at this byte of a pool of which nothing else is touched."""
    page_size, head_dim = 64, 128
    page = first_byte // (page_size * head_dim)
    cache = torch.empty(page + 1, 1, page_size, head_dim, dtype=torch.float8_e4m3fn)
    cache[page // 2] = 0.0
    cache[page].copy_(torch.randn(1, page_size, head_dim, generator=torch.Generator().manual_seed(0)))
    arguments = {
        "query": torch.ones(1, 1, head_dim, dtype=torch.bfloat16),
        "kv_cache": (cache, cache),
        "workspace_buffer": None,
        "block_tables": torch.tensor([[page]], dtype=torch.int32),
        "seq_lens": torch.tensor([60], dtype=torch.int32),
        "max_seq_len": 64,
    }
    return [(DECODE, arguments)]


def many_pages() -> Calls:
    """Pages with ids beyond 2**15."""
    [(name, arguments)] = decode((40,), page_size=1)
    k, v = (torch.cat((cache.new_zeros(40000, *cache.shape[1:]), cache)) for cache in arguments["kv_cache"])
    return [(name, arguments | {"kv_cache": (k, v), "block_tables": arguments["block_tables"] + 40000})]


def dead_before_window() -> Calls:
    """NaN in the pages that lie wholly before the window."""
    [(name, arguments)] = decode((300,), window_left=70)
    dead = arguments["block_tables"][0, :14].long()
    for cache in arguments["kv_cache"]:
        cache[dead] = math.nan
    return [(name, arguments)]


def mla_everything() -> Calls:
    """Several rows, no keys and fewer than rows, sinks, dirty scratch and outputs, NaN in page tails."""
    arguments = {"sinks": [torch.linspace(-2.0, 9.0, 16)], "workspace_buffer": workspace(255), "poison": math.nan}
    scales = {"bmm1_scale": torch.tensor([0.4]), "bmm2_scale": torch.tensor([2.0])}
    return with_buffers(1.0, mla((300, 66, 0, 3), q_len=5, page_size=64, heads=16, **arguments, **scales))


def mla_low() -> Calls:
    """All logits at -400,000."""
    [(name, arguments)] = mla()
    query, cache = torch.zeros_like(arguments["query"]), arguments["kv_cache"].clone()
    query[..., -1], cache[..., -1] = 1000.0, -1000.0
    return [(name, arguments | {"query": query, "kv_cache": cache})]


def mla_far(first_byte: int, kv_dtype: torch.dtype) -> Calls:
    """Pages from this byte on of a pool of which nothing is touched but zeros where ids that wrap would lead."""
    [(name, arguments)] = mla((60,), page_size=64, kv_dtype=kv_dtype)
    pages = arguments["kv_cache"]
    first = -(-first_byte // pages[0].nbytes)
    cache = torch.empty(first + len(pages), *pages.shape[1:], dtype=kv_dtype)
    for start, content in ((0, 0.0), (first // 2, 0.0), (first, pages)):
        cache[start : start + len(pages)] = content
    return [(name, arguments | {"kv_cache": cache, "block_tables": arguments["block_tables"] + first})]


def mla_last_page_of_nan() -> Calls:
    """A table that ends in -1, and a pool that ends in NaN."""
    [(name, arguments)] = mla((40,), foreign_id=-1)
    cache = torch.nn.functional.pad(arguments["kv_cache"], (0, 0, 0, 0, 0, 0, 0, 1), value=math.nan)
    return [(name, arguments | {"kv_cache": cache})]


def with_buffers(fill: float, calls: Calls) -> Calls:
    """The caller's out and lse, with guards around them and a filling."""
    [(name, arguments)] = calls
    *rows, head_dim = arguments["query"].shape
    out = torch.full((*rows, arguments.get("kv_lora_rank", head_dim)), fill, dtype=torch.bfloat16)
    out, lse = guarded(out, 7.0, 128), guarded(torch.full(rows, fill), 7.0)
    return [(name, arguments | {"out": out, "lse": lse, "return_lse": True})]


def workspace(scratch: int) -> Tensor:
    """Zeroed counters and filled scratch, with guards around all of it."""
    buffer = torch.zeros(COUNTER_BYTES + 2**20, dtype=torch.uint8)
    buffer[COUNTER_BYTES:] = scratch
    return guarded(buffer, 7)


def draft(topk: int = 3, page_size: int = 4, lens: tuple[int, ...] = (5, 150, 17), **changes: Any) -> Calls:
    generator = torch.Generator().manual_seed(0)
    n, width = len(lens), max(lens) + 40
    pool = torch.randint(1, 2**40, (2 * n, 2 * width), generator=generator)[:, :width]
    prefixes = torch.tensor(lens)
    cells = topk * (sum(lens) + 4 * n) + 9
    arguments = {
        "req_pool_indices": torch.randperm(2 * n, generator=generator)[:n],
        "req_to_token": pool,
        "paged_kernel_lens": prefixes,
        "kv_indices": torch.full((3, cells), -7),
        "kv_indptr": torch.full((3, n * topk + 2), -7),
        "positions": prefixes.repeat_interleave(topk),
        "topk": topk,
        "page_size": page_size,
    }
    return [(DRAFT_INDICES, arguments | changes)]


def metadata(*cases: Case) -> Calls:
    return [(MHA_METADATA, dict(zip(("batch", "pool"), build(case), strict=True))) for case in cases]


def lengths_change_later() -> Calls:
    """The batch's lengths, int32, are written after metadata were built from them."""
    [(function, arguments)] = metadata(replace(PLAIN, index_dtype=torch.int32))
    return [(function, arguments), (function, arguments | {"before": lambda: arguments["batch"].seq_lens.sub_(1)})]


VERIFY = Case(ForwardMode.TARGET_VERIFY, (17, 32, 47, 49), new=4)
DRAFT = Case(ForwardMode.DECODE, (17, 32, 47, 49), new=2)
PLAIN = Case(ForwardMode.DECODE, (17, 32, 47, 49))

# The calls that tell each mutant apart; mutants that are not named differ on DEFAULT.
DEFAULT: dict[str, Callable[[], Calls]] = {
    "masks": lambda: decode(q_len=4, window_left=70),
    "scales": decode,
    "pages": decode,
    "merging": lambda: decode(sinks=SINKS),
    "batching": decode,
    "memory": lambda: with_buffers(1.0, decode((300, 66, 0, 17))),
    "lse": lambda: decode((300, 66, 0, 17)),
    "mla": mla_everything,
    "draft_indices": draft,
    "metadata": lambda: metadata(PLAIN),
}
TRIGGERS: dict[str, Callable[[], Calls]] = {
    "window_off_by_one_wide": lambda: decode(window_left=70),
    "window_off_by_one_narrow": lambda: decode(window_left=70),
    "window_skips_page_boundary": lambda: decode(window_left=70),
    "window_ignored_with_mask": lambda: decode(q_len=4, mask=masks(4), window_left=70),
    "full_mask_to_causal": lambda: decode(q_len=4, mask=masks(4)),
    "mask_transposed": lambda: decode(q_len=4, mask=masks(4)),
    "mask_of_first_request": lambda: decode(q_len=4, mask=masks(4)),
    "mask_of_prefix_too": lambda: decode(q_len=4, mask=masks(4)),
    "mask_beyond_first_word_ignored": lambda: decode((300, 66, 135, 20), q_len=20, mask=masks(20)),
    "non_causal_ignored": lambda: context(causal=False),
    "boundary_unmasked": lambda: context(causal=False),
    "second_tile_restarts": context,
    "short_request_from_its_start": lambda: decode((3, 66), q_len=5),
    "masked_row_uniform": lambda: decode((3, 66), q_len=5),
    "finite_sentinel": low,
    "sentinel_meets_sink": lambda: decode(q_len=4, sinks=SINKS),
    "mask_lowers_logits": lambda: decode(q_len=4, magnitude=300.0),
    "kscale_on_bf16": decode,
    "scales_ignored_for_e4m3": lambda: decode(kv_dtype=torch.float8_e4m3fn),
    "tensor_scales_ignored": lambda: decode(bmm1_scale=torch.tensor([0.4]), bmm2_scale=torch.tensor([2.0])),
    "tensor_scale_in_base2": lambda: decode(bmm1_scale=torch.tensor([0.4])),
    "log2_scale_ignored": lambda: decode(bmm1_scale_log2=torch.tensor([0.9])),
    "log2_scale_taken_as_natural": lambda: decode(bmm1_scale_log2=torch.tensor([0.9])),
    "bmm1_ignores_sign": lambda: decode(bmm1_scale=-0.4),
    "page_offset_absolute": lambda: decode(page_size=256),
    "large_pages_halves_swapped": lambda: decode(page_size=128),
    "seq_len_off_by_one": lambda: decode(poison=3.0),
    "length_rounded_up_to_page": lambda: decode(poison=3.0),
    "max_length_for_one_request": lambda: decode((40,), max_seq_len=64, poison=3.0),
    "table_stride_ignored": lambda: row_strides("block_tables", decode()),
    "query_stride_ignored": lambda: row_strides("query", decode()),
    "nhd_taken_as_hnd": lambda: decode(page_size=2, kv_layout="NHD"),
    "v_pages_from_k": lambda: decode(separate_tables=True),
    "v_strides_from_k": unlike_strides,
    "sf_strides_from_k": unlike_nvfp4_strides,
    "wrap_int32": lambda: far_page(2**31),
    "wrap_int32_bytes": lambda: far_page(2**31),
    "wrap_uint32_bytes": lambda: far_page(2**32),
    "page_id_int16": many_pages,
    "tail_multiply": lambda: decode(poison=math.nan),
    "tail_additive_mask": lambda: decode(poison=math.nan),
    "table_tail_read": lambda: decode(foreign_id=-1),
    "pages_before_window_read": dead_before_window,
    "first_split_of_long_lost": lambda: decode((1100,)),
    "large_head_dim_cut": lambda: decode(head_dim=192),
    "empty_split_writes_zero": lambda: decode(window_left=70),
    "empty_row_of_split_writes_zero": lambda: decode(q_len=4),
    "late_splits_lost": lambda: decode((1100,)),
    "sink_ignored_in_verify": lambda: decode(q_len=4, sinks=SINKS),
    "light_keys_lost": peaked,
    "light_splits_lost": peaked,
    "overflows_without_origin": lambda: decode(magnitude=20.0),
    "nondeterministic_merge": lambda: decode() * 2,
    "low_precision_accumulation": lambda: decode((8192,), page_size=64),
    "request_index_mod8": lambda: decode((20,) * 9),
    "equal_lengths_share_keys": lambda: decode((50, 50)),
    "rows_reversed": lambda: decode(q_len=4),
    "odd_row_counts_misplaced": lambda: decode(q_len=5),
    "last_row_of_eight_lost": lambda: decode(q_len=8),
    "odd_groups_misread": lambda: decode(heads=(10, 2)),
    "large_groups_misread": lambda: decode(heads=(24, 2)),
    "mha_misread": lambda: decode(heads=(4, 4)),
    "ragged_rows_ignored": context,
    "padded_rows_are_request_rows": context,
    "cum_kv_is_length": context,
    "prefix_lost": context,
    "prefix_free_batch_uncausal": context,
    "out_dtype_ignored": lambda: decode(out_dtype=torch.float32),
    "sinks_overwritten": lambda: decode(sinks=SINKS.clone()),
    "sinks_padded": lambda: decode(heads=(5, 1), sinks=guarded(torch.ones(5), math.nan)),
    "counters_left": lambda: decode(workspace_buffer=workspace(0)),
    "counters_left_by_other_shape": lambda: decode(workspace_buffer=workspace(0)),
    "scratch_not_cleared": lambda: decode(workspace_buffer=workspace(255)),
    "scratch_added_to": lambda: decode(workspace_buffer=workspace(255)),
    "scratch_in_counters": lambda: decode(workspace_buffer=workspace(0)),
    "scratch_beyond_end": lambda: decode(workspace_buffer=workspace(0)),
    "output_reused": lambda: (calls := decode()) + changed(calls, bmm2_scale=3.0),
    "page_tail_cleared": lambda: decode(poison=3.0),
    "cached_bmm1": lambda: (calls := decode()) + changed(calls, bmm1_scale=0.1),
    "cached_bmm2": lambda: (calls := decode()) + changed(calls, bmm2_scale=0.1),
    "cached_tensor_scale": lambda: rewritten("bmm1_scale", lambda t: t / 2, decode(bmm1_scale=torch.tensor([0.4]))),
    "cached_q_len": lambda: decode() + decode(q_len=4),
    "cached_window": lambda: (calls := decode()) + changed(calls, window_left=70),
    "cached_sinks": lambda: (calls := decode()) + changed(calls, sinks=SINKS),
    "cached_mask": lambda: (calls := decode(q_len=4)) + changed(calls, mask=masks(4)),
    "cached_lengths": lambda: rewritten("seq_lens", lambda t: t - 1, decode()),
    "cached_table": lambda: rewritten("block_tables", lambda t: t.flip(1), decode((208, 208, 208))),
    "cached_lengths_by_shape": lambda: (calls := decode()) + changed(calls, seq_lens=calls[0][1]["seq_lens"].flip(0)),
    "cached_keys": lambda: rewritten("kv_cache", lambda t: t.flip(0), decode()),
    "cached_offsets": lambda: context() + context(q_lens=(66, 60, 12, 2)),
    "cached_layout": lambda: decode(page_size=4, heads=(4, 2)) + decode(page_size=4, heads=(4, 2), kv_layout="NHD"),
    "mla_finite_sentinel": mla_low,
    "mla_mask_lowers_logits": lambda: mla(q_len=4, bmm1_scale=1e4),
    "mla_scales_ignored_for_e4m3": lambda: mla(kv_dtype=torch.float8_e4m3fn),
    "mla_bmm1_ignores_sign": lambda: mla(bmm1_scale=-0.4),
    "mla_max_length_for_one_request": lambda: mla((40,), max_seq_len=64, poison=3.0),
    "mla_table_stride_ignored": lambda: row_strides("block_tables", mla()),
    "mla_query_stride_ignored": lambda: row_strides("query", mla()),
    "mla_wrap_int32": lambda: mla_far(2**31, torch.float8_e4m3fn),
    "mla_wrap_int32_bytes": lambda: mla_far(2**31, torch.float8_e4m3fn),
    "mla_wrap_uint32_bytes": lambda: mla_far(2**32, torch.float8_e4m3fn),
    "mla_page_id_int16": lambda: mla_far(2**16 * 2 * 64 * 12, torch.bfloat16),
    "mla_negative_page_is_last": mla_last_page_of_nan,
    "mla_page_size32_taken_as64": lambda: mla(page_size=32),
    "mla_overflows_without_origin": lambda: mla(bmm1_scale=40.0),
    "mla_nondeterministic_merge": lambda: mla() * 2,
    "mla_request_index_mod8": lambda: mla((20,) * 9),
    "mla_equal_lengths_share_keys": lambda: mla((50, 50)),
    "mla_last_row_of_eight_lost": lambda: mla(q_len=8),
    "mla_output_reused": lambda: (calls := mla()) + changed(calls, bmm2_scale=3.0),
    "mla_cached_bmm1": lambda: (calls := mla()) + changed(calls, bmm1_scale=0.1),
    "mla_cached_bmm2": lambda: (calls := mla()) + changed(calls, bmm2_scale=0.1),
    "mla_cached_tensor_scale": lambda: rewritten("bmm1_scale", lambda t: t / 2, mla(bmm1_scale=torch.tensor([0.4]))),
    "mla_cached_q_len": lambda: mla() + mla(q_len=4),
    "mla_cached_sinks": lambda: (calls := mla()) + changed(calls, sinks=SINKS),
    "mla_cached_lengths": lambda: rewritten("seq_lens", lambda t: t - 1, mla()),
    "mla_cached_table": lambda: rewritten("block_tables", lambda t: t.flip(1), mla((208, 208, 208))),
    "mla_cached_lengths_by_shape": lambda: (calls := mla()) + changed(calls, seq_lens=calls[0][1]["seq_lens"].flip(0)),
    "mla_cached_keys": lambda: rewritten("kv_cache", lambda t: t.flip(0), mla()),
    "mla_lse_garbage_empty": lambda: mla((300, 66, 0, 17)),
    "lse_without_sink": lambda: decode(sinks=SINKS),
    "lse_buffer_ignored": lambda: with_buffers(1.0, decode()),
    "indptr_from_lens": lambda: draft(positions=torch.arange(9)),
    "late_branches_uncounted": lambda: draft(topk=2, lens=(1,) * 300),
    "cut_ignored": lambda: draft(kv_indices=torch.full((3, 400), -7)),
    "buffer_regrown": lambda: metadata(replace(PLAIN, total_lens=(17, 32)), PLAIN),
    "buffer_shared": lambda: metadata(PLAIN, replace(PLAIN, total_lens=(1, 2, 3, 4))),
    "lengths_are_the_batchs": lengths_change_later,
    "seq_without_q": lambda: metadata(VERIFY),
    "draft_step_uncounted": lambda: metadata(DRAFT),
    "cu_seqlens_k_without_q": lambda: metadata(VERIFY),
    "cu_seqlens_q_of_equal_rows": lambda: metadata(Case(ForwardMode.EXTEND, (17, 32, 47, 49), new_lens=(3, 1, 4, 2))),
    "max_seq_len_q_overridden": lambda: metadata(VERIFY),
    "table_too_narrow": lambda: metadata(VERIFY),
}


def calls_of(mutant: Mutant) -> Calls:
    """The calls that show a mutant's defect."""
    module = "mla" if mutant.interface == (MLA_DECODE,) else mutant.make.__module__.rpartition(".")[2]
    return (TRIGGERS.get(mutant.name) or DEFAULT[module])()


def observed(implementation: Any, calls: Calls) -> list[bytes]:
    """All that calls show when they are over: what they returned, and all memory around their arguments."""
    results = []
    for function, arguments in calls:
        arguments = dict(arguments)
        arguments.pop("before", lambda: None)()
        results.append(getattr(implementation, function)(**arguments))
    everything = [part for result in results for part in parts(result)]
    for _, arguments in calls:
        everything += [part for value in arguments.values() for part in parts(value)]
    return [memory(part) for part in everything]


def parts(value: Any) -> list[Tensor]:
    """The tensors in a result or an argument; None counts as an empty one."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [part for each in value for part in parts(each)]
    if isinstance(value, TRTLLMMHAMetadata):
        return [part for each in vars(value).values() for part in parts(each)]
    return [torch.tensor(value)] if isinstance(value, int) else []


def memory(tensor: Tensor) -> bytes:
    """The whole allocation that a tensor is in, with its shape and dtype; nothing of a scratch or of a very large one."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if len(storage) > 2**26:
        storage = storage[:0]
    elif len(storage) > COUNTER_BYTES:
        storage = torch.cat((storage[: GUARD + COUNTER_BYTES], storage[-GUARD:]))
    return f"{tensor.dtype} {list(tensor.shape)}".encode() + storage.numpy().tobytes()
