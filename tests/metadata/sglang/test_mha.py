"""MHA metadata against SGLang's own class, on random batches: no number here is the lab's."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.metadata import ForwardMode, KVLayout, build_mha_metadata
from lab.metadata.mha.calls import AttentionLayer, call_arguments, plan_calls
from tests.devices import IN_INTERPRETER
from tests.metadata.mha_cases import Case, build, drawn_cases
from tests.metadata.sglang.mha import NAMES, REAL, assert_same, assert_same_calls, calls_of, new_backend, server_batch
from tests.metadata.sglang.wheel import sglang_modules

Load = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def sglang() -> Iterator[Load]:
    with sglang_modules(*REAL, names=NAMES) as load:
        yield load


ABSENT = (ForwardMode.DRAFT_EXTEND, ForwardMode.RAGGED_VERIFY)
CASES = drawn_cases().filter(lambda case: case.mode not in ABSENT and bool(case.total_lens))


def is_taken(case: Case) -> bool:
    """Return True if the decode call gets whole requests of equal widths, as the lab asks; the context call takes any."""
    return case.mode.is_prefill or (case.num_padding_rows == 0 and len(set(case.new_lens)) <= 1)


@IN_INTERPRETER
@given(case=CASES)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_eager_passes(sglang: Load, case: Case) -> None:
    """Every mode of 0.5.23, with requests; SGLang launches nothing for a batch of none."""
    batch, pool = build(case)
    backend = new_backend(sglang, pool, speculative_step_id=case.new - 1)
    backend.init_forward_metadata(server_batch(sglang, batch))
    assert_same(build_mha_metadata(batch, pool), backend.forward_metadata, pool.page_size)


@IN_INTERPRETER
@given(case=CASES.filter(is_taken), is_window=st.booleans())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_the_calls_of_a_layer(sglang: Load, case: Case, is_window: bool) -> None:
    """Calls, rows and tables: a prefill's padding rows are handed over, and its tail of decodes is split off."""
    batch, pool = build(case)
    layer = AttentionLayer(0.25, window_left=20 if is_window else -1, reads_swa_pool=is_window and case.sliding_window)
    cache = pool.new_cache(2, 8, torch.bfloat16, KVLayout.NHD, sliding_window=layer.reads_swa_pool)
    query = torch.zeros(batch.num_tokens, 4, 8, dtype=torch.bfloat16)
    query[:, 0, 0] = torch.arange(len(query))
    backend, server = new_backend(sglang, pool, speculative_step_id=case.new - 1), server_batch(sglang, batch)
    backend.init_forward_metadata(server)
    metadata, plan = build_mha_metadata(batch, pool), plan_calls(batch, None, True, True)
    ours = [
        (each.call.value, call_arguments(each, batch, metadata, layer, query, cache, pool.max_context_len))
        for each in plan
    ]
    assert_same_calls(ours, calls_of(sglang, backend, server, layer, query, cache))
