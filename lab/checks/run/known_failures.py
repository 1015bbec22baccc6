"""Known failures: what is wrong, of which kernel on which GPU, and the page that describes it.

An entry is the only way in which a check passes in spite of a failure. It is narrow: one implementation on one kind of GPU, in
the releases that were seen if it names any, one check, the cases that its conditions name, and only what its pattern matches of
what was wrong.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lab.checks.run.known_failure_conditions import (
    Condition,
    has_a_kv_head_per_query_head,
    has_fewer_keys_than_rows,
    has_low_logits,
    has_no_keys,
    has_sinks,
    has_window,
    is_context,
    is_decode,
    is_fp16,
    is_one_row_over_e4m3,
    mask_over_e4m3,
    only_fewer_keys_than_rows,
    only_rows_before_the_first_tile,
    only_where_a_mask_hides_every_key,
    only_without_keys,
    sink_of_minus_infinity_and_fewer_keys_than_rows,
    unscaled_e4m3_shows,
    window_over_several_rows,
)
from lab.checks.run.verdicts import CaseVerdict, Outcome
from lab.gpus import Capability
from lab.provenance import version_of
from lab.workloads.interfaces import ATTENTION


class FailingKernel(NamedTuple):
    """What fails.

    Attributes:
        implementations: its names.
        capability: (major, minor) of the GPU that it was seen on; another kind runs other kernels. None: a CPU.
        package: the kernel's package, by its name on the package index; "" where releases are not told apart.
        releases: of the package, that it was seen in.
    """

    implementations: tuple[str, ...]
    capability: Capability | None
    package: str = ""
    releases: tuple[str, ...] = ()

    def is_installed(self, release_of: Callable[[str], str | None]) -> bool:
        """Tell whether a release is installed that failed; a build's own mark, such as "+cu130", is ignored."""
        release = release_of(self.package) if self.package else ""
        return not self.package or (release is not None and release.partition("+")[0] in self.releases)


@dataclass(frozen=True)
class KnownFailure:
    """One entry.

    Attributes:
        kernel: what fails.
        checks: keys of the checks that show it.
        wrong: pattern of the sentences it explains, searched for.
        where: conditions, which must all hold of the case and the sentence.
        finding: the page and heading that describes it, "path#heading", with its reproduction.
    """

    kernel: FailingKernel
    checks: tuple[str, ...]
    wrong: str
    where: tuple[Condition, ...]
    finding: str

    def explains(self, verdict: CaseVerdict, sentence: str) -> bool:
        """Tell whether the entry explains a sentence of what was wrong with a case."""
        return bool(re.search(self.wrong, sentence)) and all(holds(verdict.case, sentence) for holds in self.where)


def known(
    verdict: CaseVerdict,
    failures: Sequence[KnownFailure],
    capability: Capability | None,
    release_of: Callable[[str], str | None] = version_of,
) -> CaseVerdict:
    """Return the verdict of a case, KNOWN if known failures explain every sentence of what was wrong.

    Args:
        verdict: of a case on such a GPU.
        failures: the known ones.
        capability: (major, minor) of the GPU; None: a CPU.
        release_of: returns the installed release of a package, or None.
    """
    if verdict.outcome is not Outcome.WRONG or verdict.interface not in ATTENTION:  # no entry is about another function
        return verdict
    entries = [
        entry
        for entry in failures
        if verdict.implementation in entry.kernel.implementations
        and entry.kernel.capability == capability
        and verdict.check in entry.checks
        and entry.kernel.is_installed(release_of)
    ]
    cited = []
    for sentence in verdict.judged.wrongs:
        found = next((entry for entry in entries if entry.explains(verdict, sentence)), None)
        if found is None:
            return verdict
        cited.append(found.finding)
    return replace(
        verdict, finding="; ".join(dict.fromkeys(cited)), judged=replace(verdict.judged, outcome=Outcome.KNOWN)
    )


def _on_hopper(package: str, release: str, *peers: str) -> FailingKernel:
    """Return another package's kernels, as `lab.kernels.peers` has them, in a release on SM90."""
    return FailingKernel(tuple(f"lab.kernels.peers.{peer}" for peer in peers), (9, 0), package, (release,))


