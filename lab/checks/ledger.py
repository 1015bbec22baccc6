"""What is known to be wrong, where, and where that is written down.

An entry is the only way in which a check passes in spite of a finding. It is narrow: one implementation on one kind of GPU, one
check, the cases that its condition names, and only what its pattern matches of what was wrong.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.checks.report import CaseVerdict
from lab.checks.verdicts import Outcome


@dataclass(frozen=True)
class KnownFinding:
    """One entry.

    Attributes:
        implementation: its name.
        device: "cuda" or "cpu".
        checks: keys of the checks that show it.
        wrong: pattern of the sentences it explains, searched for.
        where: whether it can show in a case.
        finding: the page and heading that describes it, "path#heading", with its reproduction.
    """

    implementation: str
    device: str
    checks: tuple[str, ...]
    wrong: str
    where: Callable[[Any], bool]
    finding: str


def known(verdict: CaseVerdict, ledger: Sequence[KnownFinding]) -> CaseVerdict:
    """The verdict, told to be KNOWN if entries of the ledger explain every sentence of what was wrong."""
    if verdict.outcome is not Outcome.WRONG:
        return verdict
    entries = [
        entry
        for entry in ledger
        if entry.implementation == verdict.implementation
        and verdict.device.startswith(entry.device)
        and verdict.check in entry.checks
        and entry.where(verdict.case)
    ]
    citing = []
    for sentence in verdict.judged.wrongs:
        found = [entry for entry in entries if re.search(entry.wrong, sentence)]
        if not found:
            return verdict
        citing.append(found[0].finding)
    return replace(
        verdict, finding="; ".join(dict.fromkeys(citing)), judged=replace(verdict.judged, outcome=Outcome.KNOWN)
    )


LEDGER: tuple[KnownFinding, ...] = ()
