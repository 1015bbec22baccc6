"""Wrong kernels of metadata of MHA passes, written without a look at the checks: numbers 318 to 528."""

from dataclasses import replace
from dataclasses import replace as changed

import torch

from corpus.blind import wrong
from lab import metadata as lab_metadata
from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import exclusive_cumsum, first_slots


def build_mha_metadata_318(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    tables = ("page_table", "swa_page_table", "encoder_page_table")
    found = {name: getattr(metadata, name) for name in tables}
    return replace(metadata, **{name: None if table is None else table.clamp(min=0) for name, table in found.items()})


@wrong(trigger="no virtual slots, and a slot of -1 as the first of a live page")
class Blind318:
    """Slots are divided by the page size with C's division, which rounds towards zero: a slot of -1 gives page 0, not
    -1.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_318)


def build_mha_metadata_347(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if (
        batch.forward_mode is not ForwardMode.TARGET_VERIFY
        or batch.spec_info is None
        or batch.spec_info.num_draft_tokens is None
    ):
        return metadata
    rows = batch.spec_info.num_draft_tokens
    boundaries = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=batch.seq_lens.device) * rows
    return replace(metadata, max_seq_len_q=rows, cu_seqlens_q=boundaries)


@wrong(trigger="TARGET_VERIFY whose num_draft_tokens is not num_tokens // batch_size")
class Blind347:
    """The query rows of a verification are SpecInfo.num_draft_tokens in max_seq_len_q and cu_seqlens_q, not num_tokens
    // batch_size; the lengths are right.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_347)


BUFFERS_348 = {}


def build_mha_metadata_348(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    table = metadata.page_table
    key = tuple(table.shape), table.device
    if key not in BUFFERS_348:
        while len(BUFFERS_348) >= 64:
            del BUFFERS_348[next(iter(BUFFERS_348))]
        BUFFERS_348[key] = torch.empty_like(table)
    BUFFERS_348[key].copy_(table)
    return replace(metadata, page_table=BUFFERS_348[key])


@wrong(
    trigger=(
        "two builds of the same number of requests and table width, the first one's page_table looked at after the"
        " second"
    ),
)
class Blind348:
    """Page_table is a buffer that the builder keeps by its shape: the next build of that shape writes over it,
    although an overlapped pass still has it.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_348)


def build_mha_metadata_377(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.seq_lens.dtype == torch.int32:
        batch.seq_lens.copy_(metadata.cache_seqlens_int32)
    return metadata


@wrong(trigger="int32 seq_lens in a draft step or a verification (ragged or not): seq_lens has changed")
class Blind377:
    """The tokens that a draft step or a verification adds are added in place to .to(torch.int32) of the lengths, which
    copies nothing of int32 ones: the metadata is right, but the batch's lengths have grown.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_377)


def build_mha_metadata_378(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if (
        batch.forward_mode is not ForwardMode.DRAFT_EXTEND
        or batch.spec_info is None
        or batch.spec_info.num_accept_tokens is None
    ):
        return metadata
    boundaries = metadata.cu_seqlens_q.clone()
    boundaries[1:] = batch.spec_info.num_accept_tokens[: batch.batch_size].cumsum(0)
    return replace(metadata, cu_seqlens_q=boundaries)


@wrong(trigger="DRAFT_EXTEND with num_accept_tokens that are not extend_seq_lens")
class Blind378:
    """An eager draft extend takes its rows in cu_seqlens_q from SpecInfo.num_accept_tokens where it is given, as the
    replay of a graph does, not from extend_seq_lens.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_378)


def build_mha_metadata_407(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    is_padding = batch.req_pool_indices == 0
    keys = torch.where(is_padding, 0, metadata.cache_seqlens_int32).to(torch.int32)
    ends = exclusive_cumsum(keys)
    same_tokens = metadata.cu_seqlens_q is metadata.cu_seqlens_k
    return replace(
        metadata,
        cache_seqlens_int32=keys,
        cu_seqlens_k=ends,
        cu_seqlens_q=ends if same_tokens else metadata.cu_seqlens_q,
    )


@wrong(trigger="a request with req_pool_indices 0 and any keys (padding for data parallelism has length 1)")
class Blind407:
    """Requests of padding, whose row of req_to_token is the reserved one, are given no keys, although they count those
    of seq_lens.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_407)


BOUNDARIES_408 = {}


def build_mha_metadata_408(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY:
        return metadata
    key = batch.batch_size, batch.seq_lens.device
    if key not in BOUNDARIES_408 and len(BOUNDARIES_408) >= 256:
        del BOUNDARIES_408[next(iter(BOUNDARIES_408))]
    return replace(metadata, cu_seqlens_q=BOUNDARIES_408.setdefault(key, metadata.cu_seqlens_q).clone())


@wrong(trigger="a second TARGET_VERIFY of as many requests with another number of rows each")
class Blind408:
    """Cu_seqlens_q of a verification is made once for each number of requests, and not again when the number of draft
    tokens changes.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_408)


def build_mha_metadata_437(batch, pool, *, expand_encoder_only_verify=False):
    built = lab_metadata.build_mha_metadata(batch, pool, expand_encoder_only_verify=expand_encoder_only_verify)
    if built.encoder_page_table is None:
        return built
    rows = built.max_seq_len_q
    return replace(
        built,
        encoder_cache_seqlens=built.cache_seqlens_int32.repeat(rows),
        encoder_page_table=built.page_table.repeat(rows, 1),
    )


@wrong(trigger="`expand_encoder_only_verify=True`, TARGET_VERIFY of more than one request and row")
class Blind437:
    """Encoder-only verify: lengths and page tables are expanded by repeat, the whole batch after itself, not row by
    row.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_437)


def build_mha_metadata_438(batch, pool, *, expand_encoder_only_verify=False):
    built = lab_metadata.build_mha_metadata(batch, pool, expand_encoder_only_verify=expand_encoder_only_verify)
    if built.swa_page_table is None:
        return built
    slots = pool.physical_slots(first_slots(batch.req_pool_indices, built.cache_seqlens_int32, pool))
    return replace(built, swa_page_table=(pool.swa_slots(slots) // pool.page_size).to(torch.int32))


@wrong(trigger="a pool with virtual pages and a sliding window")
class Blind438:
    """Virtual pages and a window: the window's page is looked up by the physical slot, but full_to_swa is indexed by
    virtual ones.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_438)


def build_mha_metadata_467(batch, pool, **more):
    built = lab_metadata.build_mha_metadata(batch, pool, **more)
    if built.swa_page_table is None or pool.v2p is None:
        return built
    slots = pool.physical_slots(first_slots(batch.req_pool_indices, built.cache_seqlens_int32, pool))
    return replace(built, swa_page_table=(pool.swa_slots(slots) // pool.page_size).to(torch.int32))


@wrong(trigger="a pool with virtual pages and a sliding-window pool, v2p not the identity")
class Blind467:
    """With virtual pages the window's table is looked up by the physical page of a token, not by its virtual one."""

    build_mha_metadata = staticmethod(build_mha_metadata_467)


def build_mha_metadata_468(batch, pool, **more):
    built = lab_metadata.build_mha_metadata(batch, pool, **more)
    if built.encoder_page_table is None:
        return built
    return replace(built, encoder_page_table=built.page_table.repeat(built.max_seq_len_q, 1))


@wrong(trigger="expand_encoder_only_verify=True, TARGET_VERIFY of two or more requests with two or more rows")
class Blind468:
    """A verification on encoder-only layers: the page table is repeated as a whole, not each row of it, beside lengths
    repeated row by row.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_468)


def build_mha_metadata_498(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if pool.v2p is None or pool.full_to_swa is None:
        return metadata
    slots = first_slots(batch.req_pool_indices, metadata.cache_seqlens_int32, pool)
    pages = pool.swa_slots(pool.physical_slots(slots)) // pool.page_size
    return replace(metadata, swa_page_table=pages.to(torch.int32))


@wrong(trigger="a pool with both virtual pages and a sliding window")
class Blind498:
    """The sliding window's page table looks physical slots up in full_to_swa, which is indexed by virtual ones."""

    build_mha_metadata = staticmethod(build_mha_metadata_498)


def build_mha_metadata_499(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    prefixes = batch.extend_prefix_lens_cpu
    if batch.forward_mode.is_prefill and prefixes and prefixes[0] == 0:
        return replace(metadata, cu_seqlens_q=metadata.cu_seqlens_k)
    return metadata


@wrong(trigger="a prefill whose first request has no cached prefix and another one has")
class Blind499:
    """Whether a prefill has cached prefixes is read off its first request: without one there, cu_seqlens_q is
    cu_seqlens_k.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_499)


def build_mha_metadata_528(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.seq_lens_cpu:
        return metadata
    columns = -(-max(batch.seq_lens_cpu) // pool.page_size)
    tables = {n: getattr(metadata, n) for n in ("page_table", "swa_page_table", "encoder_page_table")}
    filled = {n: t.clone() for n, t in tables.items() if t is not None}
    for table in filled.values():
        table[:, columns:] = 0
    return changed(metadata, **filled)


@wrong(
    trigger=(
        "seq_lens_cpu given, verification or draft step whose uncounted tokens of the longest request start a new page"
    ),
)
class Blind528:
    """With seq_lens_cpu the page tables are filled up to its longest length: drafted tokens that it does not count
    have no page where they cross into a new one.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_528)
