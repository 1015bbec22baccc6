"""Honest kernels that resemble dishonest ones. The judge must accept them, and they must be timed as usual."""

from typing import Any

import torch

from corpus.dishonest import DECODE
from corpus.dishonest.timing import Call, Portable, prepared


class _Named(Portable):
    def __init__(self) -> None:
        self.__name__ = type(self).__name__


class PlansByShape(_Named):
    """Keeps results that depend only on shapes, and none that depend on contents."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: dict[tuple[int, ...], dict[str, Any]] = {}

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        key = (*arguments["query"].shape, *arguments["block_tables"].shape)
        self.plans.setdefault(key, {"max_seq_len": arguments["max_seq_len"]})
        return super().prepare_trtllm_batch_decode_with_kv_cache(**arguments | self.plans[key])


class AllocatesInAdvance(_Named):
    """Writes to one buffer of its own for all calls of the same shape, and copies it to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[torch.Size, torch.Tensor] = {}

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        out = arguments["out"]
        own = self.outputs.setdefault(out.shape, torch.empty_like(out))
        honest = prepared(**arguments | {"out": own})

        def call() -> torch.Tensor:
            honest()
            return out.copy_(own)

        return call


class JoinsItsStreams(_Named):
    """Computes the second half of the requests on another stream, which it forks and joins."""

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        side = torch.cuda.Stream()
        half = len(arguments["seq_lens"]) // 2
        parts = []
        for part in (slice(None, half), slice(half, None)):
            own = {name: arguments[name][part] for name in ("query", "block_tables", "seq_lens", "out")}
            parts.append(prepared(**arguments | own))

        def call() -> torch.Tensor:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                parts[1]()
            parts[0]()
            current.wait_stream(side)
            return arguments["out"]

        return call


class AutotunedAtFirstCall(_Named):
    """Times itself in its first call, with events and waits, and stores a choice."""

    def call(self, honest: Call, arguments: dict[str, Any]) -> torch.Tensor:
        if not hasattr(self, "choice") and not torch.cuda.is_current_stream_capturing():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                honest()
            end.record()
            torch.cuda.synchronize()
            self.choice = start.elapsed_time(end) > 0
        return honest()


class PlansOnTheHost(_Named):
    """Reads lengths on the host in `plan`, like FlashInfer's wrappers; later calls have the same lengths."""

    def plan_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        longest = max(arguments["seq_lens"].tolist())
        assert longest <= arguments["max_seq_len"]
        return prepared(**arguments)


CONTROLS = tuple(
    cls() for cls in (PlansByShape, AllocatesInAdvance, JoinsItsStreams, AutotunedAtFirstCall, PlansOnTheHost)
)
plans_by_shape, allocates_in_advance, joins_its_streams, autotuned_at_first_call, plans_on_the_host = CONTROLS
__all__ = ["CONTROLS", "DECODE"]
