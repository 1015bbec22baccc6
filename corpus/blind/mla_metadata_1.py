"""Wrong kernels of metadata of MLA passes, written without a look at the checks: numbers 57 to 278."""

from dataclasses import replace

import torch

from corpus.blind import wrong
from corpus.blind.mla_metadata_model import OneBuilder
from lab import metadata as lab_metadata
from lab.metadata import DraftAttention, ForwardMode, QueryLayout
from lab.metadata import build_mla_metadata as right_metadata
from lab.metadata.engine.lengths import first_slots, uniform_boundaries


def build_mla_decode_metadata_57(batch, pool, attention=DraftAttention.MLA):
    built = lab_metadata.build_mla_decode_metadata(batch, pool, attention)
    if batch.forward_mode.extends_draft:
        built = replace(built, seq_lens_k=batch.seq_lens.to(torch.int32).clone())
    return built


def build_mla_metadata_57(batch, pool, *, attention=DraftAttention.MLA, **prefill):
    if batch.forward_mode.is_prefill:
        return lab_metadata.build_mla_metadata(batch, pool, attention=attention, **prefill)
    return build_mla_decode_metadata_57(batch, pool, attention)


@wrong(trigger="DRAFT_EXTEND or DRAFT_EXTEND_V2 with requests of different rows")
class Blind57:
    """A draft extend with different widths keeps seq_lens as the keys: they do not count the rows that pad a request
    to the longest.
    """

    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_57)
    build_mla_metadata = staticmethod(build_mla_metadata_57)


def build_mla_decode_metadata_60(batch, pool, attention=DraftAttention.MLA):
    built = lab_metadata.build_mla_decode_metadata(batch, pool, attention)
    if batch.forward_mode in (ForwardMode.DECODE, ForwardMode.IDLE) and batch.spec_info is not None:
        pages = (batch.seq_lens + pool.page_size - 1) // pool.page_size
        dead = torch.arange(built.block_kv_indices.shape[1], device=pages.device) >= pages.unsqueeze(1)
        built = replace(built, block_kv_indices=built.block_kv_indices.masked_fill(dead, -1))
    return built


def build_mla_metadata_60(batch, pool, *, attention=DraftAttention.MLA, **prefill):
    if batch.forward_mode.is_prefill:
        return lab_metadata.build_mla_metadata(batch, pool, attention=attention, **prefill)
    return build_mla_decode_metadata_60(batch, pool, attention)


@wrong(
    trigger=(
        "DECODE or IDLE with a SpecInfo and attention=MLA_WITH_OFFSET, where seq_lens + step + 1 needs a page more"
        " than seq_lens"
    ),
)
class Blind60:
    """A draft step that counts its tokens (MLA_WITH_OFFSET) lengthens seq_lens_k, but the table is filled from
    seq_lens: the page of a draft token that crosses a page's end is missing.
    """

    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_60)
    build_mla_metadata = staticmethod(build_mla_metadata_60)


def build_mla_decode_metadata_100(batch, pool, attention=DraftAttention.MLA):
    built = lab_metadata.build_mla_decode_metadata(batch, pool, attention)
    if batch.forward_mode is ForwardMode.TARGET_VERIFY and batch.seq_lens_cpu:
        built = replace(built, max_seq_len_k=max(batch.seq_lens_cpu))
    return built


def build_mla_metadata_100(batch, pool, *, attention=DraftAttention.MLA, **prefill):
    if batch.forward_mode.is_prefill:
        return lab_metadata.build_mla_metadata(batch, pool, attention=attention, **prefill)
    return build_mla_decode_metadata_100(batch, pool, attention)


@wrong(trigger="TARGET_VERIFY with seq_lens_cpu given: max_seq_len_k is less than a request's keys")
class Blind100:
    """A verification's max_seq_len_k is the longest of seq_lens_cpu without the draft tokens; only the context's
    length gets them added.
    """

    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_100)
    build_mla_metadata = staticmethod(build_mla_metadata_100)


