"""A pass that is right eagerly and wrong in a CUDA graph's replay: stale lengths or pages, moved buffers, padding that leaks.

Each case is one story of `lab.checks.stories`: replays, eager passes and poison over one runner, of the modes that an engine
captures. On a CPU a capture is simulated: the same calls are made again on the same buffers.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from lab.checks.case_run import CaseRun
from lab.checks.graph_case import GraphCase, Story, graph_modes
from lab.checks.graph_stage import MHAStage
from lab.checks.properties.check import Check, Level, first_line
from lab.checks.stories import tell
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.ranges import Ranges
from lab.workloads.geometries import geometry
from lab.workloads.interfaces import Interface

REAL = ("gpt-oss-120b",)  # a geometry with sliding-window layers and sinks, as the lab's own has
WIDTHS = (2, 4, 8)  # query rows per request of verify and of the draft extends


def told_modes(ranges: Ranges, level: Level, *more: GraphMode) -> Iterator[tuple[GraphMode, Story, int]]:
    """The modes, the stories to tell of each, and a number by which settings take turns.

    The full level tells every story of every mode, width and draft step; the smoke level each story of two modes in turn. A
    backend has `more` modes than those that all have.
    """
    widths = tuple(width for width in WIDTHS if width in ranges.q_lens) or ranges.q_lens[-1:]
    if level is Level.SMOKE:
        modes = (*graph_modes(4 if 4 in widths else widths[-1]), *more)
    else:
        several = (mode for width in widths for mode in graph_modes(width))
        modes = tuple(dict.fromkeys((*several, GraphMode.draft_decode(0), GraphMode.draft_decode(2), *more)))
    for (m, mode), (s, story) in product(enumerate(modes), enumerate(Story)):
        if level is Level.FULL:
            yield mode, story, m + s
        elif (place := (m + s) % len(modes)) in (0, 3):
            yield mode, story, s + place


def _cases(interface: Interface, ranges: Ranges, level: Level) -> Iterator[GraphCase]:
    if (torch.bfloat16, torch.bfloat16) not in ranges.dtypes:  # a story's
        return
    is_full = level is Level.FULL
    names = [name for name in REAL if is_full and name in ranges.geometries and ranges.holds(geometry(name))]
    for name in (ranges.tiny, *names):
        page_size = (
            max(ranges.page_sizes, key=lambda size: (size == 64, size)) if name in REAL else min(ranges.page_sizes)
        )
        settings = list(product(MetadataPlace, ranges.windows_of(geometry(name))))
        for mode, story, turn in told_modes(ranges, level, GraphMode.frozen_kv_draft()):
            case = GraphCase(mode, story, geometry=name, page_size=page_size)
            every = is_full and name == ranges.tiny
            chosen = settings if every else [settings[turn % len(settings)]]
            is_divided = case.interface is Interface.DECODE and mode.forward_mode.query_rows.are_uniform
            for number, (place, window) in enumerate(chosen, turn):
                if case.interface is interface:
                    splits = 3 if is_divided and number % 4 == 0 else 1
                    told = replace(case, place=place, sliding_window=window, decode_splits=splits)
                    yield replace(told, virtual_slots=splits == 1 and number % 3 == 1)
            if case.interface is interface and mode.forward_mode is ForwardMode.TARGET_VERIFY:
                yield replace(case, place=list(MetadataPlace)[turn % 2], encoder_only=True)


def _judge(run: CaseRun) -> None:
    tell(run, MHAStage)


CHECK = Check(
    "S1", "graph_stories", first_line(__doc__), _cases, _judge, interfaces=(Interface.DECODE, Interface.CONTEXT)
)
