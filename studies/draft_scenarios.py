"""Speculative iterations by name. A name says which requests an iteration has, and which metadata is made for it.

::

    kv_indices/<schedule>/<batch>[/steps<N>]               the ragged K/V lists of all draft steps: serial, token_blocks or
                                                           spread
    draft_steps/<attention>/<plan>/<batch>[/steps<N>][/eager]
                                                           every step's metadata: mha, mla or mla_with_offset by
                                                           common_template, per_step or one_launch; into kept buffers, or
                                                           eager: into new buffers
    forward_metadata/<passes>/<batch>[/steps<N>]           by the fused kernel: verify (one pass), iteration (draft, verify and
                                                           draft extend over one page table), iteration_own_tables

    batch      <count>x<tokens>: 64x8k is 64 requests of 8,192 tokens; or trace<count>: running requests of a trace
    steps<N>   speculative_num_steps, 3 if left out
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.kv_pool import KVPool
from lab.workloads.requests import admit, new_pool
from lab.workloads.scenarios import naming_scenario, read_options
from lab.workloads.traces import TracedRequest, own_trace, snapshot

# The default level of the benchmarks.
DEFAULT_DRAFT_SCENARIOS = (
    *(
        f"kv_indices/{schedule}/{batch}"
        for batch in ("1x4k", "8x80k", "64x8k", "64x80k", "256x8k", "trace64")
        for schedule in ("serial", "token_blocks", "spread")
    ),
    *(
        f"draft_steps/{attention}/{plan}/{batch}"
        for batch in ("1x80k", "64x8k")
        for attention in ("mha", "mla")
        for plan in ("common_template", "per_step", "one_launch")
    ),
    "draft_steps/mha/common_template/64x8k/eager",
    "draft_steps/mha/per_step/64x8k/eager",
    *(
        f"forward_metadata/{passes}/{batch}"
        for batch in ("1x4k", "8x80k", "64x8k", "64x80k", "256x8k")
        for passes in ("verify", "iteration")
    ),
)

# The choices of each kind of scenario, in the order of their places in its name.
CHOICES: dict[str, tuple[tuple[str, ...], ...]] = {
    "kv_indices": (("serial", "token_blocks", "spread"),),
    "draft_steps": (("mha", "mla", "mla_with_offset"), ("common_template", "per_step", "one_launch")),
    "forward_metadata": (("verify", "iteration", "iteration_own_tables"),),
}
_UNIFORM = re.compile(r"(?P<count>[0-9]+)x(?P<length>[0-9]+)(?P<kilo>k?)")
_TRACED = re.compile(r"trace(?P<count>[0-9]+)")


@dataclass(frozen=True)
class DraftCase:
    """The requests of one speculative iteration. `prefix_lens` are their numbers of tokens up to the last accepted one.

    Attributes:
        max_context_len: columns of ``req_to_token``. Page tables cover the same number of tokens.

    Raises:
        ValueError: there is no request, or a request has no room for its draft.
    """

    prefix_lens: tuple[int, ...]
    num_steps: int = 3
    page_size: int = 64
    max_context_len: int = 132 * 1024  # 128K tokens plus room for a draft, a multiple of 4,096

    def __post_init__(self) -> None:
        if not self.prefix_lens:
            raise ValueError("prefix_lens is empty: an iteration has at least one request")
        longest = max(self.prefix_lens) + self.num_draft_tokens
        if longest > self.max_context_len:
            raise ValueError(
                f"a request of {max(self.prefix_lens)} tokens and {self.num_draft_tokens} drafted ones does not fit into "
                f"max_context_len={self.max_context_len}"
            )

    @property
    def num_draft_tokens(self) -> int:
        """Return the query rows per request in the verification: the last accepted token, and one per draft step."""
        return self.num_steps + 1


@dataclass(frozen=True)
class DraftScenario:
    """A speculative iteration, and the metadata that is made for it. With `eager` the metadata is written to new buffers."""

    kind: str
    choices: tuple[str, ...]
    case: DraftCase
    eager: bool = False


def is_draft_scenario(name: str) -> bool:
    return name.split("/")[0] in CHOICES


def draft_scenario(name: str, trace: Sequence[TracedRequest] | None = None) -> DraftScenario:
    """Return the scenario that a name describes, in the grammar above. `trace` None: the lab's own trace.

    Raises:
        ValueError: a part of the name is unknown or malformed. The message says which part, and what would be right.
    """
    with naming_scenario(name):
        kind, *parts = name.split("/")
        if kind not in CHOICES:
            raise ValueError(f"no kind of draft scenario is called {kind!r}; there are {', '.join(CHOICES)}")
        needed = len(CHOICES[kind]) + 1
        if len(parts) < needed:
            raise ValueError(f"{kind} is followed by {needed} parts at least, this name has {len(parts)}")
        *choices, batch = parts[:needed]
        for choice, known in zip(choices, CHOICES[kind], strict=True):
            if choice not in known:
                raise ValueError(f"{choice!r} is none of {', '.join(known)}")
        flags = {"eager": ("eager", True)} if kind == "draft_steps" else {}
        settings = read_options(parts[needed:], flags, {"steps": "num_steps"}, f" of {kind}")
        eager = settings.pop("eager", False)
        return DraftScenario(kind, tuple(choices), DraftCase(_prefix_lens(batch, trace), **settings), eager)


def _prefix_lens(text: str, trace: Sequence[TracedRequest] | None) -> tuple[int, ...]:
    traced = _TRACED.fullmatch(text)
    if traced is not None:
        return tuple(snapshot(own_trace() if trace is None else trace, int(traced["count"])))
    match = _UNIFORM.fullmatch(text)
    if match is None:
        raise ValueError(f"batch {text!r} is not <count>x<tokens>, such as 64x8k, or trace<count>, such as trace64")
    return (int(match["length"]) * (1024 if match["kilo"] else 1),) * int(match["count"])


def build_verify(case: DraftCase, device: torch.device) -> tuple[ForwardBatch, KVPool]:
    """Return a TARGET_VERIFY batch, and its K/V pool with shuffled pages. The batch's seq_lens do not count drafted tokens."""
    q_lens = (case.num_draft_tokens,) * len(case.prefix_lens)
    pool = new_pool(
        [prefix + q_len for prefix, q_len in zip(case.prefix_lens, q_lens, strict=True)],
        page_size=case.page_size,
        max_context_len=case.max_context_len,
        device=device,
    )
    return admit(pool, case.prefix_lens, q_lens).batch(ForwardMode.TARGET_VERIFY), pool


def draft_decode(verify: ForwardBatch) -> ForwardBatch:
    """Return the draft steps' DECODE batch: the requests of a verify batch, and the write locations of the first step."""
    return replace(
        verify,
        forward_mode=ForwardMode.DECODE,
        out_cache_loc=verify.out_cache_loc.view(verify.batch_size, -1)[:, 0].contiguous(),
        num_tokens=verify.batch_size,
        spec_info=None,
    )
