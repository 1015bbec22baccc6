"""FlashInfer's four calls as engines make them, for tests of adapters: no output given, K and V halves of one allocation."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lab.calls import CALL_TYPES, AttentionCall
from tests.cases import BATCHES, CONTEXT, DECODE, MLA, RAGGED, Arguments, arguments_of, mirrors, pack_mask
from tests.kernels.held import BF16

SM75, SM80, SM90, SM100, SM103, SM120 = (7, 5), (8, 0), (9, 0), (10, 0), (10, 3), (12, 0)
SINKS, TWO_SINKS = torch.tensor([0.5, -1.0, 2.0, 1.5]), torch.tensor([0.5, -1.0])
TREE = pack_mask([[[column in (0, row) for column in range(5)] for row in range(5)]] * 3)
# Of each function: query rows, of each request or of all, and keys; sizes; and arguments.
USUAL: dict[str, tuple[Any, tuple[int, ...], Arguments, Arguments]] = {
    DECODE: (1, (16, 33, 5), {"head_dim": 64}, {"out_dtype": None}),
    CONTEXT: ((5, 0, 17), (21, 7, 17), {"head_dim": 64}, {"out_dtype": None}),
    MLA: (
        *(1, (5, 33, 70)),
        {"heads": 2, "rank": 512, "rope": 64},
        {"page_size": 64, "out": None, "bmm1_scale": 0.05},
    ),
    RAGGED: ((4, 1, 6), (4, 20, 9), {"heads": (2, 2), "dims": (192, 128)}, {"out": None, "bmm1_scale": 0.05}),
}
DRAWN = ("heads", "head_dim", "rank", "rope", "dims", "dtype", "kv_dtype")
Change = Callable[[Arguments], Arguments]


def case(function: str, q_lens: Any = None, kv_lens: Any = None, *changed: Change, **changes: Any) -> Arguments:
    """Return a call of a random batch: `changes` of the batch and of the arguments, then what `changed` makes of it.

    `on_host` gives a ragged call the lengths on the host, too.
    """
    own_q_lens, own_kv_lens, sizes, usual = USUAL[function]
    q_lens, kv_lens = own_q_lens if q_lens is None else q_lens, own_kv_lens if kv_lens is None else kv_lens
    q_lens = [q_lens] * len(kv_lens) if isinstance(q_lens, int) else q_lens
    drawn = {name: changes.pop(name) for name in DRAWN if name in changes}
    batch = BATCHES[function](q_lens, kv_lens, **sizes | drawn)
    changes = usual | {"return_lse": False} | (mirrors(batch) if changes.pop("on_host", False) else {}) | changes
    if function == MLA and not changes["return_lse"]:
        changes = {"return_lse_base": None} | changes
    arguments = arguments_of(function, batch, **changes)
    if function in (DECODE, CONTEXT):
        arguments["kv_cache"] = tuple(torch.stack(arguments["kv_cache"]))
    for change in changed:
        arguments = change(arguments)
    return arguments


decode, context, mla, ragged = (partial(case, function) for function in (DECODE, CONTEXT, MLA, RAGGED))


def function_of(arguments: Arguments) -> str:
    """The function that the arguments are of."""
    if "key" in arguments:
        return RAGGED
    if "kv_lora_rank" in arguments:
        return MLA
    return CONTEXT if "max_kv_len" in arguments else DECODE


def posed(arguments: Arguments) -> Any:
    """The problem of a call."""
    return CALL_TYPES[AttentionCall(function_of(arguments))](**arguments).problem()


def new_tokens(**changes: Any) -> Arguments:
    """A ragged call as SGLang makes it over new tokens: one tensor of offsets."""
    arguments = case(RAGGED, (4, 1, 6), (4, 1, 6), **changes)
    return arguments | {"cum_seq_lens_kv": arguments["cum_seq_lens_q"]}


def a_chunk(**changes: Any) -> Arguments:
    """A ragged call as SGLang makes it over a chunk of the prefixes, one of which is over."""
    return case(RAGGED, (4, 1, 6), (7, 0, 20), **{"is_causal": False, "return_lse": True, "o_sf_scale": -1.0} | changes)


# The same call, stored otherwise.


def remade(name: str, make: Callable[[Any], Any]) -> Change:
    """A change of one argument."""
    return lambda arguments: arguments | {name: make(arguments[name])}


def stacked(arguments: Arguments, layout: str = "HND") -> Arguments:
    """K and V as one tensor [pages, 2, ...]."""
    k, v = arguments["kv_cache"]
    if layout == "NHD":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return arguments | {"kv_cache": torch.stack((k, v), dim=1).contiguous(), "kv_layout": layout}


def expanded(arguments: Arguments, layout: str = "HND") -> Arguments:
    """K and V as pages of one pool in any order, the pool as both K and V, and the table counting in it."""
    k, v = arguments["kv_cache"]
    places = torch.randperm(2 * len(k), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    pool = torch.empty(2 * len(k), *k.shape[1:], dtype=k.dtype)
    pool[places] = torch.cat((k, v))
    if layout == "NHD":
        pool = other_order(pool)
    ids = arguments["block_tables"]
    tables = torch.stack((places[ids], places[ids + len(k)]), dim=1)
    return arguments | {"kv_cache": (pool, pool), "block_tables": tables, "uses_shared_paged_kv_idx": False}


def apart(tensor: Tensor, gap: int = 8, axis: int = -1) -> Tensor:
    """The same values, with so many elements after each line along an axis."""
    shape = [*tensor.shape]
    shape[axis] += gap
    return tensor.new_zeros(shape).narrow(axis, 0, tensor.shape[axis]).copy_(tensor)


def shifted(tensor: Tensor) -> Tensor:
    """The same values, one element later in memory."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def other_order(cache: Tensor) -> Tensor:
    """The same shape, heads and tokens stored the other way round."""
    return cache.transpose(-3, -2).contiguous().transpose(-3, -2)


