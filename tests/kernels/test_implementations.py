"""Which kernels a machine has, what the others miss, and which implementation it gets unless it asks for another."""

import importlib.util
from typing import Any

import pytest
import torch

import lab.kernels
from lab.calls.problem import AttentionCall
from lab.kernels import default_implementation, support
from lab.kernels.support import IMPLEMENTATIONS, KERNELS, availabilities
from tests.commands.command import run as run_lab

TRTLLM = "lab.kernels.trtllm"


def on(capability: tuple[int, int] | None, module: str) -> dict[AttentionCall, Any]:
    return {each.function: each for each in availabilities(capability) if each.implementation.module == module}


def test_every_kernel_of_the_support_rows_is_listed() -> None:
    assert {kernel for each in IMPLEMENTATIONS for kernel in each.kernels} == set(KERNELS)


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [
        ((9, 0), {"DECODE": ("XQA",), "CONTEXT": ("trtllm_fmha_v2_prefill",)}),
        (
            (10, 0),
            {"DECODE": ("Cake decode of one rank", "trtllm-gen decode", "XQA"), "MLA_DECODE": ("trtllm-gen MLA",)},
        ),
        ((12, 0), {"DECODE": ("XQA",), "MLA_DECODE": ("XQA MLA",)}),
    ],
)
def test_a_gpu_has_the_kernels_of_its_family(capability: tuple[int, int], kernels: dict[str, tuple[str, ...]]) -> None:
    found = on(capability, TRTLLM)
    for call, names in kernels.items():
        assert (found[AttentionCall[call]].kernels, found[AttentionCall[call]].why_not) == (names, None)


def test_a_gpu_without_a_kernel_of_a_call_says_which_gpus_have_one() -> None:
    refused = on((9, 0), TRTLLM)[AttentionCall.MLA_DECODE]
    assert refused.why_not == "it needs a GPU of SM100, SM103, SM120 and SM121, this is SM90"
    assert refused.kernels == ()


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


def test_a_cpu_gets_the_portable_kernels() -> None:
    assert default_implementation("cpu").__name__ == "lab.kernels.portable"


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "portable"),
        ((8, 9), "portable"),
        ((9, 0), "trtllm"),
        ((10, 0), "trtllm"),
        ((10, 3), "trtllm"),
        ((99, 0), "portable"),
        ((12, 0), "trtllm"),
        ((12, 1), "trtllm"),
    ],
)
def test_a_gpu_gets_flashinfer_where_it_has_kernels(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.kernels, "capability_of", lambda device: capability)
    assert default_implementation(torch.device("cuda")).__name__ == f"lab.kernels.{name}"
