"""A decode that does something else for each group of query heads: never returns, dies, raises; and is right for the others."""

import builtins
import ctypes
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lab.references import trtllm_batch_decode_with_kv_cache as right

LAST_WORD = "the last word of a kernel"


class Odd(Exception):  # noqa: N818 - an exception of somebody's own
    """What no judge has heard of."""


def hang() -> None:
    while True:
        time.sleep(1.0)


def leave() -> None:
    print(LAST_WORD, flush=True)
    os._exit(7)


def leave_at_once(environment: dict[str, str]) -> None:
    """Stand for the first thing that a worker does."""
    leave()


def raising(error: BaseException) -> Callable[[], None]:
    def deed() -> None:
        raise error

    return deed


def raise_odd() -> None:
    raise Odd("out of cheese")


DEEDS: dict[int, Callable[[], object]] = {
    2: hang,
    3: leave,
    4: lambda: ctypes.string_at(0),
    5: raising(RuntimeError("an unspecified launch failure")),
    6: lambda: len(5),  # type: ignore[arg-type]
    8: raise_odd,
    16: lambda: sys.exit(3),
}


def trtllm_batch_decode_with_kv_cache(**arguments: Any) -> Any:
    group = arguments["query"].shape[1] // arguments["kv_cache"][0].shape[1]
    if group in DEEDS:
        DEEDS[group]()
    return right(**arguments)


def _right_and_dead_later(**arguments: Any) -> Any:
    out = right(**arguments)
    threading.Timer(0.6, leave).start()
    return out


def _in_calls_of_group_3(deed: Callable[[], Any]) -> SimpleNamespace:
    """Return a kernel that damages its process or machine in calls of three query heads per KV head, and is right."""

    def decode(**arguments: Any) -> Any:
        if arguments["query"].shape[1] == 3 * arguments["kv_cache"][0].shape[1]:
            deed()
        return right(**arguments)

    return SimpleNamespace(trtllm_batch_decode_with_kv_cache=decode)


def _take_all_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    with suppress(OSError):
        while True:
            KEPT.append(os.open(os.devnull, os.O_RDONLY))


def _remove_scratch_folders() -> None:
    for folder in Path(os.environ["SCRATCH"]).glob("lab-judge-*"):
        shutil.rmtree(folder)


class Mute(Exception):  # noqa: N818 - as `Odd`
    """An exception without a message."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


def _empty_modules() -> None:
    for name in [name for name in sys.modules if name.startswith("lab")]:
        del sys.modules[name]


def _remove_working_folder() -> None:
    os.chdir(tempfile.mkdtemp())
    Path.cwd().rmdir()


def _break_len() -> None:
    builtins.len = lambda _: 0  # type: ignore[assignment]


def _send_half_a_message() -> None:
    frame: Any = sys._getframe()
    while "channel" not in frame.f_locals:
        frame = frame.f_back
    os.write(frame.f_locals["channel"].writer.fileno(), bytes([0, 1, 0, 0, 7]))


hangs = SimpleNamespace(trtllm_batch_decode_with_kv_cache=lambda **_: hang())
KEPT: list[Any] = []
ends_with_0 = _in_calls_of_group_3(lambda: os._exit(0))
takes_all_descriptors = _in_calls_of_group_3(_take_all_descriptors)
closes_all_descriptors = _in_calls_of_group_3(lambda: os.closerange(3, 1000))
removes_scratch_folders = _in_calls_of_group_3(_remove_scratch_folders)
changes_folder = _in_calls_of_group_3(lambda: os.chdir("/"))
removes_folder = _in_calls_of_group_3(_remove_working_folder)
raises_mute = _in_calls_of_group_3(raising(Mute()))
kills_its_group = _in_calls_of_group_3(lambda: os.killpg(0, signal.SIGTERM))
empties_modules = _in_calls_of_group_3(_empty_modules)
kills_its_process = _in_calls_of_group_3(lambda: os.kill(os.getpid(), signal.SIGKILL))
kills_its_parent = _in_calls_of_group_3(lambda: os.kill(os.getppid(), signal.SIGKILL))
breaks_len = _in_calls_of_group_3(_break_len)
sends_half_a_message = _in_calls_of_group_3(_send_half_a_message)
dies_later = SimpleNamespace(trtllm_batch_decode_with_kv_cache=_right_and_dead_later)
