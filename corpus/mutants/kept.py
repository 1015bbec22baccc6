"""Mutants that keep an argument of an earlier call, whose key leaves this argument out."""

import math
from dataclasses import replace

from corpus.models.lists import Lists
from corpus.models.metadata import MHABuilder, MLABuilder
from corpus.models.ragged import Ragged
from corpus.models.split_kv import Forgiving
from corpus.wrong import CONTEXT, MLA, wrong
from lab.metadata.engine.lengths import uncounted_tokens


class Kept(Forgiving):
    @wrong(stage="changed")
    def window_kept_with_table(self, problem):
        """A plan is kept with the page table's address, and its window with it."""
        key = "window", problem.k_block_tables.data_ptr(), problem.k_block_tables.shape
        return replace(problem, window_left=self.first(key, lambda: problem.window_left))

    @wrong(CONTEXT, stage="changed")
    def causal_kept_with_lengths(self, problem):
        """A plan is kept with the lengths' address, and with it whether rows see later keys."""
        return replace(problem, causal=self.first(problem.seq_lens.data_ptr(), lambda: problem.causal))

    @wrong(stage="results", mla=True)
    def out_of_first_call(self, problem):
        """Launch parameters are kept by shape, with the first output that a caller gave."""
        out, lse = super().results(problem)
        return out if problem.out is None else self.first((out.shape, out.dtype), lambda: out), lse

    @wrong(MLA, stage="launch_mla")
    def mla_base_of_first_lse(self, call):
        """The base of each LSE is that of the first one."""
        returned = super().launch(call)
        out, lse = returned if call.return_lse else (returned, None)
        if lse is not None and self.first("base", lambda: call.lse_is_base_e):
            lse *= math.log(2.0)
        return call.returned(out, lse)


@wrong()
class RaggedLSEOfFirstCall(Ragged):
    """Launch parameters are kept by shape, with the first LSE that a caller gave."""

    def changed(self, problem):
        if problem.lse is None:
            return problem
        return replace(problem, lse=self.first((problem.query.shape, problem.lse.shape), lambda: problem.lse))


@wrong()
class StepOfFirstPass(MHABuilder):
    """The number of tokens that lengths leave out is that of the first pass with as many requests."""

    def changed(self, metadata, batch, pool):
        more = self.first(batch.batch_size, lambda: uncounted_tokens(batch)) - uncounted_tokens(batch)
        return replace(metadata, cache_seqlens_int32=metadata.cache_seqlens_int32 + more)


@wrong()
class MLAAttentionOfFirstPass(MLABuilder):
    """Lengths count the draft if they did in the first pass."""

    def counted(self, attention):
        return self.first("attention", lambda: attention)


@wrong()
class PageSizeOfFirstDraft(Lists):
    """The page size is that of the first draft with as many steps and branches."""

    def draft_start(self, call, length, branch):
        page_size = self.first((call.num_steps, call.topk), lambda: call.page_size)
        return super().draft_start(replace(call, page_size=page_size), length, branch)
