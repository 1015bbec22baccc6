"""List the known failures of kernels: the kernel, the GPU, the cases that are wrong, and the page that describes the failure.

The outcome of a wrong case becomes KNOWN, instead of WRONG, if known failures explain every sentence about its errors.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.parameters.models import Configuration
from lab.checks.parameters.paged_calls import attention_case
from lab.checks.parameters.values import KeyOffsets, Mask, Sinks
from lab.checks.run.verdicts import CaseVerdict, Outcome
from lab.gpus import Capability
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.mha.vllm import Engine
from lab.provenance import version_of
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Contents, HeadPages
from lab.workloads.interfaces import PAGED_CALLS

# Returns whether something is true of a case and of a sentence about one of its errors
Predicate = Callable[[Any, str], bool]


class FailingKernel(NamedTuple):
    """A kernel that is known to fail: the implementations that run it, and the GPU and releases in which it fails."""

    implementations: tuple[str, ...]  #: names of implementations that run the kernel
    #: (major, minor) of the GPU on which it failed, because other GPUs run other kernels; None: a CPU
    capability: Capability | None
    package: str = ""  #: the kernel's package, by its name on the package index; "": the failure depends on no release
    releases: tuple[str, ...] = ()  #: releases of the package in which it failed

    def is_installed(self, release_of: Callable[[str], str | None]) -> bool:
        """Return True if `release_of(package)`, the installed release, is one of `releases`, or if `package` is ""."""
        release = release_of(self.package) if self.package else ""
        # Without a suffix such as "+cu130".
        return not self.package or (release is not None and release.partition("+")[0] in self.releases)


@dataclass(frozen=True)
class KnownFailure:
    """The wrong results that one failure of a kernel explains: their checks, the texts of their errors, and their cases."""

    kernel: FailingKernel  #: the kernel that fails
    checks: tuple[str, ...]  #: keys of the checks that show the failure, such as "K2"
    wrong: str  #: regular expression that is searched in the sentences that the entry explains
    where: tuple[Predicate, ...] = ()  #: predicates of the case and the sentence, which must all be true

    def explains(self, case: Any, sentence: str) -> bool:
        return bool(re.search(self.wrong, sentence)) and all(holds(case, sentence) for holds in self.where)


# From "path#heading", a page and the heading that describes a failure and its reproduction, to the entries of the failure.
Findings = Mapping[str, Sequence[KnownFailure]]


def known(
    verdict: CaseVerdict,
    findings: Findings,
    capability: Capability | None,
    release_of: Callable[[str], str | None] = version_of,
) -> CaseVerdict:
    """Return the verdict with the outcome KNOWN if it is WRONG and known failures explain all sentences about its errors.
    Otherwise, return the verdict unchanged.

    Args:
        verdict: the verdict on a case.
        findings: the known failures, by page and heading.
        capability: (major, minor) of the GPU on which the case was judged; None for a CPU.
        release_of: returns the installed release of a package, or None.
    """
    # All entries are about functions with a paged cache.
    if verdict.outcome is not Outcome.WRONG or verdict.interface not in PAGED_CALLS:
        return verdict
    entries = [
        (finding, entry)
        for finding, entries_of_it in findings.items()
        for entry in entries_of_it
        if verdict.implementation in entry.kernel.implementations
        and entry.kernel.capability == capability
        and verdict.check in entry.checks
        and entry.kernel.is_installed(release_of)
    ]
    cited: dict[str, None] = {}
    for sentence in verdict.judged.wrongs:
        found = next((finding for finding, entry in entries if entry.explains(verdict.case, sentence)), None)
        if found is None:
            return verdict
        cited[found] = None
    return replace(verdict, finding="; ".join(cited), judged=replace(verdict.judged, outcome=Outcome.KNOWN))


def wrong_requests(sentence: str) -> list[int]:
    # From words such as "of requests [0, 3]".
    named = re.search(r"of requests \[([0-9, ]*)\]", sentence)
    return [*map(int, re.findall("[0-9]+", named[1]))] if named else []


def case_of(case: Any) -> Any:
    return attention_case(case, Ranges()) if isinstance(case, Configuration) else case


def of_case(holds: Callable[[AttentionCase], bool]) -> Predicate:
    return lambda case, sentence: holds(case_of(case))


def some_request(is_so: Callable[[Any, int], bool]) -> Predicate:
    return of_case(lambda case: any(is_so(case, request) for request in range(len(case.kv_lens))))


def all_wrong_requests(is_so: Callable[[Any, int], bool], *, some_if_unnamed: bool = False) -> Predicate:
    """Return a predicate that is true if `is_so(case, request)` is true for each request that the error sentence names. If it
    names no request, the predicate is true only if `some_if_unnamed` is True and `is_so` is true for some request of the case.
    """

    def holds(case: Any, sentence: str) -> bool:
        requests = wrong_requests(sentence)
        if not requests:
            return some_if_unnamed and some_request(is_so)(case, sentence)
        return all(is_so(case_of(case), request) for request in requests)

    return holds


def _has_no_keys(case: Any, request: int) -> bool:
    return bool(case.kv_lens[request] == 0)


def _has_fewer_keys_than_rows(case: Any, request: int) -> bool:
    seen = getattr(case, "seen_lens", case.kv_lens)  # rows of a forward pass may see only some of the request's keys
    return bool(seen[request] < case.q_lens[request])


has_no_keys, only_without_keys = some_request(_has_no_keys), all_wrong_requests(_has_no_keys)
has_fewer_keys_than_rows = some_request(_has_fewer_keys_than_rows)
only_fewer_keys_than_rows = all_wrong_requests(_has_fewer_keys_than_rows)
# FA2 omits the causal mask for tiles of 32 rows before the first key.
only_rows_before_the_first_tile = all_wrong_requests(
    lambda case, request: 32 <= case.kv_lens[request] < case.q_lens[request], some_if_unnamed=True
)
has_heads_without_pages = of_case(lambda case: getattr(case, "head_pages", None) is HeadPages.SOME_NONE)
has_window = of_case(lambda case: case.window_left >= 0)
has_sinks = of_case(lambda case: case.sinks)
has_low_logits = of_case(lambda case: case.contents is Contents.LOW)
has_a_kv_head_per_query_head = of_case(lambda case: case.group == 1)
is_decode = of_case(lambda case: case.interface is AttentionCall.DECODE)
is_context = of_case(lambda case: case.interface is AttentionCall.CONTEXT)
is_fp16 = of_case(lambda case: case.dtype == torch.float16)
is_one_row_over_e4m3 = of_case(lambda case: case.kv_dtype == E4M3 and case.q_lens[0] == 1)


def several_rows(case: Any, sentence: str) -> bool:
    # Of a wrong decode call. Check K11 makes calls with other numbers of rows than its case, and names them in its sentences.
    mode = getattr(case, "mode", None)
    if mode is not None:  # a forward pass or a graph replay
        return getattr(mode, "forward_mode", mode) in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)
    named = re.search("mask .*of [0-9]+ rows", sentence)
    return is_decode(case, sentence) and (max(case_of(case).q_lens) > 1 or bool(named))


def window_over_several_rows(case: Any, sentence: str) -> bool:
    call = case_of(case)
    windowed = getattr(call, "sliding_window", False) or getattr(call, "window_left", -1) >= 0
    return several_rows(case, sentence) and bool(windowed or re.search(r"\bwindow", sentence))


def mask_over_e4m3(case: Any, sentence: str) -> bool:
    # A decode call with several rows per request, an e4m3 cache and a draft mask that is not causal.
    if isinstance(case, Configuration):
        is_masked = case.get("mask", Mask.NONE) not in (Mask.NONE, Mask.CAUSAL)
    else:
        replayed = "^(the first replay|a replay|an eager call between)"  # of K9, which passes a mask with several rows
        is_masked = bool(re.search(f"^(?!causal|no mask).*mask .*of [0-9]+ rows|{replayed}", sentence))
    return is_masked and getattr(case_of(case), "kv_dtype", None) == E4M3 and several_rows(case, sentence)


def only_where_a_mask_hides_every_key(case: Any, sentence: str) -> bool:
    # The mask hides each row's own key, and the wrong requests have no keys before the draft.
    hides = isinstance(case, Configuration) and case.get("mask") == Mask.OWN_BIT_CLEAR
    only_rows = all_wrong_requests(lambda call, request: call.kv_lens[request] <= call.q_lens[request])
    return hides and only_rows(case, sentence)


def sink_of_minus_infinity_and_fewer_keys_than_rows(case: Any, sentence: str) -> bool:
    has_axes = isinstance(case, Configuration)
    some = case.get("sinks") == Sinks.SOME_MINUS_INFINITY if has_axes else "minus infinity" in sentence
    return some and all_wrong_requests(_has_fewer_keys_than_rows, some_if_unnamed=True)(case, sentence)


def offsets_count_pages(case: Any, sentence: str) -> bool:
    # `cum_seq_lens_kv` counts pages, as in vLLM's passes, and the wrong requests have more keys than pages.
    if isinstance(case, Configuration):
        counts_pages = case.get("key_offsets") == KeyOffsets.PAGES
    else:
        has_long_rows = all_wrong_requests(lambda case, request: case.q_lens[request] > case.decode_threshold)
        counts_pages = getattr(case, "engine", None) is Engine.VLLM and has_long_rows(case, sentence)
    more_keys_than_pages = all_wrong_requests(lambda call, request: call.kv_lens[request] > 1 < call.page_size)
    return counts_pages and more_keys_than_pages(case, sentence)


def unscaled_e4m3_shows(case: Any, sentence: str) -> bool:
    # Rounding to e4m3 without a scale shows in large logits (hundreds with TALL) and small weights (e**-9 with SHADED).
    call = case_of(case)
    large = re.search("^(bmm1_scale below 0|rows whose logits are far apart): ", sentence)
    return call.kv_dtype == E4M3 and (call.contents in (Contents.TALL, Contents.SHADED) or bool(large))


def _on_hopper(package: str, release: str, *peers: str) -> FailingKernel:
    return FailingKernel(tuple(f"lab.kernels.peers.{peer}" for peer in peers), (9, 0), package, (release,))


FINDINGS = "results/nvidia-h200/findings.md"
DRY_RUN = "results/blackwell-dry-run/README.md"
PEERS = "results/nvidia-h200/peers.md"
TRTLLM = FailingKernel(("lab.kernels.trtllm",), (9, 0))
# The judged releases with two failures that 0.6.16 repaired.
TRTLLM_BEFORE_0616 = FailingKernel(*TRTLLM[:2], "flashinfer-python", ("0.6.0", "0.6.6", "0.6.12", "0.6.14"))
VLLM = _on_hopper("vllm", "0.33.0", "vllm_triton")
SGLANG = _on_hopper("sglang", "0.5.23", "sglang_triton")
FLEX = _on_hopper("torch", "2.11.0", "flex_attention")
FA4 = _on_hopper("flash-attn-4", "4.0.0b36", "flash_attention_4")
FA2 = _on_hopper("flashinfer-python", "0.7.2.post1", "flashinfer_paged:fa2")
# On SM90, the module without a backend's name runs FA3 too.
FA3 = _on_hopper("flashinfer-python", "0.7.2.post1", "flashinfer_paged:fa3", "flashinfer_paged")
B200 = FailingKernel(("lab.dry_run.b200",), None)

WRONG_VECTORS = "vectors are wrong|are not finite"
NO_KEY_IS_WRONG = "vectors are wrong.*: rows that see no key must be zero"
THE_LSE_IS = "LSEs are wrong: row [0-9]+ head [0-9]+ is"

KNOWN_FAILURES: Findings = {
    f"{FINDINGS}#3-xqa-is-wrong-for-a-request-with-fewer-keys-than-query-tokens": (
        KnownFailure(TRTLLM, ("K2", "K11", "K13", "K18"), WRONG_VECTORS, (is_decode, only_fewer_keys_than_rows)),
    ),
    f"{FINDINGS}#14-xqa-gives-the-mean-of-a-tile-of-values-to-a-row-whose-mask-hides-every-key": (
        KnownFailure(TRTLLM, ("K18",), NO_KEY_IS_WRONG, (is_decode, only_where_a_mask_hides_every_key)),
    ),
    f"{FINDINGS}#4-xqa-gives-no-finite-output-when-every-logit-of-a-row-is-below-about--100000": (
        KnownFailure(TRTLLM, ("K2",), WRONG_VECTORS, (is_decode, has_low_logits)),
    ),
    f"{FINDINGS}#5-fmha_v2-multiplies-the-tail-of-the-last-v-page-by-zero": (
        KnownFailure(TRTLLM, ("K4",), "^dead cells of NAN", (is_context,)),
    ),
    f"{FINDINGS}#6-fmha_v2-leaves-the-rows-of-a-request-without-keys-unwritten": (
        KnownFailure(TRTLLM, ("K2", "K18"), WRONG_VECTORS, (is_context, only_without_keys)),
    ),
    f"{FINDINGS}#8-xqa-and-fmha_v2-multiply-keys-before-the-window-by-zero": (
        KnownFailure(TRTLLM, ("K4",), "^pages of NAN before the window", (has_window,)),
    ),
    f"{FINDINGS}#9-xqa-with-e4m3-kv-multiplies-the-tail-of-the-last-v-page-by-zero": (
        KnownFailure(TRTLLM, ("K4",), "^dead cells of NAN", (is_decode, is_one_row_over_e4m3)),
    ),
    f"{FINDINGS}#15-fmha_v2-takes-lengths-from-cum_seq_lens_kv-which-vllm-counts-in-pages": (
        KnownFailure(TRTLLM, ("K18", "M1"), WRONG_VECTORS, (offsets_count_pages,)),
    ),
    f"{FINDINGS}#12-xqa-before-0616-hides-only-whole-tiles-before-the-window-from-several-query-tokens": (
        KnownFailure(
            TRTLLM_BEFORE_0616,
            ("K1", "K2", "K3", "K4", "K5", "K7", "K9", "K10", "K11", "K12", "K13", "K14", "K18", "M1", "S1"),
            f"{WRONG_VECTORS}|the bits of rows",
            (window_over_several_rows,),
        ),
    ),
    f"{FINDINGS}#13-xqa-before-0616-with-e4m3-kv-takes-every-draft-mask-for-causal": (
        KnownFailure(TRTLLM_BEFORE_0616, ("K9", "K11", "K18"), "vectors are wrong", (mask_over_e4m3,)),
    ),
    f"{DRY_RUN}#rows-that-see-no-key-keep-what-was-in-the-output": (
        KnownFailure(B200, ("K2", "K11", "K13", "K18", "M2"), WRONG_VECTORS, (only_fewer_keys_than_rows,)),
        KnownFailure(B200, ("K1", "K3", "K7", "K9", "K10"), "must be zero", (has_heads_without_pages,)),
        # Check K6 also makes a call of another shape, whose requests are not those of the case.
        KnownFailure(B200, ("K6",), "^another shape: .*: rows that see no key must be zero"),
        KnownFailure(B200, ("K2", "K18"), "LSEs are wrong", (has_fewer_keys_than_rows,)),
    ),
    f"{DRY_RUN}#the-lse-is-infinite-where-a-sink-is-far-above-every-logit": (
        KnownFailure(B200, ("K2",), f"{THE_LSE_IS} inf,", (has_low_logits, has_sinks)),
    ),
    f"{PEERS}#1-vllms-kernel-leaves-the-rows-of-a-request-without-keys-unwritten-where-it-splits-keys": (
        KnownFailure(VLLM, ("K2", "K13", "K18"), WRONG_VECTORS, (only_without_keys,)),
    ),
    f"{PEERS}#9-vllms-kernel-divides-0-by-0-in-a-row-that-sees-no-key": (
        KnownFailure(VLLM, ("K2", "K11", "K18"), f"{NO_KEY_IS_WRONG}|are not finite", (only_fewer_keys_than_rows,)),
    ),
    f"{PEERS}#2-flashinfers-fa2-leaves-the-causal-mask-out-where-a-tile-of-rows-begins-before-the-first-key": (
        KnownFailure(FA2, ("K2", "K13", "K18"), "vectors are wrong|LSEs are wrong", (only_rows_before_the_first_tile,)),
    ),
    f"{PEERS}#3-flashinfers-fa3-gives-nan-for-a-row-without-keys-and-a-sink-of-minus-infinity": (
        KnownFailure(
            FA3, ("K2", "K18"), f"{WRONG_VECTORS}|{THE_LSE_IS} nan,", (sink_of_minus_infinity_and_fewer_keys_than_rows,)
        ),
    ),
    f"{PEERS}#4-flashinfers-fa3-leaves-the-sink-out-of-the-lse-of-a-request-without-keys": (
        KnownFailure(FA3, ("K2", "K18"), f"{THE_LSE_IS} -inf,", (has_sinks, has_no_keys)),
    ),
    f"{PEERS}#5-flashinfers-fa3-and-flashattention-4-multiply-keys-before-the-window-by-zero": (
        KnownFailure(FA3, ("K4",), "^pages of NAN before the window", (has_window,)),
        KnownFailure(FA4, ("K4",), "^pages of NAN before the window", (has_window,)),
    ),
    f"{PEERS}#6-the-lse-of-flashattention-4-is-infinite-where-a-sink-is-far-above-every-logit": (
        KnownFailure(FA4, ("K2",), f"{THE_LSE_IS} inf,", (has_low_logits, has_sinks)),
    ),
    f"{PEERS}#7-flex_attention-multiplies-hidden-values-by-zero": (
        KnownFailure(FLEX, ("K4",), "^dead cells of NAN|^pages of NAN before the window"),
    ),
    f"{PEERS}#8-sglangs-kernels-round-to-e4m3-without-a-scale-over-an-e4m3-cache": (
        KnownFailure(SGLANG, ("K2", "K11", "K18"), "vectors are wrong", (unscaled_e4m3_shows,)),
    ),
    f"{PEERS}#10-sglangs-decode-kernel-rounds-each-product-of-a-query-and-a-key-where-every-query-head-has-its-own-kv-head": (
        KnownFailure(
            SGLANG, ("K8",), "row.* of each request alone: .*vectors are wrong", (is_fp16, has_a_kv_head_per_query_head)
        ),
    ),
}
