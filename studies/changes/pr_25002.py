"""SGLang's change 25002: a draft extend V2 runs in a CUDA graph."""

from lab.timing.statistics import Times
from lab.wording import counted
from studies.changes.change import Change, Recordings, compared_pairs, pairs
from studies.changes.verdicts import Answer, Observation, aspects, microseconds
from studies.recording import Recorded, RecordedRow

_DRAFT_EXTEND_V2 = "draft_extend_v2"


def judge_draft_extend_graph(recordings: Recordings) -> Answer:
    """Compare eager passes with replays of their CUDA graphs, and the kinds of output of the draft extend with each other."""
    recording = recordings["draft_extend_graph"]
    eager_graph = pairs(recording["modes"], "arm", "eager", "graph", ("mode", "batch_size"))
    own = [rows for rows in eager_graph if rows[0]["mode"] == _DRAFT_EXTEND_V2]
    others = [rows for rows in eager_graph if rows[0]["mode"] != _DRAFT_EXTEND_V2]
    claimed = {
        "Replaying the CUDA graph of draft extend V2, copies of its inputs included, takes less time than the eager pass.": (
            compared_pairs(own, _mode, _completion)
        ),
        "The graph of draft extend V2 takes less GPU time without the top-k over all rows, which no worker reads.": (
            _form_against_form(recording, "all rows with top-k", "all rows")
        ),
    }
    aside = {
        "Draft extend V2's graph takes less GPU time if the LM head gets one row of each request than if it gets all rows.": (
            _form_against_form(recording, "all rows", "selected row")
        ),
        "In modes other than draft extend V2, the GPU is idle sooner after a replay than after the eager pass.": compared_pairs(
            others, _mode, _completion
        ),
        "The kernels of a replay take less GPU time than the kernels of the eager pass, without the time of launches.": (
            compared_pairs(eager_graph, _mode)
        ),
    }
    first = recording["modes"][0]
    spread = (
        ""
        if any(row.get("completion_samples_us") for row in recording["modes"])
        else " The times until the GPU is idle have no recorded spread."
    )
    setting = (
        f"The timed pass simulates a draft model: one layer of {recording['model']['geometry_name']}, from the QKV projection "
        f"to an LM head over {recording['model']['vocab_size']:,} tokens, with {first['kv_len']:,} keys per request and the "
        f"kernels of {recording['implementation']}. The host's clock (perf_counter) measured the times from the call "
        f"until the GPU is idle. Each call began on an idle GPU, eager passes and replays in turn.{spread}"
    )
    return Answer(aspects(claimed, aside), setting, _host_times(recording), ("the graph of MLA's draft extend.",))


def _mode(row: RecordedRow) -> tuple[str, str]:
    mode = row["mode"].replace("_", " ")
    return f"MHA, {mode}", f"{mode}, {counted(row['batch_size'], 'request')}"


def _form_against_form(recording: Recorded, before: str, after: str) -> list[Observation]:
    def named(row: RecordedRow) -> tuple[str, str]:
        width = f"{row['num_draft_tokens']} draft tokens"
        return f"MHA, {width}", f"{counted(row['batch_size'], 'request')}, {width}"

    return compared_pairs(pairs(recording["forms"], "form", before, after, ("batch_size", "num_draft_tokens")), named)


def _host_times(recording: Recorded) -> tuple[str, ...]:
    host = {
        variant: [
            row["host_us"] for row in recording["modes"] if (row["mode"], row["arm"]) == (_DRAFT_EXTEND_V2, variant)
        ]
        for variant in ("eager", "graph")
    }
    if not all(host.values()):
        return ()
    eager, graph = (f"{microseconds(min(times))} to {microseconds(max(times))} µs" for times in host.values())
    return (
        f"The host time of a draft extend V2 is {eager} for an eager pass, and {graph} for a replay of its graph with the "
        "copies into the graph's inputs.",
    )


def _completion(row: RecordedRow) -> dict[str, Times]:
    samples_us = row.get("completion_samples_us")
    # An older recording has medians alone, as its setting says: differences of half a millisecond are read as they are.
    return {"": Times.of(samples_us) if samples_us else Times(row["completion_us"], iqr_us=0.0)}


CHANGE = Change(
    25002,
    "Draft extend V2 in a CUDA graph",
    "TRT-LLM MHA's draft extend V2 can run in a CUDA graph, and does not need the top-k over the logits of all rows. "
    "The lab measures how much time the graph saves, and how much time the top-k takes.",
    "description of sgl-project/sglang#25002",
    "How much sooner does a draft extend V2 end in a CUDA graph than in an eager pass, and how much time does a top-k take "
    "whose result no worker reads?",
    "draft_extend_graph",
    judge_draft_extend_graph,
)
