"""Convert recorded calls to a trace of request lengths, from which the scenarios of `lab bench` take batches."""

from collections.abc import Callable, Sequence

from lab.calls import AttentionCall, PagedAttention
from lab.recorded.call import RecordingError
from lab.recorded.case import RecordedCase
from lab.workloads.traces import TracedRequest

DECODES = (AttentionCall.DECODE, AttentionCall.MLA_DECODE)
# Time between two passes: so long that `lab.workloads.traces.snapshot` does not mix requests of two passes.
PASS_MS = 1000.0


def traced_requests(
    cases: Sequence[RecordedCase], note: Callable[[str], object] = lambda _: None
) -> list[TracedRequest]:
    """Return the requests of recorded decode calls as a trace. The length of a request is the number of keys that it had before
    the call. If there is no decode call, the trace has the requests of context calls, whose length is their number of query
    rows. `note` is called with a sentence about each call that is left out.

    Consecutive calls with the same lengths are assumed to be layers of one forward pass, and are used once. The requests of a
    pass arrive at the same time, and each generates one token. Requests without keys before the call pad a batch, and are left
    out. Raises RecordingError if no request is left.
    """
    passes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for case in cases:
        try:
            _, problem = case.posed()
        except RecordingError as error:
            note(str(error))
            continue
        if isinstance(problem, PagedAttention) and problem.is_block_sparse:
            note(f"call {case.number} is block-sparse: its lengths count selected keys only")
            continue
        is_decode = case.interface in DECODES
        both = zip(problem.seq_lens.tolist(), problem.q_lens(), strict=True)
        lengths = tuple(length for kv_len, q_len in both if (length := kv_len - q_len if is_decode else q_len) > 0)
        if lengths and passes[is_decode][-1:] != [lengths]:
            passes[is_decode].append(lengths)
    found = passes[True] or passes[False]
    if not found:
        raise RecordingError("no recorded call has a request with a length")
    return [TracedRequest(PASS_MS * turn, length, 1) for turn, lengths in enumerate(found) for length in lengths]
