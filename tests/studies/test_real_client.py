"""An engine that nobody here wrote, if it is installed: its tokens with the references in place of its own attention."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.commands.command import run

needs_engine = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "psutil")),
    reason="transformers and psutil are not installed: pip install '.[engine]'",
)


@needs_engine
def test_tokens_are_those_of_the_engines_own_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "real_client.json"
    assert run(f"experiments real-client --requests 4 --longest 201 --new-tokens 2 --out {out}") == 0
    recorded = json.loads(out.read_text())
    eager, sdpa, ours = recorded["served"]
    assert (eager["same"], sdpa["same"], ours["same"]) == (4, 4, 4)
    assert ours["attention"] == "lab.references"
    assert ours["calls"] == len(recorded["calls"]) >= 4
    assert "lab.references" in capsys.readouterr().out


def test_without_the_engine_the_command_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else object())
    assert run(f"experiments real-client --out {tmp_path / 'x.json'}") == 2
    assert "lab experiments real-client needs transformers" in (said := capsys.readouterr().err)
    assert "'.[engine]'" in said
    assert not (tmp_path / "x.json").exists()
