"""The forward modes of a serving engine. Code reads the properties of a mode, such as `ForwardMode.query_rows`, and does not
compare it with a list of modes.
"""

from enum import IntEnum
from functools import cached_property

from lab.calls.problem import AttentionCall
from lab.named_enum import NamedEnum


class QueryRows(NamedEnum):
    """How many query rows each request of a forward pass has, and which field of the batch has this number."""

    NONE = "none"  # no attention runs
    ONE = "one"
    DRAFT_TOKENS = "draft tokens"  # the same for all requests: num_tokens // batch_size, or SpecInfo.num_draft_tokens
    FIXED = "fixed"  # the same for all requests: SpecInfo.num_tokens_per_req, and extend_seq_lens
    ACCEPTED = "accepted"  # per request: extend_seq_lens
    VERIFIED = "verified"  # per request: extend_seq_lens, at most SpecInfo.num_draft_tokens
    NEW_TOKENS = "new tokens"  # per request: extend_seq_lens, after extend_prefix_lens cached tokens

    @cached_property
    def are_uniform(self) -> bool:
        return self in (QueryRows.ONE, QueryRows.DRAFT_TOKENS, QueryRows.FIXED)

    @cached_property
    def in_extend_seq_lens(self) -> bool:
        return self in (QueryRows.FIXED, QueryRows.ACCEPTED, QueryRows.VERIFIED, QueryRows.NEW_TOKENS)

    @cached_property
    def are_bounded(self) -> bool:
        """Return True if the host may know only ``SpecInfo.num_draft_tokens``, an upper bound of each request's query rows."""
        return self is QueryRows.VERIFIED

    @cached_property
    def are_unequal_drafts(self) -> bool:
        return self in (QueryRows.ACCEPTED, QueryRows.VERIFIED)


class UncountedTokens(NamedEnum):
    """Which keys of a request ``ForwardBatch.seq_lens`` does not count."""

    NONE = "none"  # seq_lens counts the new tokens
    QUERY_ROWS = "query rows"  # the draft tokens that this pass verifies
    DRAFT_STEP = "draft step"  # the tokens of earlier draft steps and of this step; none if the batch has no SpecInfo


_Rows, _Uncounted, _Call = QueryRows, UncountedTokens, AttentionCall


class ForwardMode(IntEnum):
    """SGLang's forward modes, numbered as in 0.5.13, the last release with ``DRAFT_EXTEND``.

    In later releases, the values after ``DRAFT_EXTEND`` are smaller by one: compare members, never integers. RAGGED_VERIFY is
    the lab's own member: SGLang's mode is TARGET_VERIFY, and its SpecInfo has a ``ragged_verify_layout``.

    Attributes:
        query_rows: how many query rows a request has.
        uncounted: which of a request's keys ``seq_lens`` does not count.
        mha_call, mla_call: FlashInfer's function that the MHA and the MLA backend call (SGLang 0.5.23; ``DRAFT_EXTEND`` as in
            0.5.13 with MHA and in 0.5.12 with MLA); None if no attention runs.
        in_graph: True if CUDA graphs can capture the mode.
    """

    query_rows: QueryRows
    uncounted: UncountedTokens
    mha_call: AttentionCall | None
    mla_call: AttentionCall | None
    in_graph: bool

    # Prefill, on top of a cached prefix or on nothing.
    EXTEND = 1, _Rows.NEW_TOKENS, _Uncounted.NONE, _Call.CONTEXT, _Call.RAGGED_CONTEXT
    # One new token per request; with a SpecInfo, one step of the draft model.
    DECODE = 2, _Rows.ONE, _Uncounted.DRAFT_STEP, _Call.DECODE, _Call.MLA_DECODE, True
    # Chunked prefill with decoding requests in the same batch.
    MIXED = 3, _Rows.NEW_TOKENS, _Uncounted.NONE, _Call.CONTEXT, _Call.RAGGED_CONTEXT
    # A data-parallel rank without work that must still take part in collectives.
    IDLE = 4, _Rows.ONE, _Uncounted.DRAFT_STEP, _Call.DECODE, _Call.MLA_DECODE
    # The target model scores the draft tokens.
    TARGET_VERIFY = 5, _Rows.DRAFT_TOKENS, _Uncounted.QUERY_ROWS, _Call.DECODE, _Call.MLA_DECODE, True
    # The draft model catches up on the accepted tokens, whose number differs from request to request.
    DRAFT_EXTEND = 6, _Rows.ACCEPTED, _Uncounted.NONE, _Call.CONTEXT, _Call.MLA_DECODE, True
    # The draft model catches up on the accepted tokens, with the same number of query rows for every request.
    DRAFT_EXTEND_V2 = 7, _Rows.FIXED, _Uncounted.NONE, _Call.DECODE, _Call.MLA_DECODE, True
    # The KV cache arrived from a prefill worker: no attention runs.
    PREBUILT = 8, _Rows.NONE, _Uncounted.NONE, None, None
    # A prefill cut into groups of layers.
    SPLIT_PREFILL = 9, _Rows.NEW_TOKENS, _Uncounted.NONE, _Call.CONTEXT, _Call.RAGGED_CONTEXT
    # A block of a diffusion language model.
    DLLM_EXTEND = 10, _Rows.NEW_TOKENS, _Uncounted.NONE, _Call.CONTEXT, _Call.RAGGED_CONTEXT
    # The target model scores draft tokens, whose number a planner chooses for each request (SGLang 0.5.23).
    RAGGED_VERIFY = 11, _Rows.VERIFIED, _Uncounted.QUERY_ROWS, _Call.DECODE, _Call.MLA_DECODE, True

    def __new__(
        cls,
        value: int,
        query_rows: QueryRows,
        uncounted: UncountedTokens,
        mha_call: AttentionCall | None,
        mla_call: AttentionCall | None,
        in_graph: bool = False,
    ) -> "ForwardMode":
        mode = int.__new__(cls, value)
        mode._value_ = value
        mode.query_rows, mode.uncounted, mode.in_graph = query_rows, uncounted, in_graph
        mode.mha_call, mode.mla_call = mha_call, mla_call
        return mode

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    @cached_property
    def is_prefill(self) -> bool:
        return self.query_rows is QueryRows.NEW_TOKENS

    @cached_property
    def extends_draft(self) -> bool:
        return self.query_rows in (QueryRows.ACCEPTED, QueryRows.FIXED)
