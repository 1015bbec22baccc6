"""Wrong kernels of metadata of MLA passes, written without a look at the checks: numbers 279 to 439."""

from dataclasses import replace

import torch

from corpus.blind import wrong
from corpus.blind.mla_metadata_model import OneBuilder
from lab import metadata as lab_metadata
from lab.metadata import DraftAttention, ForwardMode, QueryLayout
from lab.metadata import build_mla_metadata as right_metadata
from lab.metadata.engine.forward_mode import UncountedTokens
from lab.metadata.engine.lengths import first_slots, key_lens, num_pages


def build_mla_metadata_279(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or batch.extend_seq_lens_cpu is None:
        return metadata
    return replace(metadata, sum_seq_lens_q=sum(batch.extend_seq_lens_cpu))


@wrong(trigger="RAGGED_VERIFY with extend_seq_lens_cpu and num_tokens over its sum")
class Blind279(OneBuilder):
    """Sum_seq_lens_q of a ragged verification leaves out its rows of padding, so that their output does not become
    zero.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_279)


def build_mla_metadata_280(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    rows = batch.extend_seq_lens_cpu
    if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or not rows or len(set(rows)) > 1:
        return metadata
    return replace(metadata, query_layout=QueryLayout.VIEW)


@wrong(
    trigger=(
        "RAGGED_VERIFY with extend_seq_lens_cpu whose requests all have the same number of rows (one request is enough)"
    ),
)
class Blind280(OneBuilder):
    """A ragged verification whose requests verify as many rows each is a view, as a draft extend is, although its
    blocks have num_draft_tokens rows.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_280)


def build_mla_metadata_319(batch, pool, *, disable_chunked_prefix_cache=False, **options):
    metadata = right_metadata(batch, pool, disable_chunked_prefix_cache=disable_chunked_prefix_cache, **options)
    if not batch.forward_mode.is_prefill:
        return metadata
    return replace(
        metadata, fallback_to_flashinfer_impl=metadata.fallback_to_flashinfer_impl or disable_chunked_prefix_cache
    )


def build_mla_prefill_metadata_319(batch, pool, **settings):
    return build_mla_metadata_319(batch, pool, **settings)


@wrong(trigger="disable_chunked_prefix_cache=True in a prefill without cached prefixes")
class Blind319(OneBuilder):
    """A prefill without the chunked prefix cache falls back to other kernels whether a request has a cached prefix or
    not.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_319)
    build_mla_prefill_metadata = staticmethod(build_mla_prefill_metadata_319)


def build_mla_metadata_320(batch, pool, *, attention=DraftAttention.MLA, **options):
    metadata = right_metadata(batch, pool, attention=attention, **options)
    if batch.forward_mode.is_prefill or pool.v2p is None:
        return metadata
    keys = key_lens(batch, attention)
    width = min(metadata.block_kv_indices.shape[1], pool.block_table_width)
    page = first_slots(batch.req_pool_indices, keys, pool)[:, :width].long() // pool.page_size
    live = torch.arange(width) < num_pages(keys, pool.page_size).unsqueeze(1)
    none = live & ((page < 0) | (pool.v2p[page.clamp(min=0)] < 0))
    table = metadata.block_kv_indices.clone()
    table[:, :width].masked_fill_(none, -1)
    return replace(metadata, block_kv_indices=table)


@wrong(
    trigger=("a pool with virtual pages, a mode of the decode kernel, and a live virtual page that is mapped to none"),
)
class Blind320(OneBuilder):
    """Where slots are virtual, a live page that v2p has none for is -1 in the block table, not the sink."""

    build_mla_metadata = staticmethod(build_mla_metadata_320)


def build_mla_metadata_349(batch, pool, *, attention=DraftAttention.MLA, **options):
    metadata = right_metadata(batch, pool, attention=attention, **options)
    if batch.forward_mode.is_prefill or metadata.seq_lens_q is None:
        return metadata
    rows = metadata.seq_lens_q.clamp(min=1)
    boundaries = metadata.cu_seqlens_q.clone()
    boundaries[1:] = rows.cumsum(0)
    return replace(metadata, seq_lens_q=rows, cu_seqlens_q=boundaries)


@wrong(trigger="a draft extend or RAGGED_VERIFY with a request of 0 rows")
class Blind349(OneBuilder):
    """A request without rows in a draft extend or a ragged verification is counted with one row in seq_lens_q and
    cu_seqlens_q, as a grid needs one block at least.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_349)


def build_mla_metadata_350(batch, pool, *, in_prefill_graph=False, **options):
    metadata = right_metadata(batch, pool, in_prefill_graph=in_prefill_graph, **options)
    if not batch.forward_mode.is_prefill:
        return metadata
    has_prefix = any(batch.extend_prefix_lens_cpu)
    fallback = has_prefix and metadata.fallback_to_flashinfer_impl
    return replace(metadata, fallback_to_flashinfer_impl=fallback)


def build_mla_prefill_metadata_350(batch, pool, *, disable_chunked_prefix_cache=False, in_prefill_graph=False):
    return build_mla_metadata_350(
        batch, pool, disable_chunked_prefix_cache=disable_chunked_prefix_cache, in_prefill_graph=in_prefill_graph
    )


