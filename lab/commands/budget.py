"""Define `lab budget`, which shows rounding errors of K/V caches and kernels, or judges the failure of a test."""

import re
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from lab.commands.options import Device, Json, Markdown, list_option, prepare_machine, refuse, refusing_errors
from lab.exit_status import ExitStatus
from lab.extras import require
from lab.loading import load

of_test = partial(Option, rich_help_panel="A test's failure")
ROW_ELEMENTS = 2**15  # most elements of the outputs in a row of the table
Dtype = Annotated[Literal["bf16", "fp16", "e4m3"] | None, Option(help="of query or output; else the cache's, or bf16")]
Calls = Annotated[str | None, Option(metavar="FOLDER[#3]", help="take queries, K and V of calls of `lab record`")]
E4M3 = Annotated[bool, Option("--e4m3-arithmetic", help="the kernel rounds its operands to e4m3")]


def _size(text: str) -> int:
    if not (found := re.fullmatch(r"([0-9]{1,7})([KM]?)", text.upper())):
        raise ValueError(f"{text} is no number of keys, such as 1000, 64K or 1M")
    return int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]]


def _difference(text: str) -> tuple[float, bool]:
    return float(text.removesuffix("%")), text.endswith("%")


OffBy = Annotated[
    Any,
    of_test("--off-by", "--exceeds", parser=_difference, metavar="N", help="largest |got - want|, or N% above atol"),
]
Against = Annotated[
    Literal["stored", "rounded", "original"],
    of_test(
        "--against",
        help="the test's reference: float64 on stored K and V, that in the output's dtype, or on original K and V",
    ),
]


def budget(
    kv: Annotated[list[str], list_option(str, "caches: bf16, fp16, e4m3, nvfp4", default="bf16,e4m3,nvfp4")],
    keys: Annotated[list[int], list_option(_size, "keys of a request, such as 1K or 1M", default="1K")],
    scale: Annotated[list[str], list_option(str, "1, amax, 4amax, amax/4", default="amax")],
    values: Annotated[list[str], list_option(str, "normal, heavy, outliers", default="normal")],
    implementation: Annotated[str | None, typer.Argument(help="a kernel to measure too: module or file")] = None,
    v_std: Annotated[float, Option(help="factor of V")] = 1.0,
    query: Dtype = None,
    out: Dtype = None,
    e4m3_arithmetic: E4M3 = False,
    head_dim: Annotated[int, Option(help="elements of a vector")] = 64,
    group: Annotated[int, Option(help="query heads that share a K/V head")] = 8,
    calls: Calls = None,
    atol: Annotated[float, Option(help="absolute tolerance of an element")] = 1e-2,
    rtol: Annotated[float, Option(help="tolerance of an element relative to the expected one")] = 1e-2,
    mismatched: Annotated[int, of_test(help="elements beyond the tolerance")] = 0,
    elements: Annotated[int, of_test(help="number of compared elements")] = 0,
    off_by: OffBy = None,
    wanted: Against = "stored",
    draws: Annotated[int, of_test(min=1, help="simulated calls, fewer if they are large")] = 200,
    seed: Annotated[int, Option(help="seed of the drawn values")] = 0,
    device: Device = None,
    picture: Annotated[Path | None, Option(dir_okay=False, help="draw the table into this PNG file")] = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Show the rounding errors of K/V caches and of right kernels, or decide whether a test's failure is a bug or noise.

    With --mismatched and --elements, a test's failure is compared with simulated right kernels. Exit status: 0 noise, 1 bug,
    125 undecided.
    """
    prepare_machine(device)
    from lab import budget as computed
    from lab.calls import AttentionCall
    from lab.checks.run.judging import device_of
    from lab.recorded.case import recorded_cases
    from lab.reports.budget import answer_report, budget_figure, budget_report

    common: dict[str, Any] = {"head_dim": head_dim, "group": group, "v_std": v_std}
    common |= {"query": query or "", "out": out or "", "arithmetic": "e4m3" if e4m3_arithmetic else ""}
    with refusing_errors():
        place = device_of(device)
        found = [computed.Setting(*each, **common) for each in product(kv, keys, scale, values)]
        settings = list(
            dict.fromkeys(each if each.kv in computed.LARGEST else replace(each, scale="1") for each in found)
        )
        recorded = list(computed.recorded_requests(recorded_cases(calls))) if calls else []
        if calls and not recorded:
            raise ValueError(f"{calls} has no decode or context call with a query row and a key")
        if mismatched or elements or off_by:
            require("lab budget --mismatched", "scipy")
            if len(settings) > 1 or implementation or picture:
                raise ValueError(
                    "for the failure of a test, give one value each by --kv, --keys, --scale and --values, "
                    "and neither a kernel nor --picture"
                )
            asked: dict[str, Any] = {"mismatched": mismatched, "elements": elements, "atol": atol, "rtol": rtol}
            asked["off_by"] = off_by and (atol * (1 + off_by[0] / 100) if off_by[1] else off_by[0])
            batches = recorded or computed.drawn_requests(settings[0], draws * elements, seed)
            answer = computed.explain(settings[0], batches, against=wanted, **asked)
            report = answer_report(answer, settings[0], asked | {"against": wanted})
            report.show(json, markdown)
            raise typer.Exit(report.exit_status)
        kernel = getattr(load(implementation), AttentionCall.DECODE.value, None) if implementation else None
        if implementation and kernel is None:
            raise ValueError(f"{implementation} has no {AttentionCall.DECODE.value}")
        rows = []
        for each in settings:
            longest = max(recorded, key=lambda one: one.keys.shape[1], default=None)
            requests = longest or next(computed.drawn_requests(each, ROW_ELEMENTS, seed))
            try:
                rows.append(computed.budget(requests.to(place), each, atol, rtol, kernel))
            except (RuntimeError, TypeError) as error:  # a refusal is one, or an argument that it does not have
                refuse(f"{implementation} computes no call over a cache of {each.kv}: {error}", ExitStatus.NOT_JUDGED)
    if picture is not None:
        require("lab budget --picture", "matplotlib")
        budget_figure(rows, "Errors of K/V caches, of right kernels, and the judge's bound").savefig(picture)
    budget_report(rows, atol, rtol).show(json, markdown)
