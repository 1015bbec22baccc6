"""Judge the wrong kernels on a CPU, each until its first wrong case, and the right kernels.

    python -m corpus --workers 32 --only 'blind*'

All checks run at the full level, except the graph replays, which need Triton. results/blind.md has the results of the blind
kernels.
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

from corpus.kernels import KERNELS
from corpus.right import KERNELS as RIGHT
from lab.checks.properties import checks
from lab.files import write_text

WITHOUT = ("S1", "S2")
SHOWN = 140  # characters of a case
HEAD = """# Wrong kernels, and what finds them

`python -m corpus` judges them on a CPU until their first wrong case, at the {level} level.

{found} of {wrong} wrong kernels are found.

| kernel | found by | cases until then | its first wrong case |
|---|---|---|---|
"""


def record_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    report = options.reports / f"{name}.json"
    keys = ",".join(check.key for check in checks() if check.key not in WITHOUT)
    kernel = f"corpus.right:{name}" if name in RIGHT else f"corpus:{name}"
    words = f"-m lab judge {kernel} --level {options.level} --only {keys} --device cpu --workers {options.workers_each}"
    words += f" --no-discover --most-seconds {options.most_seconds}" + ("" if name in RIGHT else " --first-failure")
    command = [sys.executable, *words.split(), "--out", str(report)]
    subprocess.run(command, capture_output=True, env=os.environ | {"TRITON_INTERPRET": "0"}, check=False)
    record = json.loads(report.read_text())
    wrong = [case for case in record["cases"] if case["outcome"] in ("wrong", "failed")]
    found = {"check": wrong[0]["check"], "case": wrong[0]["case"]} if wrong else {}
    return {"name": name, "cases": len(record["cases"]), "left_out": record["left_out"], **found}


def row_of(record: dict[str, Any]) -> str:
    case = record.get("case", "")
    shown = f"`{case if len(case) <= SHOWN else case[:SHOWN] + '…'}`" if case else ""
    verdict = record.get("check", "right" if record["name"] in RIGHT else "not found")
    if not case and record["left_out"]:
        verdict = f"{verdict}, {record['left_out']} cases left out"
    return f"| {record['name']} | {verdict} | {record['cases']} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".benchmarks/corpus.md"))
    parser.add_argument("--level", default="full")
    parser.add_argument("--workers", type=int, default=2, help="kernels that are judged at the same time")
    parser.add_argument("--workers-each", type=int, default=1, help="worker processes of one kernel")
    parser.add_argument("--reports", type=Path, default=Path(".benchmarks/corpus"), help="reports, to go on from")
    parser.add_argument("--most-seconds", type=float, default=1e9, help="of one kernel")
    parser.add_argument("--only", default="*", help="pattern of the kernels' names, such as blind14*")
    options = parser.parse_args()
    options.reports.mkdir(parents=True, exist_ok=True)
    records = []
    with ThreadPoolExecutor(options.workers) as pool:
        names = [name for name in (*KERNELS, *RIGHT) if fnmatch(name, options.only)]
        for judged in as_completed([pool.submit(record_of, name, options) for name in names]):
            records.append(judged.result())
            print(row_of(records[-1]), flush=True)
    wrong = [record for record in records if record["name"] not in RIGHT]
    head = HEAD.format(level=options.level, found=sum("check" in record for record in wrong), wrong=len(wrong))
    rows = [row_of(record) for record in sorted(records, key=lambda record: record["name"])]
    write_text(options.out, head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
