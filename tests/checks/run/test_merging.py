"""Shards of a run judge all of it together, and their reports make one."""

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import CaseVerdict, Level, Outcome, Report, judge
from lab.checks.parameters.circumstances import OF_ALL_SHARDS, circumstances
from lab.checks.parameters.coverage import tuples_by_outcome
from lab.checks.parameters.covering import Model, Point, Shard, Values
from lab.checks.parameters.models import MODELS
from lab.checks.record import ReportError, merged, read_case
from lab.exit_status import ExitStatus
from lab.ranges import Ranges
from lab.workloads.interfaces import Interface, MetadataFunction
from tests.checks.parameters.rounds import declined_if, verdicts_in_rounds
from tests.checks.small import SMALL, declining_if, decoding

NAMES = ("trtllm_batch_decode_with_kv_cache",)
SETTINGS = {"ranges": SMALL, "device": "cpu", "discover": False, "functions": NAMES}


def in_shards(folder: Path, kernel: Any, count: int, **settings: Any) -> list[Path]:
    paths = [folder / f"{number}.json" for number in range(1, count + 1)]
    for number, path in enumerate(paths, 1):
        judge(kernel, out=path, shard=f"{number}/{count}", **SETTINGS | settings)
    return paths


def outcomes(report: Report) -> dict[str, Outcome]:
    return {repr((each.check, each.case)): each.outcome for each in report.verdicts}


def doubled_with_lse(**arguments: Any) -> Any:
    out = references.trtllm_batch_decode_with_kv_cache(**arguments)
    return (2 * out[0], out[1]) if arguments.get("return_lse") else out


def test_shards_of_the_smoke_level_judge_each_case_once_and_are_of_equal_size(tmp_path: Path) -> None:
    settings = {"only": ["K2", "K13", "L1"], "drawn": 3, "functions": [*NAMES, "draft_kv_indices"]}
    whole = judge(references, **SETTINGS | settings)
    paths = in_shards(tmp_path, references, 3, **settings)
    united = merged(paths, tmp_path / "all.json")
    assert outcomes(united) == outcomes(whole)
    sizes = [len(json.loads(path.read_text())["cases"]) for path in paths]
    assert sum(sizes) == len(whole.verdicts)
    assert max(sizes) - min(sizes) <= 2
    assert [each.number for each in united.verdicts] == list(range(1, len(whole.verdicts) + 1))
    assert united.is_right
    assert united.coverages == whole.coverages
    assert str(united) == str(whole)
    assert united.functions == whole.functions


def test_shards_of_the_smoke_level_divide_the_values_of_combinations(tmp_path: Path) -> None:
    settings = {"only": "K18", "drawn": 0, "functions": ["draft_kv_indices"]}
    whole = judge(references, **SETTINGS | settings)
    paths = in_shards(tmp_path, references, 3, **settings)
    united = merged(paths)
    assert max(len(json.loads(path.read_text())["cases"]) for path in paths) < 0.65 * len(whole.verdicts)
    assert united.is_right
    assert [each.values for each in united.coverages] == [each.values for each in whole.coverages]


def test_a_shard_says_that_it_is_one_and_fails_only_for_its_own_cases() -> None:
    report = judge(references, shard="2/2", only="K13", **SETTINGS)
    assert report.exit_status is ExitStatus.DONE
    assert str(report).startswith("Right in ") or "Not judged as a whole: this is shard 2/2" in str(report)
    assert "Right for all" not in str(report)
    nothing = judge(declining_if(lambda **_: True), shard="2/2", only="K13", drawn=0, **SETTINGS)
    assert nothing.verdicts
    assert nothing.exit_status is ExitStatus.NOT_JUDGED


FUNCTION = MetadataFunction.DRAFT_KV_INDICES
MODEL = MODELS[FUNCTION](SMALL)
FIRST, SECOND, *_ = MODEL.axes
FEW_TOGETHER = ("sinks", "causal", "lse", "window_left", "skip_softmax", "out", "bmm1_scale")
DECLINED: dict[str, Callable[[Point], bool]] = {
    "nothing": lambda point: False,
    "a value": lambda point: point[FIRST] == MODEL.axes[FIRST][-1],
    "a pair": lambda point: all(point[axis] != MODEL.default[axis] for axis in (FIRST, SECOND)),
    "a default": lambda point: point[FIRST] == MODEL.default[FIRST],
}


