"""A reference drops into somebody else's test by changing an import: it has the same parameters.

`tests/test_architecture.py` holds what the import brings with it.
"""

import inspect
from typing import Any

import pytest

import lab.references

FUNCTIONS = {
    "trtllm_batch_decode_with_kv_cache": "flashinfer.decode",
    "trtllm_batch_context_with_kv_cache": "flashinfer.prefill",
    "trtllm_ragged_attention_deepseek": "flashinfer.prefill",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_flashinfers(name: str) -> None:
    flashinfers = getattr(pytest.importorskip(FUNCTIONS[name]), name)
    assert parameters(getattr(lab.references, name)) == parameters(flashinfers)


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
