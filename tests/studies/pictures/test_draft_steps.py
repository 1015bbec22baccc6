"""What is drawn of a multi-step draft: its artists, held against the reference's lists and against the rows handed in."""

from typing import Any

import torch
from matplotlib.figure import Figure

from lab.metadata import ForwardBatch, KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.speculation.draft_steps import (
    DraftBuffers,
    DraftPlan,
    MultiStepDraft,
    PreparedDraft,
    allocate_draft,
    prepare_draft,
)
from lab.references import generate_draft_decode_kv_indices
from studies.draft_scenarios import DraftCase, build_verify, draft_decode
from studies.pictures.draft_steps import (
    PLANS,
    built_figure,
    claim_figure,
    draft_times_figure,
    lists_figure,
    steps_figure,
)
from tests.reports.pictures.figures import curves, words

PREFIX_LENS, NUM_STEPS, P = (9, 6), 3, 4

Built = tuple[ForwardBatch, KVPool, PreparedDraft, DraftBuffers]


def built(
    prefix_lens: tuple[int, ...] = PREFIX_LENS,
    num_steps: int = NUM_STEPS,
    plan: DraftPlan = DraftPlan.COMMON_TEMPLATE,
) -> Built:
    verify, pool = build_verify(DraftCase(prefix_lens, num_steps, P, 64), torch.device("cpu"))
    draft = MultiStepDraft(DraftAttention.MHA, num_steps, plan)
    buffers = allocate_draft(draft, pool, len(prefix_lens))
    prepared = prepare_draft(draft, draft_decode(verify), pool, buffers)
    prepared.write()
    return draft_decode(verify), pool, prepared, buffers


def cells(figure: Figure, kind: str) -> list[tuple[int, int, int]]:
    """Step, request and slot or page, in the order of their places."""
    found = [(patch.get_gid(), patch) for patch in figure.axes[0].patches]
    named = [(gid.split(), patch) for gid, patch in found if gid and gid.startswith(kind)]
    named.sort(key=lambda each: (int(each[0][1]), int(each[0][2]), each[1].get_x()))
    return [(int(step), int(request), int(number)) for (_, step, request, number), _ in named]


def test_the_lists_drawn_are_the_references() -> None:
    batch, pool, prepared, buffers = built()
    indices, indptr = generate_draft_decode_kv_indices(
        batch.req_pool_indices,
        pool.req_to_token,
        batch.seq_lens,
        batch.seq_lens,
        num_steps=NUM_STEPS,
        topk=1,
        page_size=P,
    )
    expected = [
        (step, request, slot)
        for step in range(NUM_STEPS)
        for request in range(len(PREFIX_LENS))
        for slot in indices[step][indptr[step][request] : indptr[step][request + 1]].tolist()
    ]
    assert cells(built_figure(batch, pool, prepared, buffers, "drawn"), "list") == expected


def test_the_pages_drawn_cover_the_lengths() -> None:
    batch, pool, prepared, buffers = built()
    figure = built_figure(batch, pool, prepared, buffers, "drawn")
    expected = [
        (step, request, int(slot) // P)
        for step in range(NUM_STEPS - 1)
        for request, length in enumerate(PREFIX_LENS)
        for slot in pool.req_to_token[batch.req_pool_indices[request], : length + step + 1 : P]
    ]
    assert cells(figure, "page") == expected
    rulers = [line.get_xdata()[1] - line.get_xdata()[0] for line in figure.axes[0].lines]
    assert rulers == [length + step + 1 for step in range(NUM_STEPS - 1) for length in PREFIX_LENS]
    said = words(figure)
    assert {"step 0: seq_lens", "step 1: seq_lens", "step 2: no such step", "request 1: 6 tokens"} <= set(said)
    assert "step 2: seq_lens" not in said


def a_row(kernel: str, requests: int, tokens: int, median_us: float, num_steps: int = 3) -> dict[str, Any]:
    return {
        "point": f"{requests}x{tokens}/steps{num_steps}",
        "mode": "draft_steps" if " " in kernel else "kv_indices",
        "kernel": kernel,
        "requests": requests,
        "kv_tokens": requests * tokens,
        "num_steps": num_steps,
        "median_us": median_us,
        "floor_us": median_us / 4,
    }


def some_rows() -> list[dict[str, Any]]:
    """Each with a time of its own, longer requests first; among them what must not be drawn."""
    plans = [f"{attention} {plan}" for attention in ("mha", "mla") for plan in PLANS]
    kernels = (*plans, "mha common_template eager", "serial", "spread")
    shapes = [(kernel, n, t, s) for kernel in kernels for n in (1, 8) for t in (8192, 1024) for s in (3, 2)]
    rows = [a_row(kernel, n, t, 10.0 + i, s) for i, (kernel, n, t, s) in enumerate(shapes)]
    traced = [row | {"point": "trace8/steps3", "median_us": 1e6} for row in rows[::8]]
    return traced + rows


def test_each_panel_has_the_times_of_its_rows() -> None:
    rows = some_rows()
    time_of = {(row["kernel"], row["point"]): row["median_us"] for row in rows if "trace" not in row["point"]}

    def over_tokens(kernel: str, requests: int, steps: int) -> list[tuple[int, float]]:
        return [(tokens, time_of[kernel, f"{requests}x{tokens}/steps{steps}"]) for tokens in (1024, 8192)]

    panels = [(attention, requests) for attention in ("mha", "mla") for requests in (1, 8)]
    for axes, (attention, requests) in zip(draft_times_figure(rows, "times").axes, panels, strict=True):
        assert curves(axes) == [over_tokens(f"{attention} {plan}", requests, 3) for plan in PLANS]
    for axes, requests in zip(lists_figure(rows, "lists", num_steps=2).axes, (1, 8), strict=True):
        serial, spread = (over_tokens(kernel, requests, 2) for kernel in ("serial", "spread"))
        assert curves(axes) == [serial, spread, [(tokens, time_us / 4) for tokens, time_us in serial]]
    for axes, attention in zip(steps_figure(rows, "steps", requests=8, tokens=1024).axes, ("mha", "mla"), strict=True):
        assert curves(axes) == [
            [(steps, time_of[f"{attention} {plan}", f"8x1024/steps{steps}"]) for steps in (2, 3)] for plan in PLANS
        ]


def test_the_claim_stands_beside_what_was_measured() -> None:
    claim: dict[str, Any] = {
        "gpu_saving_us_per_draft_mla": {"1x80k/steps3": 100.0, "4x80k/steps3": 120.0},
        "host_saving_us_per_draft": {"static buffers": 30.0},
        "implied_saving_us_per_iteration": 240.0,
    }
    figure = claim_figure(claim, "claim")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [100, 120, 30]
    assert list(axes.lines[0].get_xdata()) == [240, 240]
    assert {"GPU, 1 request of 80K", "GPU, 4 requests of 80K", "host, static buffers", "stated: 240"} <= set(
        words(figure)
    )
