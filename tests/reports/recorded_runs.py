"""Recorded runs made up for tests, in the form that the benchmarks write."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

GPU = "NVIDIA H200"
CEILINGS = {
    "bandwidth_gbps": 4243.0,
    "matrix_rate_tflops": 790.0,
    "matrix_dtype": "bfloat16",
    "datasheet_bandwidth_gbps": 4800.0,
    "datasheet_matrix_rate_tflops": 989.0,
    "datasheet_source": "NVIDIA H200 Tensor Core GPU datasheet, SXM5",
}
METHOD = "calls recorded in a CUDA graph, its replay between two CUDA events, time per call; L2 cold: copies in turn"


def environment(**changes: Any) -> dict[str, Any]:
    """What `lab.provenance.environment` says; names with a dot change nvidia-smi's fields."""
    nvidia_smi = {
        "name": GPU,
        "driver_version": "580.159.04",
        "clocks.sm": "1980 MHz",
        "clocks.mem": "3201 MHz",
        "clocks.max.sm": "1980 MHz",
        "power.limit": "700.00 W",
        "temperature.gpu": "35",
    }
    facts: dict[str, Any] = {
        "python": "3.12.3",
        "machine": "x86_64",
        "packages": {"torch": "2.11.0", "triton": "3.6.0", "flashinfer-python": "0.7.2", "cupti-python": None},
        "commit": "0a77b93dd498",
        "gpu": GPU,
        "multiprocessors": 132,
        "l2_bytes": 62914560,
        "cuda": "13.0",
    }
    smi_changes = {name: value for name, value in changes.items() if "." in name}
    others = {name: value for name, value in changes.items() if "." not in name}
    return facts | {"nvidia_smi": nvidia_smi | smi_changes} | others


def samples_us(median_us: float, noise_percent: float = 0.5, count: int = 30, seed: int = 0) -> list[float]:
    """Normal samples around a median."""
    random = np.random.default_rng(seed)
    return list(median_us * (1 + noise_percent / 100 * random.standard_normal(count)))


def entry(
    scenario: str = "decode/llama-3.1-8b/64q1s4k",
    implementation: str = "lab.kernels.trtllm",
    samples: Sequence[float] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A row of GPU time, bound by memory; `changes` replace facts, and None leaves one out."""
    samples = samples_us(260.0) if samples is None else samples
    median_us = float(np.median(samples))
    bytes_moved, operations = 1075052544, 4296015872
    facts = {
        "scenario": scenario,
        "implementation": implementation,
        "kernel": "xqa" if implementation.endswith("trtllm") else "portable",
        "mode": scenario.split("/")[0],
        "geometry": "llama-3.1-8b",
        "page_size": 64,
        "requests": 64,
        "kv_tokens": 262208,
        "query_tokens": 64,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "clock": "graph",
        "l2": "cold by rotation",
        "method": METHOD,
        "calls_per_sample": 5,
        "buffer_copies": 2,
        "launches": 1,
        "bytes_moved": bytes_moved,
        "operations": operations,
        "pool_bytes": 2181562368,
        "median_us": round(median_us, 3),
        "host_us": 41.5,
        "sm_clock_mhz": [1965, 1980],
        "memory_clock_mhz": 3201,
        "power_w": 512.3,
        "temperature_c": 48,
        "throttled_by": [],
    } | changes
    if facts["bytes_moved"] and facts["operations"]:
        facts |= _reached(facts["bytes_moved"], facts["operations"], median_us) | changes
    facts = {name: value for name, value in facts.items() if value is not None}
    settings = [str(facts.get(name, "")) for name in ("page_size", "kv_dtype", "clock", "l2")]
    return benchmark(f"test_timed[{scenario}-{implementation}-{'-'.join(settings)}]", samples, facts)


def benchmark(name: str, samples: Sequence[float], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Any benchmark as pytest-benchmark writes it; samples in microseconds."""
    return {
        "group": None,
        "name": name,
        "fullname": f"tests/benchmarks/test_forward.py::{name}",
        "extra_info": dict(facts),
        "stats": {"rounds": len(samples), "data": [float(sample) * 1e-6 for sample in samples]},
    }


def host_entry(name: str = "test_build_mha_metadata[decode]") -> dict[str, Any]:
    return benchmark(name, samples_us(800.0, 5), {"clock": "host", "method": "host time", "requests": 64})


def write_run(
    path: Path,
    entries: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any] | None = None,
    ceilings: Mapping[str, Any] | None = CEILINGS,
    not_timed: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write a recorded run."""
    lab = dict(environment() if facts is None else facts) | {"ceilings": ceilings}
    content = {
        "machine_info": {"node": "vm", "lab": lab},
        "commit_info": {"id": "unknown"},
        "benchmarks": list(entries),
        "datetime": "2026-11-21T03:36:02.518022+00:00",
        "version": "5.3.1",
        "not_timed": list(not_timed),
    }
    path.write_text(json.dumps(content))
    return path


def _reached(bytes_moved: int, operations: int, median_us: float) -> dict[str, Any]:
    memory_us = bytes_moved / CEILINGS["bandwidth_gbps"] / 1e3
    matrix_us = operations / CEILINGS["matrix_rate_tflops"] / 1e6
    return {
        "bandwidth_gbps": bytes_moved / median_us / 1e3,
        "rate_tflops": operations / median_us / 1e6,
        "bandwidth_percent": 100 * memory_us / median_us,
        "matrix_rate_percent": 100 * matrix_us / median_us,
        "floor_us": max(memory_us, matrix_us),
        "floor_bound": "memory" if memory_us >= matrix_us else "matrix",
        "floor_percent": 100 * max(memory_us, matrix_us) / median_us,
    }
