"""The modes and their rows, as SGLang 0.5.13 numbers and treats them."""

import pytest

from lab.metadata import ForwardMode

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


@pytest.mark.parametrize("mode", ForwardMode)
def test_repr_can_be_pasted_into_a_test(mode: ForwardMode) -> None:
    assert eval(repr(mode)) is mode
