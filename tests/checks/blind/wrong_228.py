"""Wrong: where a given out has another dtype than the query, the wrapper converts the result to a new tensor, and returns that;
out is not written."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403


class Wrong(Kernel):
    def paged(self, call):
        if call.out is not None and call.out.dtype != call.query.dtype:
            call = replace(call, out=None, out_dtype=call.out.dtype)
        return super().paged(call)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
