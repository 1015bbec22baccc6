"""Pairs that occur in declined cases alone are judged again in smaller ones."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import Level, Outcome, Report, judge
from lab.checks.parameters.coverage import Reach
from lab.checks.properties.k18_combinations import CHECK
from tests.checks.small import SMALL, decoding

NAMES = ("trtllm_batch_decode_with_kv_cache",)


def report_of(implementation: Any, **how: Any) -> Report:
    settings = {"level": Level.FULL, "only": "K18", "ranges": SMALL, "device": "cpu", "drawn": 0, "discover": False}
    return judge(implementation, **settings | how)


def declining(
    condition: Callable[..., bool], wrong: Callable[..., bool] = lambda **arguments: False
) -> SimpleNamespace:
    """The reference's decode, which declines some calls, and doubles the results of others."""

    def decode(**arguments: Any) -> Any:
        if condition(**arguments):
            raise NotImplementedError("not both")
        if wrong(**arguments):
            arguments["bmm2_scale"] = 2 * arguments["bmm2_scale"]
        return references.trtllm_batch_decode_with_kv_cache(**arguments)

    return decoding(decode)


def lse_and(name: str) -> Callable[..., bool]:
    return lambda **arguments: arguments.get(name) is not None and bool(arguments.get("return_lse"))


def test_a_pair_in_declined_cases_alone_is_judged_in_smaller_ones() -> None:
    report = report_of(declining(lse_and("out")))
    (found,) = report.coverages
    assert found.blind
    # A call with a rank has never been judged with an output of the caller's either.
    pairs = {frozenset({"out", "lse"}), frozenset({"out", "rank"})}
    assert {frozenset(name for name, _ in pair) for pair, _ in found.blind} == pairs
    assert {reach for _, reach in found.blind} == {Reach.DECLINED}
    assert report.left_out == 0
    first = report_of(references, functions=NAMES)
    assert len(first.verdicts) < len(report.verdicts) < 4 * len(first.verdicts)
    assert len({repr(verdict.case) for verdict in report.verdicts}) == len(report.verdicts)


def test_a_defect_of_a_pair_that_all_arrays_were_declined_with_is_found() -> None:
    """It takes tables rows apart only beside few other arguments."""

    def is_apart(block_tables: torch.Tensor, **arguments: Any) -> bool:
        return block_tables.ndim == 2 and block_tables.stride(0) > block_tables.shape[1]

    def is_declined(**arguments: Any) -> bool:
        others = ("out", "out_dtype", "mask", "cum_seq_lens_q", "sinks", "lse", "return_lse", "backend", "cp_rank")
        return is_apart(**arguments) and any(arguments.get(name) is not None for name in others)

    def is_wrong(**arguments: Any) -> bool:
        # Several short requests: the circumstances of check K18 have cases of no large array.
        is_usual = len(arguments["seq_lens"]) > 1 and max(arguments["seq_lens"].tolist()) < 256
        return is_apart(**arguments) and isinstance(arguments["bmm1_scale"], torch.Tensor) and is_usual

    report = report_of(declining(is_declined, is_wrong))
    fixed = {repr(case) for case in CHECK.cases(AttentionCall.DECODE, SMALL, Level.FULL)}
    assert any(report.wrong)
    assert not fixed & {repr(verdict.case) for verdict in report.wrong}


def test_a_value_that_is_declined_by_itself_is_tried_beside_all_others() -> None:
    """An output is taken beside an LSE alone."""

    def is_declined(out: torch.Tensor | None = None, return_lse: bool = False, **arguments: Any) -> bool:
        return out is not None and not return_lse

    report = report_of(declining(is_declined))
    (found,) = report.coverages
    assert set(found.values["out"].values()) == {Reach.JUDGED}
    never = {pair for pair, _ in found.blind if {name for name, _ in pair} == {"out", "lse"}}
    assert never
    assert len(found.blind) - len(never) < 0.02 * found.pairs[Reach.JUDGED]


def test_where_nothing_is_declined_nothing_follows_at_the_smoke_level() -> None:
    fixed = list(CHECK.cases(AttentionCall.DECODE, SMALL, Level.SMOKE))
    assert len(report_of(references, level=Level.SMOKE, functions=NAMES).verdicts) == len(fixed)


def test_a_run_is_taken_up_with_what_followed(tmp_path: Path) -> None:
    out, name = tmp_path / "report.json", "tests.checks.parameters.declining_kernel"
    first = report_of(name, out=out)
    judged: list[bool] = []
    again = report_of(name, out=out, progress=lambda progress: judged.append(progress.is_new))
    assert not any(judged)
    assert [repr(verdict.case) for verdict in again.verdicts] == [repr(verdict.case) for verdict in first.verdicts]
    assert {verdict.outcome for verdict in again.verdicts} == {Outcome.RIGHT, Outcome.DECLINED}
