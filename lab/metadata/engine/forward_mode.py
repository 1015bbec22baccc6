"""The kinds of forward pass that a serving engine runs, and the questions it asks about them."""

from enum import IntEnum, auto


class ForwardMode(IntEnum):
    """SGLang's forward modes, numbered as in 0.5.13.

    0.5.13 is the last release with the first draft extend (``DRAFT_EXTEND``), so its set covers every version.
    Later releases dropped that member and the values after it moved down by one: compare members, never integers.

    Two predicates surprise: ``is_extend()`` is true for ``TARGET_VERIFY`` and false for ``DRAFT_EXTEND_V2``.
    """

    EXTEND = auto()  # prefill, on top of a cached prefix or on nothing
    DECODE = auto()  # one new token per request; with a SpecInfo, one step of the draft model
    MIXED = auto()  # chunked prefill with decoding requests in the same batch
    IDLE = auto()  # a data-parallel rank without work that must still take part in collectives
    TARGET_VERIFY = auto()  # the target model scores the draft tokens
    DRAFT_EXTEND = auto()  # the draft model catches up on accepted tokens, as many per request as were accepted
    DRAFT_EXTEND_V2 = auto()  # the same with a fixed number of rows per request
    PREBUILT = auto()  # the KV cache arrived from a prefill worker: no attention runs
    SPLIT_PREFILL = auto()  # a prefill cut into groups of layers
    DLLM_EXTEND = auto()  # a block of a diffusion language model

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_prebuilt(self) -> bool:
        return self is ForwardMode.PREBUILT

    def is_split_prefill(self) -> bool:
        return self is ForwardMode.SPLIT_PREFILL

    def is_dllm_extend(self) -> bool:
        return self is ForwardMode.DLLM_EXTEND

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_draft_extend(self, include_v2: bool = False) -> bool:
        return self is ForwardMode.DRAFT_EXTEND or (include_v2 and self.is_draft_extend_v2())

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        """Whether the pass counts as a prefill. Includes verification, and the second draft extend by flag only."""
        return (
            self.is_extend_without_speculative()
            or self in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
            or (include_draft_extend_v2 and self.is_draft_extend_v2())
        )

    def is_extend_without_speculative(self) -> bool:
        return self in (
            ForwardMode.EXTEND,
            ForwardMode.MIXED,
            ForwardMode.SPLIT_PREFILL,
            ForwardMode.DLLM_EXTEND,
        )

    def is_extend_or_draft_extend_or_mixed(self, include_draft_extend_v2: bool = False) -> bool:
        """``is_extend`` without verification and without diffusion blocks."""
        return self in (
            ForwardMode.EXTEND,
            ForwardMode.DRAFT_EXTEND,
            ForwardMode.MIXED,
            ForwardMode.SPLIT_PREFILL,
        ) or (include_draft_extend_v2 and self.is_draft_extend_v2())

    def is_context_parallel_extend(self, include_draft_extend_v2: bool = False) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED) or (
            include_draft_extend_v2 and self.is_draft_extend_v2()
        )

    def is_cuda_graph(self) -> bool:
        """Whether the mode has the static shapes that the decode graph runner captures."""
        return self in (
            ForwardMode.DECODE,
            ForwardMode.TARGET_VERIFY,
            ForwardMode.IDLE,
            ForwardMode.DLLM_EXTEND,
        )
