"""Write a recorded call as a program that needs only FlashInfer and torch, and as a text for a bug tracker."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES, PagedAttention
from lab.calls.arguments import RESULTS
from lab.calls.entries import places_of_requests, selections_of
from lab.calls.mla_decode import lse_is_base_e
from lab.recorded.call import Fault, Reason, RecordedCall, RecordingError, sides_of
from lab.recorded.shrink import seed_of
from lab.recorded.suspicions import visible_of_request
from lab.references.assertion import truth_of_problem
from lab.references.errors import LSE_LOG2_BOUND, LSE_LOG2_RELATIVE_BOUND
from lab.wording import in_markdown

PROGRAM = Path(__file__).with_suffix(".template")
MOST_LISTED = 64  # elements of a tensor that the program lists as numbers


def write_repro(
    folder: Path, call: RecordedCall, fault: Fault | None, versions: Mapping[str, str], called: str = ""
) -> None:
    """Write `repro.py`, `ISSUE.md` and (if a tensor is too long for the program) `repro.pt` to a folder. `fault` is what is
    wrong with the result, or None. `versions` is such as {"GPU": "NVIDIA H200", "torch": "2.9.0"}. `called` is the module or
    file whose result `fault` is about, "" for the engine's own result. RecordingError: `repro.py` cannot express an argument.
    """
    saved: dict[str, Tensor] = {}
    program = repro(call, fault, called, saved)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "repro.pt").unlink(missing_ok=True)
    if saved:
        torch.save(saved, folder / "repro.pt")
    (folder / "repro.py").write_text(program)
    reads = " It reads `repro.pt`." if saved else ""
    program_line = f"`python repro.py` calls FlashInfer, and exits with 1 if the result is wrong, or crashes.{reads}\n"
    (folder / "ISSUE.md").write_text("\n".join([*_issue(call, fault, versions, called), program_line]))


def repro(call: RecordedCall, fault: Fault | None, called: str, saved: dict[str, Tensor]) -> str:
    """Return the text of `repro.py`, which exits with 1 if its call is wrong or raises the error of `fault`. `called` is as in
    `write_repro`. Tensors that are too long for the text are added to `saved`.
    """
    problem = call.problem()
    is_fault = str(call.out is None if fault is None else fault.reason is Reason.NO_RETURN)
    raises = f"type(error).__name__ == {fault.error!r}" if fault is not None and fault.error else is_fault
    requests, places = [], places_of_requests(problem, range(problem.batch_size))
    for request, (q_len, (k, v)) in enumerate(zip(problem.q_lens(), places, strict=True)):
        if isinstance(problem, PagedAttention) and problem.selected is not None:  # an entry may stand in two columns
            ((_, indices),) = selections_of(problem, [request])
            seen = f"[row[row >= 0] for row in {_tensor(indices, saved)}]"
        else:
            seen = _tensor(visible_of_request(problem, request, q_len, len(k)), saved)
        requests.append(f"    ({_tensor(k, saved)}, {_tensor(v, saved)}, {seen}),")
    truth = truth_of_problem(problem)
    truth = truth.of_rows(truth.expected.isfinite().flatten(1).all(dim=1))
    bounds = truth.compare(truth.control).bound[:, 0]  # a request's largest one is in the program, rounded up
    of_requests = (bounds[truth.request_of_row == request].tolist() for request in range(problem.batch_size))
    arguments = [f'    "{name}": {_expression(call, name, value, saved)},' for name, value in _stated(call)]
    values = {
        "title": in_markdown(_title(call, fault, called)).replace("\\", "\\\\").replace('"', '\\"'),
        "module": CALL_TYPES[call.function].module,
        "function": call.function.value,
        "arguments": "\n".join(arguments),
        "bounds": [float(f"{1.005 * max(each, default=0):.3g}") for each in of_requests],
        "requests": "\n".join(requests),
        "sides": ",\n        ".join(_side(call, side) for side in sides_of(problem)),
        "base": " / math.log(2)" if lse_is_base_e(call.given) else "",
        "raises": raises,
        "lse_bound": LSE_LOG2_BOUND,
        "lse_relative_bound": LSE_LOG2_RELATIVE_BOUND,
    }
    return Template(PROGRAM.read_text()).substitute(values)


def _stated(call: RecordedCall) -> list[tuple[str, Any]]:
    fields = CALL_TYPES[call.function].__dataclass_fields__
    return [
        (name, value)
        for name, value in call.given.items()
        if name != "workspace_buffer" and (isinstance(value, Tensor) or value != fields[name].default)
    ]


def _title(call: RecordedCall, fault: Fault | None, called: str) -> str:
    problem = call.problem()
    symptom = "right with drawn contents" if called else "with drawn contents, not made yet"
    if fault is not None:
        symptom = f"the call raises {fault.error}" if fault.error else fault.reason.value
    function = f"{'' if called else 'a recorded call of '}{call.function.value}"
    width, longest = max(problem.q_lens()), max(problem.seq_lens.tolist())
    return f"{function}: {symptom} (requests: {problem.batch_size}, rows of each: {width}, keys: {longest})"


def _issue(call: RecordedCall, fault: Fault | None, versions: Mapping[str, str], called: str) -> Iterator[str]:
    yield f"# {in_markdown(_title(call, fault, called))}\n"
    for name, version in versions.items():
        if version:
            yield f"* {name}: {in_markdown(version.split()[0] if name != 'GPU' else version)}"
    yield f"\n```text\n{call.function.value}("
    yield from (f"    {name}={_short(value)}," for name, value in _stated(call))
    yield ")\n```\n"
    name = called or call.module or "flashinfer"
    module = f"`{in_markdown(name)}`"
    made = f"The kernel of this call is {module}."
    recorded = f"The engine called {module}. The call was not made here: run `repro.py`."
    # A file or a module of another package is wrong, and FlashInfer's function of that name may be right.
    path, *_ = name.partition(":")
    is_foreign = path.endswith(".py") or path.partition(".")[0] != "flashinfer"
    yield f"{made if called else recorded}{' `repro.py` calls FlashInfer, which may be right.' * is_foreign}\n"
    if fault is not None:
        yield f"Result of {'this' if called else 'the recorded'} call: {fault.reason.value}: {in_markdown(fault.sentence)}\n"
    if fault is not None and fault.vector:
        yield f"First elements of the worst vector{'' if called else ', as recorded'}: {fault.vector}\n"


def _side(call: RecordedCall, side: Tensor) -> str:
    # An expression for K or V, as a view of the argument in whose memory it lies.
    parts = dict[str, Tensor]()
    for name in ("kv_cache", "key", "value"):
        value, text = call.given.get(name), f'ARGUMENTS["{name}"]'
        for place, each in enumerate(value if isinstance(value, tuple | list) else [value]):
            if isinstance(each, Tensor) and each.data_ptr() <= side.data_ptr():
                parts[text if each is value else f"{text}[{place}]"] = each
    nearest = max(parts, key=lambda text: parts[text].data_ptr())  # two arguments may be views of one pool
    start = side.storage_offset() - parts[nearest].storage_offset()
    return f"{nearest}.as_strided({tuple(side.shape)}, {side.stride()}, {start})"


def _expression(call: RecordedCall, name: str, value: Any, saved: dict[str, Tensor], side: int = 0) -> str:
    if isinstance(value, tuple | list):
        parts = ", ".join(_expression(call, name, each, saved, place) for place, each in enumerate(value))
        return f"[{parts}]" if isinstance(value, list) else f"({parts},)"
    if isinstance(value, bool | int | float | str | torch.dtype | None):
        return repr(value)
    if not isinstance(value, Tensor) or name == "kv_cache_sf":
        raise RecordingError(f"repro.py cannot express {name} yet, so that the call cannot be shrunk")
    shape, dtype = tuple(value.shape), value.dtype
    if name in RESULTS:
        return f"torch.empty_strided({shape}, {value.stride()}, dtype={dtype})"
    if name in call.drawn:
        text = f"drawn({seed_of(name, side)}, {shape}, {dtype})"
        wide = value.to(torch.float32)
        if not bool(wide.isfinite().all()):
            kept = _tensor(wide.where(~wide.isfinite(), 0), saved)
            text = f"torch.where({kept}.isfinite(), {text}.float(), {kept}).to({dtype})"
    else:
        text = _tensor(value, saved)
    return text if value.is_contiguous() else f"strided({text}, {value.stride()})"


def _tensor(value: Tensor, saved: dict[str, Tensor]) -> str:
    if value.dtype == torch.int64 and value.dim() == 1 and bool((value.diff() == 1).all()):
        start = int(value[0]) if len(value) else 0
        return f"torch.arange({start}, {start + len(value)})"
    if value.dtype == torch.bool and value.dim() == 2:
        diagonal = value.shape[1] - len(value)
        if torch.equal(value, torch.ones_like(value).tril(diagonal)):
            return f"torch.ones{tuple(value.shape)}.tril({diagonal}).bool()"
    if value.numel() <= MOST_LISTED:
        listed = (value.double() if value.is_floating_point() else value).tolist()
        return f"torch.tensor({listed}, dtype={value.dtype})"
    saved[name := f"tensor {len(saved)}"] = value.contiguous().clone()
    return f'saved("{name}")'


def _short(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_short, value))})"
    if not isinstance(value, Tensor):
        return repr(value)
    is_listed = value.numel() <= MOST_LISTED and not value.dtype.is_floating_point
    return f"{str(value.dtype).removeprefix('torch.')} {value.tolist() if is_listed else list(value.shape)}"
