"""Contents that change under a call: a right call stays right, and one that keeps some of the old contents is wrong."""

from collections.abc import Callable
from typing import Any

import pytest

from lab import references
from lab.kernels import PlannedOnce
from lab.timing.forward import TimedPasses
from lab.timing.staging import check_results, renew
from lab.timing.work import GpuWork
from lab.workloads.inputs.redraw import SHORTER_EVERY, Seeds

FIRST, SHORTER = Seeds(1, SHORTER_EVERY + 1), Seeds(2, 5 * SHORTER_EVERY)
WRONG = "output vectors are wrong"
STALE = {
    "query": lambda arguments: {"query": arguments["query"].clone()},
    "keys and values": lambda arguments: {"kv_cache": tuple(side.clone() for side in arguments["kv_cache"])},
    "lengths": lambda arguments: {"seq_lens": arguments["seq_lens"].clone()},
    "pages": lambda arguments: {"block_tables": arguments["block_tables"].clone()},
}


def hold_right(work: GpuWork, call: Callable[[], object], seeds: Seeds, *, tokens: bool = True) -> None:
    renew(work, seeds, tokens=tokens)
    call()
    check_results([work], seeds)


def hold_right_on_any_contents(work: GpuWork) -> None:
    """Hold one call to be right on contents that change under it, and other contents or a wiped output to be wrong."""
    call = work.call()
    for seeds in (FIRST, SHORTER):
        hold_right(work, call, seeds)
    hold_right(work, call, Seeds(SHORTER.tokens, 3), tokens=False)  # other queries, and the whole lengths again
    with pytest.raises(AssertionError, match=WRONG):
        check_results([work], Seeds(SHORTER.tokens, 4))  # of the queries of another seed
    hold_right(work, call, FIRST)
    renew(work, FIRST)
    with pytest.raises(AssertionError, match=WRONG):  # the output was wiped
        check_results([work], FIRST)


def hold_wrong_if_stale(what: str, work_of: Callable[[Any], GpuWork]) -> None:
    """Hold a decode call that keeps a part of `STALE` to be right at first, and wrong after its work was renewed."""

    class Stale:
        @staticmethod
        def prepare_trtllm_batch_decode_with_kv_cache(**arguments: Any) -> Any:
            kept = arguments | STALE[what](arguments)
            return lambda: references.trtllm_batch_decode_with_kv_cache(**kept)

    work = work_of(Stale)
    renew(work, FIRST)
    call = work.call()
    call()
    check_results([work], FIRST)
    renew(work, SHORTER)
    call()
    with pytest.raises(AssertionError, match=WRONG):
        check_results([work], SHORTER)


class Planning:
    """Reads lengths and pages when it plans."""

    @staticmethod
    def plan_trtllm_batch_decode_with_kv_cache(**arguments: Any) -> Any:
        kept = arguments | {name: arguments[name].clone() for name in ("seq_lens", "block_tables")}
        return lambda: references.trtllm_batch_decode_with_kv_cache(**kept)


def hold_planned_and_plain_right(both: TimedPasses) -> tuple[GpuWork, GpuWork]:
    """Hold a planned call to keep lengths and pages that change for a plain call over the same pass; return both works."""
    plain = both.work(references)
    hold_right(plain, plain.call(), FIRST)  # moves the pages of the tensors that it shares
    planned = both.work(PlannedOnce(Planning))
    call = planned.call()
    for seeds in (FIRST, SHORTER):
        hold_right(planned, call, seeds)
        hold_right(plain, plain.call(), seeds)
    return planned, plain
