"""The same with an honest mistake: a window of n keys, where `window_left` names the n keys beside the row's own."""

import functools

from tests.checks import someone_elses


@functools.wraps(someone_elses.trtllm_batch_decode_with_kv_cache)
def trtllm_batch_decode_with_kv_cache(*arguments, window_left=-1, **named):
    narrower = max(window_left - 1, 0) if window_left >= 0 else -1
    return someone_elses.trtllm_batch_decode_with_kv_cache(*arguments, window_left=narrower, **named)
