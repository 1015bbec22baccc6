"""Geometries as published, and their slices."""

import pytest

from lab.workloads import GEOMETRIES, geometry
from lab.workloads.geometries import tiny


def test_a_tensor_parallel_slice_divides_query_heads_and_replicates_kv_heads() -> None:
    assert geometry("llama-3.1-70b").tensor_parallel(8).group == 8
    sliced = geometry("llama-3.1-8b").tensor_parallel(16)
    assert (sliced.num_qo_heads, sliced.num_kv_heads) == (2, 1)
    with pytest.raises(ValueError, match="32 query heads; they do not divide over 3"):
        geometry("llama-3.1-8b").tensor_parallel(3)
    with pytest.raises(ValueError, match="4 K/V heads; they do not divide over 3"):
        geometry("tiny-3x4x64").tensor_parallel(3)  # a rank's 4 query heads would need two K/V heads


def test_an_unknown_geometry_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"llama-3\.1-8b"):
        geometry("llama-9")
    assert all(name == model.name for name, model in GEOMETRIES.items())


@pytest.mark.parametrize("numbers", [(3, 2, 64, True), (3, 2, 64, False), (8, 1, 128, True), (1, 4, 80, False)])
def test_a_tiny_geometry_is_made_again_of_its_name(numbers: tuple[int, int, int, bool]) -> None:
    model = geometry(tiny(*numbers))
    assert (model.group, model.num_kv_heads, model.head_dim, model.has_sinks) == numbers
    assert model.softmax_scale == model.head_dim**-0.5
    assert model.window_left == geometry("tiny").window_left
    assert (model.name == "tiny") == (numbers == (3, 2, 64, True))
