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
from tests.studies.recorded import recorded

ROWS = recorded("draft_steps")["rows"]
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


def test_each_panel_has_the_times_of_its_rows() -> None:
    rows = {
        (row["kernel"], row["requests"], row["kv_tokens"] / row["requests"], row["num_steps"]): row
        for row in ROWS
        if not row["point"].startswith("trace")
    }

    def over_tokens(kernel: str, requests: int, steps: int, value: str = "median_us") -> list[tuple[float, float]]:
        of_curve = [key for key in rows if (key[0], key[1], key[3]) == (kernel, requests, steps)]
        return sorted((key[2], rows[key][value]) for key in of_curve)

    counts = sorted(requests for requests in {key[1] for key in rows} if len(over_tokens("serial", requests, 3)) > 1)
    panels = [(attention, requests) for attention in ("mha", "mla") for requests in counts]
    for axes, (attention, requests) in zip(draft_times_figure(ROWS, "times").axes, panels, strict=True):
        assert curves(axes) == [over_tokens(f"{attention} {plan}", requests, 3) for plan in PLANS]
    for axes, requests in zip(lists_figure(ROWS, "lists").axes, counts, strict=True):
        floor = over_tokens("serial", requests, 3, "floor_us")
        assert curves(axes) == [*(over_tokens(kernel, requests, 3) for kernel in ("serial", "spread")), floor]
    for axes, attention in zip(steps_figure(ROWS, "steps", requests=64, tokens=8192).axes, ("mha", "mla"), strict=True):
        assert curves(axes) == [
            [(steps, rows[f"{attention} {plan}", 64, 8192, steps]["median_us"]) for steps in (2, 3, 4, 5)]
            for plan in PLANS
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
