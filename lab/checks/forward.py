"""The truth of a forward pass over paged K/V, from the requests' histories alone."""

from lab.checks.forward_pass import ForwardPass
from lab.checks.truth import Rules, Truth, truth_of_requests


def truth_of(forward: ForwardPass) -> Truth:
    """The truth of a pass, from its histories; worth keeping where several outputs of it are compared."""
    case, layer = forward.case, forward.layer
    rules = Rules(
        bmm1_scale=layer.softmax_scale * layer.k_scale,
        bmm2_scale=layer.v_scale,
        arithmetic=case.dtype if case.arithmetic is None else case.arithmetic,
        out_dtype=case.dtype,
        window_left=case.window_left,
        sinks=layer.sinks,
    )
    histories = [
        (keys[:kv_len], values[:kv_len]) for (keys, values), kv_len in zip(forward.histories, case.kv_lens, strict=True)
    ]
    return truth_of_requests(forward.query, histories, list(case.q_lens), rules)
