"""Wrong: the window's page table begins with a request's first page that was not evicted, not with its first page."""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    table = metadata.swa_page_table
    if table is None:
        return metadata
    held_first = (table == 0).int().argsort(dim=1, stable=True)
    return replace(metadata, swa_page_table=table.gather(1, held_first))
