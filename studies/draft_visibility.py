"""Which keys can the query of a draft step see, with the lengths that SGLang's backends pass to their kernel?

    lab experiments draft-visibility        # on a GPU or a CPU

A draft step writes its token's K and V and then attends. SGLang's TRT-LLM MHA backend passes the length seq_lens + s + 1 to
step s: its query sees the prefix, the tokens that the draft has written before it, and its own. The MLA backend passes seq_lens
in every step. The study runs the metadata of each step through the reference kernel. All logits are equal, and the value at
position p is 2 ** p, so that an output times the number of keys is a set of positions. Which keys a length lets a query see
does not depend on the number of heads or dimensions: one K/V head stands for MLA's latent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor

from lab.metadata.engine.kv_cache import KVLayout
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.speculation.draft_steps import DraftStep, MultiStepDraft, build_draft_steps
from lab.references import trtllm_batch_decode_with_kv_cache
from studies.draft_scenarios import DraftCase, build_verify, draft_decode
from studies.recording import Recorded, StudyRow
from studies.study import Part, Study, count

PAGE_SIZE = 32
MOST_TOKENS = 50  # float64 adds powers of two exactly up to 2 ** 52


@dataclass(frozen=True)
class Sight:
    """The positions that a draft step's query saw, and the cached positions that it did not see. `own_position` is its own."""

    attention: str
    step: int
    prefix_len: int
    own_position: int
    seen: tuple[int, ...]
    unseen: tuple[int, ...]


def look(attention: DraftAttention, prefix_lens: Sequence[int], num_steps: int, device: torch.device) -> list[Sight]:
    """Return what each draft step of each request sees. Raises ValueError for a request of more than 50 tokens."""
    _check_lengths(prefix_lens, num_steps)
    case = DraftCase(tuple(prefix_lens), num_steps, PAGE_SIZE, max_context_len=2 * PAGE_SIZE)
    verify, pool = build_verify(case, device)
    cache = pool.new_cache(1, 1, torch.float64, KVLayout.HND)
    steps = build_draft_steps(MultiStepDraft(attention, num_steps), draft_decode(verify), pool)
    sights = []
    for step, draft_step in enumerate(steps):
        _write_tokens(cache.storage, pool, verify.req_pool_indices, [length + step + 1 for length in prefix_lens])
        for prefix_len, seen in zip(prefix_lens, _seen(draft_step, cache.as_hnd()), strict=True):
            present = range(prefix_len + step + 1)
            unseen = tuple(position for position in present if position not in seen)
            sights.append(Sight(attention.value, step, prefix_len, prefix_len + step, seen, unseen))
    return sights


def _check_lengths(prefix_lens: Sequence[int], num_steps: int) -> None:
    if max(prefix_lens) + num_steps > MOST_TOKENS:
        raise ValueError(f"prefix_lens={list(prefix_lens)} and {num_steps} steps exceed {MOST_TOKENS} tokens")


def _write_tokens(storage: Tensor, pool: KVPool, rows: Tensor, lengths: Sequence[int]) -> None:
    """Write 2 ** position to V of each token of the requests. K stays 0, and so does V of all other slots."""
    values = storage[1].view(-1)  # one head of one element: a slot's place is its number
    for row, length in zip(rows.tolist(), lengths, strict=True):
        values[pool.slots(row, 0, length)] = 2.0 ** torch.arange(length, dtype=torch.float64, device=values.device)


def _seen(step: DraftStep, kv_cache: tuple[Tensor, Tensor]) -> list[tuple[int, ...]]:
    seq_lens, block_tables = step.metadata.seq_lens, step.metadata.block_tables
    out, lse_log2 = trtllm_batch_decode_with_kv_cache(
        torch.zeros(len(seq_lens), 1, 1, dtype=torch.float64, device=seq_lens.device),
        kv_cache,
        None,
        block_tables,
        seq_lens,
        block_tables.shape[1] * PAGE_SIZE,
        return_lse=True,
    )
    codes = torch.round(out[:, 0, 0] * torch.exp2(lse_log2[:, 0].double()).round()).tolist()
    return [tuple(position for position in range(MOST_TOKENS) if int(code) >> position & 1) for code in codes]


def in_words(sight: Sight) -> str:
    unseen = ", ".join(map(str, sight.unseen)) or "none"
    return (
        f"{sight.attention:>16}  step {sight.step}: of positions 0..{sight.own_position} in the cache, its own the last, it "
        f"does not see: {unseen}"
    )


PREFIX_HELP = "tokens before the draft; pages have 32, so that 31 leave one free in the last page"


@dataclass(frozen=True, kw_only=True)
class DraftVisibility(Study):
    """Runs a draft after one request's prefix, with the lengths that each backend passes."""

    lists = ("sights",)

    prefix_len: Annotated[int, typer.Option(min=0, help=PREFIX_HELP)] = 31
    steps: Annotated[int, count("steps of the draft, speculative_num_steps")] = 4

    def __post_init__(self) -> None:
        _check_lengths([self.prefix_len], self.steps)

    @property
    def parts(self) -> Sequence[Part]:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        def sights_of(attention: DraftAttention) -> dict[str, list[StudyRow]]:
            return {"sights": [asdict(sight) for sight in look(attention, [self.prefix_len], self.steps, device)]}

        # A frozen-KV draft has no drafted tokens in the cache that a step could leave out.
        backends = [each for each in DraftAttention if each is not DraftAttention.MHA_FROZEN_KV]
        return [Part(backends, sights_of, "backends")]

    def answer(self, result: Recorded) -> Iterable[str]:
        return (in_words(Sight(**sight)) for sight in result["sights"])
