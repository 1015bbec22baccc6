"""Change 25002: draft extend V2 in a CUDA graph."""

from collections.abc import Callable, Sequence
from operator import itemgetter

from lab.reports.changes.change import Change, Recording, Recordings, Row, compared_rows, pairs
from lab.reports.changes.verdicts import Answer, Aspect, Observation, compared, microseconds
from lab.reports.tables import counted
from lab.timing.statistics import Times

_DRAFT_EXTEND_V2 = "draft_extend_v2"


def judge_draft_extend_graph(recordings: Recordings) -> Answer:
    """Compare eager passes with replays, and the graph's outputs with each other."""
    recording = recordings["draft_extend_graph"]
    modes = list(dict.fromkeys(row["mode"] for row in recording["modes"]))
    others = [mode for mode in modes if mode != _DRAFT_EXTEND_V2]
    aspects = (
        Aspect(
            "A replay, with the copies into the graph's inputs, leaves the GPU idle sooner than the eager pass.",
            tuple(_eager_against_graph(recording, [_DRAFT_EXTEND_V2], _completion)),
        ),
        Aspect(
            "Without the top-k over all rows, which no worker reads, the graph takes less GPU time.",
            tuple(_form_against_form(recording, "all rows with top-k", "all rows")),
        ),
        Aspect(
            "With each request's one row chosen before the LM head, as in 0.5.23, it takes less again.",
            tuple(_form_against_form(recording, "all rows", "selected row")),
            of_claim=False,
        ),
        Aspect(
            "The same replay in the other modes leaves the GPU idle sooner.",
            tuple(_eager_against_graph(recording, others, _completion)),
            of_claim=False,
        ),
        Aspect(
            "The kernels of a replay take less GPU time than the eager pass's: the launches' cost is not in it.",
            tuple(_eager_against_graph(recording, modes, Times.of_row)),
            of_claim=False,
        ),
    )
    first = recording["modes"][0]
    setting = (
        f"A stand-in for a draft model, one layer of {recording['model']['geometry_name']} between QKV projection and LM head "
        f"over {recording['model']['vocab_size']:,} tokens, {first['kv_len']:,} keys per request, "
        f"{recording['implementation']}. The times until the GPU is idle are by the host's clock "
        f"({recording['completion_method']}) and recorded without a spread."
    )
    return Answer(aspects, setting, _host_times(recording), ("MLA's graph.",))


def _eager_against_graph(
    recording: Recording, modes: Sequence[str], times_of: Callable[[Row], Times]
) -> list[Observation]:
    found = []
    for eager, graph in pairs(recording["modes"], itemgetter("mode", "batch_size"), "arm", "eager", "graph"):
        if eager["mode"] in modes:
            mode = eager["mode"].replace("_", " ")
            where = f"{mode}, {counted(eager['batch_size'], 'request')}"
            found.append(compared(f"MHA, {mode}", where, {"": (times_of(eager), times_of(graph))}))
    return found


def _form_against_form(recording: Recording, before: str, after: str) -> list[Observation]:
    found = []
    for rows in pairs(recording["forms"], itemgetter("batch_size", "num_draft_tokens"), "form", before, after):
        width = f"{rows[0]['num_draft_tokens']} draft tokens"
        found.append(compared_rows(f"MHA, {width}", f"{counted(rows[0]['batch_size'], 'request')}, {width}", rows))
    return found


def _host_times(recording: Recording) -> tuple[str, ...]:
    host = {
        arm: [row["host_us"] for row in recording["modes"] if (row["mode"], row["arm"]) == (_DRAFT_EXTEND_V2, arm)]
        for arm in ("eager", "graph")
    }
    if not all(host.values()):
        return ()
    eager, graph = (f"{microseconds(min(times))} to {microseconds(max(times))} µs" for times in host.values())
    return (f"Host time of a draft extend V2: {eager} eagerly, {graph} for a replay with its copies.",)


def _completion(row: Row) -> Times:
    samples_us = row.get("completion_samples_us")
    return Times.of(samples_us) if samples_us else Times(row["completion_us"])


CHANGE = Change(
    25002,
    "Draft extend V2 in a CUDA graph",
    "TRT-LLM MHA's draft extend V2 can run in a CUDA graph, and the top-k over the logits of all rows in it is dead work. "
    "The lab asks for the time of both.",
    "description of sgl-project/sglang#25002",
    "How much sooner is a replay done than an eager pass, and what do the rows cost that nobody reads?",
    "draft_extend_graph",
    judge_draft_extend_graph,
)
