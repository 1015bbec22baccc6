"""Write a call as a program of FlashInfer and torch alone, which compares the result with float64, and as an issue's text."""

import base64
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES, AttentionCall, PagedAttention, Problem
from lab.calls.mla_decode import lse_is_base_e
from lab.recorded.call import RESULTS, RecordedCall, RecordingError
from lab.recorded.reductions import parts_of, seed_of
from lab.recorded.shrink import Fault, Reason
from lab.references.assertion import truth_of_problem
from lab.references.errors import LSE_LOG2_BOUND, LSE_LOG2_RELATIVE_BOUND
from lab.wording import in_markdown

PROGRAM = Path(__file__).with_suffix(".template")
MOST_BYTES = 20_000
MOST_LISTED = 64  # elements of a tensor that the program lists as numbers


def write_repro(
    folder: Path, call: RecordedCall, fault: Fault | None, versions: Mapping[str, str], called: str = ""
) -> str:
    """Write `repro.py` and `ISSUE.md`; the folder is made if there is none. Contents that are too long for the program are
    written to `repro.pt`, which the program reads.

    Args:
        folder: where the files are written.
        call: a call with valid arguments.
        fault: the fault of its result; None if it is right, or not known.
        versions: the name of the GPU, and the versions of the packages, with which the result is wrong.
        called: the module or file that was called; "" if the fault is that of the recorded result.

    Returns:
        The name of the file that has the contents.

    Raises:
        RecordingError: an argument cannot be expressed, or the program is too long.
    """
    saved: dict[str, Tensor] = {}
    program = repro(call, fault, called)
    if len(program) > MOST_BYTES:
        program = repro(call, fault, called, saved)
    if len(program) > MOST_BYTES:
        raise RecordingError(f"repro.py would have {len(program):,} bytes, more than {MOST_BYTES:,}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "repro.pt").unlink(missing_ok=True)
    if saved:
        torch.save(saved, folder / "repro.pt")
    (folder / "repro.py").write_text(program)
    reads = " It reads `repro.pt`." if saved else ""
    program_line = f"`python repro.py` calls FlashInfer, and exits with 1 if the result is wrong.{reads}\n"
    (folder / "ISSUE.md").write_text("\n".join([*_issue(call, fault, versions, called), program_line]))
    return "repro.pt" if saved else "repro.py"


def repro(call: RecordedCall, fault: Fault | None, called: str = "", saved: dict[str, Tensor] | None = None) -> str:
    """Return a program that makes a call, compares the result with float64 arithmetic, and exits with 1 if it is wrong. If
    `saved` is a dictionary, the program reads contents from `repro.pt`, and their tensors are added to `saved`.
    """
    problem = call.problem()
    values = {
        "title": in_markdown(_title(call, fault, called)).replace("\\", "\\\\").replace('"', '\\"'),
        "module": CALL_TYPES[call.function].module,
        "function": call.function.value,
        "arguments": "\n".join(
            f'    "{name}": {_expression(call, name, value, saved)},' for name, value in _stated(call)
        ),
        "bounds": _bounds(problem),
        "seen": _seen(problem),
        **_expressions(call, problem),
        "group": problem.group,
        "base": " / math.log(2)" if lse_is_base_e(call.given) else "",
        "raises": _raises(call, fault),
        "lse_bound": LSE_LOG2_BOUND,
        "lse_relative_bound": LSE_LOG2_RELATIVE_BOUND,
    }
    return Template(PROGRAM.read_text()).substitute(values)


def import_line(implementation: str, function: str) -> str:
    """Return a line of Python that loads a function of an implementation, which is named as for `lab.loading.load`."""
    file, mark, attribute = implementation.partition(":")
    name = f"{Path(file).resolve()}{mark}{attribute}" if file.endswith(".py") else implementation
    return f"from lab.loading import load; {function} = load({name!r}).{function}"


def _raises(call: RecordedCall, fault: Fault | None) -> str:
    """Return the condition under which an error of the function is the fault that was recorded or found."""
    if fault is None:
        return str(call.out is None)
    return f"type(error).__name__ == {fault.error!r}" if fault.error else str(fault.reason is Reason.NO_RETURN)


def _stated(call: RecordedCall) -> list[tuple[str, Any]]:
    """Return the arguments, by name, that are not at their defaults."""
    fields = CALL_TYPES[call.function].__dataclass_fields__
    return [
        (name, value)
        for name, value in call.given.items()
        if name != "workspace_buffer" and (isinstance(value, Tensor) or value != fields[name].default)
    ]


def _title(call: RecordedCall, fault: Fault | None, called: str) -> str:
    parts = parts_of(call)
    width, longest = max(len(part.rows) for part in parts), max(part.kv_len for part in parts)
    symptom = "right with drawn contents" if called else "with drawn contents, not made yet"
    if fault is not None:
        symptom = f"the call raises {fault.error}" if fault.error else fault.reason.value
    as_this = f"{called or call.module} as " if is_foreign(called or call.module) else ""
    function = f"{'' if called else 'a recorded call of '}{as_this}{call.function.value}"
    size = f"requests: {len(parts)}, rows of each: {width}, keys: {longest}"
    return f"{function}: {symptom} ({size})"


def is_foreign(module: str) -> bool:
    """Return True if a module, or a file, is not of FlashInfer. It is of FlashInfer if its name is not known."""
    name, *_ = module.partition(":")
    return name not in ("", "flashinfer") and (not name.startswith("flashinfer.") or name.endswith(".py"))


def _issue(call: RecordedCall, fault: Fault | None, versions: Mapping[str, str], called: str) -> Iterator[str]:
    """Yield the lines of the issue, in Markdown."""
    yield f"# {in_markdown(_title(call, fault, called))}\n"
    yield from (f"* {name}: {in_markdown(version)}" for name, version in versions.items())
    yield f"\n```text\n{call.function.value}("
    yield from (f"    {name}={_short(value)}," for name, value in _stated(call))
    yield ")\n```\n"
    module = f"`{in_markdown(called or call.module or 'FlashInfer')}`"
    part = "call" if call.out is None else "reduced call"
    recorded = f"The engine called {module}. The {part} was not made here: run `repro.py`."
    foreign = " `repro.py` calls FlashInfer, which may be right." if is_foreign(called or call.module) else ""
    yield f"{f'The call was made here, of {module}.' if called else recorded}{foreign}\n"
    if fault is not None:
        yield f"Result of {'this' if called else 'the recorded'} call: {fault.reason.value}: {in_markdown(fault.sentence)}\n"
    if fault is not None and fault.vector:
        yield f"First elements of the worst vector{'' if called else ', as recorded'}: {fault.vector}\n"


def _bounds(problem: Problem) -> list[float]:
    """Return the largest error that the judge allows an output vector of each request, rounded up; 0 without rows."""
    truth = truth_of_problem(problem)
    truth = truth.of_rows(truth.expected.isfinite().flatten(1).all(dim=1))
    bounds = truth.compare(truth.control).bound[:, 0]
    of_requests = (bounds[truth.request_of_row == request].tolist() for request in range(problem.batch_size))
    return [float(f"{1.005 * max(each, default=0):.3g}") for each in of_requests]


def _expressions(call: RecordedCall, problem: Problem) -> dict[str, str]:
    """Return the expressions of the program that depend on the form of the call. Each key of a call without pages is a page."""
    given, cache, logits = call.given, 'ARGUMENTS["kv_cache"]', "logits"
    sides = '(ARGUMENTS[name][:, :, None] for name in ("key", "value"))'
    pages = '(torch.arange(kv_len) + ARGUMENTS["cum_seq_lens_kv"][request])'
    if isinstance(problem, PagedAttention):
        sides = f"({cache}[:, 0], {cache}[:, -1])" if isinstance(given["kv_cache"], Tensor) else cache
        pages = f'ARGUMENTS["block_tables"][request].long()[..., : -(-kv_len // {problem.page_size})]'
        if problem.selected is not None:
            pages = "torch.arange(len(sides[0]))"
    if call.function is AttentionCall.MLA_DECODE:
        cache = f"{cache}.flatten(0, -3)[:, None]"
        sides = f"({cache}, {cache}[..., :{problem.v_head_dim}])"
    if given.get("kv_layout") == "NHD":
        sides = f"(side.transpose(1, 2) for side in {sides})"
    for name in ("sinks", "attention_sinks"):
        if given.get(name) is not None:
            first = "" if isinstance(given[name], Tensor) else "[0]"
            logits = f'torch.cat((logits, ARGUMENTS["{name}"]{first}[head : head + 1]))'
    has_log2, is_ragged = given.get("bmm1_scale_log2") is not None, problem.cu_seqlens_q is not None
    scale = 'float(ARGUMENTS["bmm1_scale_log2"]) * math.log(2)' if has_log2 else 'float(ARGUMENTS.get("bmm1_scale", 1))'
    rows = 'ARGUMENTS["cum_seq_lens_q"].tolist()' if is_ragged else f"range(0, len(query) + 1, {problem.max_q_len})"
    return {"sides": sides, "pages": pages, "logits": logits, "scale": scale, "offsets": rows}


def _seen(problem: Problem) -> str:
    """Return an expression of the program for the list of keys that a row sees."""
    if isinstance(problem, PagedAttention) and problem.num_visible is not None:
        return f"[*range(min(kv_len, {problem.num_visible.tolist()}[row]))]"
    if isinstance(problem, PagedAttention) and problem.selected is not None:
        used = "max(position + 1, 0)" if problem.selected_lens is None else 'ARGUMENTS["sparse_mla_top_k_lens"][row]'
        return f'[key for key in ARGUMENTS["block_tables"].flatten(0, -2)[row, : {used}].tolist() if key >= 0]'
    found = ["key <= position"] if problem.causal else []
    if isinstance(problem, PagedAttention) and problem.mask is not None:
        draft = f"(key - kv_len + {problem.max_q_len})"
        bit = f'int(ARGUMENTS["mask"][request, row - start, {draft} // 16]) >> {draft} % 16 & 1'
        found = [f"(key < kv_len - {problem.max_q_len} or {bit})"]
    found += [f"key >= position - {problem.window_left}"] if problem.window_left >= 0 else []
    condition = f" if {' and '.join(found)}" if found else ""
    return f"[key for key in range(kv_len){condition}]"


def _expression(call: RecordedCall, name: str, value: Any, saved: dict[str, Tensor] | None, side: int = 0) -> str:
    """Return an expression of the program for an argument's value."""
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
            kept = f"{_literal(wide.where(~wide.isfinite(), 0).to(dtype), saved)}.float()"
            text = f"torch.where({kept}.isfinite(), {text}.float(), {kept}).to({dtype})"
    elif value.numel() <= MOST_LISTED and not dtype.is_floating_point:
        text = f"torch.tensor({value.tolist()}, dtype={dtype})"
    else:
        text = _literal(value, saved)
    return text if value.is_contiguous() else f"strided({text}, {value.stride()})"


def _literal(tensor: Tensor, saved: dict[str, Tensor] | None) -> str:
    if saved is not None:
        name = f"tensor {len(saved)}"
        saved[name] = tensor.contiguous().clone()
        return f'torch.load(__file__[:-2] + "pt", weights_only=True)["{name}"]'
    raw = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    return f'literal("{base64.b64encode(zlib.compress(raw, 9)).decode()}", {tuple(tensor.shape)}, {tensor.dtype})'


def _short(value: Any) -> str:
    """Return a value in short form: the elements of a small tensor of integers, and the shape of another tensor."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_short, value))})"
    if not isinstance(value, Tensor):
        return repr(value)
    is_listed = value.numel() <= MOST_LISTED and not value.dtype.is_floating_point
    return f"{str(value.dtype).removeprefix('torch.')} {value.tolist() if is_listed else list(value.shape)}"
