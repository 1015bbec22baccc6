"""The command `lab`, as `python -m lab`."""

import sys
from collections.abc import Sequence

from lab.commands.packages import missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and end the process with its exit status.

    Returns:
        2 where a package is missing that one of the extras brings.
    """
    try:
        from lab.commands.app import app

        app(args=arguments, prog_name="lab")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "lab":
            raise
        print(f"lab: {missing(error.name)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