def all_rounds(
    declines: Callable[[Point], bool], shard: Shard, level: Level = Level.FULL, function: Interface = FUNCTION
) -> list[CaseVerdict]:
    return verdicts_in_rounds(declined_if(lambda case: declines(case.values)), level, function, shard)


@pytest.mark.parametrize("declines", DECLINED)
def test_shards_of_the_full_level_cover_the_pairs_that_one_run_covers(declines: str) -> None:
    """Each shard follows its own verdicts: what a kernel declines is tried again in the shard whose goal it is."""
    whole = all_rounds(DECLINED[declines], Shard())
    shards = [all_rounds(DECLINED[declines], Shard(number, 3)) for number in range(1, 4)]
    of_whole, _ = tuples_by_outcome(MODEL, whole)
    of_shards, _ = tuples_by_outcome(MODEL, itertools.chain(*shards))
    assert of_shards >= of_whole
    assert max(map(len, shards)) < 0.75 * len(whole)


@pytest.mark.parametrize("takes_one_group", [False, True])
def test_shards_of_the_smoke_level_try_again_what_one_run_tries_again(takes_one_group: bool) -> None:
    """A kernel that takes few forms with long requests declines cases of several forms: each form is tried by itself. One that
    takes no group but one has circumstances with this group.
    """
    function, is_long = AttentionCall.RAGGED_CONTEXT, SMALL.long_requests[0]
    model = MODELS[function](SMALL)

    def declines(point: Point) -> bool:
        if takes_one_group and point["group"] not in (1, 8):
            return True
        return point["lengths"] == is_long and sum(point[axis] != model.default[axis] for axis in FEW_TOGETHER) > 1

    def judged(verdicts: Iterable[CaseVerdict]) -> list[set[Values]]:
        taken = replace(model, axes={**model.axes, "group": (1, 8)}) if takes_one_group else model
        of_each = [(each, [one for one in verdicts if each.has(one.case.values)]) for each in circumstances(taken)]
        return [tuples_by_outcome(each.model, found)[0] & {*each.goals} for each, found in of_each]

    whole = all_rounds(declines, Shard(), Level.SMOKE, function)
    shards = [all_rounds(declines, Shard(number, 3), Level.SMOKE, function) for number in range(1, 4)]
    of_shards = judged([*itertools.chain(*shards)])
    assert all(some >= every for some, every in zip(of_shards, judged(whole), strict=True))
    of_full = judged(all_rounds(declines, Shard(), Level.FULL, function))
    assert all(more >= every for more, every in zip(of_full, judged(whole), strict=True))
    assert max(map(len, shards)) < 0.6 * len(whole)
    values, of_values = tuples_by_outcome(model, whole)[0], tuples_by_outcome(model, itertools.chain(*shards))[0]
    assert {value for value in values if len(value) == 1} <= of_values


def test_every_shard_judges_the_values_that_decide_the_circumstances() -> None:
    for call in AttentionCall:
        model = MODELS[call](Ranges())
        for each in circumstances(model):
            fixed = {axis for axis, values in each.model.axes.items() if values != model.axes[axis]}
            assert {axis for axis in fixed if each.model.default[axis] != model.default[axis]} <= {*OF_ALL_SHARDS}


def test_each_goal_is_of_one_shard() -> None:
    axes = {name: tuple(range(5)) for name in "abcd"}
    shards = [set(Model(axes, shard=Shard(number, 4)).tuples()) for number in range(1, 5)]
    every = list(Model(axes).tuples())
    assert sorted(map(repr, set().union(*shards))) == sorted(map(repr, every))
    assert sum(map(len, shards)) == len(every)
    assert min(map(len, shards)) > len(every) / 8


