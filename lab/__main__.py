"""Run the command `lab`, also as `python -m lab`."""

import atexit
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from lab.exit_status import ENDING_SIGNALS, ExitStatus
from lab.extras import EXTRA_OF, sentence
from lab.wording import printable, shortened

SHOWN_CHARACTERS = 400  # of a path that cannot be read or written
QUIET_S = 3.0  # seconds after an interruption in which further ones are ignored, so that cleaning up can end


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `lab` command that `arguments` names (None: `sys.argv[1:]`). If the command completes, the process ends with the
    exit status of the command, and `main` does not return.

    Returns:
        `ExitStatus.MISUSED` (2) if an optional package (one of pip's extras) is missing, or a file or the output cannot be read
        or written; `ExitStatus.INTERRUPTED` (130) after Ctrl-C, SIGTERM or SIGHUP (a closed terminal).
    """
    # Python has None for a stream that was closed when the process began.
    sys.stdout, sys.stderr = (each or open(os.devnull, "w") for each in (sys.stdout, sys.stderr))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(sys.stdout.fileno(), "w", closefd=False)),
            sys.stdout.encoding,
            line_buffering=sys.stdout.isatty(),
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a text that the encoding does not have is printed in escapes
            stream.reconfigure(errors="backslashreplace")
    if threading.current_thread() is threading.main_thread():
        interruption = _Interruption()
        # Python ends itself by SIGINT, whatever the exit status is, if a KeyboardInterrupt was raised in exec() of a string, as
        # in the definition of a dataclass. While the signal is blocked, Python exits with 130 instead.
        atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING_SIGNALS)
        for number in ENDING_SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, interruption)
    try:
        from lab.commands.app import app

        try:
            app(args=arguments, prog_name="lab")
        finally:
            _flush()
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        message = str(error) if "pip install" in str(error) else sentence("the command", [package])
        print(f"lab: {message}", file=sys.stderr)
        return ExitStatus.MISUSED
    except OSError as error:
        about = "" if error.filename is None else f"{shortened(printable(str(error.filename)), SHOWN_CHARACTERS)}: "
        print(f"lab: {about}{error.strerror or error}", file=sys.stderr)
        return ExitStatus.MISUSED
    return ExitStatus.DONE


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit
        raise


class _Output(io.FileIO):
    """Standard output that ignores a closed pipe, as in `lab judge ... | head -1`: the command keeps its own exit status."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from error


class _Interruption:
    def __init__(self) -> None:
        self._quiet_until = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET_S
            raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
