"""The base class of `ForwardCase` and `MLACase`: fields, lengths derived from them, and checks of the fields."""

from collections.abc import Sequence
from functools import cached_property

import torch

from lab.calls.arguments import check_int
from lab.calls.problem import E4M3, HALF_DTYPES
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows, UncountedTokens
from lab.workloads.attention_case import Contents, short_repr
from lab.workloads.requests import PassLens

PASS_CONTENTS = (Contents.RANDOM, Contents.NEEDLES)  # contents that a pass can have; only single calls can have others
# Modes that compute attention. IDLE has no request, and PREBUILT finds its K/V in the cache.
ATTENDING_MODES = tuple(mode for mode in ForwardMode if mode not in (ForwardMode.IDLE, ForwardMode.PREBUILT))


class PassCase(PassLens):
    """A forward pass of one or more requests, as data. Its subclasses are frozen dataclasses."""

    mode: ForwardMode
    page_size: int  #: tokens per page
    dtype: torch.dtype  #: of query and output, float16 or bfloat16
    kv_dtype: torch.dtype  #: of the cache: the same or float8_e4m3fn
    #: the pool has virtual pages, which its `v2p` maps to pages of the cache, as in SGLang's unified pool
    virtual_slots: bool
    contents: Contents  #: one of `PASS_CONTENTS`
    seed: int  #: seed of all random numbers
    # A subclass that supports one of these declares the field.
    num_padding_rows: int = 0  #: number of query rows after the requests' rows, which belong to no request
    num_padding_requests: int = 0  #: number of padding requests, which have no rows and no keys and follow the requests
    encoder_only: bool = False  #: rows see all keys of their request

    __repr__ = short_repr

    @property
    def window_left(self) -> int:
        """Return the number of keys before a row's own key that the row sees; -1 for all."""
        return -1

    @property
    def seen_lens(self) -> tuple[int, ...]:
        """Return the number of keys that the last row of each request would see without a sliding window."""
        return self.kv_lens

    @property
    def row_lens(self) -> tuple[int, ...]:
        """Return for each query row the number of tokens of its request up to and including the row's own token."""
        ends = zip(self.seen_lens, self.q_lens, strict=True)
        return tuple(position + 1 for seen, q_len in ends for position in range(seen - q_len, seen))

    @cached_property
    def max_context_len(self) -> int:
        """Return the engine's largest request length. It exceeds all `kv_lens`, so that page tables have unused columns."""
        return max(self.kv_lens) + 2 * self.page_size + 1

    @property
    def visible_pairs(self) -> int:
        if self.encoder_only:
            return sum(seen * q_len for seen, q_len in zip(self.seen_lens, self.q_lens, strict=True))
        return sum(row_len if self.window_left < 0 else min(row_len, self.window_left + 1) for row_len in self.row_lens)

    @property
    def visible_keys(self) -> int:
        """Return the number of keys that at least one row sees. A key that several rows or branches see counts once."""
        return sum(
            seen if self.window_left < 0 else min(seen, q_len + self.window_left)
            for seen, q_len in zip(self.seen_lens[:: self.topk], self.q_lens[:: self.topk], strict=True)
        )

    def check_requests(self) -> None:
        if self.mode not in ATTENDING_MODES:
            raise ValueError(f"{self.mode!r} computes no attention; there is nothing to judge")
        if len(self.prefix_lens) != len(self.q_lens):
            raise ValueError(f"{len(self.prefix_lens)} prefix_lens for {len(self.q_lens)} q_lens: one each per request")
        if not self.q_lens:
            raise ValueError("q_lens=() is an empty batch; there is nothing to judge: give at least one request")
        if min(self.prefix_lens) < 0 or min(self.q_lens) < 1:
            raise ValueError(f"prefix_lens {self.prefix_lens} must be >= 0 and q_lens {self.q_lens} >= 1")
        rows = self.mode.query_rows
        if rows is QueryRows.ONE and set(self.q_lens) != {1}:
            raise ValueError(f"{self.mode.name} has one row for every request, not {self.q_lens}")
        if rows.are_uniform and len(set(self.q_lens)) > 1:
            raise ValueError(f"{self.mode!r} has equally many rows for every request, not {self.q_lens}")
        is_draft_step = self.mode.uncounted is UncountedTokens.DRAFT_STEP
        self.refuse_ignored(
            draft_step=(is_draft_step, "only ForwardMode.DECODE has draft steps"),
            num_draft_tokens=(rows.are_bounded, "only ForwardMode.RAGGED_VERIFY has most rows of a request"),
        )
        if self.draft_step is not None:
            remedy = f"the first draft step is 0, a frozen-KV draft {FROZEN_KV_STEP}, and a pass outside drafting None"
            check_int("draft_step", self.draft_step, FROZEN_KV_STEP, remedy)
        if self.draft_step == FROZEN_KV_STEP and min(self.prefix_lens) < 1:
            raise ValueError(
                f"prefix_lens={self.prefix_lens}: a row of a frozen-KV draft is at its request's last token, so each has one"
            )

    def refuse_ignored(self, **uses: tuple[bool, str]) -> None:
        """Raise ValueError if an ignored field differs from its default. `uses`: field -> (is it used, which passes use it)."""
        for name, (is_used, who_uses) in uses.items():
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default and not is_used:
                raise ValueError(
                    f"{name}={value!r} would be ignored in {self.mode!r}: {who_uses}; leave it {default!r}"
                )

    def check_tensors(self, quantised: Sequence[torch.dtype] = (E4M3,)) -> None:
        check_contents(self.contents)
        check_dtype(self.dtype)
        if self.kv_dtype not in (self.dtype, *quantised):
            others = " or ".join(map(str, quantised))
            raise TypeError(f"kv_dtype={self.kv_dtype} must be dtype, {self.dtype}, or {others}")


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in HALF_DTYPES:
        raise TypeError(f"dtype={dtype} must be torch.float16 or torch.bfloat16, the query's and the output's")


def check_contents(contents: Contents) -> None:
    if contents not in PASS_CONTENTS:
        raise ValueError(f"contents={contents!r} are of single calls: a pass has one of {PASS_CONTENTS}")
