"""Which check kills which mutant, as recorded in results/mutants.json.gz: that it is whole, and that it holds."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from corpus.kernels import MUTANTS, kernel
from corpus.matrix import markdown, ranges_of, write_matrix
from corpus.models.lists import Lists
from corpus.models.metadata import DSV4Builder, MHABuilder, MLABuilder, MLAPrefillBuilder
from corpus.models.ragged import DSV4Decode, Ragged, SelectedSplitKV
from corpus.models.split_kv import SplitKV
from corpus.upstream_rules import UPSTREAM_RULES
from corpus.wrong import DSV4, DSV4_METADATA, LISTS, MHA_METADATA, MLA_METADATA, MLA_PREFILL, RAGGED
from lab.checks.properties import checks
from lab.checks.properties.check import Check
from lab.checks.record import read_expression
from lab.checks.run.judging import run_case
from lab.checks.run.verdicts import BROKEN, Judged, Outcome
from lab.files import read_json, without_suffix

pytestmark = pytest.mark.usefixtures("one_thread")
RECORDED = Path(__file__).parents[2] / "results" / "mutants.json.gz"
CPU = torch.device("cpu")
# What is right of each kind; SplitKV of attention.
RIGHT: dict[str, Any] = {
    LISTS: Lists,
    MHA_METADATA: MHABuilder,
    MLA_METADATA: MLABuilder,
    MLA_PREFILL: MLAPrefillBuilder,
    DSV4_METADATA: DSV4Builder,
    RAGGED: Ragged,
    DSV4: DSV4Decode,
}
RECORD = "add a wrong kernel that the check finds, and run `lab mutants --out results/mutants.json.gz`"
NAMES = [record["mutant"] for record in read_json(RECORDED)]
SAMPLED = 1 / 6  # of the mutants of each module: what is judged without --whole-corpus
# Pools of gigabytes, if virtual: only where no other check finds the mutant.
SLOW_CHECKS = ("K15",)


@functools.cache
def records() -> dict[str, dict[str, Any]]:
    return {record["mutant"]: record for record in read_json(RECORDED)}


@functools.cache
def check_of(key: str) -> Check:
    return next(check for check in checks() if check.key == key)


@functools.cache  # several mutants are recorded with one case
def judged_right_model(interface: str, selects: bool, key: str, case: str) -> Judged:
    """Judge what is right of an interface, or of rows that select entries, by a check in a recorded case."""
    check = check_of(key)
    right = SelectedSplitKV if selects else RIGHT.get(interface, SplitKV)
    return run_case(right(), check, read_expression(case), CPU, ranges_of(check))


def test_every_mutant_is_in_the_matrix_and_killed() -> None:
    assert sorted(NAMES) == sorted(MUTANTS), RECORD
    for name, record in records().items():
        described = (record["defect"], record["source"], tuple(record["interface"]))
        assert described == (kernel(name).defect, kernel(name).source, kernel(name).interface)
    assert [name for name, record in records().items() if not record["kills"]] == []


def test_every_check_kills_a_mutant() -> None:
    killing = {key for record in records().values() for key in record["kills"]}
    assert killing == {check.key for check in checks()}, RECORD


def test_the_table_is_the_matrix() -> None:
    assert without_suffix(RECORDED).with_suffix(".md").read_text() == markdown(list(records().values()))


@pytest.mark.parametrize(
    ("upstream", "cell"),
    [(None, ""), ([], "–"), ([0, 3], "0 3"), (list(range(len(UPSTREAM_RULES))), "all")],
)
def test_the_last_column_has_the_rules_that_accept_a_mutant(upstream: list[int] | None, cell: str) -> None:
    row = markdown([{"mutant": "one", "kills": {}, "upstream": upstream}]).splitlines()[-1]
    assert row.split("|")[-2].strip() == cell


def sample() -> set[str]:
    """Return some mutants of each module, the same in each run."""
    modules: dict[str, list[str]] = {}
    for name, mutant in MUTANTS.items():
        modules.setdefault(mutant.make.__module__, []).append(name)
    draw = random.Random(0)
    return {name for names in modules.values() for name in draw.sample(names, max(1, round(len(names) * SAMPLED)))}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        chosen = set(NAMES) if metafunc.config.getoption("--whole-corpus") else sample()
        metafunc.parametrize("name", [name for name in NAMES if name in chosen])


def test_a_recorded_kill_holds_and_the_right_model_lives(name: str) -> None:
    """One kill of each mutant, by another check from mutant to mutant so that all checks have their turn."""
    kills = records()[name]["kills"]
    keys = sorted(
        kills, key=lambda key: (key in SLOW_CHECKS, (list(kills).index(key) - NAMES.index(name)) % len(kills))
    )
    for key in keys:  # some mutants remember addresses, and chance has a part in which check meets them
        check, case = check_of(key), read_expression(kills[key]["case"])
        if run_case(kernel(name).implementation(), check, case, CPU, ranges_of(check)).outcome in BROKEN:
            break
    else:
        pytest.fail(f"no recorded kill of {name} holds: {kills}")
    made = kernel(name).make
    selects = isinstance(made, type) and issubclass(made, SelectedSplitKV)
    judged = judged_right_model(kernel(name).interface[0], selects, key, kills[key]["case"])
    assert judged.outcome is Outcome.RIGHT, judged.wrongs


def test_a_mutant_is_recorded_as_it_was(tmp_path: Path) -> None:
    name = "own_token_missing"  # few checks judge the lists of a draft
    assert write_matrix(tmp_path / "mutants.json", [kernel(name)], workers=1)
    (record,) = read_json(tmp_path / "mutants.json")
    assert (record["mutant"], set(record["kills"])) == (name, set(records()[name]["kills"]))


def test_the_whole_matrix(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if not request.config.getoption("--whole-corpus"):
        pytest.skip("about an hour of two cores: run with --whole-corpus")
    assert write_matrix(tmp_path / "mutants.json", [*MUTANTS.values()], workers=2)
    for record in json.loads((tmp_path / "mutants.json").read_text()):
        assert set(record["kills"]) == set(records()[record["mutant"]]["kills"])
        assert record["upstream"] == records()[record["mutant"]]["upstream"]
