"""The recordings of results/nvidia-h200, and copies of them with other numbers."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "results" / "nvidia-h200"
MODULES = ("draft_extend_graph", "draft_extend_kernels", "draft_steps", "length_copy", "mla_decode", "plan_stream")


@cache
def _original(module: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{module}.json").read_text())
    return found


def recorded(module: str) -> dict[str, Any]:
    """A copy of a recording, to be altered."""
    return copy.deepcopy(_original(module))


def slowed(value: Any, factor: float, name: str = "") -> Any:
    """A recording with all its times multiplied; those that name a point, which were asked for, stay."""
    if isinstance(value, dict):
        asked = {"gpu_us", "host_us", "draft_us", "verify_us"} if "arm" in value or "drafts" in value else set()
        return {key: each if key in asked else slowed(each, factor, key) for key, each in value.items()}
    if isinstance(value, list):
        return [slowed(each, factor, name) for each in value]
    return factor * value if name.endswith("_us") and isinstance(value, float | int) else value