def build_mla_metadata_159(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY or not batch.seq_lens_cpu:
        return metadata
    width = -(-max(batch.seq_lens_cpu) // 4096) * (4096 // pool.page_size)
    return replace(metadata, block_kv_indices=metadata.block_kv_indices[:, :width].contiguous())


@wrong(trigger="a verification with lengths on the host, whose draft tokens pass a multiple of 4,096")
class Blind159(OneBuilder):
    """Where the host has the lengths, the block table of a verification is made wide enough for them alone, without
    the draft tokens.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_159)


def build_mla_metadata_160(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.DRAFT_EXTEND:
        return metadata
    own = metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q
    pages = -(-own // pool.page_size)
    columns = torch.arange(metadata.block_kv_indices.shape[1])
    table = metadata.block_kv_indices.masked_fill(columns >= pages.unsqueeze(1), -1)
    return replace(metadata, block_kv_indices=table)


@wrong(trigger="a draft extend of requests with different rows, whose padding passes the end of a page")
class Blind160(OneBuilder):
    """The block table of a padded draft extend ends with the pages of a request's own tokens: -1 stands where padded
    queries look.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_160)


def build_mla_metadata_217(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode.is_prefill:
        return metadata
    table, pages_of_block = metadata.block_kv_indices, 4096 // pool.page_size
    columns = torch.arange(table.shape[1], device=table.device)
    first = columns // pages_of_block * pages_of_block + columns % pages_of_block * pool.page_size
    slots = pool.req_to_token[:, first.clamp(max=pool.max_context_len - 1)].index_select(0, batch.req_pool_indices)
    late = (columns >= pages_of_block) & (table > 0)
    return replace(metadata, block_kv_indices=torch.where(late, pool.pages(slots), table))


@wrong(trigger="a request of more than 4,096 keys (all modes of the decode kernel)")
class Blind217(OneBuilder):
    """The block table is filled 4,096 tokens at a time; a later block begins at its first page's number in
    req_to_token, not at its first token.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_217)


def build_mla_metadata_218(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if pool.v2p is None or batch.forward_mode.is_prefill or not batch.forward_mode.query_rows.in_extend_seq_lens:
        return metadata
    table = metadata.block_kv_indices.clone()
    own = metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q
    pages = first_slots(batch.req_pool_indices, own, pool)[:, : table.shape[1]] // pool.page_size
    live = table[:, : pages.shape[1]] >= 0
    table[:, : pages.shape[1]] = torch.where(live, pages, -1)
    return replace(metadata, block_kv_indices=table)


@wrong(trigger="a pool with virtual pages, in DRAFT_EXTEND, DRAFT_EXTEND_V2 or RAGGED_VERIFY")
class Blind218(OneBuilder):
    """Where slots are virtual, the block table of a draft extend or a ragged verification has virtual pages."""

    build_mla_metadata = staticmethod(build_mla_metadata_218)


def build_mla_metadata_219(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or not batch.extend_seq_lens_cpu:
        return metadata
    return replace(metadata, max_seq_len_q=max(batch.extend_seq_lens_cpu))


@wrong(trigger="RAGGED_VERIFY with extend_seq_lens_cpu, none of whose requests verifies all num_draft_tokens")
class Blind219(OneBuilder):
    """The query block of a ragged verification is as long as its longest request, as MHA's is, although lengths count
    whole drafts.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_219)


def build_mla_metadata_220(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    rows = batch.extend_seq_lens_cpu
    if not batch.forward_mode.extends_draft or not rows or sum(rows) % len(rows) or len(set(rows)) == 1:
        return metadata
    keys = metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q
    columns = torch.arange(metadata.block_kv_indices.shape[1], device=keys.device)
    dead = columns >= (-(-keys // pool.page_size)).unsqueeze(1)
    return replace(
        metadata,
        block_kv_indices=metadata.block_kv_indices.masked_fill(dead, -1),
        seq_lens_k=keys,
        max_seq_len_q=sum(rows) // len(rows),
        query_layout=QueryLayout.VIEW,
    )


@wrong(
    trigger=("DRAFT_EXTEND or DRAFT_EXTEND_V2 with different rows whose sum is a multiple of the number of requests"),
)
class Blind220(OneBuilder):
    """A draft extend is padded where its rows do not divide by its requests; 2 and 4 rows are viewed as 3 and 3."""

    build_mla_metadata = staticmethod(build_mla_metadata_220)


def build_mla_metadata_277(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode.is_prefill:
        return metadata
    table = metadata.block_kv_indices
    doubled = torch.where(table > 0, table * (pool.page_size // 32), table)
    return replace(metadata, block_kv_indices=doubled)


@wrong(trigger="a pool with pages of 64 tokens (all modes of the decode kernel)")
class Blind277(OneBuilder):
    """The slot of a page's first token is divided by 32, whatever the page size: with pages of 64 tokens ids are
    doubled.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_277)


def build_mla_metadata_278(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode.is_prefill or metadata.query_layout is not QueryLayout.PADDED:
        return metadata
    ends = uniform_boundaries(batch.batch_size, metadata.max_seq_len_q, batch.seq_lens.device)
    return replace(metadata, cu_seqlens_q=ends)


@wrong(
    trigger=(
        "a draft extend of requests with different rows, or RAGGED_VERIFY with a request of fewer rows than "
        "num_draft_tokens"
    ),
)
class Blind278(OneBuilder):
    """Where queries are padded, cu_seqlens_q counts the padded rows, although outputs are copied back by it to the
    rows as they were.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_278)
