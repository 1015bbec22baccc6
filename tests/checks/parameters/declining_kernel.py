"""The reference's decode, which declines an output handed out beside an LSE."""

from typing import Any

from lab import references


def trtllm_batch_decode_with_kv_cache(**arguments: Any) -> Any:
    if arguments.get("out") is not None and arguments.get("return_lse"):
        raise NotImplementedError("an output that is handed out goes without an LSE")
    return references.trtllm_batch_decode_with_kv_cache(**arguments)
