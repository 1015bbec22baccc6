"""Questions put to the hardware: each is a module with a table of points and arms that take turns, run by `lab experiments`.

A module's function `run` measures its points, prints tables and returns the command's exit status: WRONG if the results of an
arm were. `plan` says how GPU times are taken, and `trace` names what traced lengths come from. The JSON file `out` is written
anew after every point; None keeps no file. The output of each pass is judged by the requests' histories before and after it is
timed, and a wrong arm has no time. Arms take turns in one process, each on its own copies of the same pool, query and output.
"""

from collections.abc import Mapping

# By name, which is the recording's as well: the module, whose `run` the command `lab experiments` calls.
EXPERIMENTS: Mapping[str, str] = {
    name: f"studies.{name}"
    for name in (
        "clocks",
        "decode_split",
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


def command_of(experiment: str) -> str:
    """Return the command that puts an experiment to this machine's GPU."""
    return f"lab experiments {experiment.replace('_', '-')}"


__all__ = ["EXPERIMENTS", "command_of"]
