"""A loop of target-verify steps around a stand-in for the model, run by several arms and read from profiles."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing.gpu_time import measure, rounded_us
from lab.timing.work import GpuWork
from lab.workloads.requests import admit, forward_batch, new_pool
from studies.arms import WARM
from studies.step_profile import LoopProfile, profiled, unprofiled_us

Variant = TypeVar("Variant")
Loop = TypeVar("Loop", bound="LoopSettings")


def stand_in(least: float = 1) -> Any:
    """Return a field for the time of a stand-in, in µs, of at least so much."""
    return field(metadata={"least": least})


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The sizes of a loop, and how often it is run; an experiment adds a `stand_in` for each of its stand-ins.

    A field's metadata may have "least", its least value, where that is not 1.

    Attributes:
        batch_size, num_draft_tokens, seq_len, page_size: requests, query rows of each, their tokens at the start, tokens
            per page.
        warm_up_steps, steps: of one run; the first are not counted. So few that the driver's queue of about a thousand
            launches holds them: an arm that does not wait for the GPU runs ahead of it.
        repeats: runs of each arm.

    Raises:
        ValueError: a size is too small.
    """

    batch_size: int = 64
    num_draft_tokens: int = 4
    seq_len: int = 4096
    page_size: int = 64
    warm_up_steps: int
    steps: int
    repeats: int = 5

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata.get("least", 1)
            if value < least:
                raise ValueError(f"{each.name}={value} must be at least {least}")

    @property
    def steps_per_run(self) -> int:
        return self.warm_up_steps + self.steps

    @property
    def longest(self) -> int:
        """Return the tokens that a request may have after the last step."""
        return self.seq_len + (self.steps_per_run + 1) * self.num_draft_tokens


class VerifyRequests:
    """A loop's requests, which verify drafts, with slots for all of their tokens; and the batch of any lengths.

    Args:
        settings: the loop's.
        max_context_len: of their pool, which has no more pages than they need.
        generator: draws how many tokens each request accepts, in every iteration as many.
        device: where all of it is.
    """

    def __init__(
        self, settings: LoopSettings, max_context_len: int, generator: torch.Generator, device: torch.device
    ) -> None:
        batch_size, num_draft_tokens = settings.batch_size, settings.num_draft_tokens
        # An engine gives requests their slots before it knows which drafts are accepted; here all at once.
        lens = (settings.longest,) * batch_size
        self.pool = new_pool(lens, page_size=settings.page_size, max_context_len=max_context_len, device=device)
        self.rows = torch.tensor(admit(self.pool, lens, (0,) * batch_size).rows, device=device)
        self.q_lens = (num_draft_tokens,) * batch_size
        self.first_seq_lens = torch.full((batch_size,), settings.seq_len, device=device)
        self.accepted = torch.randint(1, num_draft_tokens + 1, (batch_size,), generator=generator).to(device)
        self._draft_positions = torch.arange(num_draft_tokens, device=device)

    def batch(self, seq_lens: Tensor) -> ForwardBatch:
        """Return the target-verify pass over requests of these lengths, [batch_size] int64, made on the device."""
        positions = seq_lens[:, None] + self._draft_positions
        slots = self.pool.req_to_token[self.rows[:, None], positions].flatten().to(torch.int64)
        return forward_batch(ForwardMode.TARGET_VERIFY, self.rows, seq_lens, self.q_lens, slots)


@dataclass
class LoopRuns:
    """The runs of one arm.

    Attributes:
        unprofiled_us: time of a step without a profile, one of each run, by the host's clock.
        profiles: one of each run.
    """

    unprofiled_us: list[float] = field(default_factory=list)
    profiles: list[LoopProfile] = field(default_factory=list)

    def facts(self, step_facts: Callable[[LoopProfile], Sequence[Any]], medians: Callable[[Sequence[Any]], Any]) -> Any:
        """Return what a row says of the profiles: the facts of each counted step by run, and their medians.

        Args:
            step_facts: reads dataclasses, one of each counted step, from a profile.
            medians: of the facts of all runs.
        """
        runs = [step_facts(each) for each in self.profiles]
        return {
            "medians": medians([facts for run in runs for facts in run]),
            "runs": [[asdict(facts) for facts in run] for run in runs],
        }


def measure_loop(
    run: Callable[[Variant], object], rounds: Iterable[Sequence[Variant]], steps_per_run: int
) -> dict[Variant, LoopRuns]:
    """Run the arms of a loop in turns, each without a profile and with one.

    Args:
        run: launches all steps of an arm, each in a range "step N".
        rounds: the arms of each round, in their order.
        steps_per_run: steps of one run.

    Raises:
        IncompleteProfileError: a profile lacks what the figures are made of.
    """
    runs: dict[Variant, LoopRuns] = {}
    for arm in itertools.chain.from_iterable(rounds):
        found = runs.setdefault(arm, LoopRuns())
        found.unprofiled_us.append(round(unprofiled_us(partial(run, arm)) / steps_per_run, 3))
        found.profiles.append(profiled(partial(run, arm)))
    return runs


def loops_of(settings: type[Loop], **values: Any) -> list[Loop]:
    """Return settings of all combinations of the values, each of which is one value or a list of several.

    Raises:
        ValueError: a value is too small.
    """
    several = (value if isinstance(value, list) else [value] for value in values.values())
    return [settings(**dict(zip(values, each, strict=True))) for each in itertools.product(*several)]


def facts_alone(work: GpuWork, name: str) -> dict[str, Any]:
    """Measure the GPU time of what is done once beside a loop, as a CUDA graph would replay it, L2 warm.

    Returns:
        JSON-ready facts; the median is called "<name>_us", its interquartile range "<name>_iqr_us".
    """
    time = measure(work, WARM)
    return {
        f"{name}_us": round(time.median_us, 3),
        f"{name}_iqr_us": round(time.iqr_us, 3),
        "samples_us": rounded_us(time.samples_us),
        "launches": time.launches,
        "method": str(time.method),
        "device": time.device.facts(),
    }
