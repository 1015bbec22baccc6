"""What the lab holds of each GPU, restated from its sources: the CUDA programming guide, FlashInfer 0.7.2 and datasheets."""

import pytest

from lab.gpus import (
    DATASHEETS,
    FAMILIES,
    SM80,
    SM90,
    SM120,
    Capability,
    family_of,
    family_that_runs,
    names_of,
    trtllm_backend_of,
)


@pytest.mark.parametrize(
    ("capability", "shared_kib", "features", "trtllm", "fa"),
    [
        ((8, 0), 163, "", None, "fa2"),
        ((8, 6), 99, "", None, "fa2"),
        ((8, 7), 163, "", None, "fa2"),
        ((8, 9), 99, "e4m3", None, "fa2"),
        ((9, 0), 227, "e4m3 overlap", "xqa", "fa3"),
        ((10, 0), 227, "e4m3 overlap tensor memory", "trtllm-gen", "fa2"),
        ((10, 3), 227, "e4m3 overlap tensor memory", "trtllm-gen", "fa2"),
        ((12, 0), 99, "e4m3 overlap", "xqa", "fa2"),
        ((12, 1), 99, "e4m3 overlap", "xqa", "fa2"),
    ],
)
def test_facts(capability: Capability, shared_kib: int, features: str, trtllm: str | None, fa: str) -> None:
    family = family_of(capability)
    assert family is not None
    assert capability in family.capabilities
    assert (family.shared_memory_kib, family.trtllm_backend, family.fa_backend) == (shared_kib, trtllm, fa)
    assert family.has_large_shared_memory == (shared_kib == 227)
    has = {"e4m3": family.has_e4m3, "overlap": family.overlaps_launches, "tensor memory": family.has_tensor_memory}
    assert has == {name: name in features for name in has}


@pytest.mark.parametrize(
    ("capability", "known"),
    [((8, 8), (8, 7)), ((9, 1), (9, 0)), ((10, 1), (10, 0)), ((10, 9), (10, 3)), ((12, 5), (12, 1))],
)
def test_a_later_minor_version_has_the_family_before_it(capability: Capability, known: Capability) -> None:
    assert family_of(capability) is family_of(known)


def test_a_gpu_that_no_family_lists_has_the_least_since_sm90() -> None:
    for capability in ((99, 0), (99, 9)):
        family = family_of(capability)
        assert family is not None
        assert (family.shared_memory_kib, family.has_e4m3, family.overlaps_launches) == (99, True, True)
        assert (family.has_tensor_memory, family.trtllm_backend, family.fa_backend) == (False, None, "fa2")


def test_what_runs_on_a_cpu_and_on_an_old_gpu() -> None:
    assert family_of(None) is family_of((7, 5)) is None
    assert family_that_runs(None) is SM90
    assert family_that_runs((7, 5)) is SM80
    assert family_that_runs((12, 1)) is SM120


def test_the_backend_of_the_trtllm_calls() -> None:
    assert [trtllm_backend_of(each) for each in (None, (8, 0), (9, 0), (10, 3))] == [None, None, "xqa", "trtllm-gen"]
    assert trtllm_backend_of(None, "xqa") == trtllm_backend_of((10, 0), "xqa") == "xqa"


def test_families_have_names() -> None:
    assert names_of(FAMILIES) == "SM80 and later"
    assert names_of((SM90,)) == "SM90"
    assert names_of((SM90, SM120)) == "SM90, SM120 and SM121"


def test_datasheets() -> None:
    assert {name: (each.bandwidth_gbps, each.matrix_rate_tflops) for name, each in DATASHEETS.items()} == {
        "NVIDIA A100-SXM4-80GB": (2039, 312),
        "NVIDIA H100 80GB HBM3": (3350, 989),
        "NVIDIA H200": (4800, 989),
        "NVIDIA B200": (8000, 2250),
        "NVIDIA B300 SXM6 AC": (8000, 2250),
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (1792, 503.8),
        "NVIDIA GB10": (273, None),
    }
