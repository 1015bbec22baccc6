"""A simulator of the Gluon kernels on a CPU: their own Python source, with torch tensors for values and threads for partitions.

The functions of `lab.kernels.portable.hopper_attention` and `hopper_mla`, and Triton's that they call, are run as they are
written, with other things in the place of Triton's modules. A copy of the copy engine lands some time after it was launched. A
scheduler, seeded, chooses at every barrier who goes on, so that many seeds try many orders; where nobody can go on, it says who
waits. Layouts are not simulated: the compiler checks those.
"""

import random
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from triton.language import constexpr

from lab.kernels.portable.triton_call import TritonLaunch
from tests.kernels.simulated_shared_memory import Barrier, Barriers, Product, Shared, Vectors

# Of each kernel, in the order in which it allocates them.
BARRIERS = {
    "hopper_attention_kernel": (
        *("k_full", "k_empty", "v_full", "v_empty"),
        *("loaded k_full", "loaded k_empty", "loaded v_full", "loaded v_empty"),  # if they are converted
    ),
    "hopper_mla_kernel": ("left_full", "left_empty", "right_full", "right_empty", "message_full", "message_empty"),
}
PROGRAM: ContextVar[tuple[tuple[int, ...], tuple[int, ...]]] = ContextVar("PROGRAM")  # (this one, the grid)


class Pointer:
    """Offsets into the elements of a tensor."""

    def __init__(self, storage: torch.Tensor, offsets: Any) -> None:
        self.storage, self.offsets = storage, torch.as_tensor(offsets)
        self.dtype = types.SimpleNamespace(element_ty=storage.dtype, is_ptr=lambda: True)

    @classmethod
    def to(cls, tensor: torch.Tensor) -> "Pointer":
        flat = torch.as_strided(tensor, (_extent(tensor),), (1,), tensor.storage_offset())
        return cls(flat, 0)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.storage, self.offsets + offset)

    def __getitem__(self, key: Any) -> "Pointer":
        return Pointer(self.storage, self.offsets[key])


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> torch.Tensor:
    if mask is None:
        return pointer.storage[pointer.offsets.long()]
    offsets, mask = torch.broadcast_tensors(pointer.offsets, torch.as_tensor(mask))
    loaded = pointer.storage[torch.where(mask, offsets, 0).long()]
    return torch.where(mask, loaded, torch.tensor(other, dtype=loaded.dtype))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    value = torch.as_tensor(value, dtype=pointer.storage.dtype)
    parts = torch.broadcast_tensors(pointer.offsets, value, torch.as_tensor(True if mask is None else mask))
    offsets, value, mask = parts
    pointer.storage[offsets[mask].long()] = value[mask]


