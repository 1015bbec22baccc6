"""Wrong: the page table of a verification on encoder-only layers repeats the whole table, not each request's row."""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if metadata.encoder_page_table is None:
        return metadata
    return replace(metadata, encoder_page_table=metadata.page_table.repeat(metadata.max_seq_len_q, 1))
