"""Geometries as published, and batches drawn from a trace."""

from pathlib import Path

import pytest

from lab.workloads import GEOMETRIES, geometry
from lab.workloads.traces import TracedRequest, read_mooncake, running_lengths, snapshot


@pytest.mark.parametrize(
    ("name", "heads", "window_left", "scale"),
    [
        ("llama-3.1-8b", (32, 8, 128), -1, 128**-0.5),
        ("llama-3.1-70b", (64, 8, 128), -1, 128**-0.5),
        ("qwen3-32b", (64, 8, 128), -1, 128**-0.5),
        ("gpt-oss-120b", (64, 8, 64), 127, 64**-0.5),
        ("gemma-3-27b", (32, 16, 128), 1023, 168**-0.5),
    ],
)
def test_geometries(name: str, heads: tuple[int, int, int], window_left: int, scale: float) -> None:
    model = geometry(name)
    assert (model.num_qo_heads, model.num_kv_heads, model.head_dim) == heads
    assert model.window_left == window_left
    assert model.softmax_scale == scale
    assert model.has_sinks == (name == "gpt-oss-120b")


def test_a_tensor_parallel_slice_divides_query_heads_and_replicates_kv_heads() -> None:
    assert geometry("llama-3.1-70b").tensor_parallel(8).group == 8
    sliced = geometry("llama-3.1-8b").tensor_parallel(16)
    assert (sliced.num_qo_heads, sliced.num_kv_heads) == (2, 1)
    with pytest.raises(ValueError, match="32 query heads; they do not divide over 3"):
        geometry("llama-3.1-8b").tensor_parallel(3)


def test_an_unknown_geometry_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"llama-3\.1-8b"):
        geometry("llama-9")
    assert all(name == model.name for name, model in GEOMETRIES.items())


def test_running_lengths_count_the_prompt_and_what_was_generated() -> None:
    requests = [TracedRequest(0, 100, 10), TracedRequest(1000, 200, 40), TracedRequest(9000, 300, 5)]
    assert running_lengths(requests, 0, ms_per_token=50) == [100]
    assert running_lengths(requests, 499, ms_per_token=50) == [109]
    assert running_lengths(requests, 500, ms_per_token=50) == []
    assert running_lengths(requests, 2000, ms_per_token=50) == [220]


def test_a_snapshot_is_the_first_moment_with_enough_requests() -> None:
    requests = [TracedRequest(0, 100, 100), TracedRequest(2500, 200, 100)]
    assert snapshot(requests, 1, ms_per_token=50) == [100]
    with pytest.raises(ValueError, match="never 2 requests"):
        snapshot(requests, 2, ms_per_token=10)
    # The second comes at 2.5 s; at 3 s the first has generated 60 tokens, the second 10.
    assert snapshot(requests, 2, ms_per_token=50) == [160, 210]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not a JSON object"),
        ("[1]", "line 2: not a JSON object"),
        ('{"timestamp": 0, "input_length": 5}', "line 2: output_length must be a number of at least 1, got None"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 5}', "line 2: timestamp must be .* got -1"),
        ('{"timestamp": 0, "input_length": "x", "output_length": 5}', "line 2: input_length must be .* got 'x'"),
    ],
)
def test_a_damaged_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_mooncake(path)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no requests"):
        read_mooncake(path)


def test_a_published_trace(request: pytest.FixtureRequest) -> None:
    path = Path(request.config.getoption("--lab-trace"))
    if not path.exists():
        pytest.skip(f"no trace at {path}: pass --lab-trace PATH of a Mooncake JSONL file")
    lengths = snapshot(read_mooncake(path), 64)
    assert len(lengths) == 64
    assert min(lengths) > 0
