"""The method of a GPU time: the clock, and the state of L2 when a call starts."""

from dataclasses import dataclass
from itertools import product

from lab.named_enum import NamedEnum


class Clock(NamedEnum):
    GRAPH = "graph"
    CUPTI = "cupti"
    EVENTS = "events"


class L2(NamedEnum):
    """The state of the GPU's L2 cache when a timed call starts."""

    WARM = "warm"
    COLD_ROTATION = "cold by rotation"
    COLD_FLUSH = "cold by flush"


_CLOCKS = {
    Clock.GRAPH: "calls recorded in a CUDA graph, its replay between two CUDA events, time per call",
    Clock.CUPTI: "calls recorded in a CUDA graph, CUPTI's first start to last end of its replay, time per call",
    Clock.EVENTS: "one eager call on an idle GPU between two CUDA events, the host's launch time included",
}
CONTENTS = "a pass' contents drawn anew before each sample; the host's clock agrees"
_CACHES = {
    L2.WARM: "the same buffers each call",
    L2.COLD_ROTATION: "each call of a replay on inputs, K/V and output of its own, so that none is still in L2; scratch is as "
    "the implementation has it, FlashInfer's workspace shared and a prepared portable call's its own",
    L2.COLD_FLUSH: "one call per sample, L2 filled before it by reading",
}
# Pairs that time nothing, with the reason and what to take instead.
_REFUSED = {
    (Clock.GRAPH, L2.COLD_FLUSH): "the graph clock times many calls in one replay, and a flush between them would be "
    "timed too: take L2.COLD_ROTATION, or Clock.CUPTI",
    (Clock.EVENTS, L2.COLD_ROTATION): "the events clock times one call a sample, for which no buffers take turns: take "
    "L2.COLD_FLUSH",
}


@dataclass(frozen=True)
class Method:
    """How a GPU time is measured: the clock, and the state of L2. Raises ValueError for a pair that does not fit together."""

    clock: Clock  #: the events of GRAPH add about 2 µs per replay
    l2: L2

    def __post_init__(self) -> None:
        if reason := _REFUSED.get((self.clock, self.l2)):
            raise ValueError(reason)

    def __str__(self) -> str:
        return f"{_CLOCKS[self.clock]}; L2 {self.l2.name.lower().split('_')[0]}: {_CACHES[self.l2]}; {CONTENTS}"


METHODS = tuple(Method(clock, l2) for clock, l2 in product(Clock, L2) if (clock, l2) not in _REFUSED)


def method_named(clock: str, l2: str) -> Method:
    """Return the method for two words of the command line: a clock, and "cold" or "warm". "cold" means rotated buffers for the
    graph clock and flushed L2 for the other clocks, as in `flashinfer.testing`.
    """
    clocks = {each.value: each for each in Clock}
    if clock not in clocks:
        raise ValueError(f"no clock is called {clock!r}; there are {', '.join(clocks)}")
    if l2 not in ("cold", "warm"):
        raise ValueError(f"L2 can be 'cold' or 'warm', not {l2!r}")
    if l2 == "warm":
        return Method(clocks[clock], L2.WARM)
    return Method(clocks[clock], L2.COLD_ROTATION if clocks[clock] is Clock.GRAPH else L2.COLD_FLUSH)
