"""Define the exit statuses of the lab's commands, and the signals that end a command."""

import enum
import signal

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which end a command with INTERRUPTED


class ExitStatus(enum.IntEnum):
    """The exit status of a command of the lab.

    Attributes:
        DONE: the judged implementation is right, or the command has done its work.
        WRONG: a result is wrong, a call failed, or a measured time is longer than before.
        MISUSED: an option, a file or a package that the command needs is wrong or missing.
        REFUSED: a time or a verdict is refused: the hardware cannot reach the time, or the kernel changed functions that time
            or judge kernels.
        NOT_JUDGED: nothing could be judged, measured or compared; `git bisect run` skips a commit with this status.
        INTERRUPTED: Ctrl-C, or another signal of `ENDING_SIGNALS`, ended the command.
    """

    DONE = 0
    WRONG = 1
    MISUSED = 2
    REFUSED = 3
    NOT_JUDGED = 125
    INTERRUPTED = 130

    __str__ = int.__repr__  # the number, in Python 3.10 too
