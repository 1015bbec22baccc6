"""The functions that can be judged, by name."""

from types import SimpleNamespace

import pytest

from lab.calls.problem import AttentionCall
from lab.workloads.interfaces import INTERFACES, PAGED_CALLS, MetadataFunction, interface_of, interfaces_of


def test_a_function_is_found_by_its_name() -> None:
    assert [interface_of(each.value) for each in INTERFACES] == [*AttentionCall, *MetadataFunction]
    with pytest.raises(ValueError, match="'build' is none of trtllm_batch_decode_with_kv_cache, "):
        interface_of("build")


def test_an_implementation_has_the_functions_that_can_be_called() -> None:
    names = {MetadataFunction.MHA_METADATA.value: print, AttentionCall.CONTEXT.value: print, "decode": print}
    implementation = SimpleNamespace(**names, **{AttentionCall.DECODE.value: None})
    assert interfaces_of(implementation) == [AttentionCall.CONTEXT, MetadataFunction.MHA_METADATA]


def test_these_calls_alone_have_not_one_paged_cache() -> None:
    assert set(AttentionCall) - set(PAGED_CALLS) == {AttentionCall.RAGGED_CONTEXT, AttentionCall.DSV4_DECODE}
