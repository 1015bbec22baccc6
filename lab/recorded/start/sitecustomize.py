"""Start the recorder in each Python process of `lab record`. That command puts this folder first in PYTHONPATH."""

import atexit
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
    """An import hook that starts the recorder after the first import of a package whose calls are recorded."""

    running = 0  # number of modules of the root packages whose import has not ended

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_watched = fullname.partition(".")[0] in {each.partition(".")[0] for each in PACKAGES}
        others = [each for each in sys.meta_path if each is not self] if is_watched else []
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def execute_and_start(module: ModuleType) -> None:
                self.running += 1
                try:
                    execute(module)
                finally:
                    self.running -= 1
                if not self.running and self in sys.meta_path and not sys.modules.keys().isdisjoint(PACKAGES):
                    sys.meta_path.remove(self)
                    # Last, so that it hides no module of the server.
                    sys.path.append(os.path.abspath(f"{HERE}/../../.."))
                    try:
                        from lab.recorded.recorder import start_from_environment

                        start_from_environment()
                    except Exception as error:  # of any kind: the server must run as it does without the recorder
                        print(f"lab record: no call of process {os.getpid()} is recorded: {error}", file=sys.stderr)
                    sys.path.pop()

            spec.loader.exec_module = execute_and_start  # type: ignore[method-assign]
        return spec

    def say_at_end(self) -> None:
        if self in sys.meta_path and os.environ["LAB_RECORD_FIRST"] == str(os.getpid()):
            print(f"lab record: process {os.getpid()} never imported {', '.join(PACKAGES)}", file=sys.stderr)


if __name__ == "sitecustomize" and "LAB_RECORD" in os.environ:
    PACKAGES = json.loads(os.environ["LAB_RECORD"])["functions"]
    os.environ.setdefault("LAB_RECORD_FIRST", str(os.getpid()))
    sys.meta_path.insert(0, first := _FirstImport())
    atexit.register(first.say_at_end)
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != HERE]
    following = PathFinder.find_spec("sitecustomize", sys.path)  # the one that Python would have imported
    if following is not None and following.loader is not None:
        sys.modules["sitecustomize"] = module_from_spec(following)
        following.loader.exec_module(sys.modules["sitecustomize"])
