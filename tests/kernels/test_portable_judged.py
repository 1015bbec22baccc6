"""Calls of the portable kernels by the judge's own models: each row names the values that differ from a plain call's.

A call is judged as `lab judge` judges it: every output vector and LSE against float64, what it returns, the memory around its
results, and its inputs.
"""

from typing import Any

import pytest
import torch

from lab.calls import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.parameters.calls import judge_call
from lab.checks.parameters.models import MODELS, Configuration
from lab.checks.properties import checks_by_key
from lab.checks.run.judging import run_case
from lab.checks.run.verdicts import Outcome
from lab.kernels import portable
from lab.kernels.portable import paged
from lab.kernels.portable.key_shares import Shares
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Entries, HeadPages
from tests.kernels.conftest import Split
from tests.kernels.held import BF16, E4M3

Values = dict[str, Any]
DECODE, CONTEXT, MLA, RAGGED, DSV4 = (
    AttentionCall.DECODE,
    AttentionCall.CONTEXT,
    AttentionCall.MLA_DECODE,
    AttentionCall.RAGGED_CONTEXT,
    AttentionCall.DSV4_DECODE,
)
ALL = (DECODE, CONTEXT, MLA, RAGGED)


def each(axis: str, *values: Any, **others: Any) -> list[Values]:
    return [{axis: value} | others for value in values]


