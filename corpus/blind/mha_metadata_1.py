"""Wrong kernels of metadata of MHA passes, written without a look at the checks: numbers 54 to 213."""

from dataclasses import replace

import torch

from corpus.blind import wrong
from corpus.blind.lists_model import counting
from lab import metadata as lab_metadata
from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import first_slots, num_pages, uncounted_tokens, uniform_boundaries


def build_mha_metadata_54(batch, pool):
    built = lab_metadata.build_mha_metadata(batch, pool)
    locations, n = built.swa_out_cache_loc, batch.out_cache_loc.shape[0]
    if locations is not None and 0 < n < batch.num_tokens:
        locations[n:] = locations[n - 1]
    return built


@wrong(trigger="a pool with a sliding window and num_tokens > len(out_cache_loc) > 0 (padding rows)")
class Blind54:
    """Rows of padding write to the last request's window slot: swa_out_cache_loc is padded with its last entry, not
    with the sink.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_54)


def build_mha_metadata_55(batch, pool):
    if batch.forward_mode is ForwardMode.IDLE and batch.spec_info is not None:
        batch = replace(batch, spec_info=None)
    return lab_metadata.build_mha_metadata(batch, pool)


@wrong(trigger="IDLE with a SpecInfo that has a speculative_step_id")
class Blind55:
    """The draft step's tokens are added to the lengths of DECODE only: an IDLE rank with a SpecInfo counts none."""

    build_mha_metadata = staticmethod(build_mha_metadata_55)


_maps_56 = {}  # pool -> its map as it was


def build_mha_metadata_56(batch, pool):
    if pool.full_to_swa is None:
        return lab_metadata.build_mha_metadata(batch, pool)
    while len(_maps_56) > 16:
        del _maps_56[next(iter(_maps_56))]
    _, stale = _maps_56.setdefault(id(pool), (pool, pool.full_to_swa.clone()))
    now = pool.full_to_swa
    pool.full_to_swa = stale
    try:
        return lab_metadata.build_mha_metadata(batch, pool)
    finally:
        pool.full_to_swa = now


@wrong(trigger="two builds on one pool with a sliding window, pages admitted or evicted between them")
class Blind56:
    """The map to sliding-window slots is copied at a pool's first build, and not again when the pool hands out or
    evicts pages.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_56)


def build_mha_metadata_58(batch, pool):
    built = lab_metadata.build_mha_metadata(batch, pool)
    prefixes = batch.extend_prefix_lens_cpu
    if batch.forward_mode.is_prefill and prefixes and prefixes[0] == 0:
        built = replace(built, cu_seqlens_q=built.cu_seqlens_k)
    return built


@wrong(trigger="a prefill mode with extend_prefix_lens_cpu[0] == 0 and a prefix elsewhere")
class Blind58:
    """Whether a prefill has cached prefixes is decided by its first request: where that has none and others do,
    cu_seqlens_q is cu_seqlens_k.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_58)


def build_mha_metadata_59(batch, pool):
    built = lab_metadata.build_mha_metadata(batch, pool)
    blocks = [block.cumsum(0) for block in built.cache_seqlens_int32.split(256)]
    sums = torch.nn.functional.pad(torch.cat(blocks).to(torch.int32), (1, 0)) if blocks else built.cu_seqlens_k
    shared = built.cu_seqlens_q is built.cu_seqlens_k
    return replace(built, cu_seqlens_k=sums, **({"cu_seqlens_q": sums} if shared else {}))


@wrong(trigger="more than 256 requests")
class Blind59:
    """Cu_seqlens_k is summed in blocks of 256 requests without the carry between them."""

    build_mha_metadata = staticmethod(build_mha_metadata_59)


def build_mha_metadata_99(batch, pool):
    built = lab_metadata.build_mha_metadata(batch, pool)
    if uncounted_tokens(batch) == 0:
        built = replace(built, cache_seqlens_int32=batch.seq_lens.to(torch.int32))
    return built


@wrong(
    trigger=(
        "int32 seq_lens in a mode without uncounted tokens, rewritten after the build: cache_seqlens_int32 changes too"
    ),
)
class Blind99:
    """The lengths are converted with .to(torch.int32), which copies nothing of int32 ones: the metadata follows the
    batch's tensor when it is rewritten.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_99)


def build_mha_metadata_154(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.RAGGED_VERIFY:
        return metadata
    return counting(metadata, metadata.max_seq_len_q - batch.extend_seq_lens)


@wrong(trigger="a ragged verification of requests with different rows")
class Blind154:
    """In a ragged verification the rows of the longest request are added to every length."""

    build_mha_metadata = staticmethod(build_mha_metadata_154)


def build_mha_metadata_155(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if pool.v2p is None or pool.full_to_swa is None:
        return metadata
    slots = first_slots(batch.req_pool_indices, metadata.cache_seqlens_int32, pool)
    pages = pool.swa_slots(pool.physical_slots(slots)) // pool.page_size
    return replace(metadata, swa_page_table=pages.to(torch.int32))


@wrong(trigger="virtual slots and a sliding-window pool")
class Blind155:
    """Where slots are virtual, the window's pages are looked up by the physical slot, not by the virtual one."""

    build_mha_metadata = staticmethod(build_mha_metadata_155)


