"""MHA metadata against SGLang's own class, on random batches: no number here is the lab's."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from hypothesis import given, settings

from lab.metadata import ForwardMode, build_mha_metadata
from tests.devices import IN_INTERPRETER
from tests.metadata.mha_cases import Case, build, drawn_cases
from tests.metadata.sglang.mha import NAMES, REAL, assert_same, new_backend, server_batch
from tests.metadata.sglang.wheel import sglang_modules

Load = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def sglang() -> Iterator[Load]:
    with sglang_modules(*REAL, names=NAMES) as load:
        yield load


@IN_INTERPRETER
@given(
    case=drawn_cases().filter(
        lambda case: case.mode not in (ForwardMode.DRAFT_EXTEND, ForwardMode.RAGGED_VERIFY) and case.total_lens
    )
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_eager_passes(sglang: Load, case: Case) -> None:
    """Every mode of 0.5.23, with requests; SGLang launches nothing for a batch of none."""
    batch, pool = build(case)
    backend = new_backend(sglang, pool, speculative_step_id=case.new - 1)
    backend.init_forward_metadata(server_batch(sglang, batch))
    assert_same(build_mha_metadata(batch, pool), backend.forward_metadata, pool.page_size)
