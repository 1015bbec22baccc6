"""Questions put to the hardware: each is a module with a command line, a table of points, and arms that take turns."""

from collections.abc import Mapping

# By name, which is the recording's as well: the module, run as `python -m <module> --out <name>.json`.
EXPERIMENTS: Mapping[str, str] = {
    name: f"lab.experiments.{name}"
    for name in (
        "clocks",
        "draft_extend_graph",
        "draft_extend_kernels",
        "draft_steps",
        "draft_visibility",
        "kv_read_once",
        "length_copy",
        "mla_decode",
        "plan_stream",
    )
}

__all__ = ["EXPERIMENTS"]