def build_mha_metadata_156(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    return counting(metadata, 1) if batch.writes_no_kv else metadata


@wrong(trigger="a frozen-KV draft, step -1")
class Blind156:
    """A frozen-KV draft, whose step is -1, is counted as the first step of a draft that writes a token."""

    build_mha_metadata = staticmethod(build_mha_metadata_156)


def build_mha_metadata_157(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.DRAFT_EXTEND_V2:
        return metadata
    return counting(metadata, batch.extend_seq_lens)


@wrong(trigger="draft extend V2")
class Blind157:
    """Draft extend V2 adds its rows to the lengths, as a verification does."""

    build_mha_metadata = staticmethod(build_mha_metadata_157)


def cut_158(table, columns):
    if table is not None:
        table = table.clone()
        table[:, columns:] = 0
    return table


def build_mha_metadata_158(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    columns = pool.max_context_len // pool.page_size
    return replace(
        metadata,
        page_table=cut_158(metadata.page_table, columns),
        swa_page_table=cut_158(metadata.swa_page_table, columns),
    )


@wrong(trigger="max_context_len no multiple of the page size, a request that reaches into the last page")
class Blind158:
    """Page tables are filled up to max_context_len // page_size columns; the last page of a context that is no
    multiple is left out.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_158)


def build_mha_metadata_209(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    table = metadata.swa_page_table
    if table is None:
        return metadata
    pages = num_pages(metadata.cache_seqlens_int32, pool.page_size)
    live = torch.arange(table.shape[1], device=table.device) < pages.unsqueeze(1)
    return replace(metadata, swa_page_table=table.masked_fill(live & (table == 0), -1))


@wrong(
    trigger=(
        "a sliding-window pool, and a live page that was evicted from the window (or a request of padding, whose "
        "page is the sink)"
    ),
)
class Blind209:
    """Pages of the window that were evicted are -1 in its table, not the sink."""

    build_mha_metadata = staticmethod(build_mha_metadata_209)


def build_mha_metadata_210(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.forward_mode.is_prefill or not batch.seq_lens_cpu:
        return metadata
    return replace(metadata, max_seq_len_q=max(batch.seq_lens_cpu))


@wrong(trigger="a prefill mode with seq_lens_cpu, whose longest request is longer than the most new tokens")
class Blind210:
    """Where the host has the lengths, max_seq_len_q of a prefill is the longest of them, cached prefix and all."""

    build_mha_metadata = staticmethod(build_mha_metadata_210)


def build_mha_metadata_211(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode not in (ForwardMode.SPLIT_PREFILL, ForwardMode.DLLM_EXTEND):
        return metadata
    boundaries = uniform_boundaries(batch.batch_size, 1, batch.seq_lens.device)
    return replace(metadata, max_seq_len_q=1, cu_seqlens_q=boundaries)


@wrong(trigger="SPLIT_PREFILL or DLLM_EXTEND with a request of several new tokens")
class Blind211:
    """The list of prefill modes has EXTEND and MIXED alone; a split prefill and a diffusion block get the query rows
    of a decode.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_211)


def build_mha_metadata_212(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if metadata.encoder_page_table is None:
        return metadata
    return replace(metadata, encoder_page_table=metadata.page_table.repeat(metadata.max_seq_len_q, 1))


@wrong(trigger="expand_encoder_only_verify=True, a verification of 2 requests or more with 2 rows or more")
class Blind212:
    """The page table of a verification on encoder-only layers repeats the whole table, not each request's row."""

    build_mha_metadata = staticmethod(build_mha_metadata_212)


def build_mha_metadata_213(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    table = metadata.page_table % 2**16
    if metadata.encoder_page_table is not None:
        metadata = replace(metadata, encoder_page_table=metadata.encoder_page_table % 2**16)
    return replace(metadata, page_table=table)


@wrong(trigger="a pool of more than 65,536 pages, and a request on one of the later ones")
class Blind213:
    """Page ids of the full pool are kept in 16 bits: those from 65,536 on wrap around."""

    build_mha_metadata = staticmethod(build_mha_metadata_213)
