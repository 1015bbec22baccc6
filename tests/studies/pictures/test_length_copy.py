"""What is drawn of a decode loop and of verify masks: its artists, held against hand-made timelines and the masks' rule."""

import pytest
import torch
from matplotlib.figure import Figure

from lab.metadata.speculation.verify_mask import VerifyMask, VerifyMaskForm, preallocate_verify_mask, write_chain_mask
from studies.pictures.length_copy import (
    Lane,
    recorded_excerpt,
    step_time_figure,
    timeline_figure,
    variants_figure,
    verify_mask_figure,
)
from tests.reports.pictures.figures import assert_legible, gids, rectangles, words
from tests.studies.recorded import recorded

VARIANTS = recorded("length_copy")["arms"]
# Two steps; in the first the host waits from 30 to 50, in the second not. Two pieces of GPU work each.
TIMELINE = [
    ["host", "step 7", 0.0, 60.0],
    ["host", "metadata", 5.0, 20.0],
    ["host", "step 8", 60.0, 20.0],
    ["CUDA calls", "cudaLaunchKernel", 6.0, 2.0],
    ["CUDA calls", "cudaStreamSynchronize", 30.0, 20.0],
    ["GPU stream 7", "small", 10.0, 5.0],
    ["GPU stream 7", "large", 25.0, 25.0],
    ["GPU stream 7", "small", 90.0, 5.0],
    ["GPU stream 9", "large", 93.0, 27.0],
]
ARM = {"arm": "with the copy", "timeline": TIMELINE}


def bars(figure: Figure, kind: str) -> list[tuple[float, float]]:
    """Start and end in µs of the bars whose gid starts so, in order."""
    found = [bar for bar in rectangles(figure) if (bar.get_gid() or "").startswith(kind)]
    ends = [(1e3 * bar.get_x(), 1e3 * (bar.get_x() + bar.get_width())) for bar in found]
    return sorted((round(start, 6), round(end, 6)) for start, end in ends)


def test_lanes_have_their_spans_and_the_gpus_idle_time() -> None:
    figure = timeline_figure([recorded_excerpt(ARM)], "two steps")
    assert bars(figure, "cpu") == [(0, 30), (50, 60), (60, 80)]
    assert bars(figure, "wait 7") == [(30, 50)]
    assert bars(figure, "gpu 7") == [(10, 15), (25, 50)]
    assert bars(figure, "gpu 8") == [(90, 95), (93, 120)]
    assert bars(figure, "idle") == [(15, 25), (50, 90)]
    assert "other steps, not recorded" in words(figure)
    # Step 8 is launched at 80 and begins at 90. The work of step 7 begins while it is launched.
    (launched_ahead,) = figure.axes[0].lines
    assert [1e3 * x for x in launched_ahead.get_xdata()] == pytest.approx([80, 90])


def test_a_bar_is_a_step_busy_and_idle() -> None:
    medians = {"step_us": 1000.0, "idle_us": 400.0, "idle_percent": 40.0}
    variant = {"arm": "with", "gpu_us": 500, "host_us": 0, "medians": medians, "unprofiled_step_us": [900, 905, 990]}
    axes = variants_figure([variant], "one arm").axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 600), (600, 400)]
    assert list(axes.lines[0].get_xdata()) == [905]
    assert "40 % idle" in [text.get_text() for text in axes.texts]


def test_what_lies_above_the_gpus_work_is_bubble() -> None:
    figure = step_time_figure([1, 2], [10, 20], {"slow": [25, 35], "fast": [15, 20]}, "two loops", chosen=2)
    slow, fast, gpu, chosen = (list(figure.axes[0].lines[place].get_ydata()) for place in (1, 2, 0, 3))
    assert (slow, fast, gpu) == ([25, 35], [15, 20], [10, 20])
    assert list(figure.axes[0].lines[3].get_xdata()) == [2, 2], chosen
    areas = [area.get_datalim(figure.axes[0].transData).intervaly.tolist() for area in figure.axes[0].collections]
    assert areas == [[15, 35], [10, 20]]
    assert_legible(figure)


def masks(seq_lens: tuple[int, ...], d: int = 3) -> list[VerifyMask]:
    made = [
        preallocate_verify_mask(form, max_batch_size=4, num_draft_tokens=d, max_context_len=64, device="cpu")
        for form in VerifyMaskForm
    ]
    found = [mask for mask in made if mask is not None]
    for mask in found:
        write_chain_mask(mask, torch.tensor(seq_lens))
    return found


def mask_cells(figure: Figure) -> set[tuple[str, int, int, int, str]]:
    named = map(str.split, gids(figure))
    return {(form, int(i), int(row), int(column), kind) for form, i, row, column, kind in named}


def test_each_draft_token_sees_the_prefix_and_the_drafts_up_to_itself() -> None:
    expected = set()
    for request, length in enumerate((5, 2)):
        for row in range(3):
            drafts = ["seen" if column <= row else "hidden" for column in range(3)]
            full = ["prefix"] * length + drafts
            expected |= {("FULL", request, row, column, kind) for column, kind in enumerate(full)}
            expected |= {("QLEN_ONLY", request, row, column, kind) for column, kind in enumerate(drafts)}
    figure = verify_mask_figure(masks((5, 2)), (5, 2), "masks")
    assert mask_cells(figure) == expected
    said = words(figure)
    assert "FULL: 39 cells for this batch; a step fills all 804 bytes of the buffer" in said
    assert "QLEN_ONLY: 18 cells for this batch; a step fills all 36 bytes of the buffer" in said
    assert_legible(figure)


def test_only_the_variant_with_the_copy_waits() -> None:
    for variant in VARIANTS:
        waits = [span for span in recorded_excerpt(variant).of(Lane.CPU) if span.waits]
        assert len(waits) == (3 if variant["arm"] == "with the copy" else 0)
        assert all(span.end_us - span.start_us > 0.8 * variant["medians"]["blocked_us"] for span in waits)
