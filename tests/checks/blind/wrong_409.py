"""Wrong: a draft step that counts its tokens (MLA_WITH_OFFSET) counts those drafted before it, s, not its own: seq_lens + s
keys, not seq_lens + s + 1.
"""

from dataclasses import replace

from lab.metadata import DraftAttention
from lab.metadata import build_mla_metadata as right_metadata
from lab.metadata.engine.forward_mode import UncountedTokens


def build_mla_metadata(batch, pool, *, attention=DraftAttention.MLA, **options):
    spec = batch.spec_info
    is_draft = batch.forward_mode.uncounted is UncountedTokens.DRAFT_STEP and spec is not None
    if is_draft and attention is DraftAttention.MLA_WITH_OFFSET and (spec.speculative_step_id or 0) >= 0:
        step = spec.speculative_step_id
        if step == 0:
            attention = DraftAttention.MLA
        elif step is not None:
            batch = replace(batch, spec_info=replace(spec, speculative_step_id=step - 1))
    return right_metadata(batch, pool, attention=attention, **options)


def build_mla_decode_metadata(batch, pool, attention=DraftAttention.MLA):
    return build_mla_metadata(batch, pool, attention=attention)
