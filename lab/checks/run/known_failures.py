"""Known findings: what is wrong, on which GPU, and the page that describes it.

An entry is the only way in which a check passes in spite of a finding. It is narrow: one implementation on one kind of GPU, in
the releases that were seen if it names any, one check, the cases that its condition names, and only what its pattern matches of
what was wrong.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lab.calls.problem import E4M3
from lab.checks.report import CaseVerdict
from lab.checks.run.known_failure_conditions import (
    has_fewer_keys_than_rows,
    has_no_keys,
    has_sinks,
    has_window,
    is_decode,
    mask_over_e4m3,
    only_fewer_keys_than_rows,
    only_rows_before_the_first_tile,
    only_where_a_mask_hides_every_key,
    only_without_keys,
    sink_of_minus_infinity_and_fewer_keys_than_rows,
    unscaled_e4m3_shows,
    window_over_several_rows,
)
from lab.checks.run.verdicts import Outcome
from lab.gpus import Capability
from lab.provenance import version_of
from lab.workloads.attention_case import Contents
from lab.workloads.interfaces import ATTENTION, Interface


@dataclass(frozen=True)
class KnownFailure:
    """One entry.

    Attributes:
        implementation: its name.
        capability: (major, minor) of the GPU that it was seen on; another kind runs other kernels. None: a CPU.
        checks: keys of the checks that show it.
        wrong: pattern of the sentences it explains, searched for.
        where: whether it explains what was wrong in a case, given the case and the sentence.
        finding: the page and heading that describes it, "path#heading", with its reproduction.
        package: the kernel's package, by its name on the package index; "" where releases are not told apart.
        releases: of the package, that it was seen in.
    """

    implementation: str
    capability: Capability | None
    checks: tuple[str, ...]
    wrong: str
    where: Callable[[Any, str], bool]
    finding: str
    package: str = ""
    releases: tuple[str, ...] = ()


def known(
    verdict: CaseVerdict,
    ledger: Sequence[KnownFailure],
    capability: Capability | None,
    release_of: Callable[[str], str | None] = version_of,
) -> CaseVerdict:
    """Return the verdict of a case, told to be KNOWN if the ledger explains every sentence of what was wrong.

    Args:
        verdict: of a case on such a GPU.
        ledger: the entries.
        capability: (major, minor) of the GPU; None: a CPU.
        release_of: returns the installed release of a package, or None.
    """
    if verdict.outcome is not Outcome.WRONG:
        return verdict
    entries = [
        entry
        for entry in ledger
        if verdict.interface in ATTENTION  # no entry is about another function
        and entry.implementation == verdict.implementation
        and entry.capability == capability
        and verdict.check in entry.checks
        and _is_installed(entry, release_of)
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


def _is_installed(entry: KnownFailure, release_of: Callable[[str], str | None]) -> bool:
    """Return True if a release is installed that the entry is about; a build's own mark, such as "+cu130", is no part of it."""
    release = release_of(entry.package) if entry.package else ""
    return not entry.package or (release is not None and release.partition("+")[0] in entry.releases)


def _on_hopper(peer: str, package: str, release: str) -> dict[str, Any]:
    """Return an entry's fields for another package's kernels, as `lab.kernels.peers` has them, in a release on SM90."""
    return {
        "implementation": f"lab.kernels.peers.{peer}",
        "capability": (9, 0),
        "package": package,
        "releases": (release,),
    }


FINDINGS = "results/nvidia-h200/findings.md"
DRY_RUN = "results/blackwell-dry-run/README.md"
NO_KEY = f"{DRY_RUN}#rows-that-see-no-key-keep-what-was-in-the-output"
BEFORE_0616 = ("0.6.0", "0.6.6", "0.6.12", "0.6.14")  # FlashInfer's, as judged; 0.6.16 repaired both findings
TRTLLM: dict[str, Any] = {"implementation": "lab.kernels.trtllm", "capability": (9, 0)}
PEERS = "results/nvidia-h200/peers.md"
VLLM = _on_hopper("vllm_triton", "vllm", "0.33.0")
SGLANG = _on_hopper("sglang_triton", "sglang", "0.5.23")
FLEX = _on_hopper("flex_attention", "torch", "2.11.0")
FA4 = _on_hopper("flash_attention_4", "flash-attn-4", "4.0.0b36")
FA2 = _on_hopper("flashinfer_paged:fa2", "flashinfer-python", "0.7.2.post1")
# FA3 is what the module without a name of a backend runs on this GPU.
FA3 = [_on_hopper(f"flashinfer_paged{backend}", "flashinfer-python", "0.7.2.post1") for backend in (":fa3", "")]
B200: dict[str, Any] = {"implementation": "lab.dry_run.b200", "capability": None}

