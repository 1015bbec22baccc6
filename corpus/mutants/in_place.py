"""Mutants of the metadata builders and of the draft's lists that change, in place, what they were given. Their results are right."""

from corpus.models.lists import Lists
from corpus.models.metadata import MHABuilder, MLABuilder, MLAPrefillBuilder
from corpus.wrong import wrong
from lab.metadata.engine.lengths import uncounted_tokens


class CountedInPlace(MHABuilder):
    @wrong(stage="changed")
    def draft_added_to_batch(self, metadata, batch, pool):
        """The draft's tokens are added to the batch's own lengths, which the next step counts from."""
        batch.seq_lens.add_(uncounted_tokens(batch))
        return metadata

    @wrong(stage="changed")
    def row_cleared_in_pool(self, metadata, batch, pool):
        """What freed requests left in the pool's rows is overwritten by 0, in the pool."""
        for row, length in zip(batch.req_pool_indices.tolist(), metadata.cache_seqlens_int32.tolist(), strict=True):
            pool.req_to_token[row, length:] = 0
        return metadata

    @wrong(stage="changed")
    def accepted_tokens_summed_in_place(self, metadata, batch, pool):
        """The accepted tokens of a draft are turned into their running sums in place."""
        accepted = None if batch.spec_info is None else batch.spec_info.num_accept_tokens
        if accepted is not None:
            accepted.copy_(accepted.cumsum(0))
        return metadata


@wrong()
class MLALengthsCountedInPlace(MLABuilder):
    """Lengths are counted in the batch's own tensor, with the draft and all."""

    def changed(self, metadata, batch, pool):
        batch.seq_lens.copy_(metadata.seq_lens_k)
        return metadata


@wrong()
class MLAPrefixTakenFromBatch(MLAPrefillBuilder):
    """The cached prefix is subtracted from the batch's own lengths."""

    def changed(self, metadata, batch, settings):
        if batch.extend_seq_lens is not None:
            batch.seq_lens.copy_(batch.extend_seq_lens)
        return metadata


@wrong()
class PositionsOfLastStep(Lists):
    """Positions are advanced in place from step to step."""

    def generate_draft_decode_kv_indices(self, **given):
        super().generate_draft_decode_kv_indices(**given)
        given["positions"].add_(len(given["kv_indices"]))
