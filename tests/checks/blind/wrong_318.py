"""Wrong: slots are divided by the page size with C's division, which rounds towards zero: a slot of -1 gives page 0, not -1."""

from dataclasses import replace

from lab.metadata import build_mha_metadata as right_metadata


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    tables = ("page_table", "swa_page_table", "encoder_page_table")
    found = {name: getattr(metadata, name) for name in tables}
    return replace(metadata, **{name: None if table is None else table.clamp(min=0) for name, table in found.items()})
