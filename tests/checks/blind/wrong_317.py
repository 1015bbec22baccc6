"""Wrong: draft extend V2 is taken to have as many rows for every request as for its first one: cu_seqlens_q goes up in equal
steps.
"""

from dataclasses import replace

from lab.metadata import ForwardMode
from lab.metadata import build_mha_metadata as right_metadata
from lab.metadata.engine.lengths import uniform_boundaries


def build_mha_metadata(batch, pool, **options):
    metadata = right_metadata(batch, pool, **options)
    if batch.forward_mode is not ForwardMode.DRAFT_EXTEND_V2 or not batch.extend_seq_lens_cpu or not batch.extend_seq_lens_cpu[0]:
        return metadata
    ends = uniform_boundaries(batch.batch_size, batch.extend_seq_lens_cpu[0], batch.seq_lens.device)
    return replace(metadata, cu_seqlens_q=ends)
