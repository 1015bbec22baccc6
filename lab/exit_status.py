"""The exit statuses of every command of the lab."""

import enum


class ExitStatus(enum.IntEnum):
    """The status that a command of the lab ends with.

    Attributes:
        DONE: what was judged is right, or the command is done.
        WRONG: something is wrong, failed or slower.
        MISUSED: an option, a file or a package that the command needs is wrong or missing.
        REFUSED: a time or a verdict is refused: the hardware cannot do it, or the kernel changed what judges it.
        NOT_JUDGED: it could not be judged, measured or compared; `git bisect run` skips a commit that ends so.
        INTERRUPTED: Ctrl-C ended it.
    """

    DONE = 0
    WRONG = 1
    MISUSED = 2
    REFUSED = 3
    NOT_JUDGED = 125
    INTERRUPTED = 130

    __str__ = int.__repr__  # the number, in Python 3.10 too
