"""A recorded finding explains what it says and nothing else, and is written down where it says."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks import AttentionCase, CaseVerdict, Configuration, Outcome
from lab.checks.case_run import CaseRun, Result
from lab.checks.properties import checks
from lab.checks.properties.k08_decomposition import single_rows
from lab.checks.run import known_failures as findings
from lab.checks.run.known_failures import KNOWN_FAILURES, FailingKernel, KnownFailure, Predicate, known, wrong_requests
from lab.checks.run.verdicts import Judged
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.mha.vllm import Engine
from lab.provenance import PACKAGES
from lab.workloads.attention_case import Contents
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.attention import build_attention
from tests.checks.small import decoding

ROOT = Path(__file__).parents[3]
CASE = AttentionCase(AttentionCall.DECODE, (1, 0, 20), (2, 2, 2))
ENTRIES = [entry for entries in KNOWN_FAILURES.values() for entry in entries]
KERNEL = FailingKernel(("some.kernel", "its.other.name"), (9, 0))
ENTRY = KnownFailure(KERNEL, ("K2", "K4"), "NaN", (lambda case, wrong: case.group == 4,))
FOUND = {"page.md#heading": [ENTRY]}
VERDICT = CaseVerdict(
    "some.kernel", "K4", AttentionCall.DECODE, CASE, "cuda:0", Judged(Outcome.WRONG, ("NaN in row 3",))
)


def wrong(*sentences: str) -> CaseVerdict:
    return replace(VERDICT, judged=Judged(Outcome.WRONG, sentences))


def test_an_entry_that_matches_makes_a_wrong_case_known_and_is_cited() -> None:
    told = known(VERDICT, FOUND, (9, 0))
    assert told.outcome is Outcome.KNOWN
    assert told.finding == "page.md#heading"
    assert told.judged.wrongs == VERDICT.judged.wrongs


def test_a_failure_of_single_rows_explains_the_sentences_of_check_k8() -> None:
    case = AttentionCase(AttentionCall.DECODE, (20, 9), (3, 3), group=1, dtype=torch.float16, kv_dtype=torch.float16)
    rows = [variant.what for variant in single_rows(build_attention(case, torch.device("cpu")))]
    judged = Judged(Outcome.WRONG, tuple(f"{row}: 2 of 4 vectors are wrong, of requests [0]" for row in rows))
    verdict = CaseVerdict("lab.kernels.peers.sglang_triton", "K8", AttentionCall.DECODE, case, "cuda:0", judged)
    assert len(rows) == 3
    assert known(verdict, KNOWN_FAILURES, (9, 0), {"sglang": "0.5.23"}.get).outcome is Outcome.KNOWN


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": KERNEL._replace(implementations=("another.kernel",))},
        {"kernel": KERNEL._replace(capability=(10, 0))},
        {"kernel": KERNEL._replace(capability=None)},
        {"checks": ("K1", "K2")},
        {"wrong": "infinity"},
        {"where": (lambda case, wrong: case.group == 5,)},
        {"where": (lambda case, wrong: "row 4" in wrong,)},
        {"where": (lambda case, wrong: case.group == 4, lambda case, wrong: "row 4" in wrong)},
    ],
)
def test_an_entry_of_something_else_explains_nothing(changes: dict[str, Any]) -> None:
    assert known(VERDICT, {"page.md#heading": [replace(ENTRY, **changes)]}, (9, 0)) == VERDICT


VERIFY = AttentionCase(AttentionCall.DECODE, (40, 50), (4, 4))
WRONG = "3 of 9 vectors are wrong, of requests [0]: row 0"


def of_requests(requests: str) -> str:
    return f"the call: 3 of 9 vectors are wrong, of requests [{requests}]: row 0"


def decode(**values: Any) -> Configuration:
    return Configuration(AttentionCall.DECODE, values)


def context(**values: Any) -> Configuration:
    return Configuration(AttentionCall.CONTEXT, values)


E4M3_VERIFY, E4M3_CASE = replace(VERIFY, kv_dtype=E4M3), replace(CASE, kv_dtype=E4M3)
ONE_ROW, PROMPTS = (1, 1), AttentionCase(AttentionCall.CONTEXT, (64, 1, 129), (65, 2, 17))
SINKS, LSES = "sinks of minus infinity", "384 LSEs are wrong: row 0 head 0 is 6.8, not 1.7 (base 2)"
MIXED_PASS = ForwardCase(ForwardMode.EXTEND, "tiny", (3, 4), (2, 9), engine=Engine.VLLM, decode_threshold=2)
FEWER = {"lengths": "fewer than rows", "q_len": 4}
TABLE: dict[Predicate, list[tuple[Any, str, bool]]] = {
    findings.window_over_several_rows: [
        (VERIFY, f"the call: {WRONG}", False),
        (replace(VERIFY, window_left=3), f"the call: {WRONG}", True),
        (replace(VERIFY, window_left=0), f"the call: {WRONG}", True),
        (replace(VERIFY, window_left=3, q_lens=ONE_ROW), f"the call: {WRONG}", False),
        (replace(VERIFY, window_left=3, interface=AttentionCall.CONTEXT), f"the call: {WRONG}", False),
        (VERIFY, f"window_left: {WRONG}", True),
        (VERIFY, f"B, the other window: {WRONG}", True),
        (replace(VERIFY, q_lens=ONE_ROW), f"window_left: {WRONG}", False),
        (replace(VERIFY, q_lens=ONE_ROW), f"tree mask of 4 rows within a window: {WRONG}", True),
        (decode(window_left=15, q_len=4), f"the call: {WRONG}", True),
        (decode(window_left=15), f"the call: {WRONG}", False),
        (ForwardCase(ForwardMode.TARGET_VERIFY, "tiny", (3,), (4,)), f"the pass: {WRONG}", False),
        (ForwardCase(ForwardMode.TARGET_VERIFY, "gpt-oss-120b", (3,), (4,), sliding_window=True), WRONG, True),
        (ForwardCase(ForwardMode.EXTEND, "gpt-oss-120b", (3,), (4,), sliding_window=True), WRONG, False),
    ],
    findings.mask_over_e4m3: [
        (VERIFY, f"full mask of 4 rows: {WRONG}", False),
        (E4M3_VERIFY, f"full mask of 4 rows: {WRONG}", True),
        (replace(E4M3_VERIFY, q_lens=ONE_ROW), f"mask that differs by request of 4 rows: {WRONG}", True),
        (E4M3_VERIFY, f"causal mask of 4 rows: {WRONG}", False),
        (E4M3_VERIFY, f"no mask of 4 rows: {WRONG}", False),
        (E4M3_VERIFY, f"bmm1_scale: {WRONG}", False),
        (E4M3_VERIFY, f"a replay after the mask changed: {WRONG}", True),
        (replace(E4M3_VERIFY, q_lens=ONE_ROW), f"a replay with requests: {WRONG}", False),
        (decode(dtypes="bf16/e4m3", mask="tree", q_len=4), WRONG, True),
        (decode(dtypes="bf16/e4m3", mask="causal", q_len=4), WRONG, False),
        (decode(dtypes="bf16/bf16", mask="tree", q_len=4), WRONG, False),
    ],
    findings.offsets_count_pages: [
        (context(key_offsets="pages"), WRONG, True),
        (context(key_offsets="pages"), "3 of 9 vectors are wrong", False),
        (context(key_offsets="pages", page_size=1), WRONG, False),
        (context(key_offsets="pages", lengths="none first"), WRONG, False),
        (context(key_offsets="pages", lengths="none first"), of_requests("1"), True),
        (context(), WRONG, False),
        (MIXED_PASS, of_requests("1"), True),
        (MIXED_PASS, of_requests("0, 1"), False),  # request 0 is decoded
        (replace(MIXED_PASS, page_size=1), of_requests("1"), False),
        (replace(MIXED_PASS, prefix_lens=(3, 0), page_size=8), of_requests("1"), True),  # 9 keys in 2 pages
        (ForwardCase(ForwardMode.EXTEND, "tiny", (3, 4), (1, 9)), of_requests("1"), False),
    ],
    findings.only_where_a_mask_hides_every_key: [
        (decode(q_len=4, mask="own bit clear"), of_requests("0"), True),
        (decode(q_len=4, mask="own bit clear"), of_requests("0, 2"), False),  # request 2 has keys before its rows
        (decode(q_len=4, mask="own bit clear"), of_requests(""), False),
        (decode(q_len=4, mask="tree"), of_requests("0"), False),
        (decode(q_len=4), of_requests("0"), False),
    ],
    findings.sink_of_minus_infinity_and_fewer_keys_than_rows: [
        (CASE, f"{SINKS}: 3 of 9 vectors are wrong, of requests [0, 1]: row 0", True),
        (CASE, f"{SINKS}: 3 of 9 vectors are wrong, of requests [2]: row 4", False),
        (CASE, f"{SINKS}: 4 LSEs are wrong: row 0 head 0 is nan, not -inf (base 2)", True),
        (CASE, of_requests("0"), False),
        (decode(sinks="some minus infinity", **FEWER), "", True),
        (decode(sinks="per head", **FEWER), "", False),
        (decode(sinks="some minus infinity"), "", False),
    ],
    findings.unscaled_e4m3_shows: [
        (replace(E4M3_CASE, contents=Contents.TALL), "the call: 3 of 9", True),
        (E4M3_CASE, "the call: 3 of 9", False),
        (E4M3_CASE, "rows whose logits are far apart: 3 of 9", True),
        (replace(CASE, contents=Contents.TALL), "the call: 3 of 9", False),
        (decode(dtypes="bf16/e4m3", contents="shaded"), "the call: 3 of 9", True),
        (decode(dtypes="bf16/bf16", contents="shaded"), "the call: 3 of 9", False),
    ],
    findings.only_fewer_keys_than_rows: [
        (CASE, of_requests("0, 1"), True),
        (CASE, of_requests("1"), True),
        (CASE, of_requests("0, 2"), False),
        (CASE, of_requests(""), False),
        (replace(CASE, kv_lens=(2, 0, 20)), of_requests("0"), False),
        (decode(**FEWER), of_requests("0, 2"), True),
    ],
    findings.only_without_keys: [
        (CASE, of_requests("0, 1"), False),
        (CASE, of_requests("1"), True),
        (CASE, of_requests(""), False),
        (context(lengths="none first"), of_requests("0"), True),
        (context(lengths="none first"), of_requests("1"), False),
    ],
    findings.has_no_keys: [(CASE, "", True), (VERIFY, "", False)],
    findings.has_fewer_keys_than_rows: [
        (CASE, "", True),
        (replace(VERIFY, kv_lens=(4, 3)), "", True),
        (VERIFY, "", False),
    ],
    findings.only_rows_before_the_first_tile: [
        (PROMPTS, of_requests("0"), True),
        (PROMPTS, of_requests("0, 1"), False),  # whose one key fills no tile
        (PROMPTS, of_requests("2"), False),
        (PROMPTS, LSES, True),
        (replace(PROMPTS, kv_lens=(32, 1, 129)), of_requests("0"), True),
        (replace(PROMPTS, kv_lens=(31, 1, 129)), of_requests("0"), False),
        (CASE, LSES, False),
    ],
    findings.has_window: [(replace(CASE, window_left=0), "", True), (CASE, "", False)],
    findings.is_one_row_over_e4m3: [
        (replace(E4M3_CASE, q_lens=(1, 1, 1)), "", True),
        (E4M3_CASE, "", False),
        (CASE, "", False),
    ],
}


@pytest.mark.parametrize(
    ("holds", "case", "sentence", "explained"),
    [(holds, *row) for holds, rows in TABLE.items() for row in rows],
    ids=lambda each: getattr(each, "__name__", None) if callable(each) else None,
)
def test_a_condition_holds(holds: Predicate, case: Any, sentence: str, explained: bool) -> None:
    assert holds(case, sentence) is explained


def test_every_sentence_must_be_explained() -> None:
    both = wrong("NaN in row 3", "it changed its query")
    assert known(both, FOUND, (9, 0)) == both
    other = FOUND | {"page.md#other": [replace(ENTRY, wrong="changed its query")]}
    assert known(both, other, (9, 0)).finding == "page.md#heading; page.md#other"


@pytest.mark.parametrize(
    ("installed", "is_known"),
    [("4.0.1", True), ("4.0.1+cu130", True), ("4.0.2", False), ("4.0.10", False), (None, False)],
)
def test_an_entry_of_releases_is_of_these_alone(installed: str | None, is_known: bool) -> None:
    entry = replace(ENTRY, kernel=KERNEL._replace(package="kernels", releases=("4.0.0", "4.0.1")))
    told = known(VERDICT, {"page.md#heading": [entry]}, (9, 0), {"kernels": installed}.get)
    assert (told.outcome is Outcome.KNOWN) is is_known


def test_what_is_wrong_with_a_ragged_call_is_no_known_finding() -> None:
    case = Configuration(AttentionCall.RAGGED_CONTEXT, {})
    found = replace(wrong(WRONG), implementation="lab.dry_run.b200", check="K18", interface=case.interface, case=case)
    assert known(found, KNOWN_FAILURES, None) == found


def test_no_failure_is_ever_known() -> None:
    failed = replace(VERDICT, judged=Judged(Outcome.FAILED, ("it raised RuntimeError: NaN",)))
    assert known(failed, FOUND, (9, 0)) == failed


def test_the_requests_are_read_from_the_judges_own_sentence() -> None:
    run = CaseRun(decoding(lambda **_: None), CASE, torch.device("cpu"))
    truth = run.build().truth()
    out = truth.expected.clone()
    out[0], out[4, 1] = 7.0, 7.0
    run.expect_close("the call", Result(out, None), truth)
    assert wrong_requests(run.wrongs[0]) == [0, 2]
    assert wrong_requests("it changed its query") == []


@pytest.mark.parametrize(
    "kernel", [entry.kernel for entry in ENTRIES if entry.kernel.package], ids=lambda kernel: kernel.package
)
def test_an_entry_of_a_package_names_what_reports_name(kernel: FailingKernel) -> None:
    assert kernel.package in PACKAGES
    assert kernel.releases


@pytest.mark.parametrize("finding", KNOWN_FAILURES, ids=lambda finding: finding.split("#")[-1][:30])
def test_every_finding_is_a_heading_of_a_page_that_exists(finding: str) -> None:
    page, anchor = finding.split("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {anchor_of(heading) for heading in headings}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_is_of_checks_of_the_catalogue(entry: KnownFailure) -> None:
    assert set(entry.checks) <= {check.key for check in checks()}
    assert entry.checks
    assert not re.search(entry.wrong, ""), "it would explain everything"


def anchor_of(heading: str) -> str:
    """As GitHub makes it: lower case, punctuation but hyphens and underscores gone, a hyphen for each space."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_anchors_are_github_s() -> None:
    assert anchor_of("4. XQA's `q_len`: below -100,000") == "4-xqas-q_len-below--100000"
