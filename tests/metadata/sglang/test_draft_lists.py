"""SGLang's own kernel of a draft's K/V lists, held to the lab's reference by the lab's check: serial and by token blocks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.workloads.inputs.draft_lists import DraftLists, DraftListsCase
from tests.devices import IN_INTERPRETER
from tests.kernels.test_draft_decode_kv_indices import CASES, drawn_cases
from tests.metadata.sglang.wheel import sglang_modules

pytestmark = IN_INTERPRETER

MODULE = "sglang.kernels.ops.speculative.cache_locs"
NAMES = {f"sglang.srt.utils.is_{name}": lambda: False for name in ("cpu", "cuda", "hip", "musa", "npu", "xpu")}


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    with sglang_modules(MODULE, names=NAMES) as load:
        yield load(MODULE).generate_draft_decode_kv_indices


def launch(
    kernel: Any,
    token_blocks: int,
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    paged_kernel_lens: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    positions: Tensor,
    topk: int,
    page_size: int,
    window_size: int = 0,
    sink_size: int = 0,
    entry_page_size: int = 1,
    v2p: Tensor | None = None,
) -> None:
    """Launch SGLang's kernel as `FlashInferMultiStepDraftBackend.common_template` does; 0 token blocks are the serial one."""
    num_steps, num_requests = len(kv_indices), len(paged_kernel_lens)
    kernel[(num_steps * max(token_blocks, 1), num_requests, topk)](
        req_pool_indices,
        req_to_token,
        paged_kernel_lens,
        kv_indices,
        kv_indptr,
        positions,
        req_to_token.stride(0),
        kv_indices.stride(0),
        kv_indptr.stride(0),
        triton.next_power_of_2(num_requests),
        triton.next_power_of_2(num_steps),
        triton.next_power_of_2(num_requests * topk),
        page_size,
        window_size,
        sink_size,
        ENTRY_PAGE_SIZE=entry_page_size,
        v2p=v2p,
        TRANSLATE=v2p is not None,
        NUM_STEPS=num_steps if token_blocks else 0,
    )


def with_room(case: DraftListsCase) -> DraftListsCase:
    """Return the case with rows and lists as long as they must be: SGLang's kernel bounds neither, its engine does.

    It multiplies `v2p`'s pages in their own dtype, which an engine's number of slots fits, and the lab's wide ones do not.
    """
    dtypes = case.dtypes | {"v2p": case.dtypes["kv_indices"]}
    room = {"spare_columns": max(case.spare_columns, 0), "spare_capacity": max(case.spare_capacity, 0)}
    return replace(case, dtypes=dtypes, **room)


@pytest.mark.parametrize("token_blocks", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_named_cases(kernel: Any, name: str, token_blocks: int) -> None:
    assert DraftLists(with_room(CASES[name])).wrongs(partial(launch, kernel, token_blocks)) == []


@given(case=drawn_cases(), token_blocks=st.integers(0, 3))
@settings(deadline=None, derandomize=True, max_examples=80)
def test_drawn_cases(kernel: Callable[..., Any], case: DraftListsCase, token_blocks: int) -> None:
    assert DraftLists(with_room(case)).wrongs(partial(launch, kernel, token_blocks)) == []
