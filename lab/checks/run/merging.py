"""Unite the reports of the shards of one run in one report. A shard is one part of a run (`lab judge --shard 3/8`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.checks.parameters.covering import Shard
from lab.checks.properties.check import Level
from lab.checks.record import ReportError, read_cases, read_expression, read_record
from lab.checks.report import WORST_FIRST, Report
from lab.checks.run.verdicts import CaseVerdict, Key, credible
from lab.wording import joined
from lab.workloads.interfaces import interface_of

# Entries of a report that must be equal in all shards, with words for an error.
EQUAL = {
    "implementation": "the kernel",
    "level": "the level",
    "ranges": "the ranges",
    "device": "the device",
    "profile": "the profile",
    "refusals": "the refusals",
    "run": "the sources of the kernel or the lab, a setting, or the software",
}


def merged(paths: Sequence[Path], out: Path | None = None) -> Report:
    """Return one report with the verdicts of all shards of a run, the worst one for each case. `out` is the file to which
    the caller will write it. Raise ReportError unless `paths` are the reports of all shards of one run, each of which has
    ended.
    """
    by_path = {path: read_record(path) for path in paths}
    _check_shards(paths, by_path)
    records = list(by_path.values())
    found: dict[tuple[str, str], dict[Key, CaseVerdict]] = {}  # by check and function
    for record in records:
        for verdict in read_cases(record):
            of_check = found.setdefault((verdict.check, verdict.interface.value), {})
            held = replace(verdict, judged=credible(verdict.judged))
            both = (held, of_check.get(verdict.key, held))
            of_check[verdict.key] = min(
                both, key=lambda each: (WORST_FIRST.index(each.outcome), -each.judged.worst_ratio)
            )
    verdicts = [verdict for of_check in found.values() for verdict in of_check.values()]
    first, left_out = records[0], [record for record in records if record["left_out"]]
    ranges = (each for record in records for each in record["narrowed"].items())
    return Report(
        level=Level(first["level"]),
        environment=dict(first["environment"]),
        verdicts=tuple(
            replace(each, number=number, recorded_in=str(out or "")) for number, each in enumerate(verdicts, 1)
        ),
        ranges=read_expression(first["ranges"]),
        ended=left_out[0]["ended"] if left_out else "",
        interrupted=any(record["interrupted"] for record in records),
        narrowed=tuple(dict.fromkeys((interface_of(name), read_expression(text)) for name, text in ranges)),
        refusals=tuple(first["refusals"]),
        functions=tuple(dict.fromkeys(interface_of(name) for record in records for name in record["functions"])),
        folder=str(first.get("folder") or ""),
        **{name: first[name] for name in ("implementation", "device", "run", "profile")},
        **{name: sum(each[name] for each in records) for name in ("left_out", "num_random", "audited", "unended")},
    )


def _check_shards(paths: Sequence[Path], records: Mapping[Path, Mapping[str, Any]]) -> None:
    if not paths:
        raise ReportError("name the reports of all shards of a run")
    (first, expected), *others = records.items()
    for path, record in others:
        for name, words in EQUAL.items():
            if record.get(name) != expected.get(name):
                raise ReportError(f"{first} and {path} are not of one run: {words} differs")
    shards: dict[Shard, Path] = {}
    for path in paths:
        if not (text := str(records[path].get("shard") or "")):
            raise ReportError(f"{path} is no report of a shard: lab judge --shard writes one")
        shard = Shard.of(text)
        if (other := shards.setdefault(shard, path)) is not path:
            raise ReportError(f"{other} and {path} are both shard {shard}")
        if records[path].get("diagnosis") is None:
            raise ReportError(f"{path} is of a run that has not ended: run shard {shard} again with the same --out")
        if shard.count != next(iter(shards)).count:
            raise ReportError(f"{first} is shard {next(iter(shards))}, and {path} is shard {shard}")
    count = next(iter(shards)).count
    if missing := [str(number) for number in range(1, count + 1) if Shard(number, count) not in shards]:
        raise ReportError(f"of {count} shards, {joined(missing)} {'is' if len(missing) == 1 else 'are'} missing")
