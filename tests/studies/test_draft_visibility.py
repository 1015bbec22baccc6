"""What a draft step's query sees, against the rule said in plain words."""

import json
from pathlib import Path

import pytest
import torch

from lab.metadata.engine.lengths import DraftAttention
from studies.draft_visibility import look
from tests.commands.command import run

CPU = torch.device("cpu")


@pytest.mark.parametrize("attention", [DraftAttention.MHA, DraftAttention.MLA_WITH_OFFSET])
def test_with_an_offset_a_step_sees_the_prefix_the_draft_so_far_and_itself(attention: DraftAttention) -> None:
    for sight in look(attention, [31, 0, 7], 5, CPU):
        assert sight.seen == tuple(range(sight.own_position + 1))
        assert sight.unseen == ()


def test_without_one_a_step_sees_the_prefix_alone() -> None:
    sights = look(DraftAttention.MLA, [31, 32, 7], 5, CPU)
    assert [sight.step for sight in sights] == [step for step in range(4) for _ in range(3)]
    for sight in sights:
        assert sight.seen == tuple(range(sight.prefix_len))
        assert sight.unseen == tuple(range(sight.prefix_len, sight.own_position + 1))


def test_what_the_code_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="exceed 50 tokens"):
        look(DraftAttention.MHA, [47], 4, CPU)


def test_the_command_line_prints_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sights.json"
    assert run(f"experiments draft-visibility --prefix-len 5 --steps 3 --out {out}") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].endswith("does not see: none")
    assert any("mla  step 1" in line and line.endswith("does not see: 5, 6") for line in printed)
    recorded = json.loads(out.read_text())
    assert len(recorded["sights"]) == 6
    assert recorded["environment"]["packages"]["torch"]
