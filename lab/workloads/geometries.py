"""Attention geometries of real models, as their published configurations state them, and their tensor-parallel slices."""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Geometry:
    """The sizes of one attention layer of a model, on one GPU: heads, head_dim, scale, window and sinks."""

    name: str  #: the name in ids and reports
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float  #: factor of Q·K^T
    source: str  #: the Hugging Face configuration from which the numbers come
    #: keys that a row of a sliding-window layer sees, its own included; None: no such layer
    sliding_window: int | None = None
    has_sinks: bool = False  #: each query head has one learned logit in the softmax's denominator

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def window_left(self) -> int:
        """Return `sliding_window` as kernels count it: the keys before a row's own key; -1 without a window."""
        return -1 if self.sliding_window is None else self.sliding_window - 1

    def tensor_parallel(self, size: int) -> "Geometry":
        """Return the layer's slice on one of `size` GPUs, at least 1 K/V head. Raise ValueError if slices would be uneven."""
        if size < 1 or self.num_qo_heads % size:
            raise ValueError(f"{self.name} has {self.num_qo_heads} query heads; they do not divide over {size} GPUs")
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise ValueError(f"{self.name} has {self.num_kv_heads} K/V heads; they do not divide over {size} GPUs")
        heads = self.num_qo_heads // size
        return replace(self, num_qo_heads=heads, num_kv_heads=max(1, self.num_kv_heads // size))


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("llama-3.1-8b", 32, 8, 128, 128**-0.5, "meta-llama/Llama-3.1-8B"),
        Geometry("llama-3.1-70b", 64, 8, 128, 128**-0.5, "meta-llama/Llama-3.1-70B"),
        Geometry("qwen3-32b", 64, 8, 128, 128**-0.5, "Qwen/Qwen3-32B"),
        Geometry("gpt-oss-120b", 64, 8, 64, 64**-0.5, "openai/gpt-oss-120b", 128, True),
        # The scale does not follow from head_dim: query_pre_attn_scalar = 168.
        Geometry("gemma-3-27b", 32, 16, 128, 168**-0.5, "google/gemma-3-27b-it", 1024),
        # Not a real model: small enough for an interpreted kernel on a CPU, with a window, sinks, and a group of 3.
        Geometry("tiny", 6, 2, 64, 64**-0.5, "the lab's own", 24, True),
    )
}

# Query heads of models of latent attention (MLA), whose entries have 512 + 64 elements: deepseek-ai/DeepSeek-V3 and
# moonshotai/Kimi-K2-Instruct on Hugging Face. Those of deepseek-ai/DeepSeek-V4-Flash and -Pro have 512 and lie in two pools.
LATENT_HEADS = {"deepseek-v3": 128, "kimi-k2": 64, "deepseek-v4-flash": 64, "deepseek-v4-pro": 128}
# DeepSeek-V4: number of compressed entries that an indexer selects, and number of tokens of such an entry.
V4_INDEX_TOPK, INDEXED_RATIO = {"deepseek-v4-flash": 512, "deepseek-v4-pro": 1024}, 4

TINY = re.compile(r"tiny-(\d+)x(\d+)x(\d+)(-sinks)?")


def tiny(group: int, num_kv_heads: int, head_dim: int, has_sinks: bool) -> str:
    """Return the name of a synthetic geometry, such as "tiny-4x2x128-sinks"; "tiny" for the sizes of GEOMETRIES["tiny"]."""
    usual = GEOMETRIES["tiny"]
    if (group, num_kv_heads, head_dim, has_sinks) == (usual.group, usual.num_kv_heads, usual.head_dim, usual.has_sinks):
        return usual.name
    return f"tiny-{group}x{num_kv_heads}x{head_dim}{'-sinks' if has_sinks else ''}"


def geometry(name: str) -> Geometry:
    """Return the geometry with a name that is a key of `GEOMETRIES` or a result of `tiny`. Raise ValueError for other names."""
    if found := TINY.fullmatch(name):
        group, heads, head_dim = map(int, found.groups()[:3])
        usual = GEOMETRIES["tiny"]
        window, has_sinks = usual.sliding_window, found[4] is not None
        return Geometry(name, group * heads, heads, head_dim, head_dim**-0.5, usual.source, window, has_sinks)
    if name not in GEOMETRIES:
        raise ValueError(f"no geometry is called {name!r}; there are {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]
