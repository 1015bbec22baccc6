"""The sizes, dtypes and features from which the judge makes cases (`Ranges`), and the command-line options that narrow them.

`lab judge` and pytest derive their options from the fields of `Ranges`. Importing this module does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lab.workloads.geometries import Geometry

SEEDS = 100_000  # number of case seeds per seed of `Ranges`
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "nvfp4": "uint8"}  # names in torch
PAIRS = ("bf16/bf16", "fp16/fp16", "bf16/e4m3", "fp16/e4m3", "e4m3/e4m3")  # dtypes of the query and the cache
LAYOUTS = ("HND", "NHD")


@dataclass(frozen=True)
class Kind:
    """A type of option values: which values are permitted, and how a text is converted to a value."""

    words: Callable[[], str]  # returns a description that follows "is not", such as "a power of two"
    holds: Callable[[Any], bool]  # returns True if a value is permitted
    parse: Callable[[str], Any] = int  # converts a text to a value; may raise ValueError
    metavar: str = "N,N,..."  # text that stands for the values in a help text

    def read(self, text: str) -> Any:
        try:
            value = self.parse(text) if str(text).isascii() else None  # int() takes the digits of all scripts
        except ValueError:
            value = None
        if value is None or not self.holds(value):
            raise ValueError(f"{text or repr(text)} is not {self.words()}")
        return value


def text_of(value: Any) -> str:
    """Return a value as its command-line option writes it, such as bf16/e4m3 for two dtypes or 576/512 for two sizes."""
    if isinstance(value, tuple):
        return "/".join(map(text_of, value))
    return next((name for name, of_torch in DTYPES.items() if str(value) == f"torch.{of_torch}"), str(value))


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_latent(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(_is_whole(each, 2) for each in value)
    return is_pair and value[1] <= value[0]


@cache
def dtype_of(name: str) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def dtypes_of(pair: str) -> "tuple[torch.dtype, torch.dtype]":
    query, _, of_cache = pair.partition("/")
    return dtype_of(query), dtype_of(of_cache)


def _geometries() -> tuple[str, ...]:
    from lab.workloads.geometries import GEOMETRIES

    return tuple(GEOMETRIES)


def _whole(least: int) -> Kind:
    return Kind(lambda: f"a whole number of at least {least}", partial(_is_whole, least=least))


def _name(names: Callable[[], tuple[str, ...]], metavar: str) -> Kind:
    return Kind(lambda: f"one of {', '.join(names())}", lambda value: value in names(), str, metavar)


FLAG = Kind(lambda: "True or False", lambda value: isinstance(value, bool))
POSITIVE = _whole(1)
POWER_OF_TWO = Kind(lambda: "a power of two", lambda value: _is_whole(value, 1) and not value & (value - 1))
DTYPE_PAIR = Kind(
    lambda: f"one of {', '.join(PAIRS)}; in Python each is two torch dtypes",
    lambda value: text_of(value) in PAIRS and isinstance(value, tuple),
    lambda text: dtypes_of(text) if text in PAIRS else None,
    "Q/KV,...",
)
LATENT = Kind(
    lambda: "two whole numbers of at least 2 such as 576/512, the second no larger than the first",
    _is_latent,
    lambda text: tuple(map(int, text.split("/"))),
    "N/N,...",
)


@dataclass(frozen=True)
class Option:
    """The command-line option of a field of `Ranges`, the field's values that few kernels support, and those that most do."""

    help: str
    kind: Kind
    is_several: bool  # the field is a tuple of values
    beyond: tuple[Any, ...] = ()  # values that K18 adds to the default; few kernels support them
    likely: tuple[Any, ...] = ()  # the values that most kernels support, the most common first

    @property
    def is_switch(self) -> bool:
        return self.kind is FLAG

    def values(self, text: str) -> list[Any]:
        return [self.kind.read(each.strip()) for each in text.split(",")]


def _field(default: Any, kind: Kind, words: str, **more: Any) -> Any:
    """Declare a field of `Ranges` with its command-line option. `default` is the field's default value, or a function that
    returns it if the value needs torch. `words` is the help text, and `more` has further fields of `Option`.
    """
    given: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    is_several = callable(default) or isinstance(default, tuple)
    return field(**given, metadata={"option": Option(words, kind, is_several, **more)})


