"""The command `lab`, run in this process."""

import functools
import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import typer.main

from lab.__main__ import main
from lab.exit_status import ENDING_SIGNALS

_get_command = functools.cache(typer.main.get_command)


def made_once() -> AbstractContextManager[Any]:
    """Let Typer make the parsers of an application only once in this process, and not for each command line."""
    return mock.patch.object(typer.main, "get_command", _get_command)


def run(line: str | Sequence[str]) -> int:
    """Run a command line such as "judge my.kernel"; return its exit status.

    Lines are not wrapped, and what the command sets in the environment, and for signals, is forgotten.
    """
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    with mock.patch.dict(os.environ, COLUMNS="1000"), made_once():
        try:
            return main(shlex.split(line) if isinstance(line, str) else line)
        except SystemExit as ended:
            return int(str(ended.code))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
