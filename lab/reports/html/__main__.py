"""The command line: `python -m lab.reports.html results/nvidia-h200 --out report.html`."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.files import write_text
from lab.reports.recorded import RecordedFileError, read_folder

NEEDED = ("itables", "jinja2", "markdown_it", "matplotlib")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; return the exit status, 2 without recorded files or without the packages that make a page."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.reports.html", description="One self-contained HTML page of a folder of recorded results."
    )
    parser.add_argument("folder", type=Path, help="such as results/nvidia-h200")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), help="the file to write (default: %(default)s)"
    )
    given = parser.parse_args(argv)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"no report: {', '.join(missing)} not installed: pip install '.[html]'", file=sys.stderr)
        return 2
    from lab.reports.html.page import html_report

    try:
        page = html_report(given.folder, read_folder(given.folder))
    except RecordedFileError as error:
        print(f"no report: {error}", file=sys.stderr)
        return 2
    write_text(given.out, page)
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