@dataclass(frozen=True)
class Ranges:
    """The sizes, dtypes and features from which the judge makes cases. Narrow a field to the values that a kernel supports.
    Raises ValueError if a field is empty, has a value twice, or has a value from which no case can be made.
    """

    dtypes: tuple["tuple[torch.dtype, torch.dtype]", ...] = _field(
        lambda: tuple(map(dtypes_of, ("bf16/bf16", "fp16/fp16", "bf16/e4m3"))),
        DTYPE_PAIR,
        "dtypes of the query and the cache, such as bf16/bf16,e4m3/e4m3",
        beyond=("fp16/e4m3", "e4m3/e4m3"),
        likely=("bf16/bf16", "fp16/fp16", "bf16/e4m3", "e4m3/e4m3"),
    )
    groups: tuple[int, ...] = _field(
        (1, 2, 3, 4, 5, 6, 8, 16),
        POSITIVE,
        "query heads per K/V head",
        beyond=(7, 12, 24, 32, 48, 64),
        likely=(8, 4, 1),
    )
    num_kv_heads: tuple[int, ...] = _field((1, 2, 3), POSITIVE, "K/V heads of the cache", beyond=(32,), likely=(1, 2))
    head_dims: tuple[int, ...] = _field(
        (64, 128, 256), _whole(2), "head_dim of the cache", beyond=(80, 96, 192, 512), likely=(128, 64)
    )
    page_sizes: tuple[int, ...] = _field(
        (16, 32, 64, 128), POWER_OF_TWO, "tokens per page of the cache", beyond=(8, 256, 512, 1), likely=(64, 16, 32)
    )
    q_lens: tuple[int, ...] = _field(
        (1, 2, 3, 4, 5, 6, 7, 8),
        POSITIVE,
        "query rows of a request in a decode call",
        beyond=(9, 11, 16, 19, 130),
        likely=(1,),
    )
    windows: tuple[bool, ...] = _field((False, True), FLAG, "a sliding window", likely=(False,))
    sinks: tuple[bool, ...] = _field((False, True), FLAG, "a sink per head", likely=(False,))
    nvfp4: tuple[bool, ...] = _field((False, True), FLAG, "an NVFP4 cache", likely=(False,))
    kv_layouts: tuple[str, ...] = _field(
        LAYOUTS, _name(lambda: LAYOUTS, "HND,NHD"), "orders of a page's axes", likely=("HND",)
    )
    long_requests: tuple[int, ...] = _field(  # each value in a case with few heads and query rows
        (4_100, 16_500, 131_072), POSITIVE, "keys of the long requests of check K18"
    )
    # 40 exceeds the 32 lanes of a warp. Each other value is one above a multiple of 132 or 148 multiprocessors, and above a
    # power of 2: 128, 256, 512 and 1,024.
    large_batches: tuple[int, ...] = _field(
        (40, 133), POSITIVE, "requests of the large batches", beyond=(297, 529, 1037)
    )
    masked_rows: tuple[int, ...] = _field(  # a mask of more than 16 rows has a second word per row
        (4, 8, 20, 40), POSITIVE, "query rows of the calls with a draft mask", beyond=(70,)
    )
    mla_head_dims: tuple[tuple[int, int], ...] = _field(
        ((80, 64), (576, 512)),
        LATENT,
        "head_dim and v_head_dim of MLA, such as 576/512",
        beyond=((64, 64), (320, 256), (224, 128)),  # rotary parts of 0, 64 and 96
        likely=((576, 512),),
    )
    mla_heads: tuple[int, ...] = _field(
        (1, 8, 16, 128), POSITIVE, "query heads of MLA", beyond=(32, 64, 24, 20), likely=(128, 16)
    )
    mla_page_sizes: tuple[int, ...] = _field(
        (32, 64), POWER_OF_TWO, "tokens per page of MLA's cache", beyond=(8, 16, 128, 1), likely=(64, 32)
    )
    top_ks: tuple[int, ...] = _field(  # 132 exceeds a tile of 128 by the least that FlashInfer allows, 4
        (132, 512), _whole(0), "sparse_mla_top_k of MLA decode calls that select entries, 0 for none", beyond=(8, 2048)
    )
    geometries: tuple[str, ...] = _field(
        ("gemma-3-27b", "gpt-oss-120b", "llama-3.1-70b", "llama-3.1-8b", "qwen3-32b"),
        _name(_geometries, "NAME,..."),
        "models whose passes and graph replays the full level judges",
    )
    # A kernel that rounds Q and the softmax's weights to e4m3.
    e4m3_arithmetic: bool = _field(False, FLAG, "the kernel is known to compute in e4m3 where the cache is e4m3")
    longest: int = _field(700, POSITIVE, "approximate number of keys of the longest request, in all checks but K18")
    seed: int = _field(0, _whole(0), "seed of the random cases: another seed draws others; the report names it")

    def __post_init__(self) -> None:
        from lab.calls.problem import NVFP4_BLOCK

        for name, option in OPTIONS.items():
            _check(name, option, getattr(self, name))
        if self.longest < max(self.q_lens):
            raise ValueError(f"longest={self.longest!r} must be at least {max(self.q_lens)}: q_lens")
        odd = [head_dim for head_dim in self.head_dims if head_dim % NVFP4_BLOCK]
        if odd and True in self.nvfp4:
            raise ValueError(
                f"head_dims={self.head_dims}: an NVFP4 cache stores blocks of {NVFP4_BLOCK}, which {odd[0]} has no whole "
                "number of: leave it out, or NVFP4 by nvfp4=(False,), in a shell --no-nvfp4"
            )

    def __repr__(self) -> str:
        from lab.workloads.attention_case import short_repr

        return short_repr(self)

    def widened(self, name: str) -> tuple[Any, ...]:
        """Return the values that check K18 (combinations) tries for the field `name`: the field's own values. If these are the
        default, the values of `Option.beyond` follow, which fewer kernels support.
        """
        values: tuple[Any, ...] = getattr(self, name)
        option = OPTIONS[name]
        beyond = map(dtypes_of, option.beyond) if option.kind is DTYPE_PAIR else option.beyond
        return (*values, *beyond) if values == getattr(type(self)(), name) else values

    def arithmetic(self, dtype: "torch.dtype", kv_dtype: "torch.dtype") -> "torch.dtype | None":
        """Return e4m3 if a kernel may round the operands of Q·K^T and of P·V to e4m3, for a query of `dtype` and a cache of
        `kv_dtype`. Otherwise return None: the operands keep the query's dtype.
        """
        from lab.calls.problem import E4M3

        return E4M3 if dtype == E4M3 or (self.e4m3_arithmetic and kv_dtype == E4M3) else None

    def holds(self, model: "Geometry") -> bool:
        return (
            model.head_dim in self.head_dims
            and model.group in self.groups
            and (True in self.sinks or not model.has_sinks)
        )

    @property
    def tiny(self) -> str:
        """Return the name of a small synthetic model that these ranges permit, such as "tiny" or "tiny-4x2x128-sinks"."""
        from lab.workloads.geometries import geometry, tiny

        usual = geometry("tiny")
        return tiny(
            usual.group if usual.group in self.groups else self.groups[0],
            usual.num_kv_heads if usual.num_kv_heads in self.num_kv_heads else self.num_kv_heads[0],
            usual.head_dim if usual.head_dim in self.head_dims else self.head_dims[0],
            True in self.sinks,
        )

    def windows_of(self, model: "Geometry") -> tuple[bool, ...]:
        """Return (False, True) if the model is to be judged without and with its sliding window, else (False,)."""
        return (False, True) if model.sliding_window is not None and True in self.windows else (False,)