# What a call may be given, by the calls that have it.
SHARED: list[tuple[tuple[AttentionCall, ...], list[Values]]] = [
    (ALL, each("sinks", "per head", "some minus infinity", lengths="none first", lse="returned")),
    (ALL, each("lengths", "none in the middle", "none at all", "fewer than rows", lse="returned")),
    ((CONTEXT, RAGGED), each("lengths", "none first", causal=False, lse="returned")),
    (ALL, each("offsets", "none first", "none twice", "none at all", lse="returned")),
    ((DECODE, CONTEXT, MLA), each("offsets", "padding after", "padding of NaN", max_q_len="larger")),
    ((RAGGED,), each("padding", "rows and keys", "rows and keys of NaN", max_q_len="larger", max_kv_len="larger")),
    (ALL, each("seq_lens", "uint32", "amid others")),
    (ALL, each("bmm1_scale", "tensor [1]", "tensor []", "negative", bmm2_scale="0.9 as a tensor []")),
    (ALL, each("bmm2_scale", "0.9 as a number", "negative tensor [1]", "1 as a whole number", bmm1_scale="tensor [1]")),
    (ALL, each("out", "none", "a view", "given fp16", "given fp32", lse="given")),
    ((DECODE, CONTEXT, RAGGED), each("lse", "given", "given alone", "returned", out="given")),
    ((MLA,), each("lse", "given", "base e", "given as the query", q_len=2, offsets="equal")),
    ((RAGGED,), each("lse", "strided", "rows apart")),
    (ALL, each("query", "rows apart", "heads apart", "heads first", lse="returned")),
    ((DECODE, CONTEXT, RAGGED), each("window_left", 0, 1, 15, 20, 127, 2**31 - 1, sinks="per head")),
    (ALL, each("contents", "needles")),
]
OWN: dict[AttentionCall, list[Values]] = {
    DECODE: [
        *each("q_len", *range(1, 9), 11, 19, group=3, sinks="per head", lse="returned"),
        *each("group", 1, 2, 3, 5, 8, num_kv_heads=2, q_len=2),
        *each("dtypes", "fp16/fp16", "bf16/e4m3", "fp16/e4m3", "e4m3/e4m3", q_len=2),
        *each("dtypes", "fp16/fp16", "bf16/e4m3", "e4m3/e4m3", head_dim=128, group=8, q_len=5),
        *each("dtypes", "bf16/bf16", "bf16/e4m3", "e4m3/e4m3", head_dim=256),
        *each("page_size", 32, 64, 128, q_len=2),
        *each("mask", "causal", "tree", "by request", "own bit clear", "at a word", q_len=19),
        *each("mask", "tree", "bits after the draft", q_len=5, window_left=20),
        *each("bmm1_scale", "log2 tensor [1]", "log2 tensor [] beside a tensor", "log2 tensor below 0"),
        *each("out", "dtype bf16", "dtype fp16", "dtype e4m3", bmm2_size=300.0),
        *each("cache", "odd strides", "tokens an element apart", "V otherwise", dtypes="bf16/e4m3"),
        *each(
            "head_pages", "half", "last", "all", "some none", num_kv_heads=2, group=3, sinks="per head", lse="returned"
        ),
        *each("head_pages", "half", "some none", num_kv_heads=2, q_len=20, lengths="none in the middle"),
        *each("head_pages", "some none", num_kv_heads=3, page_size=64, dtypes="bf16/e4m3", head_dim=128),
        *each("head_pages", "not last", num_kv_heads=2, offsets="unequal", q_len=4),
    ],
    CONTEXT: [
        *each("rows", "one each", 65, causal=False),
        *each("group", 2, rows=65, window_left=20, num_kv_heads=2),
        *each("group", 8, rows=17, window_left=20, num_kv_heads=2),
        *each("dtypes", "fp16/fp16", "bf16/e4m3", "e4m3/e4m3", group=4),
    ],
    MLA: [
        *each("q_len", *range(1, 9), 11, heads=8, sinks="per head", lse="returned"),
        *each("heads", 1, 16, 24, 128, q_len=2, sinks="per head"),
        *each("head_dims", "576/512", "64/64", "320/256", heads=16, q_len=4, page_size=64),
        *each("dtypes", "fp16/fp16", "bf16/e4m3", "fp16/e4m3", "e4m3/e4m3", q_len=2, heads=16),
        *each("page_size", 1, 16, 64, 128),
        *each("cache", "pages apart", "tokens apart", "4-D", "4-D with odd strides"),
        *each("block_tables", "rows apart", "at an element", "tail of -1"),
        *each("entries", "mixed", "ordered", "shuffled", "edges", "one", "none", "late", top_k=132, q_len=3, heads=8),
        *each("entries", "mixed", "shuffled", top_k=512, sinks="per head", offsets="unequal", q_len=4, lse="returned"),
        *each("entries", "shuffled", "twice", top_k=132, page_size=1, lengths="fewer than rows", q_len=4),
        *each(
            "dtypes", "fp16/fp16", "bf16/e4m3", "e4m3/e4m3", top_k=132, entries="mixed", bmm2_scale="0.9 as a number"
        ),
        *each("heads", 1, 24, 128, top_k=132, entries="mixed", sinks="per head"),
        *each(
            "head_dims",
            "80/64",
            "64/64",
            top_k=132,
            entries="ordered",
            top_k_lens=True,
            block_tables="tail far outside",
        ),
        {"head_dims": "64/64", "q_len": 2},
    ],
    RAGGED: [
        *each("head_dims", "192/128", "128/128", "256/256", "80/64", "64/128", rows=65),
        *each("num_kv_heads", 1, 3, 16, group=2, sinks="per head"),
        *each("dtype", "fp16", "e4m3", causal=False),
        *each("dtype", "fp16", "e4m3", rows=65, lengths="as rows"),
        *each("kv", "tokens apart", "heads first", "of one tensor", "V of a projection"),
        *each("rows", "one each", 65, 300, lengths="longer", lse="returned"),
    ],
    DSV4: [
        {"head_dim": 64} | values
        for values in (
            {},
            {"dtypes": "e4m3/e4m3", "heads": 8, "q_len": 2, "sinks": "per head"},
            {"columns": 132, "q_len": 3, "sparse_indices": "tail far outside", "window_entries": "ordered"},
            {"columns": 128, "page_size": 8, "compressed_page_size": 64, "cache": "pages apart", "kv_layout": "NHD"},
            {"columns": 640, "compressed_entries": "none", "offsets": "unequal", "q_len": 3, "cache": "tokens apart"},
            {
                "sparse_indices": "rows apart",
                "q_len": 2,
                "query": "requests apart",
                "bmm2_scale": "0.9 as a tensor [1]",
            },
            {"requests": 40, "offsets": "none first"},
        )
    ],
}
PAGED: list[Values] = [
    *each("kv_layout", "NHD", cache="plain"),
    *each("cache", "pages apart", "tokens apart", "heads apart", "one tensor", "one tensor of two halves", "K is V"),
    *each("cache", "V otherwise", "V otherwise inside pages", kv_layout="NHD"),
    *each("block_tables", "rows apart", "at an element", "tail of -1", "separate", "separate with rows apart"),
]
ROWS = [(call, values) for calls, rows in SHARED for call in calls for values in rows]
ROWS += [(call, values) for call, rows in OWN.items() for values in rows]
ROWS += [(call, values) for call in (DECODE, CONTEXT) for values in PAGED]
# With these values most rows see nothing, or one key alone, so that a call shows little else.
HIDING: tuple[tuple[str, Any], ...] = (
    *(("lengths", "none at all"), ("lengths", "fewer than rows"), ("offsets", "none at all")),
    *(("contents", "needles"), ("window_left", 0), ("window_left", 1), ("entries", "none")),
)
MOST_VALUES = 8
SHARES = (None, Shares(16))  # which cut no request, and most


