"""The PTX of every kernel that the host code chooses for every GPU (`tests.kernels.compiled_choices`), without names.

A quarter of an hour on a quiet core. `--only "SM90 decode"` compiles some of the calls.
"""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from unittest import mock

from net.recorded import FOLDER, read

ROOT = Path(__file__).parents[1]


def record(only: str, is_compared: bool) -> dict[str, list[str]]:
    """Return the digests of the PTX of each target and call, compiled by a process that has no interpreter.

    Args:
        is_compared: only of what is recorded: every call of SM90, and a few of other targets.
    """
    out = ROOT / ".benchmarks" / "net-ptx.json"
    out.parent.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "net.compiled", str(out), only, *(["compare"] if is_compared else [])],
        check=True,
        cwd=ROOT,
        env=environment,
    )
    return read(out)


def digests(only: str, among: Container[str]) -> Iterator[tuple[str, list[str]]]:
    """Compile, and yield (target and call, a digest and what the kernel takes for each launch)."""
    import importlib
    import pkgutil

    import lab.kernels.portable
    import lab.kernels.serving
    from tests.kernels import gpu_target
    from tests.kernels.compiled_choices import TARGETS, every_choice

    for package in (lab.kernels.portable, lab.kernels.serving):
        names = [each.name for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        gpu_target.forget_line_numbers(*map(importlib.import_module, names))
    describe = gpu_target._described
    found: list[str] = []

    def described(built, *arguments):  # type: ignore[no-untyped-def]
        found.append(
            f"{digest(built.asm['ptx'])} {built.metadata.num_warps} warps {built.metadata.shared} bytes shared"
        )
        return describe(built, *arguments)

    with mock.patch.object(gpu_target, "_described", described):
        for target, capability in TARGETS.items():
            for description in every_choice(capability):
                if only in (name := f"{target} {description}") and name in among:
                    found.clear()
                    with gpu_target.gpu_target(capability):  # tensors that a choice has are made in it, too
                        every_choice(capability)[description]()
                    print(name, file=sys.stderr, flush=True)
                    yield name, list(found)


class Anything:
    """Contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


def digest(ptx: str) -> str:
    """Return 16 digits of the PTX, with numbers in place of the names of functions."""
    names = dict.fromkeys(re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx))
    for number, name in enumerate(names):
        ptx = re.sub(rf"(?<![\w$]){re.escape(name)}(?=_param_|[^\w$])", f"function_{number}", ptx)
    return hashlib.sha256(ptx.encode()).hexdigest()[:16]


if __name__ == "__main__":
    import json

    recorded = read(FOLDER / "ptx.json.gz") if sys.argv[3:] else Anything()
    Path(sys.argv[1]).write_text(json.dumps(dict(digests(sys.argv[2], recorded))))
