"""The modes and their rows, as SGLang 0.5.13 numbers and treats them."""

import copy
import pickle

import pytest

from lab.metadata import ForwardMode

EXTENDS = {"EXTEND", "MIXED", "DRAFT_EXTEND", "TARGET_VERIFY", "SPLIT_PREFILL", "DLLM_EXTEND"}

# One line per mode, in the order of their numbers: query rows, uncounted tokens, calls of MHA and MLA, whether a graph runs it.
# RAGGED_VERIFY is the lab's own.
ROWS = {
    "EXTEND": ("NEW_TOKENS", "NONE", "CONTEXT", "RAGGED_CONTEXT", False),
    "DECODE": ("ONE", "DRAFT_STEP", "DECODE", "MLA_DECODE", True),
    "MIXED": ("NEW_TOKENS", "NONE", "CONTEXT", "RAGGED_CONTEXT", False),
    "IDLE": ("ONE", "DRAFT_STEP", "DECODE", "MLA_DECODE", False),
    "TARGET_VERIFY": ("DRAFT_TOKENS", "QUERY_ROWS", "DECODE", "MLA_DECODE", True),
    "DRAFT_EXTEND": ("ACCEPTED", "NONE", "CONTEXT", "MLA_DECODE", True),
    "DRAFT_EXTEND_V2": ("FIXED", "NONE", "DECODE", "MLA_DECODE", True),
    "PREBUILT": ("NONE", "NONE", None, None, False),
    "SPLIT_PREFILL": ("NEW_TOKENS", "NONE", "CONTEXT", "RAGGED_CONTEXT", False),
    "DLLM_EXTEND": ("NEW_TOKENS", "NONE", "CONTEXT", "RAGGED_CONTEXT", False),
    "RAGGED_VERIFY": ("VERIFIED", "QUERY_ROWS", "DECODE", "MLA_DECODE", True),
}


def test_members_are_numbered_as_in_0_5_13() -> None:
    found = [(mode.value, mode.name) for mode in ForwardMode]
    assert found == list(enumerate(ROWS, 1)), (
        "ROWS above has a row for each mode, from SGLang's code and not from the lab's"
    )


@pytest.mark.parametrize("mode", ForwardMode)
def test_row(mode: ForwardMode) -> None:
    found = (mode.query_rows, mode.uncounted, mode.mha_call, mode.mla_call)
    assert (*(each and each.name for each in found), mode.in_graph) == ROWS[mode.name]


def test_properties_of_the_rows() -> None:
    def modes(name: str) -> set[str]:
        return {mode.name for mode in ForwardMode if getattr(mode, name)}

    assert modes("is_prefill") == EXTENDS - {"TARGET_VERIFY", "DRAFT_EXTEND"}
    assert modes("extends_draft") == {"DRAFT_EXTEND", "DRAFT_EXTEND_V2"}
    assert {mode.name for mode in ForwardMode if mode.query_rows.in_extend_seq_lens} == (
        EXTENDS - {"TARGET_VERIFY"} | {"DRAFT_EXTEND_V2", "RAGGED_VERIFY"}
    )
    uniform = {mode.name for mode in ForwardMode if mode.query_rows.are_uniform}
    assert uniform == {"DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"}
    assert [mode.name for mode in ForwardMode if mode.query_rows.are_bounded] == ["RAGGED_VERIFY"]
    assert [mode.name for mode in ForwardMode if mode.query_rows.are_unequal_drafts] == [
        "DRAFT_EXTEND",
        "RAGGED_VERIFY",
    ]


def test_a_mode_survives_copies() -> None:
    assert pickle.loads(pickle.dumps(ForwardMode.MIXED)) is ForwardMode(3)
    assert copy.deepcopy(ForwardMode.MIXED) is ForwardMode.MIXED


@pytest.mark.parametrize("mode", ForwardMode)
def test_repr_can_be_pasted_into_a_test(mode: ForwardMode) -> None:
    assert eval(repr(mode)) is mode
