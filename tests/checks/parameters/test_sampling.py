"""Random points after the level's cases, and a wrong one made small."""

import itertools
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import Configuration, Level, Outcome, Report, judge
from lab.checks.parameters.covering import Constraint, Model
from lab.checks.parameters.models import MODELS
from lab.checks.parameters.sampling import DrawnPoint, samples, shrunk
from lab.checks.properties.check import Check, Scope
from lab.checks.properties.k18_combinations import CHECK as COMBINATIONS
from lab.checks.run.judge_run import Progress
from lab.reports.judgement import notes
from tests.checks.small import SMALL, declining_if, twice_as_large_if
from tests.checks.test_report import verdict_of

MODEL = MODELS[AttentionCall.DECODE](SMALL)
NAMES = (AttentionCall.DECODE.value,)
NO_MORE: Any = {Level.SMOKE: ()}


def report_of(implementation: Any, **how: Any) -> Report:
    settings = {"only": "K18", "ranges": SMALL, "functions": NAMES, "device": "cpu", "discover": False}
    return judge(implementation, **settings | how)


def first(count: int) -> list[Check]:
    """Return check K18 with its first fixed cases alone: a case for each value."""
    return [replace(COMBINATIONS, fixed=lambda scope: itertools.islice(COMBINATIONS.fixed(scope), count), more=NO_MORE)]


# Their cases take the least time.
of_lists = partial(report_of, references, only=first(20), functions=["draft_kv_indices"])


def is_pair(query: torch.Tensor, lse: Any = None, **arguments: Any) -> bool:
    """Tell what no value alone is: an LSE that is handed out, with unsigned lengths."""
    return lse is not None and arguments["seq_lens"].dtype == torch.uint32


def test_random_points_have_taken_values_alone_and_are_the_same_each_time() -> None:
    points = [MODEL.completed({"lse": value}) or {} for value in ("none", "returned")]
    verdicts = [verdict_of(Outcome.RIGHT, case=Configuration(AttentionCall.DECODE, point)) for point in points]
    draws = (COMBINATIONS.draw_on(Scope(AttentionCall.DECODE, SMALL, Level.SMOKE), verdicts) for _ in range(2))
    drawn = [[sample.case for sample in itertools.islice(draw, 30)] for draw in draws]
    assert drawn[0] == drawn[1]
    assert {case["lse"] for case in drawn[0]} == {"none", "returned"}
    assert all(MODEL.fits(case.values) for case in drawn[0])


SIZES = Model(
    {"size": range(1000), "form": ("none", "view", "gap"), "kind": (0, 1)},
    (Constraint(lambda size, form: form != "view" or size > 9, "a view has ten elements"),),
    vacuous=frozenset({("kind", 1)}),
)


def sample_of(size: int, form: str, seed: int = 5) -> DrawnPoint:
    return DrawnPoint(
        SIZES, {"size": size, "form": form, "kind": 0}, seed, lambda point, seed: (point["size"], point["form"], seed)
    )


def test_a_size_is_made_as_small_as_can_be_wrong_in_few_tries() -> None:
    tried: list[int] = []

    def stays_wrong(case: Any) -> bool:
        tried.append(case[0])
        return case[0] > 100

    assert shrunk(sample_of(999, "none"), stays_wrong).case == (101, "none", 0)
    assert len(tried) < 60


def test_no_smaller_case_breaks_a_rule_or_has_the_seed_where_another_is_wrong_too() -> None:
    small = shrunk(sample_of(500, "view"), lambda case: case[1] == "view" and case[2] == 5)
    assert small.case == (10, "view", 5)


def test_points_are_drawn_over_all_values_but_vacuous_ones() -> None:
    drawn = list(itertools.islice(samples(SIZES, "a", lambda point, seed: None), 300))
    assert {sample.point["form"] for sample in drawn} == {"none", "view", "gap"}
    assert {sample.point["kind"] for sample in drawn} == {0}
    assert all(SIZES.fits(sample.point) for sample in drawn)
    assert len({sample.seed for sample in drawn}) == 300
    few = list(itertools.islice(samples(SIZES, "a", lambda point, seed: None, fewest=1), 300))
    assert sum(sample.point["size"] == 0 for sample in few) > 50 > sum(sample.point["size"] == 0 for sample in drawn)


def test_a_pair_that_the_level_has_not_is_found_and_made_small() -> None:
    report = report_of(twice_as_large_if(is_pair), only=first(121), for_seconds=math.inf, first_failure=True)
    (wrong,) = report.wrong
    assert wrong.drawn
    assert wrong.case.non_default.keys() - {"group"} <= {"seq_lens", "lse", "lengths", "q_len"}
    assert wrong.case["seq_lens"] == "uint32"
    assert report.exit_status == 1
    assert report.left_out == 0
    assert report.num_random > 0


def test_what_is_right_stays_right_until_the_time_is_over() -> None:
    start = time.monotonic()
    assert of_lists(for_seconds=0.0).num_random == 0
    level_s = time.monotonic() - start
    start = time.monotonic()
    report = of_lists(for_seconds=2 * level_s)
    assert 2 * level_s <= time.monotonic() - start < 10 * level_s + 20
    assert report.is_right
    assert report.num_random > 0
    assert f"{report.num_random:,} random cases of K18 were judged after those of the level" in list(notes(report))


def test_an_interrupt_keeps_the_verdicts() -> None:
    def interrupt(progress: Progress) -> None:
        if progress.verdict.drawn:
            raise KeyboardInterrupt

    report = of_lists(for_seconds=math.inf, progress=interrupt)
    assert report.interrupted
    assert len(report.verdicts) == 20
    assert report.left_out == 0


def test_a_kernel_that_takes_nothing_ends_at_once() -> None:
    assert report_of(declining_if(lambda **_: True), only=first(20), for_seconds=math.inf).num_random == 0
