"""The lengths of the requests in recorded calls, as a trace from which scenarios take their batches."""

from collections.abc import Callable, Sequence

from lab.calls import AttentionCall, PagedAttention
from lab.recorded.call import RecordingError
from lab.recorded.case import RecordedCase
from lab.workloads.traces import TracedRequest

DECODES = (AttentionCall.DECODE, AttentionCall.MLA_DECODE)
PASS_MS = 1000.0  # from one pass to the next, so that `lab.workloads.traces.snapshot` never mixes two passes


def traced_requests(
    cases: Sequence[RecordedCase], note: Callable[[str], object] = lambda _: None
) -> list[TracedRequest]:
    """Return the requests of recorded decode calls as a trace. The length of a request is the number of its keys before the
    call. If there is no decode call, return the prompts: the query rows of context calls.

    Consecutive calls with the same lengths are layers of one forward pass, and count once. Calls that cannot be read and
    block-sparse calls, whose lengths count selected keys only, are left out: `note` is called with a sentence about each. So
    are requests without keys before the call, which pad a batch. The requests of a pass arrive together, and each answer is one
    token.

    Raises:
        RecordingError: no call has a request with a length.
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
