"""The command `lab`, as `python -m lab`."""

import io
import sys
from collections.abc import Sequence

from lab.exit_status import ExitStatus
from lab.extras import EXTRA_OF, sentence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. A command that ran ends the process with the command's exit status.

    Returns:
        MISUSED (2) if a package of one of the extras is missing, or a file cannot be read or written; INTERRUPTED (130) after
        Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a text that the encoding does not have is printed in escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        from lab.commands.app import app

        app(args=arguments, prog_name="lab")
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
        if error.filename is None:
            raise
        print(f"lab: {error.filename}: {error.strerror}", file=sys.stderr)
        return ExitStatus.MISUSED
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