def together() -> list[tuple[AttentionCall, Values]]:
    """Put the rows of each call into few configurations: the values of a row are together in one of them."""
    found: list[tuple[AttentionCall, Values]] = []
    for call, row in ROWS:
        model = MODELS[call](Ranges())
        alone = any(item in HIDING for item in row.items())
        for other, values in [] if alone else found:
            both = values | row
            if other is not call or len(both) > MOST_VALUES or any(item in HIDING for item in values.items()):
                continue
            if both == row | values and model.fits(Configuration(call, both, 1).values):
                values |= row
                break
        else:
            found.append((call, dict(row)))
    return found


CASES = together()


# Dead cells of zeros, huge numbers and NaN, where no bit may change: page tails, entries that no row selects, freed pages.
POISONED = [
    *(
        AttentionCase(call, (1, 33, 64, 0), (2,) * 4, kv_dtype=dtype)
        for call in (DECODE, CONTEXT)
        for dtype in (BF16, E4M3)
    ),
    AttentionCase(DECODE, (200, 70), (2, 2), window_left=20),
    AttentionCase(DECODE, (90, 40), (2, 2), head_pages=HeadPages.HALF),
    AttentionCase(MLA, (1, 33, 64, 0), (2,) * 4, 1, head_dim=80, v_head_dim=64),
    AttentionCase(MLA, (70, 9), (3, 3), 1, head_dim=80, v_head_dim=64, top_k=132, entries=Entries.MIXED),
]
K4 = checks_by_key()["K4"]


def judge(call: AttentionCall, values: Values, device: str) -> None:
    run = CaseRun(portable, Configuration(call, values, 1), torch.device(device))
    judge_call(run)
    assert not run.wrongs + run.failures + run.declines
    assert run.judged


@pytest.mark.parametrize(("number", "call", "values"), [(n, *case) for n, case in enumerate(CASES)], ids=repr)
def test_right(number: int, call: AttentionCall, values: Values, device: str, split: Split) -> None:
    """In turns with each request's keys whole, and with most requests cut."""
    split(shares=SHARES[number % 2])
    judge(call, values, device)


@pytest.mark.parametrize(("number", "case"), [*enumerate(POISONED)], ids=repr)
def test_what_is_dead_changes_no_bit(number: int, case: AttentionCase, device: str, split: Split) -> None:
    split(shares=SHARES[number % 2])
    judged = run_case(portable, K4, case, torch.device(device), Ranges())
    assert judged.outcome is Outcome.RIGHT, judged


@pytest.mark.parametrize(
    ("requests", "count", "merges_at_once"),
    [(1, 40, False), (1, 40, True), (3, 40, True), (40, 264, False), (65, 200, False)],
)
def test_pages_of_each_head_in_small_batches(
    requests: int, count: int, merges_at_once: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is small by its requests times its 2 K/V heads, and then cut into equal parts: of 2, 6 and 80, not of 130."""
    monkeypatch.setattr(paged, "choose_shares", lambda *_: Shares(count))
    monkeypatch.setattr(paged, "merges_at_once", lambda *_: merges_at_once)
    judge(DECODE, {"head_pages": "half", "num_kv_heads": 2, "requests": requests}, device)
