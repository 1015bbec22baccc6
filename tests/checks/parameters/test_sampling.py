"""Random points after the level's cases, and a wrong one made small."""

import itertools
import math
import time
from types import SimpleNamespace
from typing import Any

import torch

from lab import references
from lab.checks import Configuration, Interface, Outcome, Report, judge
from lab.checks.parameters.sampling import made_small, random_points
from lab.checks.parameters.targets import TARGETS
from tests.checks.parameters.test_retries import NAMES
from tests.checks.small import SMALL, twice_as_large_if
from tests.checks.test_report import verdict_of

MODEL = TARGETS[Interface.DECODE].model(SMALL)


def report_of(implementation: Any, **how: Any) -> Report:
    settings = {"only": "K18", "ranges": SMALL, "functions": NAMES, "device": "cpu", "probe": False}
    return judge(implementation, **settings | how)


def is_pair(query: torch.Tensor, lse: Any = None, **arguments: Any) -> bool:
    """Tell what no value alone is: an LSE that is handed out, beside one request."""
    return lse is not None and len(arguments["seq_lens"]) == 1


def test_a_case_is_reset_to_the_plain_one_but_for_what_makes_it_wrong() -> None:
    whole = {
        axis: values[-1] for axis, values in MODEL.axes.items() if axis not in ("offsets", "cache", "out", "lengths")
    }
    case = Configuration(Interface.DECODE, MODEL.completed(whole | {"mask": "none"}) or {}, seed=17)
    assert len(case.non_default) > 10
    small = made_small(SMALL, case, lambda each: each["requests"] >= 4 and each["lse"] != "none")
    assert small == Configuration(Interface.DECODE, MODEL.default | {"requests": 5, "lse": case["lse"]})


def test_random_points_have_taken_values_alone_and_are_the_same_each_time() -> None:
    points = [MODEL.completed({"lse": value}) or {} for value in ("none", "returned")]
    verdicts = [verdict_of(Outcome.RIGHT, case=Configuration(Interface.DECODE, point)) for point in points]
    drawn = [list(itertools.islice(random_points(Interface.DECODE, SMALL, verdicts), 30)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert {case["lse"] for case in drawn[0]} == {"none", "returned"}
    assert all(MODEL.fits(case.values) for case in drawn[0])


def test_a_pair_that_the_level_has_not_is_found_and_made_small() -> None:
    report = report_of(twice_as_large_if(is_pair), for_seconds=math.inf, first_failure=True)
    (wrong,) = report.wrong
    assert wrong.drawn
    assert wrong.case.non_default.keys() - {"group"} <= {"requests", "lse", "lengths", "q_len"}
    assert wrong.case["requests"] == 1
    assert report.exit_status == 1
    assert report.left_out == 0
    assert report.num_random > 0


def test_what_is_right_stays_right_until_the_time_is_over() -> None:
    start = time.monotonic()
    assert report_of(references, for_seconds=0.0).num_random == 0
    level_s = time.monotonic() - start
    start = time.monotonic()
    report = report_of(references, for_seconds=2 * level_s)
    assert 2 * level_s <= time.monotonic() - start < 10 * level_s + 20
    assert report.is_right
    assert report.num_random > 0
    assert f"{report.num_random:,} random cases of K18 were judged after those of the level" in list(report.notes())


def test_an_interrupt_keeps_the_verdicts() -> None:
    calls = itertools.count()

    def decode(**arguments: Any) -> Any:
        if next(calls) == 150:
            raise KeyboardInterrupt
        return references.trtllm_batch_decode_with_kv_cache(**arguments)

    report = report_of(SimpleNamespace(**{NAMES[0]: decode}), for_seconds=math.inf)
    assert report.interrupted
    assert len(report.verdicts) > 100
    assert report.left_out == 0


def test_a_kernel_that_takes_nothing_ends_at_once() -> None:
    def decode(**arguments: Any) -> Any:
        raise NotImplementedError("nothing")

    report = report_of(SimpleNamespace(**{NAMES[0]: decode}), for_seconds=math.inf)
    assert report.num_random == 0
