"""Wrong kernels of metadata of MHA passes, written without a look at the checks: numbers 530 to 590."""

from dataclasses import replace
from dataclasses import replace as changed

import torch

from corpus.blind import wrong
from lab.metadata import QueryRows
from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import first_slots


def build_mha_metadata_530(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    by_row = torch.zeros(pool.req_to_token.shape[0], dtype=torch.int32)
    for row, keys in zip(batch.req_pool_indices.tolist(), metadata.cache_seqlens_int32.tolist()):
        by_row[row] = keys
    slots = first_slots(batch.req_pool_indices, by_row[batch.req_pool_indices.long()], pool)
    tables = dict(page_table=pool.pages(slots))
    if metadata.swa_page_table is not None:
        tables["swa_page_table"] = (pool.swa_slots(slots) // pool.page_size).to(torch.int32)
    if metadata.encoder_page_table is not None:
        tables["encoder_page_table"] = tables["page_table"].repeat_interleave(metadata.max_seq_len_q, dim=0)
    return changed(metadata, **tables)


@wrong(trigger="a request twice in a batch with different numbers of pages (the later shorter: pages lost)")
class Blind530:
    """Lengths are scattered by the request's row of the pool to count the pages: where a request is twice in a batch,
    both get as many pages as the later one.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_530)


def build_mha_metadata_558(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    spec = batch.spec_info
    if batch.forward_mode.query_rows is not QueryRows.ACCEPTED or spec is None or spec.num_accept_tokens is None:
        return metadata
    ends = spec.num_accept_tokens[: batch.batch_size].cumsum(0).to(torch.int32)
    return replace(metadata, cu_seqlens_q=torch.nn.functional.pad(ends, (1, 0)))


@wrong(trigger="DRAFT_EXTEND with SpecInfo.num_accept_tokens unlike extend_seq_lens")
class Blind558:
    """The rows of an eager first draft extend come from SpecInfo.num_accept_tokens where it is given, as in graph
    replay.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_558)


def build_mha_metadata_588(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if metadata.swa_page_table is None or pool.v2p is None:
        return metadata
    slots = pool.physical_slots(first_slots(batch.req_pool_indices, metadata.cache_seqlens_int32, pool))
    return replace(metadata, swa_page_table=(pool.swa_slots(slots) // pool.page_size).to(torch.int32))


@wrong(trigger="a pool with num_virtual_pages and sliding-window pages")
class Blind588:
    """With virtual pages, the map to sliding-window slots is asked for the physical slot."""

    build_mha_metadata = staticmethod(build_mha_metadata_588)


def build_mha_metadata_590(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    prefixes = batch.extend_prefix_lens_cpu
    if batch.forward_mode.is_prefill and prefixes and prefixes[0] == 0:
        return replace(metadata, cu_seqlens_q=metadata.cu_seqlens_k)
    return metadata


@wrong(trigger="a prefill whose first request has no cached prefix and another has")
class Blind590:
    """A prefill whose first request has no cached prefix is taken to have none at all, so that queries and keys share
    their offsets.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_590)
