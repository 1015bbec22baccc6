"""The options of `lab judge` and of pytest that narrow the judge's axes (`lab.checks.Ranges`).

An axis is one property of the judged cases, such as the page size, with the values that it takes. Importing this module imports
nothing heavy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.ranges import Ranges

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}  # names in torch


def positive(text: str) -> int:
    """Read a whole number of at least 1.

    Raises:
        ValueError: the text is no such number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text} is not a whole number of at least 1")
    return int(text)


def _dtypes(pair: str) -> Any:
    import torch

    query, _, cache = pair.partition("/")
    if not {query, cache} <= set(DTYPES):
        raise ValueError(f"{pair!r} is no pair such as bf16/e4m3, of {', '.join(DTYPES)}")
    return getattr(torch, DTYPES[query]), getattr(torch, DTYPES[cache])


def _mla_head_dims(pair: str) -> tuple[int, int]:
    head_dim, _, v_head_dim = pair.partition("/")
    return positive(head_dim), positive(v_head_dim)


def _geometry(name: str) -> str:
    from lab.workloads.geometries import GEOMETRIES

    if name not in GEOMETRIES:
        raise ValueError(f"there is no geometry {name!r}; there are {', '.join(sorted(GEOMETRIES))}")
    return name


def _kv_layout(name: str) -> str:
    if name not in ("HND", "NHD"):
        raise ValueError(f"{name!r} is neither HND nor NHD")
    return name


@dataclass(frozen=True)
class Axis:
    """The option of an axis with several values.

    Attributes:
        words: its text in the help.
        metavar: the placeholder of the values in the help.
        read: makes one value from its text; the message of its ValueError is shown to the user.
    """

    words: str
    metavar: str = "N,N,..."
    read: Callable[[str], Any] = positive

    def values(self, text: str) -> list[Any]:
        """Read the values, separated by commas. Raises ValueError as `read` does."""
        return [self.read(each.strip()) for each in text.split(",")]


# Field of `Ranges` -> its option.
SEVERAL = {
    "dtypes": Axis("pairs such as bf16/bf16,bf16/e4m3", "Q/KV,...", _dtypes),
    "groups": Axis("query heads per K/V head"),
    "num_kv_heads": Axis("K/V heads of the cache"),
    "head_dims": Axis("head_dim of the cache"),
    "page_sizes": Axis("tokens per page of the cache"),
    "q_lens": Axis("query rows of a request in a decode call"),
    "long_requests": Axis("keys of the long requests of check K18"),
    "large_batches": Axis("requests of the large batches"),
    "masked_rows": Axis("query rows of the calls with a draft mask"),
    "mla_head_dims": Axis("head_dim and v_head_dim of MLA, such as 576/512", "N/N,...", _mla_head_dims),
    "mla_heads": Axis("query heads of MLA"),
    "mla_page_sizes": Axis("tokens per page of MLA's cache"),
    "geometries": Axis("models whose passes and graph replays the full level judges", "NAME,...", _geometry),
    "kv_layouts": Axis("orders of a page's axes", "HND,NHD", _kv_layout),
}
# Field of `Ranges` -> a feature that some cases have, unless its option switches it off.
SOME = {"windows": "a sliding window", "sinks": "a sink per head", "nvfp4": "an NVFP4 cache"}
LONGEST = "approximate number of keys of the longest request"
SEED = "seed of the random cases: another seed draws others; the report names it"
E4M3_ARITHMETIC = "the kernel is known to compute in e4m3 where the cache is e4m3"


def ranges_of(chosen: Mapping[str, Any]) -> "Ranges":
    """Return the default axes, narrowed by the options of the same names. An option that is None or absent was not given.

    Raises:
        ValueError: `Ranges` refuses them.
    """
    from lab.ranges import Ranges

    narrowed: dict[str, Any] = {}
    for axis in fields(Ranges):
        value = chosen.get(axis.name)
        if value is None:
            continue
        if axis.name in SEVERAL:
            value = tuple(value)
        elif axis.name in SOME:
            value = (False, True) if value else (False,)
        narrowed[axis.name] = value
    return Ranges(**narrowed)


def options_of(ranges: "Ranges", prefix: str = "--") -> str:
    """Return the options that narrow the default axes to `ranges`: the inverse of `ranges_of`.

    Args:
        ranges: the axes.
        prefix: start of each option; pytest's is "--lab-".
    """
    usual, words = type(ranges)(), []
    for axis in fields(ranges):
        value = getattr(ranges, axis.name)
        option = axis.name.replace("_", "-")
        if value == getattr(usual, axis.name):
            continue
        if axis.name in SEVERAL:
            words.append(f"{prefix}{option} {','.join(map(_text, value))}")
        elif axis.name in SOME:
            words.append(f"{prefix}{'' if True in value else 'no-'}{option}")
        else:
            words.append(f"{prefix}{option}" + ("" if value is True else f" {value}"))
    return " ".join(words)


def _text(value: Any) -> str:
    """Return one value of an axis as its option spells it."""
    if isinstance(value, tuple):
        return "/".join(map(_text, value))
    named = {torch_name: name for name, torch_name in DTYPES.items()}
    return named.get(str(value).removeprefix("torch."), str(value))
