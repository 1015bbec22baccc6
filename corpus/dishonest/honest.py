"""Honest kernels that do what dishonest ones do too: they stay right, and are timed as ever."""

from typing import Any

import torch

from corpus.dishonest import DECODE
from corpus.dishonest.timing import Call, Portable, prepared


class _Named(Portable):
    def __init__(self) -> None:
        self.__name__ = type(self).__name__


class PlansByShape(_Named):
    """Keeps what it worked out of the shapes, and nothing of the contents."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: dict[tuple[int, ...], dict[str, Any]] = {}

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        key = (*arguments["query"].shape, *arguments["block_tables"].shape)
        self.plans.setdefault(key, {"max_seq_len": arguments["max_seq_len"]})
        return super().prepare_trtllm_batch_decode_with_kv_cache(**arguments | self.plans[key])


class AllocatesInAdvance(_Named):
    """Has an output of its own for all calls of a shape, and copies it."""

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
    """Does the second half of the requests on another stream, which it forks and joins."""

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
    """Times itself at its first call, with events and waits, and remembers a choice."""

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
    """Reads lengths on the host when it plans, as FlashInfer's wrappers do, for calls on the same lengths."""

    def plan_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Call:
        longest = max(arguments["seq_lens"].tolist())
        assert longest <= arguments["max_seq_len"]
        return prepared(**arguments)


CONTROLS = tuple(
    cls() for cls in (PlansByShape, AllocatesInAdvance, JoinsItsStreams, AutotunedAtFirstCall, PlansOnTheHost)
)
plans_by_shape, allocates_in_advance, joins_its_streams, autotuned_at_first_call, plans_on_the_host = CONTROLS
__all__ = ["CONTROLS", "DECODE"]
