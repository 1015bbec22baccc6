"""Wrong kernels of metadata of MHA passes, written without a look at the checks: numbers 214 to 317."""

from dataclasses import replace
from itertools import takewhile

import torch

from corpus.blind import wrong
from corpus.blind.lists_model import counting
from lab.metadata import ForwardMode, UncountedTokens
from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import num_pages, uniform_boundaries


def build_mha_metadata_214(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if metadata.swa_out_cache_loc is None or len(batch.out_cache_loc):
        return metadata
    return replace(metadata, swa_out_cache_loc=metadata.swa_out_cache_loc[:0])


@wrong(
    trigger=(
        "a sliding-window pool, an empty out_cache_loc and num_tokens > 0: a frozen-KV draft, or an IDLE rank with"
        " rows of padding"
    ),
)
class Blind214:
    """Where a pass writes no slots, swa_out_cache_loc is left empty: rows of padding and of a frozen-KV draft have
    none.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_214)


def build_mha_metadata_215(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or batch.extend_seq_lens_cpu or not batch.batch_size:
        return metadata
    return replace(metadata, max_seq_len_q=batch.num_tokens // batch.batch_size)


@wrong(trigger="RAGGED_VERIFY with extend_seq_lens_cpu=None, where num_tokens // batch_size is not num_draft_tokens")
class Blind215:
    """A ragged verification whose rows the host does not know gets num_tokens // batch_size as its most rows."""

    build_mha_metadata = staticmethod(build_mha_metadata_215)


def build_mha_metadata_216(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    slots = len(batch.out_cache_loc)
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY or slots == batch.num_tokens or slots < batch.batch_size:
        return metadata
    num_tokens = slots // batch.batch_size * batch.batch_size
    fewer = replace(batch, num_tokens=num_tokens, out_cache_loc=batch.out_cache_loc[:num_tokens])
    wrong = right_metadata(fewer, pool, **options)
    return replace(wrong, swa_out_cache_loc=metadata.swa_out_cache_loc)


@wrong(
    trigger=(
        "TARGET_VERIFY with fewer slots than num_tokens (requests of padding without slots), at least one for each"
        " request"
    ),
)
class Blind216:
    """The rows of a verification are counted from out_cache_loc, which names no slots for padding, not from
    num_tokens.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_216)


def build_mha_metadata_269(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.forward_mode.extends_draft or any(batch.extend_prefix_lens_cpu or ()):
        return metadata
    return replace(metadata, cu_seqlens_q=metadata.cu_seqlens_k)


@wrong(trigger="DRAFT_EXTEND or DRAFT_EXTEND_V2 with a request of more keys than rows")
class Blind269:
    """Only a prefill with cached prefixes has its own cu_seqlens_q: a draft extend, which has none, gets cu_seqlens_k."""

    build_mha_metadata = staticmethod(build_mha_metadata_269)


def build_mha_metadata_270(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    table = metadata.swa_page_table
    if table is None:
        return metadata
    held_first = (table == 0).int().argsort(dim=1, stable=True)
    return replace(metadata, swa_page_table=table.gather(1, held_first))


@wrong(trigger="a sliding-window pool, and a request with an evicted page before one that it still has")
class Blind270:
    """The window's page table begins with a request's first page that was not evicted, not with its first page."""

    build_mha_metadata = staticmethod(build_mha_metadata_270)


def build_mha_metadata_271(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    slots = metadata.swa_out_cache_loc
    if slots is None or batch.forward_mode.uncounted is not UncountedTokens.QUERY_ROWS:
        return metadata
    slots = slots.clone()
    slots[: len(batch.out_cache_loc)] = batch.out_cache_loc
    return replace(metadata, swa_out_cache_loc=slots)


@wrong(trigger="TARGET_VERIFY or RAGGED_VERIFY with a sliding-window pool")
class Blind271:
    """The slots that a verification writes are not translated to the sliding-window pool."""

    build_mha_metadata = staticmethod(build_mha_metadata_271)


def build_mha_metadata_272(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.MIXED:
        return metadata
    decoding = len(list(takewhile(lambda rows: rows == 1, reversed(batch.extend_seq_lens_cpu))))
    number = torch.arange(batch.batch_size, device=batch.seq_lens.device)
    return counting(metadata, (number >= batch.batch_size - decoding).int())


@wrong(trigger="MIXED whose last request has one new token")
class Blind272:
    """In a mixed batch the decoding requests (the last ones, of one new token) get that token added to their lengths."""

    build_mha_metadata = staticmethod(build_mha_metadata_272)


def build_mha_metadata_273(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    lens, q_len = metadata.encoder_cache_seqlens, metadata.max_seq_len_q
    if lens is None:
        return metadata
    row = torch.arange(len(lens), dtype=torch.int32, device=lens.device) % q_len
    return replace(metadata, encoder_cache_seqlens=lens - (q_len - 1) + row)


@wrong(trigger="expand_encoder_only_verify=True, a TARGET_VERIFY of 2 rows or more for each request")
class Blind273:
    """Of a verification on encoder-only layers each row gets the keys up to its own, not all keys of its request."""

    build_mha_metadata = staticmethod(build_mha_metadata_273)


def build_mha_metadata_274(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.forward_mode.query_rows.in_extend_seq_lens or batch.batch_size == 0:
        return metadata
    if len(batch.out_cache_loc) == batch.num_tokens:
        return metadata
    ends = metadata.cu_seqlens_q.clone()
    ends[-1] = batch.num_tokens
    return replace(metadata, cu_seqlens_q=ends)


@wrong(
    trigger=(
        "a mode with extend_seq_lens (prefills, draft extends, RAGGED_VERIFY) with num_tokens over the sum of the rows"
    ),
)
class Blind274:
    """Rows of padding are given to the last request: where rows differ, cu_seqlens_q ends at num_tokens."""

    build_mha_metadata = staticmethod(build_mha_metadata_274)


def build_mha_metadata_275(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.forward_mode.is_prefill or metadata.max_seq_len_q != 1:
        return metadata
    return replace(metadata, max_seq_len_q=0)


@wrong(
    trigger=(
        "a prefill mode whose longest request has one new token (prompts cached but for the last token, or "
        "decoding requests alone)"
    ),
)
class Blind275:
    """Max_seq_len_q of a prefill is the most rows of the requests before the last ones with one new token each, which
    go to the decode kernel: 0 if there are no others.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_275)


def overrun_276(table, pages):
    """Return the table with zeros where pages beyond the width of the row before lie."""
    if table is None or len(table) < 2:
        return table
    beyond = torch.nn.functional.pad(pages - table.shape[1], (1, 0))[:-1]
    columns = torch.arange(table.shape[1], device=table.device)
    return table.masked_fill(columns < beyond.unsqueeze(1), 0)


def build_mha_metadata_276(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    pages = num_pages(metadata.cache_seqlens_int32, pool.page_size)
    table = overrun_276(metadata.page_table, pages)
    if metadata.encoder_page_table is not None:
        metadata = replace(metadata, encoder_page_table=table.repeat_interleave(metadata.max_seq_len_q, dim=0))
    return replace(metadata, page_table=table, swa_page_table=overrun_276(metadata.swa_page_table, pages))


@wrong(
    trigger=(
        "a request that is not the last one and whose keys, with the draft tokens, need more than "
        "ceil(max_context_len / page_size) pages"
    ),
)
class Blind276:
    """Columns of a page table are not held against its width: of a request with more keys than the context, zeros for
    the further pages go to the start of the next request's row.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_276)


def build_mha_metadata_315(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    rows = batch.req_pool_indices.tolist()
    last = {row: i for i, row in enumerate(rows)}
    source = torch.tensor([last[row] for row in rows], dtype=torch.int64)
    changed = {"page_table": metadata.page_table[source]}
    if metadata.swa_page_table is not None:
        changed["swa_page_table"] = metadata.swa_page_table[source]
    if metadata.encoder_page_table is not None:
        changed["encoder_page_table"] = changed["page_table"].repeat_interleave(metadata.max_seq_len_q, dim=0)
    return replace(metadata, **changed)


@wrong(trigger="a row of req_to_token twice in req_pool_indices, with lengths of different numbers of pages")
class Blind315:
    """Pages are kept by request: of a request that occurs twice in a batch, with different lengths, both rows of a
    page table are those of the last one.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_315)


def build_mha_metadata_316(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if metadata.swa_page_table is None:
        return metadata
    pages = -(-batch.seq_lens.long() // pool.page_size)
    column = torch.arange(metadata.swa_page_table.shape[1])
    table = metadata.swa_page_table.masked_fill(column >= pages.unsqueeze(1), 0)
    return replace(metadata, swa_page_table=table)


@wrong(
    trigger=(
        "a sliding-window pool, a draft step or a verification (ragged or not), and a request whose draft tokens "
        "need a page more"
    ),
)
class Blind316:
    """The sliding window's page table is filled for seq_lens as the batch has them, without the draft tokens that a
    draft step or a verification adds; page_table is right.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_316)


def build_mha_metadata_317(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if (
        batch.forward_mode is not ForwardMode.DRAFT_EXTEND_V2
        or not batch.extend_seq_lens_cpu
        or not batch.extend_seq_lens_cpu[0]
    ):
        return metadata
    ends = uniform_boundaries(batch.batch_size, batch.extend_seq_lens_cpu[0], batch.seq_lens.device)
    return replace(metadata, cu_seqlens_q=ends)


@wrong(trigger="DRAFT_EXTEND_V2 with requests of different rows (num_tokens_per_req=-1)")
class Blind317:
    """Draft extend V2 is taken to have as many rows for every request as for its first one: cu_seqlens_q goes up in
    equal steps.
    """

    build_mha_metadata = staticmethod(build_mha_metadata_317)
