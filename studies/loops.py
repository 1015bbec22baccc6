"""A loop of target-verify steps, with matrix products in place of the model. Several variants run it, and are profiled."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

import torch
import typer
from torch import Tensor
from torch.profiler import record_function

from lab.metadata.engine.capture import capturing
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing.gpu_time import measure, rounded_us
from lab.timing.work import GpuWork
from lab.workloads.requests import admit, forward_batch, new_pool
from studies.step_profile import LoopProfile, profiled, unprofiled_us
from studies.study import Study, count
from studies.variants import WARM

LoopVariant = TypeVar("LoopVariant")
WarmUpSteps = Annotated[int, typer.Option(help="steps before the counted ones in each run")]
Steps = Annotated[int, typer.Option(help="counted steps of each run")]
# Of a loop's times; `part` is what GPU work belongs to, `steps` what the medians are taken over.
METHOD = (
    "torch.profiler (CUPTI), CPU and CUDA activities; GPU work belongs to the {part} whose launch has its correlation id; "
    "medians over the {steps} of all runs, the arms' runs in turns"
)
MATRIX_SIZE = 2048  # a product of about 30 µs on an H200: short for a step, long for a launch


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The sizes of a loop, and how often it is run. A study adds the duration of the work that stands for the model.

    A run has few steps, because the driver's queue holds about a thousand launches, and a variant that does not wait for the
    GPU runs ahead of it. A field's metadata has its least value as "least", if that is not 1.
    """

    batch_size: Annotated[int, count("requests of the batch")] = 64
    num_draft_tokens: Annotated[int, count("query rows of each request")] = 4
    seq_len: Annotated[int, count("tokens of each request at the start")] = 4096
    page_size: Annotated[int, count("tokens per page")] = 64
    warm_up_steps: WarmUpSteps
    steps: Steps
    repeats: Annotated[int, typer.Option(help="runs of each variant")] = 5

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
        """Return the largest number of tokens that a request may have after the last step."""
        return self.seq_len + (self.steps_per_run + 1) * self.num_draft_tokens


class MatrixProducts:
    """A CUDA graph of matrix products that takes about `gpu_us`, in place of a model."""

    def __init__(self, gpu_us: float, device: torch.device) -> None:
        # Kept here, because a graph does not keep what it reads and writes.
        self.operands = [torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self.out = torch.empty_like(self.operands[0])
        arguments = dict(zip(("input", "mat2"), self.operands, strict=True)) | {"out": self.out}
        product = GpuWork.of(torch.mm, 3 * self.out.nbytes, 2 * MATRIX_SIZE**3, **arguments)
        self.products = max(1, round(gpu_us / measure(product, WARM).median_us))
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph):
            for _ in range(self.products):
                torch.mm(*self.operands, out=self.out)


class VerifyLoop(ABC, Generic[LoopVariant]):
    """A loop of target-verify steps that several variants run. Its K/V pool has slots for all tokens of a run."""

    def __init__(self, settings: LoopSettings, max_context_len: int, device: torch.device) -> None:
        self.settings = settings
        batch_size, num_draft_tokens = settings.batch_size, settings.num_draft_tokens
        # An engine gives requests their slots before it knows which drafts are accepted; here all at once.
        lens = (settings.longest,) * batch_size
        self.pool = new_pool(lens, page_size=settings.page_size, max_context_len=max_context_len, device=device)
        self.rows = torch.tensor(admit(self.pool, lens, (0,) * batch_size).rows, device=device)
        self.q_lens = (num_draft_tokens,) * batch_size
        self.first_seq_lens = torch.full((batch_size,), settings.seq_len, device=device)
        self.generator = torch.Generator().manual_seed(0)
        self.accepted = torch.randint(1, num_draft_tokens + 1, (batch_size,), generator=self.generator).to(device)
        self._draft_positions = torch.arange(num_draft_tokens, device=device)

    @abstractmethod
    def step(self, variant: LoopVariant, seq_lens: Tensor, number: int) -> Tensor:
        """Launch step `number` over requests with the lengths `seq_lens`. Return their lengths in the next step."""

    def run(self, variant: LoopVariant, steps: int | None = None) -> None:
        """Launch all steps of one run, each in a profiler range "step N". The GPU may still work when this returns."""
        seq_lens = self.first_seq_lens
        for number in range(self.settings.steps_per_run if steps is None else steps):
            with record_function(f"step {number}"):
                seq_lens = self.step(variant, seq_lens, number)

    def batch(self, seq_lens: Tensor) -> ForwardBatch:
        """Return the target-verify batch of requests of these lengths, [batch_size] int64. It is made on the device."""
        positions = seq_lens[:, None] + self._draft_positions
        slots = self.pool.req_to_token[self.rows[:, None], positions].flatten().to(torch.int64)
        return forward_batch(ForwardMode.TARGET_VERIFY, self.rows, seq_lens, self.q_lens, slots)

    def measure(self, rounds: Iterable[Sequence[LoopVariant]]) -> "dict[LoopVariant, LoopRuns]":
        """Run the variants of each round in order, each once without a profile and once with a profile."""
        runs: dict[LoopVariant, LoopRuns] = {}
        for variant in itertools.chain.from_iterable(rounds):
            found, run = runs.setdefault(variant, LoopRuns()), partial(self.run, variant)
            found.unprofiled_us.append(round(unprofiled_us(run) / self.settings.steps_per_run, 3))
            found.profiles.append(profiled(run))
        return runs


@dataclass
class LoopRuns:
    """The runs of one variant. Each run is made twice: timed by the host's clock without a profile, and profiled."""

    unprofiled_us: list[float] = field(default_factory=list)
    profiles: list[LoopProfile] = field(default_factory=list)

    def facts(self, step_facts: Callable[[LoopProfile], Sequence[Any]], medians: Callable[[Sequence[Any]], Any]) -> Any:
        runs = [step_facts(each) for each in self.profiles]
        return {
            "medians": medians([facts for run in runs for facts in run]),
            "runs": [[asdict(facts) for facts in run] for run in runs],
        }


@dataclass(frozen=True)
class LoopStudy(Study):
    """A study of loops. Its options are the settings of a loop. Options may have several values; each combination is a loop."""

    loops: tuple[Any, ...]

    @classmethod
    def of(cls, **values: Any) -> "LoopStudy":
        assert cls.settings is not None
        several = (value if isinstance(value, tuple) else (value,) for value in values.values())
        return cls(tuple(cls.settings(**dict(zip(values, each, strict=True))) for each in itertools.product(*several)))


def facts_alone(work: GpuWork, name: str) -> dict[str, Any]:
    """Measure the GPU time of a call outside a loop, in a CUDA graph with warm L2. The median is the field "<name>_us"."""
    time = measure(work, WARM)
    return {
        f"{name}_us": round(time.median_us, 3),
        f"{name}_iqr_us": round(time.iqr_us, 3),
        "samples_us": rounded_us(time.samples_us),
        "launches": time.launches,
        "method": str(time.method),
        "device": time.device.facts(),
    }
