"""Wrong: where queries are padded, cu_seqlens_q counts the padded rows, although outputs are copied back by it to the rows as
they were.
"""

from dataclasses import replace

from lab.metadata import DraftAttention, QueryLayout
from lab.metadata import build_mla_metadata as right_metadata
from lab.metadata.engine.lengths import uniform_boundaries


def build_mla_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode.is_prefill or metadata.query_layout is not QueryLayout.PADDED:
        return metadata
    ends = uniform_boundaries(batch.batch_size, metadata.max_seq_len_q, batch.seq_lens.device)
    return replace(metadata, cu_seqlens_q=ends)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