@wrong(trigger="in_prefill_graph=True in a prefill without cached prefixes")
class Blind350:
    """A prefill in a graph falls back to other kernels only where a request has a cached prefix; it should always."""

    build_mla_metadata = staticmethod(build_mla_metadata_350)
    build_mla_prefill_metadata = staticmethod(build_mla_prefill_metadata_350)


def build_mla_metadata_379(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.forward_mode.is_prefill or not batch.seq_lens_cpu:
        return metadata
    return replace(metadata, max_seq_len=max(batch.seq_lens_cpu))


def build_mla_prefill_metadata_379(batch, pool, *, disable_chunked_prefix_cache=False, in_prefill_graph=False):
    return build_mla_metadata_379(
        batch, pool, disable_chunked_prefix_cache=disable_chunked_prefix_cache, in_prefill_graph=in_prefill_graph
    )


@wrong(trigger="a prefill mode with seq_lens_cpu, whose longest request is longer than the most new tokens")
class Blind379:
    """Where the host has the lengths, max_seq_len of a prefill is the longest of them, cached prefix and all, not the
    most new tokens.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_379)
    build_mla_prefill_metadata = staticmethod(build_mla_prefill_metadata_379)


def build_mla_metadata_380(batch, pool, *, attention=DraftAttention.MLA, **options):
    metadata = right_metadata(batch, pool, attention=attention, **options)
    if batch.forward_mode.is_prefill:
        return metadata
    table = metadata.block_kv_indices.clone()
    table[:, pool.block_table_width :] = -1
    return replace(metadata, block_kv_indices=table)


@wrong(
    trigger=(
        "a mode of the decode kernel, and a request with more keys (padding rows included) than "
        "ceil(max_context_len / page_size) pages hold"
    ),
)
class Blind380(OneBuilder):
    """Pages of a length above the context are -1 in the block table, as cells after the live pages are, not the sink."""

    build_mla_metadata = staticmethod(build_mla_metadata_380)


def build_mla_metadata_409(batch, pool, *, attention=DraftAttention.MLA, **options):
    spec = batch.spec_info
    is_draft = batch.forward_mode.uncounted is UncountedTokens.DRAFT_STEP and spec is not None
    if is_draft and attention is DraftAttention.MLA_WITH_OFFSET and (spec.speculative_step_id or 0) >= 0:
        step = spec.speculative_step_id
        if step == 0:
            attention = DraftAttention.MLA
        elif step is not None:
            batch = replace(batch, spec_info=replace(spec, speculative_step_id=step - 1))
    return right_metadata(batch, pool, attention=attention, **options)


@wrong(trigger="DECODE or IDLE with a SpecInfo and attention=MLA_WITH_OFFSET")
class Blind409(OneBuilder):
    """A draft step that counts its tokens (MLA_WITH_OFFSET) counts those drafted before it, s, not its own: seq_lens +
    s keys, not seq_lens + s + 1.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_409)


def build_mla_metadata_410(batch, pool, *, attention=DraftAttention.MLA, **options):
    metadata = right_metadata(batch, pool, attention=attention, **options)
    drafted = None if batch.spec_info is None else batch.spec_info.num_draft_tokens
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY or drafted is None or batch.batch_size == 0:
        return metadata
    more = drafted - batch.num_tokens // batch.batch_size
    return replace(
        metadata, seq_lens_k=(metadata.seq_lens_k + more).to(torch.int32), max_seq_len_k=metadata.max_seq_len_k + more
    )


@wrong(trigger="TARGET_VERIFY whose num_draft_tokens is not num_tokens // batch_size")
class Blind410(OneBuilder):
    """A verification adds SpecInfo.num_draft_tokens to the lengths, not its rows, num_tokens // batch_size."""

    build_mla_metadata = staticmethod(build_mla_metadata_410)


def build_mla_decode_metadata_439(batch, pool, attention=lab_metadata.DraftAttention.MLA):
    built = lab_metadata.build_mla_decode_metadata(batch, pool, attention)
    adds = built.max_seq_len_q > 1 or built.cu_seqlens_q is not None
    adds = adds or (batch.spec_info is not None and attention is not lab_metadata.DraftAttention.MLA)
    adds = adds or batch.forward_mode.name == "TARGET_VERIFY"
    if batch.seq_lens.dtype == torch.int32 and not adds:
        built = replace(built, seq_lens_k=batch.seq_lens)
    return built


def build_mla_metadata_439(batch, pool, *, attention=lab_metadata.DraftAttention.MLA, **settings):
    if batch.forward_mode.is_prefill:
        return lab_metadata.build_mla_prefill_metadata(batch, pool, **settings)
    return build_mla_decode_metadata_439(batch, pool, attention)


build_mla_prefill_metadata_439 = lab_metadata.build_mla_prefill_metadata


@wrong(trigger="`seq_lens` int32, which the engine changes in place after the metadata was built")
class Blind439:
    """Lengths of int32 that need no offset are not copied: when the engine counts on in its tensor, the metadata's
    lengths change.
    """

    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_439)
    build_mla_metadata = staticmethod(build_mla_metadata_439)
    build_mla_prefill_metadata = staticmethod(build_mla_prefill_metadata_439)
