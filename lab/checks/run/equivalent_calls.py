"""Repeat a refused call with equivalent arguments, such as without `out`, so that the kernel can be judged nevertheless."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES
from lab.calls.problem import AttentionCall
from lab.checks.run.support_protocol import (
    KernelError,
    Refusals,
    Unsupported,
    invoke,
    is_capturing,
    output_and_lse,
    own_name,
)
from lab.workloads.inputs.masks import packed_mask

Arguments = dict[str, Any]


@dataclass(frozen=True)
class EquivalentForm:
    """A change of a call's arguments that does not change the expected result, such as leaving out the workspace."""

    name: str  # words for "judged with ... instead"
    # Returns whether the change is possible and useful, given the function, the arguments and the sentence of the refusal.
    applies: Callable[[AttentionCall, Arguments, str], bool]
    change: Callable[[AttentionCall, Arguments], Arguments]  # returns the changed arguments
    by_engines: bool = False  # only for calls of an engine's pass; elsewhere a check wants the argument itself judged


def _has_no_mask(interface: AttentionCall, arguments: Arguments, refusal: str) -> bool:
    """Return True for a decode call with several query rows per request, which could have a mask and has none."""
    several = (arguments.get("q_len_per_req") or 1) > 1
    takes_mask = interface is AttentionCall.DECODE and not arguments.get("enable_block_sparse_attention")
    return takes_mask and several and arguments.get("mask") is None


def _with_causal_mask(interface: AttentionCall, arguments: Arguments) -> Arguments:
    q_len, device = arguments["q_len_per_req"], arguments["query"].device
    return arguments | {"mask": _causal_mask(len(arguments["seq_lens"]), q_len, device)}


@functools.cache  # a CUDA graph cannot build a mask during capture, and reads the same mask in each replay
def _causal_mask(batch_size: int, q_len: int, device: torch.device) -> Tensor:
    """Return a draft's packed causal mask, uint16 [batch_size, q_len, words]: row i sees the draft's tokens 0 to i."""
    causal = torch.ones(q_len, q_len, dtype=torch.bool).tril()
    return packed_mask(causal.expand(batch_size, -1, -1)).to(device)


def _with_out(interface: AttentionCall, arguments: Arguments) -> Arguments:
    query, problem = arguments["query"], CALL_TYPES[interface](**arguments).problem()
    shape = (*query.shape[:-1], problem.v_head_dim)
    return arguments | {"out": query.new_full(shape, float("nan"), dtype=problem.out_dtype)}


def _names(name: str, refusal: str) -> bool:
    return re.search(rf"\b{name}\b", refusal) is not None


def _left_out(name: str, words: str, by_engines: bool = False) -> EquivalentForm:
    """Return the form that leaves out the argument `name`. It applies if the call has the argument and the refusal names it."""
    return EquivalentForm(
        words,
        lambda interface, arguments, refusal: arguments.get(name) is not None and _names(name, refusal),
        lambda interface, arguments: {other: value for other, value in arguments.items() if other != name},
        by_engines,
    )


FORMS = (
    # Arguments on which no result depends.
    *(
        _left_out(name, f"no {name}")
        for name in ("workspace_buffer", "multi_ctas_kv_counter_buffer", "max_seq_len", "max_kv_len")
    ),
    _left_out("out", "its result copied into the output", by_engines=True),
    EquivalentForm(
        "an output handed out",
        lambda interface, arguments, refusal: arguments.get("out") is None and _names("out", refusal),
        _with_out,
    ),
    EquivalentForm("the causal mask of its rows", _has_no_mask, _with_causal_mask),
)


class KernelCalls:
    """Makes the calls of an implementation in one case, and repeats a refused call in the equivalent forms of `FORMS`.

    Args:
        note: called with a sentence for each refused call that was accepted in an equivalent form.
        refusals: the exceptions that count as refusals; None for the default of `support_protocol.invoke`.
    """

    def __init__(self, note: Callable[[str], None], refusals: Refusals | None = None) -> None:
        self.note, self.refusals = note, refusals
        self.count = 0  #: number of calls so far
        self.needed: dict[Any, list[EquivalentForm]] = {}  #: the forms with which calls of a shape were accepted
        #: a hint for each exception class of the implementation that it raised and that does not count as a refusal
        self.remarks: dict[str, None] = {}

    def once(self, function: Callable[..., Any], /, *args: Any, **arguments: Any) -> Any:
        """Call a function with exactly these arguments. Raise the errors of `support_protocol.invoke`."""
        self.count += 1
        try:
            return invoke(function, args, arguments, self.refusals)
        except KernelError as failure:
            if own := own_name(failure.__cause__, function):
                self.remarks[f"if the kernel refuses a call by raising {own}, say so: --refusals {own}"] = None
            raise

    def prepared(self, prepare: Callable[..., Any], /, **arguments: Any) -> Callable[[], Any]:
        """Call `prepare`, which prepares or plans a call, and return a function that makes the prepared call."""
        return functools.partial(self.once, self.once(prepare, **arguments))

    def invoke(
        self, interface: AttentionCall, function: Callable[..., Any], arguments: Arguments, by_engine: bool = False
    ) -> Any:
        """Make a call. If it raises Unsupported, make it in equivalent forms, until one is accepted.

        Args:
            interface: which of FlashInfer's functions is called.
            function: makes the call with given arguments, and raises Unsupported if the call is refused.
            arguments: the arguments of the call.
            by_engine: True for a call of an engine's pass. An equivalent form may then leave out `out`; the result is copied
                into `out`.

        Raises:
            Unsupported: the call and all equivalent forms were refused. The message is the first refusal's. A refusal after a
                write, or during the capture of a CUDA graph, is raised at once.
        """
        key = (interface, tuple(arguments), arguments["query"].shape, arguments.get("q_len_per_req"))
        if key in self.needed and is_capturing():
            return _made(interface, function, arguments, self.needed[key])
        try:
            return function(**arguments)
        except Unsupported as refused:
            if refused.late or is_capturing():
                raise
            forms = [each for each in FORMS if by_engine or not each.by_engines]
            used: list[EquivalentForm] = []
            sentence = str(refused)
            while left := [each for each in forms if each not in used and each.applies(interface, arguments, sentence)]:
                used.append(left[0])
                try:
                    returned = _made(interface, function, arguments, used)
                except Unsupported as again:
                    sentence = str(again)
                else:
                    self.needed[key] = used
                    self.note(f"{refused}: judged with {' and '.join(each.name for each in used)} instead")
                    return returned
            raise


def _made(
    interface: AttentionCall, function: Callable[..., Any], arguments: Arguments, used: Sequence[EquivalentForm]
) -> Any:
    """Make a call with its arguments changed by all forms in `used`, and return the result. If a form leaves out `out`, copy
    the result into the `out` of `arguments`.
    """
    changed = arguments
    for form in used:
        changed = form.change(interface, changed)
    returned = function(**changed)
    if returned is None:  # the function only wrote its result into `out`
        returned = changed.get("out")
    if arguments.get("out") is not None and "out" not in changed:
        arguments["out"].copy_(output_and_lse(interface.value, returned)[0].view(arguments["out"].shape))
    return returned
