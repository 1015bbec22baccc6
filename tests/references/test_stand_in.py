"""A reference drops into somebody else's test by changing an import: same parameters, and nothing heavy comes along."""

import inspect
import subprocess
import sys
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


def test_import_needs_torch_alone_and_leaves_cuda_alone() -> None:
    program = """
import sys, torch
before = set(sys.modules)
import lab.references
heavy = {"triton", "flashinfer", "pytest", "hypothesis", "pandas", "scipy", "matplotlib", "rich"}
print(sorted(name for name in heavy if name in sys.modules))
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
print(torch.cuda.is_initialized())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:3] == ["[]", "['lab']", "False"]
