"""Wrong: page ids of the full pool are kept in 16 bits: those from 65,536 on wrap around."""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    table = metadata.page_table % 2**16
    if metadata.encoder_page_table is not None:
        metadata = replace(metadata, encoder_page_table=metadata.encoder_page_table % 2**16)
    return replace(metadata, page_table=table)
