"""Start the recorder in each Python process of a command that `lab record` runs.

Python imports the module `sitecustomize` at its start, and `lab record` puts this folder first in PYTHONPATH. Torch and the lab
are imported only when the process imports a package whose functions are recorded.
"""

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class _FirstImport(MetaPathFinder):
    """Starts the recorder before the first import of a recorded package, which then finds the package."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        _start()
        return find_spec(fullname)  # anew, since Python has read the list of finders already


def _start() -> None:
    sys.path.append(os.path.abspath(f"{HERE}/../../.."))  # last, so that it hides no module of the server
    try:
        from lab.recorded.recorder import start_from_environment

        start_from_environment()
    except (ImportError, OSError) as error:  # the server runs all the same
        print(f"lab record: no call of process {os.getpid()} is recorded: {error}", file=sys.stderr)
    sys.path.pop()


if __name__ == "sitecustomize" and "LAB_RECORD" in os.environ:
    PACKAGES = {each.partition(".")[0] for each in json.loads(os.environ["LAB_RECORD"])["functions"]}
    if "lab" in PACKAGES:  # the recorder imports the lab, and cannot wait for that import
        _start()
    else:
        sys.meta_path.insert(0, _FirstImport())
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != HERE]
    following = PathFinder.find_spec("sitecustomize", sys.path)  # the one that Python would have imported
    if following is not None and following.loader is not None:
        sys.modules["sitecustomize"] = module_from_spec(following)
        following.loader.exec_module(sys.modules["sitecustomize"])
