"""The block table ends with the requests' own pages: pages that only padding rows would read are -1, not the sink."""

from lab import metadata as lab_metadata
from lab.metadata.engine.lengths import num_pages
import torch

def build_mla_decode_metadata(batch, pool, attention=lab_metadata.DraftAttention.MLA):
    built = lab_metadata.build_mla_decode_metadata(batch, pool, attention)
    if built.seq_lens_q is not None:
        own = built.seq_lens_k - built.max_seq_len_q + built.seq_lens_q
        columns = torch.arange(built.block_kv_indices.shape[1], device=pool.device)
        built.block_kv_indices.masked_fill_(columns >= num_pages(own, pool.page_size)[:, None], -1)
    return built


def build_mla_metadata(batch, pool, *, attention=lab_metadata.DraftAttention.MLA, **settings):
    if batch.forward_mode.is_prefill:
        return lab_metadata.build_mla_prefill_metadata(batch, pool, **settings)
    return build_mla_decode_metadata(batch, pool, attention)


build_mla_prefill_metadata = lab_metadata.build_mla_prefill_metadata