FINDINGS = "results/nvidia-h200/findings.md"
DRY_RUN = "results/blackwell-dry-run/README.md"
NO_KEY = f"{DRY_RUN}#rows-that-see-no-key-keep-what-was-in-the-output"
PEERS = "results/nvidia-h200/peers.md"
BEFORE_WINDOW = f"{PEERS}#5-flashinfers-fa3-and-flashattention-4-multiply-keys-before-the-window-by-zero"
TRTLLM = FailingKernel(("lab.kernels.trtllm",), (9, 0))
# As judged; 0.6.16 repaired both failures.
TRTLLM_BEFORE_0616 = FailingKernel(*TRTLLM[:2], "flashinfer-python", ("0.6.0", "0.6.6", "0.6.12", "0.6.14"))
VLLM = _on_hopper("vllm", "0.33.0", "vllm_triton")
SGLANG = _on_hopper("sglang", "0.5.23", "sglang_triton")
FLEX = _on_hopper("torch", "2.11.0", "flex_attention")
FA4 = _on_hopper("flash-attn-4", "4.0.0b36", "flash_attention_4")
FA2 = _on_hopper("flashinfer-python", "0.7.2.post1", "flashinfer_paged:fa2")
# FA3 is what the module without a name of a backend runs on this GPU.
FA3 = _on_hopper("flashinfer-python", "0.7.2.post1", "flashinfer_paged:fa3", "flashinfer_paged")
B200 = FailingKernel(("lab.dry_run.b200",), None)

WRONG_VECTORS = "vectors are wrong|are not finite"

