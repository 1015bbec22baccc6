"""Draw new contents of a timed forward pass in place, so that a kernel cannot reuse the results of earlier calls. The
expected results are computed from the seeds after a call, so that no kernel can find them earlier.
"""

import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.metadata.engine.kv_cache import NVFP4KVCache, PagedKVCache
from lab.metadata.mha.metadata import TRTLLMMHAMetadata
from lab.metadata.mla.dsv4 import DSV4Cache
from lab.metadata.mla.metadata import TRTLLMMLADecodeMetadata
from lab.references.errors import Truth
from lab.workloads.inputs.contents import fill
from lab.workloads.inputs.expected import made
from lab.workloads.inputs.forward_pass import EnginePass
from lab.workloads.requests import History

# Requests are a few tokens shorter than in the case if this number divides a call's seed. Most samples have the case's lengths.
SHORTER_EVERY = 8
MOST_SHORTER = 3  # largest number of tokens by which a request is shorter
MOST_TOUCHED = 256  # largest number of tokens that each call replaces
PART_PAIRS = 2**19  # largest number of (query row, key, head) triples of a judged part of several requests
TABLES = ("page_table", "swa_page_table", "encoder_page_table", "block_kv_indices")
LENGTHS = ("cache_seqlens_int32", "seq_lens_k")


class Seeds(NamedTuple):
    """Seeds of a timed call's contents: `tokens` for cached K, V and pages, `call` for the query, new tokens and lengths."""

    tokens: int
    call: int


def wipe(arguments: Mapping[str, Any]) -> None:
    fill(arguments["out"], float("nan"))


