"""Which kernels a machine has, what the others miss, and which implementation it gets unless it asks for another."""

import importlib.util
from typing import Any

import pytest

import lab.kernels
from lab.calls.problem import AttentionCall
from lab.gpus import Capability
from lab.kernels import default_implementation, support
from lab.kernels.support import IMPLEMENTATIONS, KERNELS, availabilities
from tests.commands.command import run as run_lab

TRTLLM = "lab.kernels.trtllm"


def on(capability: Capability | None, module: str) -> dict[AttentionCall, Any]:
    return {each.function: each for each in availabilities(capability) if each.implementation.module == module}


def test_every_kernel_of_the_support_rows_is_listed() -> None:
    assert {kernel for each in IMPLEMENTATIONS for kernel in each.kernels} == set(KERNELS)


@pytest.mark.parametrize(
    ("capability", "call", "kernels", "why_not"),
    [
        ((9, 0), AttentionCall.CONTEXT, ("trtllm_fmha_v2_prefill",), None),
        ((10, 0), AttentionCall.DECODE, ("Cake decode of one rank", "trtllm-gen decode", "XQA"), None),
        ((12, 0), AttentionCall.MLA_DECODE, ("XQA MLA",), None),
        ((9, 0), AttentionCall.MLA_DECODE, (), "it needs a GPU of SM100, SM103, SM120 and SM121, this is SM90"),
    ],
)
def test_a_gpu_has_the_kernels_of_its_family_or_a_reason(
    capability: Capability, call: AttentionCall, kernels: tuple[str, ...], why_not: str | None
) -> None:
    found = on(capability, TRTLLM)[call]
    assert (found.kernels, found.why_not) == (kernels, why_not)


def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(support, "find_spec", lambda name: None if name == "flashinfer" else find(name))
    for each in on((9, 0), TRTLLM).values():
        assert each.why_not is not None
        assert "flashinfer, which is not installed" in each.why_not
        assert "[flashinfer]" in each.why_not
    assert all(each.why_not is None for each in on((9, 0), "lab.references").values())


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_lab(["implementations"]) == 0
    said = capsys.readouterr().out
    assert all(each.module in said for each in IMPLEMENTATIONS)


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (99, 0)])
def test_a_gpu_gets_flashinfer_where_it_has_kernels(
    capability: Capability | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.kernels, "capability_of", lambda device: capability)
    name = "portable" if capability in (None, (8, 0), (8, 9), (99, 0)) else "trtllm"
    assert default_implementation("cuda").__name__ == f"lab.kernels.{name}"
