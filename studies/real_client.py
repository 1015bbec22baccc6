"""Does an engine that nobody here wrote choose the same tokens when its attention goes through FlashInfer's calls?

    lab experiments real-client --out real_client.json        # on a GPU, or in minutes on a CPU

transformers' continuous batching serves requests of mixed lengths, some of which share a prefix (`studies.real_engine`). Its
own eager attention chooses the tokens to compare with. The control is the engine's second attention function, sdpa: if that one
chooses other tokens too, rounding decides between them.

For each request with other tokens, the first other token is recorded with the gap of the two tokens' logits in a float32 model,
and with the distance of neighbouring numbers of the engine's dtype at these logits. A gap of a few such distances is a tie.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
import typer

from lab.extras import require
from lab.loading import load
from lab.provenance import version_of
from lab.reports.tables import Table, number
from studies.real_engine import DECODE, Engine, PagedCalls, mixed_prompts
from studies.recording import Formats, Recorded, StudyRow, table_of
from studies.settings import count
from studies.study import Part, Study

EAGER, SDPA = "paged|eager", "paged|sdpa"  # the engine's own attention functions
SHARED = 200  # tokens of the prefix that some requests share


@dataclass(frozen=True, kw_only=True)
class RealClient(Study):
    """The same requests, served once with each attention."""

    lists = ("served", "differing", "calls")

    implementations: Annotated[
        tuple[str, ...], typer.Argument(help="implementations to call; if left out, those of the lab for this machine")
    ] = ()
    requests: Annotated[int, count("requests to serve")] = 100
    longest: Annotated[int, typer.Option(min=SHARED + 1, help="tokens of the longest prompt")] = 600
    new_tokens: Annotated[int, count("tokens to choose for each request")] = 16

    @property
    def parts(self) -> Sequence[Part]:
        return [Part((EAGER, SDPA, *self.modules), self._served, "attentions")]

    @property
    def modules(self) -> tuple[str, ...]:
        on_gpu = self._engine.device.type == "cuda"
        return self.implementations or (
            ("lab.kernels.portable", "lab.kernels.trtllm") if on_gpu else ("lab.references",)
        )

    @cached_property
    def _engine(self) -> Engine:
        on_gpu = torch.cuda.is_available()
        return Engine(torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32)

    @cached_property
    def _prompts(self) -> list[list[int]]:
        return mixed_prompts(self.requests, self.longest, SHARED)

    @cached_property
    def _expected(self) -> list[list[int]]:
        return self._engine.serve(self._prompts, EAGER, self.new_tokens)

    def facts(self) -> Mapping[str, Any]:
        engine = self._engine
        require("lab experiments real-client", "transformers", *(["psutil"] if engine.device.type == "cpu" else []))
        return {
            "transformers": version_of("transformers"),
            "dtype": str(engine.dtype).removeprefix("torch."),
            **{name: getattr(engine, name) for name in ("block_size", "num_blocks", "max_batch_tokens")},
            "requests": self.requests,
            "prompt_tokens": sum(map(len, self._prompts)),
            "new_tokens": self.new_tokens,
        }

    def _served(self, attention: str) -> dict[str, list[StudyRow]]:
        """Serve all requests with an attention function of the engine or with an implementation."""
        calls = None if attention in (EAGER, SDPA) else PagedCalls(load(attention))
        if self._engine.device.type == "cuda":  # kernels are compiled
            self._engine.serve(self._prompts, calls or attention, self.new_tokens)
        made = [] if calls is None else calls.calls
        made.clear()
        start = time.perf_counter()
        tokens = self._engine.serve(self._prompts, calls or attention, self.new_tokens)
        seconds = time.perf_counter() - start
        differing = [{"attention": attention, **row} for row in self._differing(tokens)]
        row = {
            "attention": attention,
            "requests": len(tokens),
            "same": len(tokens) - len(differing),
            "calls": len(made),
            "decode_calls": sum(call["function"] == DECODE for call in made),
            "host_us": statistics.median(call["host_us"] for call in made) if made else None,
            "seconds": seconds,
            "largest_gap": max((row["gap"] / row["distance"] for row in differing), default=None),
        }
        return {"served": [row], "differing": differing, "calls": [{"attention": attention, **call} for call in made]}

    def _differing(self, tokens: Sequence[Sequence[int]]) -> Iterable[StudyRow]:
        """Yield a row for each request whose tokens are not those of the eager attention."""
        for request, (own, found) in enumerate(zip(self._expected, tokens, strict=True)):
            if own == found:
                continue
            step = next(step for step, (a, b) in enumerate(zip(own, found, strict=True)) if a != b)
            logits = self._engine.logits([*self._prompts[request], *own[:step]])
            largest = logits[[own[step], found[step]]].abs().max()
            yield {
                "request": request,
                "prompt_tokens": len(self._prompts[request]),
                "step": step,
                "tokens": [own[step], found[step]],
                "gap": float((logits[own[step]] - logits[found[step]]).abs()),
                "distance": torch.finfo(self._engine.dtype).eps * 2 ** int(largest.log2().floor()),
            }

    def answer(self, result: Recorded) -> Iterable[Table | str]:
        yield table_of(f"{result['requests']} requests in {result['dtype']}", COLUMNS, result["served"])


COLUMNS: Formats = {
    "attention": "{attention}",
    "same tokens": "{same}",
    "largest gap of others, neighbouring numbers": lambda row: number(row["largest_gap"], 1),
    "calls": "{calls}",
    "of decode": "{decode_calls}",
    "median call, µs on the host": lambda row: number(row["host_us"], 1),
    "all, s": "{seconds:.2f}",
}
