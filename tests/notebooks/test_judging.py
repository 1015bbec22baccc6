"""Notebook 7 with another mutant than the one it is committed with."""

from typing import Any

import pytest

pytest.importorskip("jupytext")
pytest.importorskip("matplotlib")

from notebooks.execute import FOLDER

DEFAULT = 'MUTANT = "verify_rows_at_last_position"'
LAST = "# A second one reads V's last page"


@pytest.mark.parametrize(
    ("mutant", "shown"),
    [("table_not_populated", "verify_rows_at_last_position"), ("finite_sentinel", "finite_sentinel")],
)
def test_the_readers_mutant_can_be_changed(mutant: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = (FOLDER / "7_judging.py").read_text(encoding="utf-8")
    assert (program.count(DEFAULT), program.count(LAST)) == (1, 1)
    names: dict[str, Any] = {"__name__": "notebook"}
    exec(program.replace(DEFAULT, f'MUTANT = "{mutant}"').partition(LAST)[0], names)
    said = capsys.readouterr().out.partition(f"{mutant}: ")[2].rpartition("found by")[2]
    assert said.count(": wrong\n") == min(len(names["record"]["kills"]), names["MOST_SHOWN"])
    assert ": right" not in said.replace("without the defect: right", "")
    assert names["shown"] == shown