def _check(name: str, option: Option, given: Any) -> None:
    if not option.is_several:
        if not option.kind.holds(given):
            raise ValueError(f"{name}={given!r} must be {option.kind.words()}")
        return
    if not isinstance(given, tuple) or not given:
        raise ValueError(f"{name}={given!r} must be a tuple of at least one value, each {option.kind.words()}")
    if wrong := [value for value in given if not option.kind.holds(value)]:
        raise ValueError(f"{name}={given!r}: {wrong[0]!r} is not {option.kind.words()}")
    if len(set(given)) < len(given):
        raise ValueError(f"{name}={given!r} has a value twice")


OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(Ranges)}


def ranges_of(chosen: Mapping[str, Any]) -> Ranges:
    """Return the default ranges with the fields in `chosen` replaced. A value of None keeps the default."""
    narrowed: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value = chosen.get(name)
        if value is not None:
            several = ((False, True) if value else (False,)) if option.is_switch else value
            narrowed[name] = tuple(several) if option.is_several else value
    return Ranges(**narrowed)


def options_of(ranges: Ranges, prefix: str = "--") -> str:
    """Return the options that make `ranges` from the default ones. `prefix` is "--" for `lab`, "--lab-" for pytest."""
    usual, words = Ranges(), []
    for name, option in OPTIONS.items():
        value = getattr(ranges, name)
        spelt = name.replace("_", "-")
        if value == getattr(usual, name):
            continue
        values = value if option.is_several else (value,)
        if option.is_switch:
            words.append(f"{prefix}{'' if True in values else 'no-'}{spelt}")
        else:
            words.append(f"{prefix}{spelt} {','.join(map(text_of, values))}")
    return " ".join(words)
