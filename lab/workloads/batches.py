"""Batches written down, in the grammar of vLLM's attention benchmarks (`benchmarks/attention_benchmarks/batch_spec.py`).

A batch is groups joined with `_`. A group is `[count]q<q_len>[k][s<kv_len>[k]]`: `count` requests with `q_len` query rows each
and `kv_len` keys each. The count is 1 if left out. `k` stands for 1024. The keys include the query rows' own keys; if `kv_len`
is left out, they are the only keys.

    q2k              one prompt of 2,048 tokens
    8q1s1k           8 decoding requests, each with 1,024 tokens, the new token included
    2q2k_32q1s1k     two prompts and 32 decoding requests
    8q2ks4k          8 chunks of 2,048 tokens, each after 2,048 cached tokens
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby, product
from operator import add

_GROUP = re.compile(r"(?P<count>[0-9]*)q(?P<q_len>[0-9]+k?)(s(?P<kv_len>[0-9]+k?))?")


@dataclass(frozen=True, repr=False)
class Batch:
    """The numbers of query rows and of keys of each request. `str` returns the batch as the shortest text, such as "8q1s1k"."""

    q_lens: tuple[int, ...]  #: query rows of each request, at least one: the tokens that are new in this pass
    kv_lens: tuple[int, ...]  #: tokens of each request, the new ones included

    def __post_init__(self) -> None:
        if not self.q_lens or len(self.q_lens) != len(self.kv_lens):
            raise ValueError(
                f"{len(self.q_lens)} q_lens and {len(self.kv_lens)} kv_lens: a batch has one each per request, and at "
                "least one request"
            )
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            if q_len < 1:
                raise ValueError(f"q_len {q_len} must be 1 or more: a request in a batch has a query row")
            if kv_len < q_len:
                raise ValueError(f"kv_len {kv_len} must be {q_len} or more: it counts the request's {q_len} new tokens")

    @property
    def prefix_lens(self) -> tuple[int, ...]:
        """Return the number of tokens of each request that are cached before this pass."""
        return tuple(kv_len - q_len for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True))

    def __add__(self, other: "Batch") -> "Batch":
        return Batch(self.q_lens + other.q_lens, self.kv_lens + other.kv_lens)

    def __str__(self) -> str:
        runs = groupby(zip(self.q_lens, self.kv_lens, strict=True))
        return "_".join(_group_text(len(list(requests)), *lengths) for lengths, requests in runs)

    def __repr__(self) -> str:
        return f"parse_batch({str(self)!r})"


def parse_batch(text: str) -> Batch:
    """Return the batch that a text describes: "2q2k_32q1s1k" is 2 prompts of 2,048 tokens, and 32 decodes over 1,024 tokens."""
    return reduce(add, map(_parse_group, text.split("_")))


def sweep(
    num_requests: Sequence[int] = (1, 8, 64), kv_lens: Sequence[int] = (4096, 81920), q_lens: Sequence[int] = (1, 4)
) -> tuple[Batch, ...]:
    """Return a batch of equal requests for each combination of the three arguments' values; `q_lens` varies fastest."""
    return tuple(
        Batch((q_len,) * count, (kv_len,) * count) for count, kv_len, q_len in product(num_requests, kv_lens, q_lens)
    )


def _parse_group(group: str) -> Batch:
    match = _GROUP.fullmatch(group)
    if match is None:
        raise ValueError(
            f"batch group {group!r} is not [count]q<q_len>[k][s<kv_len>[k]]: 8q1s1k, for instance, is 8 requests of 1 query "
            "row over 1,024 keys; groups are joined with _"
        )
    count = int(match["count"] or 1)
    q_len = _length(match["q_len"])
    kv_len = _length(match["kv_len"] or match["q_len"])
    if count == 0:
        raise ValueError(f"batch group {group!r} has no requests: the count must be 1 or more, or be left out for 1")
    try:
        return Batch((q_len,) * count, (kv_len,) * count)
    except ValueError as error:
        raise ValueError(f"batch group {group!r}: {error}") from error


def _length(text: str) -> int:
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


def _group_text(count: int, q_len: int, kv_len: int) -> str:
    keys = "" if kv_len == q_len else f"s{_length_text(kv_len)}"
    return f"{'' if count == 1 else count}q{_length_text(q_len)}{keys}"


def _length_text(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
