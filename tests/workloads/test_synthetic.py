"""The lab's own trace is what its program writes, has the lengths that it claims, and fills large batches."""

import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev

import pytest

from lab.workloads.traces import OWN_TRACE, _log_normal, as_mooncake, own_trace, read_mooncake, snapshot, synthetic_chat


def test_the_file_is_what_the_program_writes() -> None:
    assert OWN_TRACE.read_text(encoding="utf-8") == as_mooncake(synthetic_chat())
    assert own_trace() == synthetic_chat()


def test_a_written_trace_reads_back(tmp_path: Path) -> None:
    requests = synthetic_chat(num_requests=50, seed=7)
    assert requests != own_trace()[:50]
    path = tmp_path / "trace.jsonl"
    path.write_text(as_mooncake(requests))
    assert read_mooncake(path) == requests


def test_lengths_are_log_normal_and_arrivals_poisson() -> None:
    """Within about four standard errors of 20,000 draws; the clips, which few draws reach, hardly move a logarithm."""
    requests = synthetic_chat(num_requests=20_000, seed=3)
    for name, middle, sigma, least, most in (
        ("input_length", 1000, 1.2, 16, 120_000),
        ("output_length", 250, 0.9, 4, 4000),
    ):
        lengths = [getattr(request, name) for request in requests]
        assert least <= min(lengths)
        assert max(lengths) <= most
        assert median(lengths) == pytest.approx(middle, rel=0.045)
        assert stdev(math.log(length) for length in lengths) == pytest.approx(sigma, rel=0.02)
    gaps_ms = [later.arrival_ms - earlier.arrival_ms for earlier, later in pairwise(requests)]
    assert fmean(gaps_ms) == pytest.approx(50.0, rel=0.03)
    assert stdev(gaps_ms) == pytest.approx(50.0, rel=0.04)  # an exponential's deviation is its mean


def test_lengths_are_clipped() -> None:
    lengths = [_log_normal(uniform, 1000, 1.2, 16, 120_000) for uniform in (0.0, 0.5, 1 - 2.0**-53)]
    assert lengths == [16, 1000, 120_000]


@pytest.mark.parametrize("batch_size", [1, 8, 64, 256])
def test_the_own_trace_fills_a_batch(batch_size: int) -> None:
    assert len(snapshot(own_trace(), batch_size)) == batch_size
