"""The command `lab`, run in this process."""

import os
import shlex
from collections.abc import Sequence
from unittest import mock

from lab.__main__ import main


def run(line: str | Sequence[str]) -> int:
    """Run a command line such as "judge my.kernel"; return its exit status.

    Lines are not wrapped, and what the command sets in the environment is forgotten.
    """
    with mock.patch.dict(os.environ, COLUMNS="1000"):
        try:
            return main(shlex.split(line) if isinstance(line, str) else line)
        except SystemExit as ended:
            return int(str(ended.code))
