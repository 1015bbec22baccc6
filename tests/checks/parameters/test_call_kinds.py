"""Special kinds of calls are declared once, and each check of single calls has cases of them within its ranges."""

import math
from dataclasses import replace

import pytest
import torch

from lab import references
from lab.calls.problem import NVFP4, AttentionCall
from lab.checks import Level, Outcome, Ranges
from lab.checks.parameters.attention import balanced
from lab.checks.parameters.paged_axes import RANKS
from lab.checks.properties import checks
from lab.checks.properties.check import BLOCK_SPARSE, KINDS, NVFP4_CACHE, ONE_RANK, SELECTED_ENTRIES, Check
from lab.checks.run.judging import run_case
from lab.workloads.attention_case import AttentionCase, Contents, Entries, HeadPages, Storage
from lab.workloads.inputs.attention import new_pools

SHORT = replace(Ranges(), longest=200)
# What a case of a kind has.
HAS = {
    NVFP4_CACHE: lambda case: case.kv_dtype == NVFP4 and case.arithmetic is None,
    SELECTED_ENTRIES: lambda case: case.top_k > 0,
    BLOCK_SPARSE: lambda case: case.head_pages is not None,
    ONE_RANK: lambda case: case.rank is not None and case.storage.kv_layout == "HND",
}
SINGLE_CALLS = [check for check in checks() if check.key in {f"K{number}" for number in range(1, 16)}]


@pytest.mark.parametrize("check", SINGLE_CALLS, ids=lambda check: check.key)
def test_each_check_of_single_calls_has_cases_of_each_kind(check: Check) -> None:
    lacks = dict.fromkeys(("K8", "K11"), (ONE_RANK,)).get(check.key, ())
    for interface in AttentionCall:
        cases = [
            each
            for each in (check.cases(interface, SHORT, Level.SMOKE) if interface in check.interfaces else ())
            if isinstance(each, AttentionCase)
        ]
        for kind, has in HAS.items() if cases else ():
            assert any(map(has, cases)) == (interface in kind.interfaces and kind not in lacks)


def test_the_full_level_has_each_form_of_a_kind_and_the_smoke_level_as_many_as_are_asked() -> None:
    plain = [
        replace(case, kv_lens=(90, 80, 70), seed=7 + case.seed)
        for case in balanced(SHORT, AttentionCall.MLA_DECODE, 16)
    ]
    several = list(SELECTED_ENTRIES.cases(plain, SHORT, None))
    forms = {(case.entries, case.top_k_lens) for case in several}
    assert forms == {(each, lens) for each in Entries for lens in (False, True) if not (lens and each.has_gaps)}
    assert {case.top_k for case in several} == set(SHORT.top_ks)
    assert list(SELECTED_ENTRIES.cases(plain, SHORT, 2)) == several[:2]
    without_0 = SELECTED_ENTRIES.cases(plain, replace(SHORT, top_ks=(0, *SHORT.top_ks)), None)
    assert list(without_0) == several
    assert not list(SELECTED_ENTRIES.cases(plain, replace(SHORT, top_ks=(0,)), None))
    assert several[0].entries is list(Entries)[7 % len(forms) % len(Entries)]
    assert [replace(case, top_k=0, entries=None, top_k_lens=False) for case in several] == plain[: len(several)]
    blocks = BLOCK_SPARSE.cases(list(balanced(SHORT, AttentionCall.DECODE, 5)), SHORT, None)
    assert {case.head_pages for case in blocks} == set(HeadPages)
    for check in SINGLE_CALLS:
        cases = [
            each for each in check.cases(AttentionCall.MLA_DECODE, SHORT, Level.FULL) if isinstance(each, AttentionCase)
        ]
        assert {(case.entries, case.top_k_lens) for case in cases if case.top_k} == forms, check.key


@pytest.mark.parametrize("pages", HeadPages)
def test_k11_expects_the_pages_that_heads_select_of_unequal_rows_too(pages: HeadPages) -> None:
    (check,) = (check for check in SINGLE_CALLS if check.key == "K11")
    storage = Storage(page_size=32, kv_layout="NHD", page_seed=1)
    case = AttentionCase(
        AttentionCall.DECODE, (65, 87), (1, 1), head_pages=pages, contents=Contents.NEEDLES, seed=1, storage=storage
    )
    judged = run_case(references, check, case, torch.device("cpu"), replace(SHORT, masked_rows=(4,)))
    assert judged.outcome is Outcome.RIGHT, judged.wrongs


@pytest.mark.parametrize("interface", [AttentionCall.DECODE, AttentionCall.CONTEXT])
def test_far_pages_of_nvfp4_are_far_in_bytes(interface: AttentionCall) -> None:
    (check,) = (check for check in SINGLE_CALLS if check.key == "K15")
    cases = [case for case in check.cases(interface, SHORT, Level.SMOKE) if case.kv_dtype == NVFP4]
    pages = [math.prod(new_pools(case, 1, torch.device("cpu"))[0].shape) for case in cases]
    first_bytes = [case.storage.first_page * page for case, page in zip(cases, pages, strict=True)]
    assert [number // 2**31 for number in first_bytes] == [1, 1, 2, 2]


def test_a_kind_keeps_to_its_functions_and_to_the_ranges() -> None:
    decodes, mla = (list(balanced(SHORT, call, 3)) for call in (AttentionCall.DECODE, AttentionCall.MLA_DECODE))
    for kind in KINDS:
        assert not list(kind.cases([], SHORT, 1))
        assert bool(list(kind.cases(mla, SHORT, 1))) == (AttentionCall.MLA_DECODE in kind.interfaces)
    assert not list(NVFP4_CACHE.cases(decodes, replace(SHORT, nvfp4=(False,)), 1))
    assert not list(SELECTED_ENTRIES.cases(mla, replace(SHORT, top_ks=(0,)), None))


def test_a_form_that_a_plain_case_cannot_have_is_made_of_the_next_that_can() -> None:
    few = AttentionCase(AttentionCall.DECODE, (1, 9), (4, 4), window_left=3, sinks=True)  # fewer keys than rows
    enough = replace(few, kv_lens=(40, 41), seed=1)
    ranks = [rank for rank in RANKS.values() if rank]
    for plain, first in (([few, enough], 0), ([enough, few], 1)):
        made = list(ONE_RANK.cases(plain, SHORT, None))
        assert [case.rank for case in made] == [*ranks[first:], *ranks[:first]]
        assert {(case.kv_lens, case.window_left, case.sinks) for case in made} == {((40, 41), -1, False)}
    assert [case.rank for case in ONE_RANK.cases([few], SHORT, None)] == [(3, 4)]
