"""Decode calls divided by length against SGLang's own `_run_fixed_q_len_decode`: the calls, and what comes out."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab import references
from lab.metadata import ForwardMode
from lab.metadata.mha.backend import CallSettings, call_arguments
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.forward_pass import ForwardPass, build_forward
from tests.metadata.noted import NotedCalls, is_same
from tests.metadata.sglang.mha import BACKEND, NAMES, REAL, Load, new_backend
from tests.metadata.sglang.wheel import sglang_fixture

# SGLang names the dtype where it has the output allocated; the lab's calls have an output. The others are None here.
IGNORED = ("out", "out_dtype", "kv_cache_sf", "skip_softmax_threshold_scale_factor")


sglang = sglang_fixture(*REAL, names=NAMES)


def drawn_passes() -> st.SearchStrategy[ForwardCase]:
    """Decodes and verifications of distinct lengths: SGLang's order of equal ones is nobody's promise."""
    return st.builds(
        lambda lens, q_len, splits, window, seed: ForwardCase(
            ForwardMode.DECODE if q_len == 1 else ForwardMode.TARGET_VERIFY,
            "tiny",
            tuple(lens),
            (q_len,) * len(lens),
            page_size=16,
            sliding_window=window,
            decode_splits=splits,
            seed=seed,
        ),
        lens=st.lists(st.integers(0, 90), min_size=1, max_size=7, unique=True),
        q_len=st.integers(1, 4),
        splits=st.integers(1, 9),
        window=st.booleans(),
        seed=st.integers(0, 2**16),
    )


def theirs_of(load: Load, forward: ForwardPass, counters: torch.Tensor) -> tuple[NotedCalls, torch.Tensor]:
    """SGLang's calls of a pass, and their output."""
    noted, case = NotedCalls(references), forward.case
    load(BACKEND).flashinfer = SimpleNamespace(decode=noted)
    backend = new_backend(
        load,
        forward.pool,
        workspace_buffer=None,
        q_data_type=case.dtype,
        max_context_len=case.max_context_len,
        decode_seq_len_splits=case.decode_splits,
        _multi_ctas_kv_counter_buffer=counters,
    )
    (planned,) = forward.plan
    ours = call_arguments(
        planned, forward.batch, forward.metadata, forward.layer, forward.query, forward.cache, case.max_context_len
    )
    names = (
        "kv_cache",
        "block_tables",
        "seq_lens",
        "bmm1_scale",
        "bmm2_scale",
        "window_left",
        "sinks",
        "q_len_per_req",
    )
    return noted, backend._run_fixed_q_len_decode(ours["query"], **{name: ours[name] for name in names})


@given(case=drawn_passes())
@settings(deadline=None, derandomize=True, max_examples=40)
def test_the_calls_and_their_output(sglang: Load, case: ForwardCase) -> None:
    forward, counters = build_forward(case, torch.device("cpu")), torch.zeros(64, dtype=torch.uint8)
    theirs, their_out = theirs_of(sglang, forward, counters)
    ours, out = NotedCalls(references), forward.new_out()
    with_counters = CallSettings(counters, decode_splits=case.decode_splits)
    replace(case.backend(ours), settings=with_counters).prepare_attention(**forward.arguments(out))()
    assert torch.equal(out, their_out)
    assert len(ours.calls) == len(theirs.calls)
    for (_, mine), (_, other) in zip(ours.calls, theirs.calls, strict=True):
        # What is a default of FlashInfer's may be left out: SGLang does so with one row, the lab with None.
        other = {"q_len_per_req": 1} | {name: value for name, value in other.items() if name not in IGNORED}
        mine = {name: value for name, value in mine.items() if name not in IGNORED}
        assert set(mine) == set(other)
        for name, value in mine.items():
            assert value is other[name] or is_same(value, other[name]), name
