"""The modes and their predicates, as truth tables of SGLang 0.5.13."""

import pytest

from lab.metadata import ForwardMode

MODES = [
    "EXTEND",
    "DECODE",
    "MIXED",
    "IDLE",
    "TARGET_VERIFY",
    "DRAFT_EXTEND",
    "DRAFT_EXTEND_V2",
    "PREBUILT",
    "SPLIT_PREFILL",
    "DLLM_EXTEND",
]

EXTENDS = {"EXTEND", "MIXED", "DRAFT_EXTEND", "TARGET_VERIFY", "SPLIT_PREFILL", "DLLM_EXTEND"}

PREDICATES = [
    ("is_decode_or_idle", {}, {"DECODE", "IDLE"}),
    ("is_extend", {}, EXTENDS),
    ("is_extend", {"include_draft_extend_v2": True}, EXTENDS | {"DRAFT_EXTEND_V2"}),
    ("is_draft_extend", {}, {"DRAFT_EXTEND"}),
    ("is_draft_extend", {"include_v2": True}, {"DRAFT_EXTEND", "DRAFT_EXTEND_V2"}),
    ("is_draft_extend_v2", {}, {"DRAFT_EXTEND_V2"}),
    ("is_cuda_graph", {}, {"DECODE", "TARGET_VERIFY", "IDLE", "DLLM_EXTEND"}),
    ("is_context_parallel_extend", {}, {"EXTEND", "MIXED"}),
    ("is_context_parallel_extend", {"include_draft_extend_v2": True}, {"EXTEND", "MIXED", "DRAFT_EXTEND_V2"}),
    ("is_extend_or_draft_extend_or_mixed", {}, {"EXTEND", "DRAFT_EXTEND", "MIXED", "SPLIT_PREFILL"}),
    (
        "is_extend_or_draft_extend_or_mixed",
        {"include_draft_extend_v2": True},
        {"EXTEND", "DRAFT_EXTEND", "MIXED", "SPLIT_PREFILL", "DRAFT_EXTEND_V2"},
    ),
    ("is_extend_without_speculative", {}, EXTENDS - {"TARGET_VERIFY", "DRAFT_EXTEND"}),
    ("is_decode", {}, {"DECODE"}),
    ("is_idle", {}, {"IDLE"}),
    ("is_mixed", {}, {"MIXED"}),
    ("is_target_verify", {}, {"TARGET_VERIFY"}),
    ("is_prebuilt", {}, {"PREBUILT"}),
    ("is_split_prefill", {}, {"SPLIT_PREFILL"}),
    ("is_dllm_extend", {}, {"DLLM_EXTEND"}),
]


def test_members_are_numbered_as_in_0_5_13() -> None:
    assert [(mode.name, mode.value) for mode in ForwardMode] == list(zip(MODES, range(1, 11), strict=True))


@pytest.mark.parametrize(("name", "flags", "expected"), PREDICATES)
def test_predicate(name: str, flags: dict[str, bool], expected: set[str]) -> None:
    assert {mode.name for mode in ForwardMode if getattr(mode, name)(**flags)} == expected


@pytest.mark.parametrize("mode", ForwardMode)
def test_repr_can_be_pasted_into_a_test(mode: ForwardMode) -> None:
    assert eval(repr(mode)) is mode
