"""Judge the blind kernels, for results/blind.md.

    python -m corpus.blind --workers 32

Each wrong kernel is judged on a CPU until its first wrong case, by all checks but the graph stories, which need Triton.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from corpus.blind import kernels
from lab.checks.properties import checks
from lab.files import write_text

WITHOUT = ("S1", "S2")
SHOWN = 140  # characters of a case
TITLE = """# Wrong kernels that were written without a look at the checks

`python -m corpus.blind` judges the kernels of `corpus/blind` on a CPU, the wrong ones until their first wrong case, at the
{level} level.
"""


def verdict_of(kernel: str, options: argparse.Namespace) -> dict[str, Any]:
    """Judge one kernel, from where its report stopped; return its name, the cases and the first that is wrong."""
    report = options.reports / f"{kernel.partition(':')[2]}.json"
    keys = ",".join(check.key for check in checks() if check.key not in WITHOUT)
    command = [
        sys.executable,
        "-m",
        "lab",
        "judge",
        kernel,
        "--level",
        options.level,
        "--only",
        keys,
        "--device",
        "cpu",
    ]
    command += ["--workers", str(options.workers_each), "--no-probe", "--most-seconds", str(options.most_seconds)]
    command += ["--out", str(report), *(["--first-failure"] if is_wrong(report) else [])]
    subprocess.run(command, capture_output=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    return record_of(report)


def is_wrong(report: Path) -> bool:
    """Tell whether the kernel of a report is meant to be wrong."""
    return report.stem.startswith("Blind")


def record_of(report: Path) -> dict[str, Any]:
    """Return what the table says of one report."""
    record = json.loads(report.read_text())
    wrong = [case for case in record["cases"] if case["outcome"] in ("wrong", "failed")]
    found = {"check": wrong[0]["check"], "case": wrong[0]["case"]} if wrong else {}
    return {"name": report.stem, "cases": len(record["cases"]), "left_out": record["left_out"], **found}


def row_of(record: dict[str, Any]) -> str:
    case = record.get("case", "")
    shown = f"`{case if len(case) <= SHOWN else case[:SHOWN] + '…'}`" if case else ""
    said = record.get("check", "not found" if record["name"].startswith("Blind") else "right")
    if not case and record["left_out"]:
        said = f"{said}, {record['left_out']} cases left out"
    return f"| {record['name']} | {said} | {record['cases']} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".benchmarks/blind.md"))
    parser.add_argument("--level", default="full")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--workers-each", type=int, default=1, help="worker processes of one kernel")
    parser.add_argument(
        "--reports",
        type=Path,
        default=Path(".benchmarks/blind"),
        help="folder of the kernels' reports: go on from them",
    )
    parser.add_argument("--most-seconds", type=float, default=1e9, help="of one kernel")
    parser.add_argument("--only", default="*", help="pattern of the kernels' names, such as Blind14*")
    options = parser.parse_args()
    options.reports.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.workers) as pool:
        every = [*kernels(), *(f"corpus.blind.right:Right{number}" for number in range(1, 7))]
        names = [name for name in every if fnmatch(name.partition(":")[2], options.only)]
        for verdict in as_completed([pool.submit(verdict_of, name, options) for name in names]):
            print(row_of(verdict.result()), flush=True)
    records = [record_of(report) for report in sorted(options.reports.glob("*.json"))]
    wrong = [each for each in records if each["name"].startswith("Blind")]
    found = f"{sum('check' in each for each in wrong)} of {len(wrong)} wrong kernels are found.\n"
    head = ["| kernel | found by | cases until then | its first wrong case |", "|---|---|---|---|"]
    write_text(options.out, "\n".join((TITLE.format(level=options.level), found, *head, *map(row_of, records))) + "\n")


if __name__ == "__main__":
    main()
