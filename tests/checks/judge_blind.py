"""Judge the kernels of `blind`, which were written from the documented calls alone, for results/blind.md.

    python -m tests.checks.judge_blind --workers 32

Each wrong kernel is judged on a CPU until its first wrong case, by all checks but the graph stories, which need Triton.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lab.checks.catalogue import checks
from lab.files import write_text

BLIND = Path(__file__).with_name("blind")
WITHOUT = ("S1", "S2")
SHOWN = 140  # characters of a case
TITLE = """# Wrong kernels that were written without a look at the checks

Sixty kernels, each wrong in one way, and six right ones were written from the documented calls alone
(`tests/checks/blind/README.md` lists them). `python -m tests.checks.judge_blind` judges them on a CPU, the wrong ones until
their first wrong case, at the {level} level.
"""


def verdict_of(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Judge one kernel, from where its report stopped; return its name, the cases and the first that is wrong."""
    report = options.reports / f"{path.stem}.json"
    keys = ",".join(check.key for check in checks() if check.key not in WITHOUT)
    command = [
        sys.executable,
        "-m",
        "lab",
        "judge",
        str(path),
        "--level",
        options.level,
        "--only",
        keys,
        "--device",
        "cpu",
    ]
    command += ["--workers", str(options.workers_each), "--no-probe", "--most-seconds", str(options.most_seconds)]
    command += ["--out", str(report), *(["--first-failure"] if path.stem.startswith("wrong") else [])]
    subprocess.run(command, capture_output=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    return record_of(report)


def record_of(report: Path) -> dict[str, Any]:
    """Return what the table says of one report."""
    record = json.loads(report.read_text())
    wrong = [case for case in record["cases"] if case["outcome"] in ("wrong", "failed")]
    found = {"check": wrong[0]["check"], "case": wrong[0]["case"]} if wrong else {}
    return {"name": report.stem, "cases": len(record["cases"]), "left_out": record["left_out"], **found}


def row_of(record: dict[str, Any]) -> str:
    case = record.get("case", "")
    shown = f"`{case if len(case) <= SHOWN else case[:SHOWN] + '…'}`" if case else ""
    said = record.get("check", "not found" if record["name"].startswith("wrong") else "right")
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
    parser.add_argument("--only", default="*", help="pattern of the kernels' numbers")
    options = parser.parse_args()
    options.reports.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.workers) as pool:
        paths = sorted((*BLIND.glob(f"wrong_{options.only}.py"), *BLIND.glob(f"right_{options.only}.py")))
        for verdict in as_completed([pool.submit(verdict_of, path, options) for path in paths[::-1]]):
            print(row_of(verdict.result()), flush=True)
    records = [record_of(report) for report in sorted(options.reports.glob("*.json"))]
    wrong = [each for each in records if each["name"].startswith("wrong")]
    found = f"{sum('check' in each for each in wrong)} of {len(wrong)} wrong kernels are found.\n"
    head = ["| kernel | found by | cases until then | its first wrong case |", "|---|---|---|---|"]
    write_text(options.out, "\n".join((TITLE.format(level=options.level), found, *head, *map(row_of, records))) + "\n")


if __name__ == "__main__":
    main()
