"""Encoder-only verify: lengths and page tables are expanded by repeat, the whole batch after itself, not row by row."""

from dataclasses import replace

from lab import metadata as lab_metadata

def build_mha_metadata(batch, pool, *, expand_encoder_only_verify=False):
    built = lab_metadata.build_mha_metadata(batch, pool, expand_encoder_only_verify=expand_encoder_only_verify)
    if built.encoder_page_table is None:
        return built
    rows = built.max_seq_len_q
    return replace(
        built, encoder_cache_seqlens=built.cache_seqlens_int32.repeat(rows), encoder_page_table=built.page_table.repeat(rows, 1)
    )
