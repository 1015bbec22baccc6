"""Wrong kernels of metadata of MLA passes, written without a look at the checks: numbers 440 to 589."""

from dataclasses import replace
from dataclasses import replace as changed

import torch

from corpus.blind import wrong
from lab import metadata as lab_metadata
from lab.metadata import DraftAttention, ForwardMode, QueryRows, build_mla_prefill_metadata
from lab.metadata import build_mla_decode_metadata as right_decode_metadata
from lab.metadata import build_mla_decode_metadata as right_metadata_529
from lab.metadata import build_mla_metadata as right_metadata
from lab.metadata.engine.lengths import num_pages
from lab.metadata.mla.metadata import mla_block_table_width


def build_mla_decode_metadata_440(batch, pool, attention=lab_metadata.DraftAttention.MLA):
    built = lab_metadata.build_mla_decode_metadata(batch, pool, attention)
    if built.seq_lens_q is not None:
        own = built.seq_lens_k - built.max_seq_len_q + built.seq_lens_q
        columns = torch.arange(built.block_kv_indices.shape[1], device=pool.device)
        built.block_kv_indices.masked_fill_(columns >= num_pages(own, pool.page_size)[:, None], -1)
    return built


def build_mla_metadata_440(batch, pool, *, attention=lab_metadata.DraftAttention.MLA, **settings):
    if batch.forward_mode.is_prefill:
        return lab_metadata.build_mla_prefill_metadata(batch, pool, **settings)
    return build_mla_decode_metadata_440(batch, pool, attention)


build_mla_prefill_metadata_440 = lab_metadata.build_mla_prefill_metadata


@wrong(
    trigger=(
        "DRAFT_EXTEND of different widths, or RAGGED_VERIFY, whose padding crosses the end of a request's last page"
    ),
)
class Blind440:
    """The block table ends with the requests' own pages: pages that only padding rows would read are -1, not the sink."""

    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_440)
    build_mla_metadata = staticmethod(build_mla_metadata_440)
    build_mla_prefill_metadata = staticmethod(build_mla_prefill_metadata_440)


def patched_469(built, batch):
    if batch.forward_mode is ForwardMode.RAGGED_VERIFY and batch.extend_seq_lens_cpu is not None:
        return replace(built, sum_seq_lens_q=sum(batch.extend_seq_lens_cpu))
    return built


def build_mla_metadata_469(batch, pool, **more):
    return patched_469(lab_metadata.build_mla_metadata(batch, pool, **more), batch)


def build_mla_decode_metadata_469(batch, pool, attention=DraftAttention.MLA):
    return patched_469(lab_metadata.build_mla_decode_metadata(batch, pool, attention), batch)


