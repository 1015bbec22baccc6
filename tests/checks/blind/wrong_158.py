"""Wrong: page tables are filled up to max_context_len // page_size columns; the last page of a context that is no
multiple is left out.
"""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def cut(table, columns):
    if table is not None:
        table = table.clone()
        table[:, columns:] = 0
    return table


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    columns = pool.max_context_len // pool.page_size
    return replace(
        metadata, page_table=cut(metadata.page_table, columns), swa_page_table=cut(metadata.swa_page_table, columns)
    )
