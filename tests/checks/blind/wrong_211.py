"""Wrong: the list of prefill modes has EXTEND and MIXED alone; a split prefill and a diffusion block get the query rows of a
decode.
"""

from dataclasses import replace

from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import uniform_boundaries


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode not in (ForwardMode.SPLIT_PREFILL, ForwardMode.DLLM_EXTEND):
        return metadata
    boundaries = uniform_boundaries(batch.batch_size, 1, batch.seq_lens.device)
    return replace(metadata, max_seq_len_q=1, cu_seqlens_q=boundaries)
