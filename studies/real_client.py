"""Does an engine that is not part of the lab choose the same tokens if FlashInfer's calls compute its attention?

    lab experiments real-client --out real_client.json        # on a GPU, or in minutes on a CPU
    lab experiments real-client --wrong corpus:shared_page_of_one_request --recordings calls --out real_client.json

transformers' continuous batching serves requests of mixed lengths, some of which share a prefix (`studies.real_engine`). Its
own eager attention chooses the tokens to compare with. The control is the engine's second attention function, sdpa: if sdpa
also chooses other tokens, rounding decides between the tokens.

For each request with other tokens, the first other token is recorded with the gap of the two tokens' logits in a float32 model,
and with the distance of neighbouring numbers of the engine's dtype at these logits. A gap of a few such distances is a tie. A
negative gap says that the float32 model prefers the other token.

Then the first implementation, and a kernel that is known to be wrong, serve the requests while the recorder judges calls in
shadow: it judges one of n calls at once, and stores a wrong call.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer

from lab.extras import require
from lab.loading import load
from lab.provenance import version_of
from lab.recorded import Recorder, Triggers
from lab.reports.tables import Table, number
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.host_time import host_time
from studies.real_engine import CONTEXT, DECODE, Engine, PagedCalls, mixed_prompts
from studies.recording import Formats, Recorded, StudyRow, table_of
from studies.study import Part, Study, count

EAGER, SDPA = "paged|eager", "paged|sdpa"  # the engine's own attention functions
SHARED = 200  # tokens of the prefix that some requests share
NEVER = 10**9  # calls from one that the recorder would keep to the next


@dataclass(frozen=True)
class Attention:
    """The name of an attention function or implementation. One of `shadow` calls is judged; if `shadow` is 0, none."""

    name: str
    shadow: int = 0

    @cached_property
    def calls(self) -> PagedCalls | None:
        if self.name in (EAGER, SDPA):
            return None
        implementation = load(self.name)
        return PagedCalls(_module(self.name, {name: getattr(implementation, name) for name in (DECODE, CONTEXT)}))


@dataclass(frozen=True, kw_only=True)
class RealClient(Study):
    """Serves the same requests once with each attention function."""

    lists = ("served", "differing", "calls")

    implementations: Annotated[
        tuple[str, ...], typer.Argument(help="implementations to call; if left out, those of the lab for this machine")
    ] = ()
    wrong: Annotated[str | None, typer.Option(help="a wrong kernel to serve with in shadow, such as corpus:zeros")] = (
        None
    )
    shadow: Annotated[int, count("in shadow, judge one of each n calls")] = 7
    recordings: Annotated[Path | None, typer.Option(file_okay=False, help="the folder for the calls found wrong")] = (
        None
    )
    requests: Annotated[int, count("requests to serve")] = 100
    longest: Annotated[int, typer.Option(min=SHARED + 1, help="tokens of the longest prompt")] = 600
    new_tokens: Annotated[int, count("tokens to choose for each request")] = 16

    @property
    def parts(self) -> Sequence[Part]:
        in_shadow = [Attention(name, self.shadow) for name in (self._names[0], self.wrong) if name]
        return [Part([*map(Attention, (EAGER, SDPA, *self._names)), *in_shadow], self._rows_of, "attentions")]

    @property
    def modules(self) -> tuple[str, ...]:
        return (*self._names, *filter(None, (self.wrong,)))

    @property
    def _names(self) -> tuple[str, ...]:
        on_gpu = self._engine.device.type == "cuda"
        own = ("lab.kernels.portable", "lab.kernels.trtllm") if on_gpu else ("lab.references",)
        return self.implementations or own

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

    @cached_property
    def _folder(self) -> Path:
        return self.recordings or Path(tempfile.mkdtemp(prefix="real_client_"))

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
            "idle_recorder": idle_recorder(),
        }

    def _rows_of(self, attention: Attention) -> dict[str, list[StudyRow]]:
        calls = attention.calls
        if self._engine.device.type == "cuda" and not attention.shadow:  # kernels are compiled
            self._engine.serve(self._prompts, calls or attention.name, self.new_tokens)
        made = [] if calls is None else calls.calls
        made.clear()
        with self._recording(attention) as recorder:
            start = time.perf_counter()
            tokens = self._engine.serve(self._prompts, calls or attention.name, self.new_tokens)
            seconds = time.perf_counter() - start
        what = {"attention": attention.name, "shadow": attention.shadow}
        differing = [{**what, **row} for row in self._differing(tokens)]
        row = {
            **what,
            "requests": len(tokens),
            "same": len(tokens) - len(differing),
            "largest_gap": max((row["gap"] / row["distance"] for row in differing), default=None),
            "calls": len(made),
            "decode_calls": sum(call["function"] == DECODE for call in made),
            "host_us": statistics.median(call["host_us"] for call in made) if made else None,
            "seconds": seconds,
        }
        listed: list[StudyRow] = []
        if recorder is not None:
            listed = [
                {**what, **call, "verdict": verdict(n, recorder.judged, recorder.wrong)}
                for n, call in enumerate(made, start=1)
            ]
            judged = [call["host_us"] / 1e3 for call in listed if call["verdict"]]
            row |= {"judged": len(recorder.judged), "wrong": len(recorder.wrong)}
            row |= {"kept": recorder.kept, "kept_bytes": recorder.kept_bytes}
            row["judged_ms"] = statistics.median(judged) if judged else None
        return {"served": [row], "differing": differing, "calls": listed}

    def _recording(self, attention: Attention) -> contextlib.AbstractContextManager[Recorder | None]:
        if not attention.shadow or attention.calls is None:
            return contextlib.nullcontext()
        folder = self._folder / attention.name.replace(":", ".")
        triggers, module = Triggers(shadow=attention.shadow), attention.calls.implementation
        return Recorder(folder, triggers=triggers, functions=[module])

    def _differing(self, tokens: Sequence[Sequence[int]]) -> Iterator[StudyRow]:
        for request, (own, found) in enumerate(zip(self._expected, tokens, strict=True)):
            if own == found:
                continue
            step = next(step for step, (a, b) in enumerate(zip(own, found, strict=True)) if a != b)
            logits = self._engine.logits([*self._prompts[request], *own[:step]])[[own[step], found[step]]]
            yield {
                "request": request,
                "prompt_tokens": len(self._prompts[request]),
                "step": step,
                "tokens": [own[step], found[step]],
                "gap": float(logits[0] - logits[1]),
                "distance": torch.finfo(self._engine.dtype).eps * 2 ** int(logits.abs().max().log2().floor()),
            }

    def answer(self, result: Recorded) -> Iterable[Table | str]:
        caption = f"{result['requests']} requests in {result['dtype']}, medians over the calls"
        yield table_of(caption, COLUMNS, result["served"])
        idle = result["idle_recorder"]
        yield f"an idle recorder adds {idle['with_us'] - idle['without_us']:.2f} µs of host time to a call"
        yield f"the calls that shadow found wrong are in {self._folder}"


def _module(name: str, functions: Mapping[str, Any]) -> ModuleType:
    """Return a new module with these functions, which the recorder can replace."""
    module = ModuleType(f"{__name__} with {name}")
    vars(module).update(functions)
    sys.modules[module.__name__] = module
    return module


def verdict(call_number: int, judged: Collection[int], wrong: Collection[int]) -> str:
    if call_number in wrong:
        return "wrong"
    return "right" if call_number in judged else ""


def idle_recorder() -> dict[str, Any]:
    """Measure the host time of a function that does nothing, without a recorder, and with a recorder that stores no call."""

    def nothing(**_: object) -> None:
        pass

    module = _module("nothing", {DECODE: nothing})
    with tempfile.TemporaryDirectory() as folder, Recorder(folder, triggers=Triggers(every=NEVER), functions=[module]):
        arguments = dict.fromkeys(("query", "kv_cache", "block_tables", "seq_lens", "max_seq_len"))
        functions = {"without": nothing, "with": getattr(module, DECODE)}
        times = host_time({name: partial(function, **arguments) for name, function in functions.items()})
    return {"method": HOST_METHOD, **{f"{name}_us": each.median_us for name, each in times.items()}}


COLUMNS: Formats = {
    "attention": "{attention}",
    "judged": lambda row: number(row.get("judged")),
    "wrong": lambda row: number(row.get("wrong")),
    "same tokens": "{same}",
    "largest gap, distances": lambda row: number(row["largest_gap"], 1),
    "calls": "{calls}",
    "of decode": "{decode_calls}",
    "call, µs on the host": lambda row: number(row["host_us"], 1),
    "judged call, ms": lambda row: number(row.get("judged_ms"), 1),
    "all requests, s": "{seconds:.2f}",
}