@pytest.mark.parametrize("text", ["3", "0/8", "9/8", "3/8/1", "-1/2", "a/b", "1/0"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a shard: give its number"):
        judge(references, shard=text, **SETTINGS)


def test_the_quick_level_has_no_shards() -> None:
    with pytest.raises(ValueError, match="the quick level is not divided"):
        judge(references, shard="1/2", level=Level.QUICK, **SETTINGS)


def test_a_wrong_case_of_one_shard_makes_all_wrong_and_is_judged_again_by_its_number(tmp_path: Path) -> None:
    kernel = decoding(doubled_with_lse)
    paths = in_shards(tmp_path, kernel, 2, only="K1", drawn=0)
    whole, out = judge(kernel, only="K1", drawn=0, **SETTINGS), tmp_path / "all.json"
    united = merged(paths, out)
    united.write(out)
    assert outcomes(united) == outcomes(whole)
    assert united.exit_status is ExitStatus.WRONG
    first = next(united.wrong)
    assert read_case(out, first.number).case == first.case
    assert first.recorded_in == str(out)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The reports of a run in two shards."""
    return [path.read_text() for path in in_shards(tmp_path_factory.mktemp("shards"), references, 2, only="K15")]


@pytest.fixture
def paths(shards: list[str], tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"{number}.json" for number in range(1, len(shards) + 1)]
    for path, text in zip(found, shards, strict=True):
        path.write_text(text)
    return found


def changed(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"level": "full"}, "are not of one run: the level differs"),
        ({"implementation": "other"}, "the kernel differs"),
        ({"ranges": "Ranges(seed=3)"}, "the ranges differs"),
        ({"run": "other"}, "the sources of the kernel or the lab"),
        ({"shard": ""}, "is no report of a shard"),
        ({"shard": "1/2"}, "are both shard 1/2"),
        ({"diagnosis": None}, "has not ended: run shard 2/2 again"),
        ({"shard": "2/3"}, "is shard 1/2, and .* is shard 2/3"),
        ({"cases": [{"number": 5}]}, r"2\.json: case 5: it is no report"),
    ],
)
def test_damaged_reports_and_those_of_other_runs_are_refused(
    entries: dict[str, Any], sentence: str, paths: list[Path]
) -> None:
    changed(paths[1], **entries)
    with pytest.raises(ReportError, match=sentence):
        merged(paths)


def test_a_missing_shard_is_named(paths: list[Path]) -> None:
    changed(paths[0], shard="2/3")
    with pytest.raises(ReportError, match="of 3 shards, 1 and 3 are missing"):
        merged(paths[:1])


def test_cases_that_a_shard_left_out_are_left_out_of_the_whole(tmp_path: Path) -> None:
    paths = in_shards(tmp_path, references, 2, only="K13")
    judge(references, out=paths[1], shard="2/2", only="K13", most_seconds=0.0, fresh=True, **SETTINGS)
    united = merged(paths)
    assert united.left_out > 0
    assert united.exit_status is ExitStatus.NOT_JUDGED
    assert "left out, the time was over" in str(united)


def test_a_known_failure_of_a_shard_stays_known(paths: list[Path]) -> None:
    first, *others = json.loads(paths[0].read_text())["cases"]
    known = {
        "outcome": "known",
        "wrongs": ["the call: 1 vector is wrong"],
        "worst_ratio": 9.0,
        "finding": "page#heading",
    }
    changed(paths[0], cases=[first | known, *others])
    (found,) = (each for each in merged(paths).verdicts if each.outcome is Outcome.KNOWN)
    assert (found.finding, found.reason) == ("page#heading", "the call: 1 vector is wrong")


def test_of_equal_verdicts_on_a_case_the_one_with_the_largest_error_counts(paths: list[Path]) -> None:
    first = next(case for path in paths for case in json.loads(path.read_text())["cases"])
    for path, ratio in zip(paths, (0.75, 0.5), strict=True):
        changed(path, cases=[first | {"worst_ratio": ratio}], checks=[{"worst_ratio": 0.01}])
    for order in (paths, paths[::-1]):
        (row,) = merged(order).rows
        assert row.worst.judged.worst_ratio == 0.75


@pytest.mark.parametrize("ratio", [1.01, "inf", "nan"])
def test_a_right_case_with_an_error_above_its_bound_is_dishonest(ratio: float | str, paths: list[Path]) -> None:
    cases = json.loads(paths[0].read_text())["cases"]
    changed(paths[0], cases=[cases[0] | {"outcome": "right", "worst_ratio": ratio}, *cases[1:]])
    united = merged(paths)
    assert united.exit_status is ExitStatus.REFUSED
    assert [each.outcome for each in united.wrong] == [Outcome.DISHONEST]


def test_the_worst_of_several_verdicts_on_a_case_counts(paths: list[Path]) -> None:
    first = next(case for path in paths for case in json.loads(path.read_text())["cases"])
    changed(paths[0], cases=[first])
    changed(paths[1], cases=[first | {"outcome": "wrong", "wrongs": ["it is wrong"]}])
    for order in (paths, paths[::-1]):
        (verdict,) = merged(order).verdicts
        assert verdict.outcome is Outcome.WRONG
