"""Wrong: the width of a padded draft extend's block table does not count the padding rows."""

from dataclasses import replace

from lab import metadata as lab_metadata
from lab.metadata.mla.metadata import mla_block_table_width


def narrowed(metadata, batch, pool):
    if not batch.forward_mode.extends_draft:
        return metadata
    width = mla_block_table_width(metadata.max_seq_len_k, pool.page_size)
    return replace(metadata, block_kv_indices=metadata.block_kv_indices[:, :width].contiguous())


def build_mla_metadata(batch, pool, **options):
    return narrowed(lab_metadata.build_mla_metadata(batch, pool, **options), batch, pool)


def build_mla_decode_metadata(batch, pool, *options, **more):
    return narrowed(lab_metadata.build_mla_decode_metadata(batch, pool, *options, **more), batch, pool)