KNOWN_FAILURES: tuple[KnownFailure, ...] = (
    KnownFailure(
        **TRTLLM,
        checks=("K2", "K11", "K13", "K18"),
        wrong="vectors are wrong|are not finite",
        where=lambda case, sentence: is_decode(case, sentence) and only_fewer_keys_than_rows(case, sentence),
        finding=f"{FINDINGS}#3-xqa-is-wrong-for-a-request-with-fewer-keys-than-query-tokens",
    ),
    KnownFailure(
        **TRTLLM,
        checks=("K18",),
        wrong="vectors are wrong.*: rows that see no key must be zero",
        where=lambda case, sentence: is_decode(case, sentence) and only_where_a_mask_hides_every_key(case, sentence),
        finding=f"{FINDINGS}#14-xqa-gives-the-mean-of-a-tile-of-values-to-a-row-whose-mask-hides-every-key",
    ),
    KnownFailure(
        **TRTLLM,
        checks=("K2",),
        wrong="vectors are wrong|are not finite",
        where=lambda case, sentence: is_decode(case, sentence) and case.contents is Contents.LOW,
        finding=f"{FINDINGS}#4-xqa-gives-no-finite-output-when-every-logit-of-a-row-is-below-about--100000",
    ),
    KnownFailure(
        **TRTLLM,
        checks=("K4",),
        wrong="^dead cells of NAN",
        where=lambda case, sentence: case.interface is Interface.CONTEXT,
        finding=f"{FINDINGS}#5-fmha_v2-multiplies-the-tail-of-the-last-v-page-by-zero",
    ),
    KnownFailure(
        **TRTLLM,
        checks=("K2", "K18"),
        wrong="vectors are wrong|are not finite",
        where=lambda case, sentence: case.interface is Interface.CONTEXT and only_without_keys(case, sentence),
        finding=f"{FINDINGS}#6-fmha_v2-leaves-the-rows-of-a-request-without-keys-unwritten",
    ),
    KnownFailure(
        **TRTLLM,
        checks=("K4",),
        wrong="^pages of NAN before the window",
        where=has_window,
        finding=f"{FINDINGS}#8-xqa-and-fmha_v2-multiply-keys-before-the-window-by-zero",
    ),
    KnownFailure(
        **TRTLLM,
        checks=("K4",),
        wrong="^dead cells of NAN",
        where=lambda case, sentence: is_decode(case, sentence) and case.kv_dtype == E4M3 and case.q_lens[0] == 1,
        finding=f"{FINDINGS}#9-xqa-with-e4m3-kv-multiplies-the-tail-of-the-last-v-page-by-zero",
    ),
    KnownFailure(
        **TRTLLM,
        checks=("K1", "K2", "K3", "K4", "K5", "K7", "K9", "K10", "K11", "K12", "K13", "K14", "K18", "M1", "S1"),
        wrong="vectors are wrong|are not finite|the bits of rows",
        where=window_over_several_rows,
        finding=f"{FINDINGS}#12-xqa-before-0616-hides-only-whole-tiles-before-the-window-from-several-query-tokens",
        package="flashinfer-python",
        releases=BEFORE_0616,
    ),
    KnownFailure(
        **TRTLLM,
        checks=("K9", "K11", "K18"),
        wrong="vectors are wrong",
        where=mask_over_e4m3,
        finding=f"{FINDINGS}#13-xqa-before-0616-with-e4m3-kv-takes-every-draft-mask-for-causal",
        package="flashinfer-python",
        releases=BEFORE_0616,
    ),
    KnownFailure(
        **B200,
        checks=("K2", "K11", "K13", "K18", "M2"),
        wrong="vectors are wrong|are not finite",
        where=only_fewer_keys_than_rows,
        finding=NO_KEY,
    ),
    KnownFailure(  # whose other shape has requests that the case does not tell
        **B200,
        checks=("K6",),
        wrong="^another shape: .*: rows that see no key must be zero",
        where=lambda case, sentence: True,
        finding=NO_KEY,
    ),
    KnownFailure(
        **B200,
        checks=("K2", "K18"),
        wrong="LSEs are wrong",
        where=lambda case, sentence: has_fewer_keys_than_rows(case),
        finding=NO_KEY,
    ),
    KnownFailure(
        **B200,
        checks=("K2",),
        wrong="LSEs are wrong: row [0-9]+ head [0-9]+ is inf,",
        where=lambda case, sentence: case.contents is Contents.LOW and case.sinks,
        finding=f"{DRY_RUN}#the-lse-is-infinite-where-a-sink-is-far-above-every-logit",
    ),
    KnownFailure(
        **VLLM,
        checks=("K2", "K13", "K18"),
        wrong="vectors are wrong|are not finite",
        where=only_without_keys,
        finding=f"{PEERS}#1-vllms-kernel-leaves-the-rows-of-a-request-without-keys-unwritten-where-it-splits-keys",
    ),
    KnownFailure(
        **VLLM,
        checks=("K2", "K11", "K18"),
        wrong="vectors are wrong.*: rows that see no key must be zero|are not finite",
        where=only_fewer_keys_than_rows,
        finding=f"{PEERS}#9-vllms-kernel-divides-0-by-0-in-a-row-that-sees-no-key",
    ),
    KnownFailure(
        **FA2,
        checks=("K2", "K13", "K18"),
        wrong="vectors are wrong|LSEs are wrong",
        where=only_rows_before_the_first_tile,
        finding=f"{PEERS}#2-flashinfers-fa2-leaves-the-causal-mask-out-where-a-tile-of-rows-begins-before-the-first-key",
    ),
    *(
        entry
        for fa3 in FA3
        for entry in (
            KnownFailure(
                **fa3,
                checks=("K2", "K18"),
                wrong="vectors are wrong|are not finite|LSEs are wrong: row [0-9]+ head [0-9]+ is nan,",
                where=sink_of_minus_infinity_and_fewer_keys_than_rows,
                finding=f"{PEERS}#3-flashinfers-fa3-gives-nan-for-a-row-without-keys-and-a-sink-of-minus-infinity",
            ),
            KnownFailure(
                **fa3,
                checks=("K2", "K18"),
                wrong="LSEs are wrong: row [0-9]+ head [0-9]+ is -inf,",
                where=lambda case, sentence: has_sinks(case) and has_no_keys(case),
                finding=f"{PEERS}#4-flashinfers-fa3-leaves-the-sink-out-of-the-lse-of-a-request-without-keys",
            ),
            KnownFailure(
                **fa3,
                checks=("K4",),
                wrong="^pages of NAN before the window",
                where=has_window,
                finding=f"{PEERS}#5-flashinfers-fa3-and-flashattention-4-multiply-keys-before-the-window-by-zero",
            ),
        )
    ),
    KnownFailure(
        **FA4,
        checks=("K4",),
        wrong="^pages of NAN before the window",
        where=has_window,
        finding=f"{PEERS}#5-flashinfers-fa3-and-flashattention-4-multiply-keys-before-the-window-by-zero",
    ),
    KnownFailure(
        **FA4,
        checks=("K2",),
        wrong="LSEs are wrong: row [0-9]+ head [0-9]+ is inf,",
        where=lambda case, sentence: case.contents is Contents.LOW and case.sinks,
        finding=f"{PEERS}#6-the-lse-of-flashattention-4-is-infinite-where-a-sink-is-far-above-every-logit",
    ),
    KnownFailure(
        **FLEX,
        checks=("K4",),
        wrong="^dead cells of NAN|^pages of NAN before the window",
        where=lambda case, sentence: True,
        finding=f"{PEERS}#7-flex_attention-multiplies-hidden-values-by-zero",
    ),
    KnownFailure(
        **SGLANG,
        checks=("K2", "K11", "K18"),
        wrong="vectors are wrong",
        where=unscaled_e4m3_shows,
        finding=f"{PEERS}#8-sglangs-kernels-round-to-e4m3-without-a-scale-over-an-e4m3-cache",
    ),
    KnownFailure(
        **SGLANG,
        checks=("K8",),
        wrong="^the row .* by itself: .*vectors are wrong",
        where=lambda case, sentence: case.dtype == torch.float16 and case.group == 1,
        finding=f"{PEERS}#10-sglangs-decode-kernel-rounds-each-product-of-a-query-and-a-key-where-every-query-head-has-its-own-kv-head",
    ),
)
