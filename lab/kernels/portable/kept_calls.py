"""A cache of prepared calls: a later call whose arguments differ only in addresses and contents skips checks and preparation.

A call's *key* is everything that its preparation reads from its arguments: of a tensor its class, shape, strides, dtype,
device, and address and storage offset modulo 16, on which Triton's code depends; of other arguments type and value. A call has
no key if a tensor is not on a GPU, if a check might read an argument's contents, or if `out` or `lse` has the storage of
another tensor. Calls with the same key pass the same checks, and their launches differ in addresses only.

The second call with a key is cached, without its tensors, if it consists of launches only. The first call is not cached,
because many keys occur only once. A call that raises an error is not cached, so that the next call raises the error again.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, ParamSpec

import torch

from lab.calls import made_at_once
from lab.calls.arguments import RESULTS
from lab.kernels.portable.triton_call import TritonCall

MOST_KEPT = 512  # cached calls per function: the layers of a model, whose scales may differ, times a few batches
TENSORS = (torch.Tensor, torch.nn.Parameter)
MOST_POSITIONAL = 7  # arguments before `out` and `lse` in every function
PLAIN = (int, float, bool, str, type(None), torch.dtype)
ALIGNMENT = 16  # bytes of an address, elements of a storage offset

P = ParamSpec("P")


class NotKeptError(Exception):
    """A call cannot be cached: it has no cache key, or a launch uses memory that is neither an argument nor the call's own."""


def kept_at_once(prepare: Callable[P, TritonCall]) -> Callable[P, Any]:
    """Return a function that prepares and runs a call, and caches prepared calls for later calls. Its method `cache_clear()`
    empties the cache; a test that changes what `prepare` chooses must call `cache_clear()`.
    """

    @functools.lru_cache(maxsize=MOST_KEPT)
    def place_of(_key: Hashable) -> SimpleNamespace:  # is_known: True after the first call with the key
        return SimpleNamespace(is_known=False, call=None)

    @functools.wraps(made_at_once(prepare))
    def entry(*args: P.args, **kwargs: P.kwargs) -> Any:
        given: list[torch.Tensor] = []
        try:
            key = tuple([(name, facts_of(value, given)) for name, value in (*enumerate(args), *kwargs.items())])
            _check_results(args, kwargs, given)
            place = place_of(key)
        except NotKeptError:
            place = SimpleNamespace(is_known=False, call=None)  # of this call alone
        if place.call is not None:
            return place.call(given)
        call = prepare(*args, **kwargs)
        results = call()
        if place.is_known:
            place.call = kept(call, given)
        place.is_known = True
        return results

    entry.cache_clear = place_of.cache_clear  # type: ignore[attr-defined]
    return entry


def _check_results(args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]) -> None:
    """Raise NotKeptError if `out` or `lse` shares the storage of another argument. The cache key does not contain storages."""
    if len(args) > MOST_POSITIONAL:
        raise NotKeptError
    if results := [kwargs[name] for name in RESULTS if isinstance(kwargs.get(name), torch.Tensor)]:
        storages = [each.untyped_storage().data_ptr() for each in given]
        if any(storages.count(each.untyped_storage().data_ptr()) > 1 for each in results):
            raise NotKeptError


def facts_of(value: Any, given: list[torch.Tensor]) -> Hashable:
    """Return an argument's part of the cache key, and append its tensors to `given`. Raise NotKeptError if it has no key."""
    kind = type(value)
    if kind in TENSORS and value.is_cuda and value.layout is torch.strided:
        given.append(value)
        places = value.data_ptr() % ALIGNMENT, value.storage_offset() % ALIGNMENT
        return kind, value.shape, value.stride(), value.dtype, value.device, places
    if kind in PLAIN:
        return kind, value or repr(value)  # 0.0 and -0.0 are equal
    if kind is tuple or kind is list:
        return kind, tuple([facts_of(part, given) for part in value])
    raise NotKeptError


def kept(call: TritonCall, given: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], Any] | None:
    """Return a function that repeats the launches of `call` with the tensors of a later call with the same cache key, in the
    order of `given`, the tensors of `call`. It keeps no tensor alive. Return None if later calls may need other launches.
    """
    launches, results, device = call.launches, call.returned, call.device
    if launches is None or call.reads_contents:
        return None
    results = results if isinstance(results, tuple) else (results,)
    storages = {_memory(tensor): tensor.untyped_storage() for launch in launches for tensor in launch.scratch}
    scratch = [torch.empty(0, dtype=torch.uint8, device=device).set_(each) for each in storages.values()]
    counters = {_memory(tensor): tensor for launch in launches for tensor in launch.counters}
    empty = [*(result for result in results if all(result is not each for each in given)), *scratch]
    new = [*empty, *counters.values()]
    sources = [(_memory(tensor), tensor.data_ptr()) for tensor in (*given, *new)]
    views: list[tuple[int, int]] = []  # (index of a given or new tensor, bytes from its address) of each view of them

    def index_of(tensor: torch.Tensor) -> int:
        memory, address = _memory(tensor), tensor.data_ptr()
        found = [index for index, source in enumerate(sources) if source[0] == memory]
        if len(found) > 1:  # of several sources in one allocation, only one at the tensor's address fits
            found = [index for index in found if sources[index][1] == address]
        if len(found) != 1:
            raise NotKeptError
        if sources[found[0]][1] == address:
            return found[0]
        views.append((found[0], address - sources[found[0]][1]))
        return len(sources) + len(views) - 1

    try:
        elsewhere = [launch.elsewhere(index_of) for launch in launches]
    except NotKeptError:
        return None
    picked = [next(index for index, tensor in enumerate((*given, *new)) if tensor is result) for result in results]
    terms = [(index >= len(empty), tensor.shape, tensor.dtype) for index, tensor in enumerate(new)]
    returned = itemgetter(*picked)

    def repeat(given: Sequence[torch.Tensor]) -> Any:
        tensors = list(given)
        for is_zero, shape, dtype in terms:
            tensors.append((torch.zeros if is_zero else torch.empty)(shape, dtype=dtype, device=device))
        addresses = [tensor.data_ptr() for tensor in tensors]
        addresses += [addresses[index] + offset for index, offset in views]
        with torch.cuda.device(device.index):
            for launch in elsewhere:
                launch(addresses)
        return returned(tensors)

    return repeat


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
