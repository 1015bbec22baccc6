"""Prepared decode calls that keep some of the contents that they were prepared with, and are wrong after a renewal."""

from collections.abc import Callable
from typing import Any

import pytest

from lab import references
from lab.timing.staging import check_results, renew
from lab.timing.work import GpuWork
from lab.workloads.inputs.redraw import Seeds

STALE = {
    "query": lambda arguments: {"query": arguments["query"].clone()},
    "keys and values": lambda arguments: {"kv_cache": tuple(side.clone() for side in arguments["kv_cache"])},
    "lengths": lambda arguments: {"seq_lens": arguments["seq_lens"].clone()},
    "pages": lambda arguments: {"block_tables": arguments["block_tables"].clone()},
}


def hold_wrong_if_stale(what: str, work_of: Callable[[Any], GpuWork], first: Seeds, later: Seeds) -> None:
    """Hold a call that keeps a part of `STALE` to be right at first, and wrong after its work was renewed."""

    class Stale:
        @staticmethod
        def prepare_trtllm_batch_decode_with_kv_cache(**arguments: Any) -> Any:
            kept = arguments | STALE[what](arguments)
            return lambda: references.trtllm_batch_decode_with_kv_cache(**kept)

    work = work_of(Stale)
    renew(work, first)
    call = work.call()
    call()
    check_results([work], first)
    renew(work, later)
    call()
    with pytest.raises(AssertionError, match="output vectors are wrong"):
        check_results([work], later)