def touched(seed: int, count: int, device: torch.device) -> Tensor:
    """Return the indices of the cached tokens that `write_call` replaces, evenly spread among all `count` cached tokens."""
    number = min(MOST_TOUCHED, count)
    first = random.Random(f"touched {seed}").randrange(max(count, 1))
    return (first + torch.arange(number, device=device) * (count // max(number, 1))) % max(count, 1)


@dataclass(frozen=True, eq=False)
class SeededRedraw:
    """Draws new contents into the tensors of timed calls from seeds, and judges the outputs."""

    forward: Any  #: the pass, or the recorded call
    keeps_metadata: bool = False  #: page ids and lengths must not change, because the host planned calls from them
    #: sets of arguments without `out`, which all timed calls of the pass share
    sets: list[dict[str, Any]] = field(default_factory=list)

    def inputs(self, number: int) -> dict[str, Any]:
        """Return set `number`, from 0, of a call's arguments without `out`. Each set has tensors of its own."""
        if not self.sets:
            self.sets.append(self.first_set())
        while number >= len(self.sets):
            self.sets.append(copy.deepcopy(self.sets[0]))
        return self.sets[number]

    def first_set(self) -> dict[str, Any]:
        """Return the arguments of the pass without `out`, with the page ids and lengths with which the pass was built."""
        raise NotImplementedError

    def write_tokens(self, arguments: Mapping[str, Any], seed: int) -> None:
        """Draw new K and V from the seed, and write them to other pages of the pool than before."""
        raise NotImplementedError

    def write_call(self, arguments: Mapping[str, Any], seeds: Seeds) -> None:
        """Draw new queries, replace some cached tokens, and fill the output with NaN. Some seeds also shorten the requests."""
        raise NotImplementedError

    def truth(self, seeds: Seeds, requests: Sequence[int]) -> Truth:
        raise NotImplementedError

    def results(self, arguments: Mapping[str, Any], seeds: Seeds, *, whole: bool) -> Tensor:
        """Return a copy of the output rows to be judged: of all requests if `whole`, else of requests that the seeds choose."""
        out: Tensor = self.forward.rows_of_requests(arguments["out"])
        return self._rows(out, self._judged(seeds, whole))

    def check_of(self, seeds: Seeds, *, whole: bool) -> Callable[[Tensor], None]:
        """Return a function that raises AssertionError if a result of `results(…, seeds, whole=whole)` is wrong."""
        truth = made(self.truth(seeds, self._judged(seeds, whole)))

        def check(results: Tensor) -> None:
            comparison = truth.compare(results)
            if not comparison.passed:
                raise AssertionError(
                    f"{int(comparison.faulty.sum())} of {comparison.faulty.numel()} output vectors are wrong, the worst "
                    f"{comparison.worst_ratio:.3g} times what is allowed: a time of this is worth nothing"
                )

        return check

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.forward.query.device).manual_seed(seed)

    def _rows(self, out: Tensor, requests: Sequence[int]) -> Tensor:
        parts = out.split(self.forward.case.q_lens)
        return torch.cat([parts[request] for request in requests])

    def _judged(self, seeds: Seeds, whole: bool) -> list[int]:
        case = self.forward.case
        order, chosen, pairs = [request for request, q_len in enumerate(case.q_lens) if q_len], list[int](), 0
        if whole:
            return order
        random.Random(f"part {seeds}").shuffle(order)
        for request in order:
            pairs += case.q_lens[request] * case.kv_lens[request] * self.forward.query.shape[1]
            if chosen and pairs > PART_PAIRS:
                break
            chosen.append(request)
        return sorted(chosen)


@dataclass(frozen=True, eq=False)
class PassRedraw(SeededRedraw):
    forward: EnginePass

    def __post_init__(self) -> None:
        _ = self._metadata, self._slots  # computed now, before another work over the pass moves pages

    def first_set(self) -> dict[str, Any]:
        own = self.forward.arguments(self.forward.query)
        inputs = {name: value for name, value in own.items() if name != "out"}
        if self.keeps_metadata:
            inputs = copy.deepcopy(inputs)
            for name, tensor in self._metadata.items():
                getattr(inputs["metadata"], name).copy_(tensor)
            self._write_lengths(inputs["metadata"], ())
        return inputs

    def write_tokens(self, arguments: Mapping[str, Any], seed: int) -> None:
        cache = arguments["cache"]
        for name, table in self._metadata.items() if self._moves else ():
            # Only the tables of the cache's own pool have its pages.
            if name in TABLES and (name == "swa_page_table" or self.forward.case.window_left < 0):
                pages = self._pages(seed)
                known = pages[table.clamp(0, len(pages) - 1).long()].int()
                moved = torch.where((table < 0) | (table >= len(pages)), table, known)
                getattr(arguments["metadata"], name).copy_(moved)
        fill(cache.storage)
        if isinstance(cache, NVFP4KVCache):
            fill(cache.scale_factors)
        _, tokens = self._slots
        cache.write(self._moved(seed), *(side if tokens is None else side[tokens] for side in self._drawn(seed)))

    def write_call(self, arguments: Mapping[str, Any], seeds: Seeds) -> None:
        rows = sum(self.forward.case.q_lens)
        arguments["query"][:rows].normal_(generator=self._generator(seeds.call))
        places = self._touched(seeds.tokens)
        arguments["cache"].write(self._moved(seeds.tokens)[places], *self._drawn(seeds.call + 1, len(places)))
        if self._moves:
            self._write_lengths(arguments["metadata"], self._shorter(seeds.call))
        wipe(arguments)

    def truth(self, seeds: Seeds, requests: Sequence[int]) -> Truth:
        query = self.forward.rows_of_requests(self.forward.query)
        drawn = torch.empty_like(query).normal_(generator=self._generator(seeds.call))
        lens, shorter = self.forward.case.kv_lens, self._shorter(seeds.call)
        topk = self.forward.case.topk
        sides = [side.split(lens[::topk]) for side in self.forward.read(*self._tokens(seeds))]
        histories = [
            tuple(side[request // topk][: lens[request] - shorter[request]] for side in sides) for request in requests
        ]
        return self.forward.truth_of(self._rows(drawn, requests), histories, requests)

    @functools.cached_property
    def _moves(self) -> bool:
        return not self.keeps_metadata and isinstance(
            self.forward.metadata, TRTLLMMHAMetadata | TRTLLMMLADecodeMetadata
        )

    @functools.cached_property
    def _metadata(self) -> dict[str, Tensor]:
        held = {name: getattr(self.forward.metadata, name, None) for name in (*TABLES, *LENGTHS)}
        return {name: tensor.clone() for name, tensor in held.items() if tensor is not None}

    @functools.cached_property
    def _slots(self) -> tuple[Tensor, Tensor | None]:
        """Return (slots of the cached tokens, their indices among the requests' tokens). Indices are None if all are cached."""
        forward, case = self.forward, self.forward.case
        rows = forward.batch.req_pool_indices[: len(case.q_lens)].tolist()
        slots, tokens, first = [], [], 0
        # The pages before a request's window were evicted, but DSV4 caches entries of all tokens.
        window_left = -1 if isinstance(forward.cache, DSV4Cache) else case.window_left
        for request in range(0, len(case.q_lens), case.topk):
            before = max(0, case.first_rows[request] - window_left) if window_left >= 0 else 0
            kept, kv_len = before // case.page_size * case.page_size, case.kv_lens[request]
            slots.append(forward.pool.slots(rows[request], kept, kv_len))
            tokens.append(torch.arange(first + kept, first + kv_len, device=slots[-1].device))
            first += kv_len
        every, pool = torch.cat(slots), forward.pool
        every = pool.physical_slots(every) if window_left < 0 else pool.swa_slots(every)
        return every, None if len(every) == first else torch.cat(tokens)

    def _drawn(self, seed: int, count: int | None = None) -> History:
        forward, case = self.forward, self.forward.case
        total = sum(case.kv_lens[:: case.topk]) if count is None else count
        generator, device = self._generator(seed), forward.query.device
        draw = functools.partial(torch.randn, device=device, dtype=case.dtype, generator=generator)
        return forward.stored(*(draw(total, *shape) for shape in case.token_shapes))

    def _tokens(self, seeds: Seeds) -> History:
        (_, tokens), places = self._slots, self._touched(seeds.tokens)
        sides, changed = self._drawn(seeds.tokens), self._drawn(seeds.call + 1, len(places))
        for side, new in zip(sides, changed, strict=True):
            side.view(torch.uint8)[places if tokens is None else tokens[places]] = new.view(torch.uint8)
        return sides

    def _touched(self, seed: int) -> Tensor:
        slots, _ = self._slots
        return touched(seed, len(slots), slots.device)

    def _moved(self, seed: int) -> Tensor:
        (slots, _), size = self._slots, self.forward.case.page_size
        return self._pages(seed)[slots // size] * size + slots % size if self._moves else slots

    def _pages(self, seed: int) -> Tensor:
        # The new id of each page: all ids but 0 are shifted cyclically.
        cache = self.forward.cache
        count, device = cache.storage.shape[int(isinstance(cache, PagedKVCache))] - 1, cache.storage.device
        shift = random.Random(f"pages {seed}").randrange(count)
        pages = 1 + (torch.arange(-1, count, device=device) + shift) % count
        pages[0] = 0
        return pages

    def _shorter(self, seed: int) -> list[int]:
        case = self.forward.case
        if not self._moves or seed % SHORTER_EVERY or "encoder_page_table" in self._metadata:
            return [0] * len(case.q_lens)
        dice, found = random.Random(f"lengths {seed}"), list[int]()
        for request, prefix in enumerate(case.prefix_lens):
            most = min(MOST_SHORTER, max(prefix - 1, 0))
            if case.window_left >= 0:
                most = min(most, max(0, case.first_rows[request] - case.window_left) % case.page_size)
            found.append(found[-1] if request % case.topk else dice.randint(0, most))
        return found

    def _write_lengths(self, metadata: Any, shorter: Sequence[int]) -> None:
        for name in (name for name in LENGTHS if name in self._metadata):
            lengths = self._metadata[name]
            if any(shorter):
                fewer = torch.tensor(shorter, dtype=lengths.dtype, device=lengths.device)
                lengths = lengths - torch.nn.functional.pad(fewer, (0, len(lengths) - len(fewer)))
            getattr(metadata, name).copy_(lengths)
            if isinstance(metadata, TRTLLMMHAMetadata):
                metadata.cu_seqlens_k[1:].copy_(lengths.cumsum(0))
