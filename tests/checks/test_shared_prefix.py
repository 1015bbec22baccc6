"""K7 shares pages of one request with others: kernels that find a common prefix and take too much of it are found."""

from types import SimpleNamespace
from typing import Any

import pytest

from corpus.kernels import kernel
from lab import references
from lab.calls import AttentionCall
from lab.checks import judge_case
from lab.workloads.attention_case import AttentionCase, Storage

PAGE_SIZE = 32
FIRST, LONGEST_FIRST = "a shared prefix", "unequal shared prefixes, the longest request first"


def trtllm_batch_decode_with_kv_cache(**arguments: Any) -> Any:
    """Take all pages but the last of the first request for a request with the first request's first page."""
    tables = arguments["block_tables"].clone()
    pages = [-(-length // PAGE_SIZE) for length in arguments["seq_lens"].tolist()]
    for request in range(1, len(tables)):
        if tables[request, 0] == tables[0, 0]:
            shared = min(pages[0], pages[request]) - 1
            tables[request, :shared] = tables[0, :shared]
    return references.trtllm_batch_decode_with_kv_cache(**arguments | {"block_tables": tables})


def first_page_for_all(**arguments: Any) -> Any:
    """Read each page of the prefix that all requests share as the prefix's first page, if the prefix has several pages."""
    tables = arguments["block_tables"].clone()
    whole = int(arguments["seq_lens"].min()) // PAGE_SIZE
    is_shared = (tables == tables[0]).all(dim=0)[:whole].int().cumprod(0)
    if len(tables) > 1 and (shared := int(is_shared.sum())) > 1:
        tables[:, 1:shared] = tables[:, :1]
    return references.trtllm_batch_decode_with_kv_cache(**arguments | {"block_tables": tables})


DECODE = SimpleNamespace(trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache)
WHOLE = SimpleNamespace(trtllm_batch_decode_with_kv_cache=first_page_for_all)
CONTEXT = kernel("blind515").implementation()  # it takes what the first two requests share for what all share


@pytest.mark.parametrize(
    ("implementation", "interface", "kv_lens", "q_lens", "found_by"),
    [
        (DECODE, AttentionCall.DECODE, (64, 199, 172, 127), (1, 1, 1, 1), [LONGEST_FIRST]),
        (CONTEXT, AttentionCall.CONTEXT, (199, 172, 127, 64), (3, 1, 2, 1), [LONGEST_FIRST]),
        (WHOLE, AttentionCall.DECODE, (64, 199, 172, 127), (1, 1, 1, 1), [FIRST]),
    ],
    ids=["one page", "two pages", "all two pages"],
)
def test_a_prefix_that_is_taken_for_longer_than_it_is(
    implementation: Any,
    interface: AttentionCall,
    kv_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    found_by: list[str],
) -> None:
    model: dict[str, int] = {"num_kv_heads": 1, "group": 2, "head_dim": 64}
    case = AttentionCase(interface, kv_lens, q_lens, **model, storage=Storage(page_size=PAGE_SIZE))
    judged = judge_case(implementation, "K7", case, "cpu").judged
    assert [result.name for result in judged.results if result.wrong] == found_by
