"""`python -m net`: see the package."""

import argparse
import os
import sys
import time
from typing import Any

import net
from net.recorded import FOLDER, read, write

PARTS = ("references", "right", "wrong", "ptx", "tables", "quick")


def state(part: str, only: str, is_compared: bool) -> Any:
    """Return the state of a part now: rows or lines by name, of the names that contain `only`."""
    if part == "ptx":
        from net import compiled

        return compiled.record(only, is_compared)
    if part == "tables":
        from net import tables

        return tables.record(only)
    from net.plans import PLANS
    from net.verdicts import record

    return record([plan for plan in PLANS[part] if only in plan.name])


def compare(part: str, before: Any, after: Any) -> tuple[list[str], list[str]]:
    """Return (faults, notes)."""
    if part in ("ptx", "tables"):
        from net.tables import compare_lines

        return compare_lines(before, after), []
    from net.verdicts import compare

    return compare(before, after)


def main() -> int:
    parser = argparse.ArgumentParser(
        "net", description=net.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("record", "compare"))
    parser.add_argument("--part", choices=PARTS, action="append", help="all if left out")
    parser.add_argument("--only", default="", help="of a part, what has this text in its name")
    options = parser.parse_args()
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    failed = False
    for part in options.part or PARTS:
        start, path = time.monotonic(), FOLDER / f"{part}.json.gz"
        after = state(part, options.only, options.task == "compare")
        if options.task == "record":
            write(path, (read(path) if options.only and path.exists() else {}) | after)
            print(f"{part}: recorded, {len(after)} subjects, {path.stat().st_size:,} bytes", flush=True)
            continue
        faults, notes = compare(part, read(path), after)
        for kind, lines in (("note", notes), ("CHANGED", faults)):
            print(*(f"{kind}: {line}" for line in lines), sep="\n", end="\n" if lines else "")
        size = sum(map(len, after.values()))
        print(f"{part}: {size} lines compared, {len(faults)} changed, {time.monotonic() - start:.0f} s", flush=True)
        failed |= bool(faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
