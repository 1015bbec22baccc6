"""Known findings: what is wrong, on which GPU, and the page that describes it.

An entry is the only way in which a check passes in spite of a finding. It is narrow: one implementation on one kind of GPU, one
check, the cases that its condition names, and only what its pattern matches of what was wrong.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.calls.problem import E4M3
from lab.checks.domain.combination import Combination
from lab.checks.domain.paged_shape import attention_case
from lab.checks.report import CaseVerdict
from lab.checks.space import Space
from lab.checks.verdicts import Outcome
from lab.gpus import Capability
from lab.workloads.attention_case import AttentionCase, Contents
from lab.workloads.interfaces import Interface


@dataclass(frozen=True)
class KnownFinding:
    """One entry.

    Attributes:
        implementation: its name.
        capability: (major, minor) of the GPU that it was seen on; another kind runs other kernels. None: a CPU.
        checks: keys of the checks that show it.
        wrong: pattern of the sentences it explains, searched for.
        where: whether it explains what was wrong in a case, given the case and the sentence.
        finding: the page and heading that describes it, "path#heading", with its reproduction.
    """

    implementation: str
    capability: Capability | None
    checks: tuple[str, ...]
    wrong: str
    where: Callable[[Any, str], bool]
    finding: str


def known(verdict: CaseVerdict, ledger: Sequence[KnownFinding], capability: Capability | None) -> CaseVerdict:
    """The verdict of a case on such a GPU, told to be KNOWN if the ledger explains every sentence of what was wrong."""
    if verdict.outcome is not Outcome.WRONG:
        return verdict
    entries = [
        entry
        for entry in ledger
        if entry.implementation == verdict.implementation
        and entry.capability == capability
        and verdict.check in entry.checks
    ]
    citing = []
    for sentence in verdict.judged.wrongs:
        found = [entry for entry in entries if re.search(entry.wrong, sentence) and entry.where(verdict.case, sentence)]
        if not found:
            return verdict
        citing.append(found[0].finding)
    return replace(
        verdict, finding="; ".join(dict.fromkeys(citing)), judged=replace(verdict.judged, outcome=Outcome.KNOWN)
    )


def wrong_requests(sentence: str) -> list[int]:
    """The requests that a sentence of `lab.checks.trial.Trial.hold` names."""
    named = re.search(r"of requests \[([0-9, ]*)\]", sentence)
    return [int(number) for number in named.group(1).split(",") if number.strip()] if named else []


def lens_of(case: AttentionCase | Combination) -> AttentionCase:
    """Return the case that has the lengths of each request."""
    return attention_case(case, Space()) if isinstance(case, Combination) else case


def only_fewer_keys_than_rows(case: AttentionCase | Combination, sentence: str) -> bool:
    """All that is wrong belongs to requests with fewer keys than query rows."""
    requests, case = wrong_requests(sentence), lens_of(case)
    seen = getattr(case, "seen_lens", case.kv_lens)  # of a pass, whose rows may see fewer keys than there are
    return bool(requests) and all(seen[request] < case.q_lens[request] for request in requests)


def has_fewer_keys_than_rows(case: AttentionCase | Combination) -> bool:
    """Some request of the case has fewer keys than query rows."""
    case = lens_of(case)
    return any(kv_len < q_len for kv_len, q_len in zip(case.kv_lens, case.q_lens, strict=True))


def only_without_keys(case: AttentionCase | Combination, sentence: str) -> bool:
    """All that is wrong belongs to requests without a key."""
    requests, case = wrong_requests(sentence), lens_of(case)
    return bool(requests) and all(case.kv_lens[request] == 0 for request in requests)


def is_decode(case: AttentionCase, sentence: str) -> bool:
    return case.interface is Interface.DECODE


FINDINGS = "results/nvidia-h200/findings.md"
DRY_RUN = "results/blackwell-dry-run/README.md"
NO_KEY = f"{DRY_RUN}#rows-that-see-no-key-keep-what-was-in-the-output"
TRTLLM: dict[str, Any] = {"implementation": "lab.kernels.trtllm", "capability": (9, 0)}
B200: dict[str, Any] = {"implementation": "lab.dry_run.b200", "capability": None}

LEDGER: tuple[KnownFinding, ...] = (
    KnownFinding(
        **TRTLLM,
        checks=("K2", "K11", "K13", "K18"),
        wrong="vectors are wrong|are not finite",
        where=lambda case, sentence: is_decode(case, sentence) and only_fewer_keys_than_rows(case, sentence),
        finding=f"{FINDINGS}#3-xqa-is-wrong-for-a-request-with-fewer-keys-than-query-tokens",
    ),
    KnownFinding(
        **TRTLLM,
        checks=("K2",),
        wrong="vectors are wrong|are not finite",
        where=lambda case, sentence: is_decode(case, sentence) and case.contents is Contents.LOW,
        finding=f"{FINDINGS}#4-xqa-gives-no-finite-output-when-every-logit-of-a-row-is-below-about--100000",
    ),
    KnownFinding(
        **TRTLLM,
        checks=("K4",),
        wrong="^dead cells of NAN",
        where=lambda case, sentence: case.interface is Interface.CONTEXT,
        finding=f"{FINDINGS}#5-fmha_v2-multiplies-the-tail-of-the-last-v-page-by-zero",
    ),
    KnownFinding(
        **TRTLLM,
        checks=("K2", "K18"),
        wrong="vectors are wrong|are not finite",
        where=lambda case, sentence: case.interface is Interface.CONTEXT and only_without_keys(case, sentence),
        finding=f"{FINDINGS}#6-fmha_v2-leaves-the-rows-of-a-request-without-keys-unwritten",
    ),
    KnownFinding(
        **TRTLLM,
        checks=("K4",),
        wrong="^pages of NAN before the window",
        where=lambda case, sentence: case.window_left >= 0,
        finding=f"{FINDINGS}#8-xqa-and-fmha_v2-multiply-keys-before-the-window-by-zero",
    ),
    KnownFinding(
        **TRTLLM,
        checks=("K4",),
        wrong="^dead cells of NAN",
        where=lambda case, sentence: is_decode(case, sentence) and case.kv_dtype == E4M3 and case.q_lens[0] == 1,
        finding=f"{FINDINGS}#9-xqa-with-e4m3-kv-multiplies-the-tail-of-the-last-v-page-by-zero",
    ),
    KnownFinding(
        **B200,
        checks=("K2", "K11", "K13", "K18", "M2"),
        wrong="vectors are wrong|are not finite",
        where=only_fewer_keys_than_rows,
        finding=NO_KEY,
    ),
    KnownFinding(  # whose other shape has requests that the case does not tell
        **B200,
        checks=("K6",),
        wrong="^another shape: .*: rows that see no key must be zero",
        where=lambda case, sentence: True,
        finding=NO_KEY,
    ),
    KnownFinding(
        **B200,
        checks=("K2", "K18"),
        wrong="LSEs are wrong",
        where=lambda case, sentence: has_fewer_keys_than_rows(case),
        finding=NO_KEY,
    ),
    KnownFinding(
        **B200,
        checks=("K2",),
        wrong="LSEs are wrong: row [0-9]+ head [0-9]+ is inf,",
        where=lambda case, sentence: case.contents is Contents.LOW and case.sinks,
        finding=f"{DRY_RUN}#the-lse-is-infinite-where-a-sink-is-far-above-every-logit",
    ),
)