stacked_nhd, expanded_nhd = partial(stacked, layout="NHD"), partial(expanded, layout="NHD")
unstacked = remade("kv_cache", lambda pool: pool.unbind(1))
k_for_v = remade("kv_cache", lambda cache: cache[0].unsqueeze(1))  # one tensor for both
two_allocations = remade("kv_cache", lambda cache: tuple(side.clone() for side in cache))
permuted = remade("kv_cache", lambda cache: tuple(other_order(torch.stack(cache))))  # halves of an NHD pool
v_elsewhere = remade("kv_cache", lambda cache: (cache[0], other_order(cache[1])))
# A column slice of a wider table, whose other columns are wrong.
widened = remade("block_tables", partial(apart, gap=3))
# An MLA cache with a page of NaN after each page, and one an element later in memory.
with_gaps = remade("kv_cache", lambda cache: torch.stack((cache, torch.full_like(cache, math.nan)), dim=1)[:, 0])
misplaced = remade("kv_cache", shifted)


def with_columns(columns: int) -> Change:
    return remade("block_tables", lambda table: pad(table, (0, columns - table.shape[1])))


def gapped(name: str, gap: int) -> Change:
    """A tensor with so many elements after each head."""
    return remade(name, partial(apart, gap=gap))


def one_after_the_other(arguments: Arguments) -> Arguments:
    """Keys' first part and values in one tensor, as an up-projection leaves them."""
    sizes = [arguments[name].shape[2] for name in ("key", "value")]
    wide = torch.full((*arguments["key"].shape[:2], sum(sizes)), math.nan, dtype=BF16)
    parts = zip(("key", "value"), wide.split(sizes, dim=2), strict=True)
    return arguments | {name: part.copy_(arguments[name]) for name, part in parts}


def padded(arguments: Arguments) -> Arguments:
    """Rows after those of the last request, as in a graph's buffers; a ragged call's keys and values, too."""
    names = [name for name in ("query", "key", "value") if name in arguments]
    longer = {name: torch.cat((arguments[name], torch.full_like(arguments[name][:2], math.nan))) for name in names}
    return arguments | longer


def into(dtype: torch.dtype = BF16) -> Change:
    """An output of this dtype, full of NaN."""

    def given(arguments: Arguments) -> Arguments:
        size = arguments["value"].shape[2] if "value" in arguments else arguments["query"].shape[-1]
        shape = (*arguments["query"].shape[:-1], arguments.get("kv_lora_rank", size))
        return arguments | {"out": torch.full(shape, math.nan).to(dtype)}

    return given


def without_rows(arguments: Arguments, max_q_len: int = 0) -> Arguments:
    """Requests of which nobody has a row, and a graph's buffers."""
    offsets = {"cum_seq_lens_q": torch.zeros_like(arguments["seq_lens"][:1]).repeat(len(arguments["seq_lens"]) + 1)}
    own = {"q_len_per_req": None} if function_of(arguments) == DECODE else {}
    return arguments | offsets | own | {"max_q_len": max_q_len}


def without_requests(arguments: Arguments, num_rows: int = 0) -> Arguments:
    """Nobody, and so many rows of padding."""
    nobody = {name: arguments[name][:0] for name in ("seq_lens", "block_tables")}
    nobody |= {name: arguments[name][:1] for name in ("cum_seq_lens_q", "cum_seq_lens_kv") if name in arguments}
    size = {"batch_size": 0} if "batch_size" in arguments else {}
    return arguments | nobody | size | {"query": arguments["query"][:num_rows]}
