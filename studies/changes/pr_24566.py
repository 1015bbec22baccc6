"""SGLang's change 24566: a draft extend runs on the decode kernel."""

from collections.abc import Sequence
from operator import itemgetter

from lab.wording import counted
from studies.changes.change import Change, Recordings, compared_pairs, pairs
from studies.changes.verdicts import Answer, aspects
from studies.recording import Recorded, RecordedRow


def judge_decode_kernel(recordings: Recordings) -> Answer:
    """Compare the context call with the decode call at every point that has times of both calls."""
    recording = recordings["draft_extend_kernels"]
    rows = sorted(recording["rows"], key=itemgetter("q_len", "requests", "kv_len"))
    both = pairs(rows, "arm", "context", "decode", ("q_len", "requests", "kv_len"))
    claimed = {"The decode call takes less GPU time than the context call.": compared_pairs(both, _named)}
    setting = (
        f"The timed calls are draft extends V2 of one layer of {recording['geometry']} on one of "
        f"{recording['tensor_parallel']} tensor-parallel GPUs. *q* is the number of query rows of each request."
    )
    # MLA's draft extend used the decode call with several rows even before the change.
    mla = recordings.get("mla_decode", {}).get("rows", ())
    several = [row for row in mla if row["q_len"] > 1]
    lacking = "pull request 24566 for MLA, whose draft extend already used the decode call (sgl-project/sglang#11664)"
    lacking += "." if several else "; nor MLA's decode call with several rows."
    return Answer(aspects(claimed), setting, _mla_sentences(mla), (*_left_out(recording), lacking))


def _named(row: RecordedRow) -> tuple[str, str]:
    return f"MHA, q {row['q_len']}", f"{row['requests']} × {row['kv_len']:,} keys, q {row['q_len']}"


def _left_out(recording: Recorded) -> tuple[str, ...]:
    skipped, declined = len(recording["skipped"]), len(recording["declined"])
    variants = ", ".join(sorted({str(row["arm"]) for row in recording["declined"]}))
    found = {
        f"{skipped} points of more than {recording['most_keys']:,} keys.": skipped,
        f"{counted(declined, 'time')}, because these arms declined: {variants}.": declined,
    }
    return tuple(sentence for sentence, count in found.items() if count)


def _mla_sentences(rows: Sequence[RecordedRow]) -> tuple[str, ...]:
    """Return a sentence about MLA's decode call: its times with several query rows, divided by those with one row."""
    point = itemgetter("requests", "kv_len", "heads", "arm", "kv_dtype")
    single_us = {point(row): row["median_us"] for row in rows if row["q_len"] == 1}
    several = [row for row in rows if row["q_len"] > 1 and point(row) in single_us]
    if not several:
        return ()
    ratios = [row["median_us"] / single_us[point(row)] for row in several]
    return (
        f"At {counted(len(ratios), 'point')} of mla_decode.json, MLA's decode call takes {min(ratios):.2f} to "
        f"{max(ratios):.2f} times as long with {' or '.join(map(str, sorted({row['q_len'] for row in several})))} query rows "
        "per request as with one query row.",
    )


CHANGE = Change(
    24566,
    "Draft extend on the decode kernel",
    "The draft extend of TRT-LLM MHA should run the decode kernel, as target verify does, and not the context kernel. "
    "Pull request 24566 gives no number.",
    "description of sgl-project/sglang#24566; reverted by #24856 after an illegal memory access, restored by #28241",
    "For which numbers of rows, requests and keys does the decode call take less time than the context call?",
    "draft_extend_kernels",
    judge_decode_kernel,
    ("mla_decode",),
)
