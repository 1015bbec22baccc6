"""Which implementation a machine gets unless it asks for another."""

import pytest
import torch

import lab.kernels
from lab.kernels import default_implementation


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
        ((11, 0), "portable"),
        ((12, 0), "trtllm"),
        ((12, 1), "trtllm"),
    ],
)
def test_a_gpu_gets_flashinfer_where_it_has_kernels(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.kernels, "capability_of", lambda device: capability)
    assert default_implementation(torch.device("cuda")).__name__ == f"lab.kernels.{name}"
