"""Start the recorder in each Python process of a command that `lab record` runs.

Python imports the module `sitecustomize` at its start, and `lab record` puts this folder first in PYTHONPATH. Torch and the lab
are imported only when the process has imported a package whose functions are recorded.
"""

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class _FirstImport(MetaPathFinder):
    """Starts the recorder right after the first import of a recorded package has ended, with the imports that it makes."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        others = [each for each in sys.meta_path if each is not self] if fullname in PACKAGES else []
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_start(module: ModuleType) -> None:
                is_first = self in sys.meta_path
                if is_first:
                    sys.meta_path.remove(self)
                execute(module)
                if is_first:
                    _start()

            spec.loader.exec_module = execute_and_start  # type: ignore[method-assign]
        return spec


def _start() -> None:
    sys.path.append(os.path.abspath(f"{HERE}/../../.."))  # last, so that it hides no module of the server
    try:
        from lab.recorded.recorder import start_from_environment

        start_from_environment()
    except (ImportError, OSError) as error:  # the server runs all the same
        print(f"lab record: no call of process {os.getpid()} is recorded: {error}", file=sys.stderr)
    sys.path.pop()


if __name__ == "sitecustomize" and "LAB_RECORD" in os.environ:
    PACKAGES = json.loads(os.environ["LAB_RECORD"])["functions"]
    sys.meta_path.insert(0, _FirstImport())
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != HERE]
    following = PathFinder.find_spec("sitecustomize", sys.path)  # the one that Python would have imported
    if following is not None and following.loader is not None:
        sys.modules["sitecustomize"] = module_from_spec(following)
        following.loader.exec_module(sys.modules["sitecustomize"])
