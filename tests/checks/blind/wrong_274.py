"""Wrong: rows of padding are given to the last request: where rows differ, cu_seqlens_q ends at num_tokens."""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if not batch.forward_mode.query_rows.in_extend_seq_lens or batch.batch_size == 0:
        return metadata
    if len(batch.out_cache_loc) == batch.num_tokens:
        return metadata
    ends = metadata.cu_seqlens_q.clone()
    ends[-1] = batch.num_tokens
    return replace(metadata, cu_seqlens_q=ends)