@wrong(trigger="RAGGED_VERIFY with extend_seq_lens_cpu and num_tokens above its sum")
class Blind469:
    """A ragged verification: sum_seq_lens_q is the sum of the requests' rows, without the padding that the pass has
    besides.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_469)
    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_469)


def patched_470(built, batch):
    if getattr(built, "seq_lens_q", None) is None:
        return built
    return replace(built, seq_lens_q=batch.extend_seq_lens.to(torch.int32))


def build_mla_metadata_470(batch, pool, **more):
    return patched_470(lab_metadata.build_mla_metadata(batch, pool, **more), batch)


def build_mla_decode_metadata_470(batch, pool, attention=DraftAttention.MLA):
    return patched_470(lab_metadata.build_mla_decode_metadata(batch, pool, attention), batch)


@wrong(
    trigger=(
        "DRAFT_EXTEND, DRAFT_EXTEND_V2 or RAGGED_VERIFY with int32 extend_seq_lens that is written again after the"
        " metadata were built"
    ),
)
class Blind470:
    """Seq_lens_q is extend_seq_lens itself where that is int32 already: what the engine writes there for its next pass
    reaches the metadata.
    """

    build_mla_metadata = staticmethod(build_mla_metadata_470)
    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_470)


def _narrowed_500(metadata, batch, pool):
    if not batch.forward_mode.extends_draft:
        return metadata
    width = mla_block_table_width(metadata.max_seq_len_k, pool.page_size)
    return replace(metadata, block_kv_indices=metadata.block_kv_indices[:, :width].contiguous())


def build_mla_decode_metadata_500(batch, pool, *args, **options):
    return _narrowed_500(right_decode_metadata(batch, pool, *args, **options), batch, pool)


def build_mla_metadata_500(batch, pool, **options):
    return _narrowed_500(right_metadata(batch, pool, **options), batch, pool)


@wrong(trigger="a draft extend of unequal rows whose longest length <= 4,096 k < longest length + most rows")
class Blind500:
    """The block table of a padded draft extend is as wide as max_seq_len_k asks for, without room for the padding
    rows.
    """

    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_500)
    build_mla_metadata = staticmethod(build_mla_metadata_500)


def build_mla_decode_metadata_529(batch, pool, attention=DraftAttention.MLA):
    metadata = right_metadata_529(batch, pool, attention)
    if metadata.seq_lens_q is None:
        return metadata
    own = metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q
    pages = (own + pool.page_size - 1) // pool.page_size
    table = metadata.block_kv_indices
    return changed(metadata, block_kv_indices=table.masked_fill(torch.arange(table.shape[1]) >= pages[:, None], -1))


def build_mla_metadata_529(batch, pool, *, attention=DraftAttention.MLA, **options):
    if batch.forward_mode.is_prefill:
        return build_mla_prefill_metadata(batch, pool, **options)
    return build_mla_decode_metadata_529(batch, pool, attention)


@wrong(
    trigger=("ragged verification or draft extend whose padding rows reach into a page after the request's own last"),
)
class Blind529:
    """The block table ends (-1) at a request's own last page: pages that only its padding rows read do not name the
    sink.
    """

    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_529)
    build_mla_metadata = staticmethod(build_mla_metadata_529)


def padded_to_longest_559(batch):
    if batch.forward_mode.query_rows is not QueryRows.VERIFIED or not batch.extend_seq_lens_cpu:
        return batch
    most = max(1, max(batch.extend_seq_lens_cpu))
    return replace(batch, spec_info=replace(batch.spec_info, num_draft_tokens=most))


def build_mla_decode_metadata_559(batch, pool, *arguments, **options):
    return lab_metadata.build_mla_decode_metadata(padded_to_longest_559(batch), pool, *arguments, **options)


def build_mla_metadata_559(batch, pool, **options):
    return lab_metadata.build_mla_metadata(padded_to_longest_559(batch), pool, **options)


@wrong(trigger="RAGGED_VERIFY whose longest request has fewer rows than num_draft_tokens")
class Blind559:
    """The rows of a ragged verification are padded to the batch's longest request, not to SpecInfo.num_draft_tokens."""

    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_559)
    build_mla_metadata = staticmethod(build_mla_metadata_559)


def by_the_first_560(metadata, batch, disable_chunked_prefix_cache, in_prefill_graph):
    cached = bool(batch.extend_prefix_lens_cpu) and batch.extend_prefix_lens_cpu[0] > 0
    return replace(metadata, fallback_to_flashinfer_impl=in_prefill_graph or (disable_chunked_prefix_cache and cached))


def build_mla_prefill_metadata_560(batch, pool, *, disable_chunked_prefix_cache=False, in_prefill_graph=False):
    options = dict(disable_chunked_prefix_cache=disable_chunked_prefix_cache, in_prefill_graph=in_prefill_graph)
    return by_the_first_560(lab_metadata.build_mla_prefill_metadata(batch, pool, **options), batch, **options)


def build_mla_metadata_560(batch, pool, *, disable_chunked_prefix_cache=False, in_prefill_graph=False, **others):
    options = dict(disable_chunked_prefix_cache=disable_chunked_prefix_cache, in_prefill_graph=in_prefill_graph)
    metadata = lab_metadata.build_mla_metadata(batch, pool, **options, **others)
    return by_the_first_560(metadata, batch, **options) if batch.forward_mode.is_prefill else metadata


@wrong(
    trigger=("disable_chunked_prefix_cache=True, a request but the first has a cached prefix and the first has none"),
)
class Blind560:
    """Without the chunked prefix cache, a prefill falls back by the first request's cached prefix, not by any
    request's.
    """

    build_mla_prefill_metadata = staticmethod(build_mla_prefill_metadata_560)
    build_mla_metadata = staticmethod(build_mla_metadata_560)


def narrowed_589(metadata, batch, pool):
    if not batch.forward_mode.extends_draft:
        return metadata
    width = mla_block_table_width(metadata.max_seq_len_k, pool.page_size)
    return replace(metadata, block_kv_indices=metadata.block_kv_indices[:, :width].contiguous())


def build_mla_metadata_589(batch, pool, **options):
    return narrowed_589(lab_metadata.build_mla_metadata(batch, pool, **options), batch, pool)


def build_mla_decode_metadata_589(batch, pool, *options, **more):
    return narrowed_589(lab_metadata.build_mla_decode_metadata(batch, pool, *options, **more), batch, pool)


@wrong(trigger="a draft extend with different rows, where the padding rows pass a multiple of 4,096 tokens")
class Blind589:
    """The width of a padded draft extend's block table does not count the padding rows."""

    build_mla_metadata = staticmethod(build_mla_metadata_589)
    build_mla_decode_metadata = staticmethod(build_mla_decode_metadata_589)
