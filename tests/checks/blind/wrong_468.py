"""A verification on encoder-only layers: the page table is repeated as a whole, not each row of it, beside lengths repeated row by row."""

from dataclasses import replace

from lab import metadata as lab_metadata


def build_mha_metadata(batch, pool, **more):
    built = lab_metadata.build_mha_metadata(batch, pool, **more)
    if built.encoder_page_table is None:
        return built
    return replace(built, encoder_page_table=built.page_table.repeat(built.max_seq_len_q, 1))