KNOWN_FAILURES: tuple[KnownFailure, ...] = (
    KnownFailure(
        TRTLLM,
        checks=("K2", "K11", "K13", "K18"),
        wrong=WRONG_VECTORS,
        where=(is_decode, only_fewer_keys_than_rows),
        finding=f"{FINDINGS}#3-xqa-is-wrong-for-a-request-with-fewer-keys-than-query-tokens",
    ),
    KnownFailure(
        TRTLLM,
        checks=("K18",),
        wrong="vectors are wrong.*: rows that see no key must be zero",
        where=(is_decode, only_where_a_mask_hides_every_key),
        finding=f"{FINDINGS}#14-xqa-gives-the-mean-of-a-tile-of-values-to-a-row-whose-mask-hides-every-key",
    ),
    KnownFailure(
        TRTLLM,
        checks=("K2",),
        wrong=WRONG_VECTORS,
        where=(is_decode, has_low_logits),
        finding=f"{FINDINGS}#4-xqa-gives-no-finite-output-when-every-logit-of-a-row-is-below-about--100000",
    ),
    KnownFailure(
        TRTLLM,
        checks=("K4",),
        wrong="^dead cells of NAN",
        where=(is_context,),
        finding=f"{FINDINGS}#5-fmha_v2-multiplies-the-tail-of-the-last-v-page-by-zero",
    ),
    KnownFailure(
        TRTLLM,
        checks=("K2", "K18"),
        wrong=WRONG_VECTORS,
        where=(is_context, only_without_keys),
        finding=f"{FINDINGS}#6-fmha_v2-leaves-the-rows-of-a-request-without-keys-unwritten",
    ),
    KnownFailure(
        TRTLLM,
        checks=("K4",),
        wrong="^pages of NAN before the window",
        where=(has_window,),
        finding=f"{FINDINGS}#8-xqa-and-fmha_v2-multiply-keys-before-the-window-by-zero",
    ),
    KnownFailure(
        TRTLLM,
        checks=("K4",),
        wrong="^dead cells of NAN",
        where=(is_decode, is_one_row_over_e4m3),
        finding=f"{FINDINGS}#9-xqa-with-e4m3-kv-multiplies-the-tail-of-the-last-v-page-by-zero",
    ),
    KnownFailure(
        TRTLLM_BEFORE_0616,
        checks=("K1", "K2", "K3", "K4", "K5", "K7", "K9", "K10", "K11", "K12", "K13", "K14", "K18", "M1", "S1"),
        wrong="vectors are wrong|are not finite|the bits of rows",
        where=(window_over_several_rows,),
        finding=f"{FINDINGS}#12-xqa-before-0616-hides-only-whole-tiles-before-the-window-from-several-query-tokens",
    ),
    KnownFailure(
        TRTLLM_BEFORE_0616,
        checks=("K9", "K11", "K18"),
        wrong="vectors are wrong",
        where=(mask_over_e4m3,),
        finding=f"{FINDINGS}#13-xqa-before-0616-with-e4m3-kv-takes-every-draft-mask-for-causal",
    ),
    KnownFailure(
        B200,
        checks=("K2", "K11", "K13", "K18", "M2"),
        wrong=WRONG_VECTORS,
        where=(only_fewer_keys_than_rows,),
        finding=NO_KEY,
    ),
    KnownFailure(  # whose other shape has requests that the case does not tell
        B200,
        checks=("K6",),
        wrong="^another shape: .*: rows that see no key must be zero",
        where=(),
        finding=NO_KEY,
    ),
    KnownFailure(
        B200,
        checks=("K2", "K18"),
        wrong="LSEs are wrong",
        where=(has_fewer_keys_than_rows,),
        finding=NO_KEY,
    ),
    KnownFailure(
        B200,
        checks=("K2",),
        wrong="LSEs are wrong: row [0-9]+ head [0-9]+ is inf,",
        where=(has_low_logits, has_sinks),
        finding=f"{DRY_RUN}#the-lse-is-infinite-where-a-sink-is-far-above-every-logit",
    ),
    KnownFailure(
        VLLM,
        checks=("K2", "K13", "K18"),
        wrong=WRONG_VECTORS,
        where=(only_without_keys,),
        finding=f"{PEERS}#1-vllms-kernel-leaves-the-rows-of-a-request-without-keys-unwritten-where-it-splits-keys",
    ),
    KnownFailure(
        VLLM,
        checks=("K2", "K11", "K18"),
        wrong="vectors are wrong.*: rows that see no key must be zero|are not finite",
        where=(only_fewer_keys_than_rows,),
        finding=f"{PEERS}#9-vllms-kernel-divides-0-by-0-in-a-row-that-sees-no-key",
    ),
    KnownFailure(
        FA2,
        checks=("K2", "K13", "K18"),
        wrong="vectors are wrong|LSEs are wrong",
        where=(only_rows_before_the_first_tile,),
        finding=f"{PEERS}#2-flashinfers-fa2-leaves-the-causal-mask-out-where-a-tile-of-rows-begins-before-the-first-key",
    ),
    KnownFailure(
        FA3,
        checks=("K2", "K18"),
        wrong="vectors are wrong|are not finite|LSEs are wrong: row [0-9]+ head [0-9]+ is nan,",
        where=(sink_of_minus_infinity_and_fewer_keys_than_rows,),
        finding=f"{PEERS}#3-flashinfers-fa3-gives-nan-for-a-row-without-keys-and-a-sink-of-minus-infinity",
    ),
    KnownFailure(
        FA3,
        checks=("K2", "K18"),
        wrong="LSEs are wrong: row [0-9]+ head [0-9]+ is -inf,",
        where=(has_sinks, has_no_keys),
        finding=f"{PEERS}#4-flashinfers-fa3-leaves-the-sink-out-of-the-lse-of-a-request-without-keys",
    ),
    KnownFailure(
        FA3,
        checks=("K4",),
        wrong="^pages of NAN before the window",
        where=(has_window,),
        finding=BEFORE_WINDOW,
    ),
    KnownFailure(
        FA4,
        checks=("K4",),
        wrong="^pages of NAN before the window",
        where=(has_window,),
        finding=BEFORE_WINDOW,
    ),
    KnownFailure(
        FA4,
        checks=("K2",),
        wrong="LSEs are wrong: row [0-9]+ head [0-9]+ is inf,",
        where=(has_low_logits, has_sinks),
        finding=f"{PEERS}#6-the-lse-of-flashattention-4-is-infinite-where-a-sink-is-far-above-every-logit",
    ),
    KnownFailure(
        FLEX,
        checks=("K4",),
        wrong="^dead cells of NAN|^pages of NAN before the window",
        where=(),
        finding=f"{PEERS}#7-flex_attention-multiplies-hidden-values-by-zero",
    ),
    KnownFailure(
        SGLANG,
        checks=("K2", "K11", "K18"),
        wrong="vectors are wrong",
        where=(unscaled_e4m3_shows,),
        finding=f"{PEERS}#8-sglangs-kernels-round-to-e4m3-without-a-scale-over-an-e4m3-cache",
    ),
    KnownFailure(
        SGLANG,
        checks=("K8",),
        wrong="^the row .* by itself: .*vectors are wrong",
        where=(is_fp16, has_a_kv_head_per_query_head),
        finding=f"{PEERS}#10-sglangs-decode-kernel-rounds-each-product-of-a-query-and-a-key-where-every-query-head-has-its-own-kv-head",
    ),
)
