"""Tell every graph story of every mode and record the verdicts.

    python -m lab.checks.graph_survey lab.kernels.trtllm --out graphs.json

Decode, draft decode, target verify and both draft extends, full and sliding-window layers, metadata rebuilt before the replay
and in the graph. On a CPU captures are simulated.
"""

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lab.checks.graphs import GraphCase, GraphVerdict, judge_graphs
from lab.checks.verdicts import Outcome
from lab.kernels import default_implementation
from lab.metadata.engine.cuda_graph import MetadataPlace
from lab.metadata.engine.forward_batch import SpecInfo
from lab.metadata.engine.graph_inputs import GraphMode
from lab.provenance import environment
from lab.workloads.geometries import GEOMETRIES, geometry

WIDTHS = (2, 4, 8)  # query rows per request of verify and of the draft extends


def survey_cases(name: str, page_size: int, widths: Sequence[int] = WIDTHS) -> Iterator[GraphCase]:
    """All cases on one geometry."""
    modes = [GraphMode.decode(), *(GraphMode.draft_decode(step) for step in (0, 2))]
    for width in widths:
        spec_info = SpecInfo(num_tokens_per_req=width)
        modes += [GraphMode.target_verify(width), GraphMode.draft_extend(width), GraphMode.draft_extend_v2(spec_info)]
    windows = (False, True) if geometry(name).sliding_window is not None else (False,)
    for mode in modes:
        for place in MetadataPlace:
            for sliding_window in windows:
                yield GraphCase(mode, place, name, page_size, sliding_window=sliding_window)


def summary(verdicts: Sequence[GraphVerdict]) -> dict[str, dict[str, int]]:
    """Counts of outcomes per check."""
    checks = dict.fromkeys(verdict.check for verdict in verdicts)
    return {
        check: dict(Counter(verdict.outcome.value for verdict in verdicts if verdict.check == check))
        for check in checks
    }


def as_record(verdict: GraphVerdict) -> dict[str, Any]:
    """One verdict as JSON."""
    mode = verdict.case.mode
    case = asdict(replace(verdict.case, mode=GraphMode.decode())) | {
        "mode": mode.forward_mode.name.lower(),
        "num_tokens_per_req": mode.num_tokens_per_req,
        "draft_step": mode.draft_step,
        "place": verdict.case.place.value,
    }
    outcome = {"check": verdict.check, "outcome": verdict.outcome.value}
    return outcome | ({"reason": verdict.reason} if verdict.reason else {}) | case


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, print, record. The exit status is 1 if anything is wrong, or nothing was judged."""
    parser = argparse.ArgumentParser(prog="python -m lab.checks.graph_survey", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "implementation", nargs="?", help="a module with FlashInfer's names; what fits the GPU if left out"
    )
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="gpt-oss-120b")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), help="query rows per request")
    parser.add_argument("--out", type=Path, help="where to write the report, JSON")
    given = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    implementation = importlib.import_module(given.implementation or default_implementation(device).__name__)
    verdicts: list[GraphVerdict] = []
    for case in survey_cases(given.geometry, given.page_size, given.widths):
        judged = judge_graphs(implementation, case, device)
        verdicts += judged
        for verdict in judged:
            if verdict.outcome in (Outcome.WRONG, Outcome.FAILED):
                print(f"{verdict.check} is {verdict.outcome.value}: {verdict.case}: {verdict.reason}", flush=True)
    report = {
        "implementation": implementation.__name__,
        "environment": environment(),
        "captured": device.type == "cuda",
        "summary": summary(verdicts),
        "verdicts": [as_record(verdict) for verdict in verdicts],
    }
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"], indent=1))
    kept = [verdict for verdict in verdicts if verdict.outcome is not Outcome.DECLINED]
    return 1 if not kept or any(verdict.outcome is not Outcome.RIGHT for verdict in kept) else 0


if __name__ == "__main__":
    sys.exit(main())
