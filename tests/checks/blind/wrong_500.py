"""Wrong: the block table of a padded draft extend is as wide as max_seq_len_k asks for, without room for the padding rows."""

from dataclasses import replace

from lab.metadata import build_mla_decode_metadata as right_decode_metadata
from lab.metadata import build_mla_metadata as right_metadata
from lab.metadata.mla.metadata import mla_block_table_width


def _narrowed(metadata, batch, pool):
    if not batch.forward_mode.extends_draft:
        return metadata
    width = mla_block_table_width(metadata.max_seq_len_k, pool.page_size)
    return replace(metadata, block_kv_indices=metadata.block_kv_indices[:, :width].contiguous())


def build_mla_decode_metadata(batch, pool, *args, **options):
    return _narrowed(right_decode_metadata(batch, pool, *args, **options), batch, pool)


def build_mla_metadata(batch, pool, **options):
    return _narrowed(right_metadata(batch, pool, **options), batch, pool)