class Scheduler:
    """Runs partitions one at a time; whoever comes to a barrier hands over."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._turn = threading.Condition()
        self._ready: dict[str, Callable[[], bool]] = {}
        self._running: str | None = None
        self._failure: BaseException | None = None
        self.copies: list[Callable[[], None]] = []
        self.name = threading.local()  # of the partition that a thread runs

    def run(self, partitions: dict[str, Callable[[], None]]) -> None:
        threads = [threading.Thread(target=self._partition, args=each) for each in partitions.items()]
        self._ready = dict.fromkeys(partitions, lambda: True)
        context = PROGRAM.get()
        self._context = context
        for thread in threads:
            thread.start()
        with self._turn:
            while self._ready or self.copies:
                choices: list[Any] = [name for name, ready in self._ready.items() if ready()]
                choices += [None] if self.copies else []
                if not choices or self._failure:
                    break
                chosen = self._random.choice(choices)
                if chosen is None:
                    self.copies.pop(self._random.randrange(len(self.copies)))()
                    continue
                self._running = chosen
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._running is None)
            stuck = sorted(self._ready)
            self._failure = self._failure or (AssertionError(f"deadlock: {stuck} wait") if stuck else None)
            self._running = "nobody"
            self._turn.notify_all()
        for thread in threads:
            thread.join()
        if self._failure:
            raise self._failure

    def _partition(self, name: str, body: Callable[[], None]) -> None:
        PROGRAM.set(self._context)
        self.name.value = name
        try:
            self.hand_over(lambda: True)
            body()
        except BaseException as error:  # raised again where the partitions were started
            self._failure = self._failure or error
        with self._turn:
            self._ready.pop(name, None)
            if self._running == name:
                self._running = None
            self._turn.notify_all()

    def hand_over(self, ready: Callable[[], bool]) -> None:
        """Let others run until `ready`."""
        name = self.name.value
        with self._turn:
            self._ready[name] = ready
            if self._running == name:
                self._running = None
                self._turn.notify_all()
            self._turn.wait_for(lambda: self._running in (name, "nobody"))
            if self._running == "nobody":
                raise SystemExit


class Simulator:
    """One program of the kernel.

    Args:
        seed: of the order in which partitions go on.
        barriers: their names, one for each allocation.
    """

    def __init__(self, seed: int, barriers: tuple[str, ...]) -> None:
        self.scheduler = Scheduler(seed)
        self.barriers = iter(barriers)
        hand_over = lambda: self.scheduler.hand_over(lambda: True)  # noqa: E731

        def wait(barrier: Barrier, parity: Any, pred: Any = True) -> None:
            if bool(pred):
                self.scheduler.hand_over(lambda: barrier.has_completed(parity))

        def init(barrier: Barrier, count: int) -> None:
            barrier.count = barrier.pending = count

        def copy(descriptor: Any, where: list[Any], barrier: Barrier, box: torch.Tensor) -> None:
            self.scheduler.copies.append(lambda: _copy_box(descriptor, [int(each) for each in where], barrier, box))
            hand_over()

        def product(a: Any, b: Any, sums: Any, use_acc: bool = True, is_async: bool = False) -> Product:
            hand_over()
            return Product(a, b, sums if use_acc else torch.zeros_like(sums))

        def arrive(barrier: Barrier) -> None:
            barrier.arrive()
            hand_over()

        def completed(_outstanding: int, products: list[Product]) -> torch.Tensor:
            hand_over()
            return products[0].result()

        self._globals = {
            "gl": _language(self),
            "tl": _language(self),
            "mbarrier": types.SimpleNamespace(
                wait=wait, init=init, arrive=arrive, expect=lambda b, n: b.arrive(n), MBarrierLayout=lambda: "barriers"
            ),
            "tma": types.SimpleNamespace(async_copy_global_to_shared=copy),
            "warpgroup_mma": product,
            "warpgroup_mma_wait": completed,
            "fence_async_shared": lambda: None,
            "gdc_launch_dependents": lambda: None,
            "gdc_wait": lambda: None,
            "bytes_of": lambda dtype: dtype.itemsize,
            "in_rows_of": lambda x, _tile: x,
            "INTERPRETED": False,
        }
        self._functions: dict[int, Callable[..., Any]] = {}

    def function(self, jitted: Any) -> Callable[..., Any]:
        """Return a jitted function as plain Python over simulated modules."""
        if id(jitted) not in self._functions:
            fn = jitted.fn
            names = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
            found = self.globals_of(names) | {"__builtins__": __builtins__}
            self._functions[id(jitted)] = types.FunctionType(fn.__code__, found, fn.__name__, fn.__defaults__)
        return self._functions[id(jitted)]

    def globals_of(self, names: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in names.items():
            if name in self._globals:
                found[name] = self._globals[name]
            elif isinstance(value, constexpr):
                found[name] = value.value
            elif hasattr(value, "fn") and hasattr(value.fn, "__code__"):
                found[name] = lambda *args, _jitted=value, **named: self.function(_jitted)(*args, **named)
            else:
                found[name] = value
        return found

    def warp_specialize(self, functions: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(functions) - 1  # the first partition has the launch's own warps
        self.scheduler.run({f"partition {n}": lambda f=f, args=args: f(*args) for n, (f, args) in enumerate(functions)})


def _copy_box(descriptor: Any, where: list[int], barrier: Barrier, box: torch.Tensor) -> None:
    """Copy a box of a pool, zeros where it lies outside; only then do its bytes count."""
    page, head, key, dim = where
    _, _, keys, dims = box.shape
    rows = torch.arange(key, key + keys)
    inside = (rows >= 0) & (rows < descriptor.base.shape[2])
    box.zero_()
    box = box.view(torch.int8) if box.element_size() == 1 else box
    box[0, 0, inside] = descriptor.base[page, head, rows[inside], dim : dim + dims].view(box.dtype)
    barrier.land(box.numel() * box.element_size())


def _language(simulator: Simulator) -> types.SimpleNamespace:
    def tensor(value: Any, like: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        return torch.tensor(value, dtype=like.dtype if isinstance(like, torch.Tensor) else None)

    def of_two(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda a, b: operation(tensor(a, b), tensor(b, a))

    def where(condition: Any, a: Any, b: Any) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition), tensor(a, b), tensor(b, a))

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout == "vectors":
            return Vectors(dtype, shape)
        if layout != "barriers":
            return Shared(dtype, shape)
        barriers = Barriers(shape[0], next(simulator.barriers))
        return barriers if len(shape) > 1 else barriers.index(0)

    def summed(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.sum(axis, dtype=x.dtype)

    def layout(*_args: Any) -> None:
        return None

    return types.SimpleNamespace(
        **{name: getattr(torch, name) for name in ("int32", "int64", "float32", "float16", "bfloat16")},
        uint32=torch.int64,  # torch does not divide uint32
        **dict.fromkeys(("NVMMADistributedLayout", "NVMMASharedLayout", "BlockedLayout", "SliceLayout"), layout),
        float8e4nv=torch.float8_e4m3fn,
        DotOperandLayout=layout,
        SwizzledSharedLayout=lambda *_: "vectors",
        allocate_shared_memory=allocate,
        arange=lambda begin, end, _layout=None: torch.arange(begin, end, dtype=torch.int32),
        abs=torch.abs,
        cast=lambda x, dtype: torch.as_tensor(x).to(dtype),
        cdiv=lambda a, b: -(-torch.as_tensor(a) // b),
        convert_layout=lambda x, _layout: x,
        cumsum=lambda x, axis: x.cumsum(axis, dtype=x.dtype),
        exp2=torch.exp2,
        floor=torch.floor,
        full=lambda shape, value, dtype, _layout=None: torch.full(shape, value, dtype=dtype),
        load=_load,
        log2=torch.log2,
        max=lambda x, axis: x.amax(axis),
        maximum=of_two(torch.maximum),
        minimum=of_two(torch.minimum),
        num_programs=lambda axis: torch.tensor(PROGRAM.get()[1][axis], dtype=torch.int32),
        reshape=torch.reshape,
        program_id=lambda axis: torch.tensor(PROGRAM.get()[0][axis], dtype=torch.int32),
        static_range=range,
        store=_store,
        sum=summed,
        warp_specialize=simulator.warp_specialize,
        where=where,
    )


def simulate(launch: TritonLaunch, seed: int = 0) -> None:
    """Make one launch of a Gluon kernel, program after program; tensors get what a GPU would write.

    Raises:
        AssertionError: a deadlock, too many arrivals, or a slot that changed under a product.
    """
    grid = (*launch._grid, 1, 1)[:3]
    for number in range(grid[0] * grid[1]):
        PROGRAM.set(((number % grid[0], number // grid[0], 0), grid))
        simulator = Simulator(seed * 1000 + number, BARRIERS[launch._kernel.fn.__name__])
        arguments = [_argument(each) for each in launch._arguments]
        named = {name: value for name, value in launch._named.items() if name.isupper()}
        with mock.patch.object(torch.Tensor, "__iadd__", torch.Tensor.__add__):  # Triton's += makes a new value
            simulator.function(launch._kernel)(*arguments, **named)


def _argument(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return Pointer.to(argument)
    if isinstance(argument, tuple):
        made = [_argument(each) for each in argument]
        return type(argument)(*made) if hasattr(argument, "_fields") else tuple(made)
    if hasattr(argument, "block_shape"):
        return types.SimpleNamespace(base=argument.base, dtype=argument.base.dtype, layout=None)
    if isinstance(argument, int) and not isinstance(argument, bool):
        return torch.tensor(argument, dtype=torch.int32)
    return argument
