"""A small model with one attention layer, which stands for a draft model, so that its CUDA graph resembles an engine's.

Token ids and the target's hidden states are projected to Q, K and V together, as EAGLE-3's layer does; K and V are written into
the paged cache; attention runs; its output is projected to hidden states, and these to logits. There are no norms, no rotary
embedding, no MLP and no residual: next to a residual, the average of thousands of random values would be lost in rounding, and
with it every error of the attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.metadata.engine.backend import Backend
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.kv_cache import KVLayout, PagedKVCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.mha.backend import AttentionLayer
from lab.metadata.mha.metadata import TRTLLMMHAMetadata
from lab.metadata.speculation.draft_extend_graph import DraftExtendOutput, DraftInputs, DraftOutputs, selected_rows
from lab.references.errors import Comparison, Truth, compare
from lab.workloads.geometries import Geometry, geometry
from lab.workloads.inputs.expected import made
from lab.workloads.inputs.forward_pass import mha_truth
from lab.workloads.requests import admit

DTYPE = torch.bfloat16  # of weights, hidden states and cache
LOGITS_DTYPE = torch.float32  # of SGLang's logits buffer; the LM head's own product is bf16 before
# Modes whose passes can be drawn: those that run in CUDA graphs, draft steps apart.
# A ragged verification has no stand-in: XQA, which these passes run on too, takes no ragged rows.
GRAPH_MODES = tuple(mode for mode in ForwardMode if mode.in_graph and mode is not ForwardMode.RAGGED_VERIFY)


@dataclass(frozen=True)
class StandInSizes:
    """Sizes of a stand-in model. `geometry_name` is a key of `lab.workloads.GEOMETRIES`."""

    vocab_size: int
    hidden_size: int
    geometry_name: str

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.hidden_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size} and hidden_size={self.hidden_size} must be at least 1")
        geometry(self.geometry_name)

    @property
    def attention(self) -> Geometry:
        return geometry(self.geometry_name)

    @property
    def q_size(self) -> int:
        return self.attention.num_qo_heads * self.attention.head_dim

    @property
    def kv_size(self) -> int:
        return self.attention.num_kv_heads * self.attention.head_dim

    @property
    def layer_parameters(self) -> int:
        return 2 * self.hidden_size * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        return self.hidden_size * self.vocab_size


# vocab_size and hidden_size of meta-llama/Llama-3.1-8B: a vocabulary of the size that draft models of that family share.
LLAMA_8B_SIZES = StandInSizes(vocab_size=128_256, hidden_size=4096, geometry_name="llama-3.1-8b")
# The lab's own: small enough for a kernel interpreted on a CPU.
TINY_SIZES = StandInSizes(vocab_size=97, hidden_size=48, geometry_name="tiny")


class StandInModel:
    """Seeded random weights, one layer's cache, and its forward pass of any mode that runs in CUDA graphs.

    Args:
        sliding_window: the layer has the geometry's window, and reads and writes the sliding-window pool.
        seed: of the weights. Rows of all products have variance 1 for inputs of variance 1.

    Attributes:
        embedding: [vocab_size, hidden_size].
        qkv_weight: [2 * hidden_size, q_size + 2 * kv_size].
        out_weight: [q_size, hidden_size].
        head_weight: [hidden_size, vocab_size].
        layer, cache: of the attention. The weights and the cache are bf16.

    Raises:
        ValueError: a sliding-window layer without a window in the geometry or the pool, or a pool of virtual slots, which the
            model's writes do not translate.
    """

    def __init__(self, sizes: StandInSizes, pool: KVPool, *, sliding_window: bool = False, seed: int = 0) -> None:
        model, hidden = sizes.attention, sizes.hidden_size
        if sliding_window and model.sliding_window is None:
            raise ValueError(f"{model.name} has no sliding-window layers: leave sliding_window False")
        if pool.v2p is not None:
            raise ValueError(
                "the pool has virtual slots, where this model would write: make one without num_virtual_pages"
            )
        generator = torch.Generator(device=pool.device).manual_seed(seed)

        def weight(fan_in: int, fan_out: int) -> Tensor:
            drawn = torch.randn(fan_in, fan_out, device=pool.device, generator=generator, dtype=torch.float32)
            return drawn.mul_(fan_in**-0.5).to(DTYPE)

        self.sizes = sizes
        self.pool = pool
        self.embedding = weight(1, sizes.vocab_size * hidden).view(sizes.vocab_size, hidden)
        self.qkv_weight = weight(2 * hidden, sizes.q_size + 2 * sizes.kv_size)
        self.out_weight = weight(sizes.q_size, hidden)
        self.head_weight = weight(hidden, sizes.vocab_size)
        sinks = torch.randn(model.num_qo_heads, device=pool.device, generator=generator) if model.has_sinks else None
        self.layer = AttentionLayer(
            softmax_scale=model.softmax_scale,
            window_left=model.window_left if sliding_window else -1,
            reads_swa_pool=sliding_window,
            sinks=sinks,
        )
        self.cache: PagedKVCache = pool.new_cache(
            model.num_kv_heads, model.head_dim, DTYPE, KVLayout.NHD, sliding_window=sliding_window
        )

    def new_inputs(self, max_batch_size: int, max_num_tokens: int) -> DraftInputs:
        device = self.pool.device
        return DraftInputs(
            input_ids=torch.zeros(max_num_tokens, dtype=torch.int64, device=device),
            hidden_states=torch.zeros(max_num_tokens, self.sizes.hidden_size, dtype=DTYPE, device=device),
            select_index=torch.zeros(max_batch_size, dtype=torch.int64, device=device),
        )

    def new_outputs(self, form: DraftExtendOutput, max_batch_size: int, max_num_tokens: int) -> DraftOutputs:
        device, rows = self.pool.device, form.num_rows(max_batch_size, max_num_tokens)
        has_topk = form is DraftExtendOutput.ALL_ROWS_WITH_TOPK
        return DraftOutputs(
            logits=torch.zeros(rows, self.sizes.vocab_size, dtype=LOGITS_DTYPE, device=device),
            hidden_states=torch.zeros(rows, self.sizes.hidden_size, dtype=DTYPE, device=device),
            topk_p=torch.zeros(rows, 1, dtype=torch.float32, device=device) if has_topk else None,
            topk_index=torch.zeros(rows, 1, dtype=torch.int64, device=device) if has_topk else None,
        )

    def prepare(
        self,
        backend: Backend[TRTLLMMHAMetadata],
        batch: ForwardBatch,
        metadata: TRTLLMMHAMetadata,
        inputs: DraftInputs,
        outputs: DraftOutputs,
        form: DraftExtendOutput,
    ) -> Callable[[], object]:
        """Prepare the pass, to be called or captured. Its large intermediates are allocated here, once.

        `form` says which rows go through the LM head; modes other than ``DRAFT_EXTEND_V2`` take all of theirs.

        Raises:
            ValueError: the buffers have other sizes than the pass, or the metadata lacks the layer's sliding-window pool.
        """
        self._check(batch, inputs, outputs, form)
        rows, sizes, model = batch.num_tokens, self.sizes, self.sizes.attention
        slots = self._write_locations(batch, metadata)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device=self.pool.device)

        features = empty(rows, 2 * sizes.hidden_size)
        projected = empty(rows, sizes.q_size + 2 * sizes.kv_size)
        query, attended = (empty(rows, model.num_qo_heads, model.head_dim) for _ in range(2))
        selects = form is DraftExtendOutput.SELECTED_ROW
        hidden_states = empty(rows, sizes.hidden_size) if selects else outputs.hidden_states
        product = empty(outputs.logits.shape[0], sizes.vocab_size)
        new_queries, *new_kv = projected.split((sizes.q_size, sizes.kv_size, sizes.kv_size), dim=1)
        # Rows that have no slot are padding of an eager pass.
        keys, values = (side[: slots.shape[0]].unflatten(1, (model.num_kv_heads, model.head_dim)) for side in new_kv)
        attention = backend.prepare_attention(
            batch, metadata, self.layer, query, self.cache, max_context_len=self.pool.max_context_len, out=attended
        )

        def run() -> None:
            features[:, : sizes.hidden_size].copy_(self.embedding[inputs.input_ids])
            features[:, sizes.hidden_size :].copy_(inputs.hidden_states)
            torch.mm(features, self.qkv_weight, out=projected)
            self.cache.write(slots, keys, values)
            query.copy_(new_queries.view(query.shape))
            attention()
            torch.mm(attended.flatten(1), self.out_weight, out=hidden_states)
            if selects:
                torch.index_select(hidden_states, 0, inputs.select_index, out=outputs.hidden_states)
            torch.mm(outputs.hidden_states, self.head_weight, out=product)
            outputs.logits.copy_(product)
            if outputs.topk_index is not None and outputs.topk_p is not None:
                torch.argmax(outputs.logits, dim=1, keepdim=True, out=outputs.topk_index)
                outputs.topk_p.fill_(1.0)

        return run

    def _check(self, batch: ForwardBatch, inputs: DraftInputs, outputs: DraftOutputs, form: DraftExtendOutput) -> None:
        if form is DraftExtendOutput.SELECTED_ROW and batch.forward_mode is not ForwardMode.DRAFT_EXTEND_V2:
            raise ValueError(f"{batch.forward_mode!r} has no row to select: only DRAFT_EXTEND_V2 has")
        expected = {
            "input_ids": (inputs.input_ids, batch.num_tokens),
            "hidden_states": (inputs.hidden_states, batch.num_tokens),
            "select_index": (inputs.select_index, batch.batch_size),
            "logits": (outputs.logits, form.num_rows(batch.batch_size, batch.num_tokens)),
        }
        for name, (tensor, rows) in expected.items():
            if tensor.shape[0] != rows:
                raise ValueError(f"{name} has {tensor.shape[0]} rows, but this pass has {rows}")

    def _write_locations(self, batch: ForwardBatch, metadata: TRTLLMMHAMetadata) -> Tensor:
        if not self.layer.reads_swa_pool:
            return batch.out_cache_loc
        if metadata.swa_out_cache_loc is None:
            raise ValueError("the layer reads the sliding-window pool, but the metadata has no swa_out_cache_loc")
        return metadata.swa_out_cache_loc


@dataclass(frozen=True, eq=False)
class StandInPass:
    """A pass of a stand-in model: an engine's batch and inputs, and the histories that were written before.

    Attributes:
        q_lens: query rows of each request.
        input_ids: int64 [num_tokens].
        hidden_states: bf16 [num_tokens, hidden_size].
        accept_lens: int32 [batch_size], 1 to q_lens[i] each.
        histories: per request (K, V) of its earlier tokens, bf16 [prefix_len, num_kv_heads, head_dim].
    """

    batch: ForwardBatch
    q_lens: tuple[int, ...]
    input_ids: Tensor
    hidden_states: Tensor
    accept_lens: Tensor
    histories: list[tuple[Tensor, Tensor]]


def draw_pass(
    model: StandInModel, mode: ForwardMode, prefix_lens: Sequence[int], q_lens: Sequence[int], seed: int = 0
) -> StandInPass:
    """Admit requests to the model's pool, write K and V of their earlier tokens to its cache, and draw a pass over them."""
    if mode not in GRAPH_MODES:
        raise ValueError(f"{mode!r} is not drawn; there are {', '.join(map(repr, GRAPH_MODES))}")
    pool, sizes = model.pool, model.sizes
    generator = torch.Generator(device=pool.device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=pool.device, generator=generator).to(DTYPE)

    heads = sizes.attention
    histories = [
        (randn(prefix_len, heads.num_kv_heads, heads.head_dim), randn(prefix_len, heads.num_kv_heads, heads.head_dim))
        for prefix_len in prefix_lens
    ]
    requests = admit(pool, prefix_lens, q_lens)
    requests.write(model.cache, histories, sliding_window=model.layer.reads_swa_pool)
    num_tokens = sum(q_lens)
    accept_lens = [
        int(torch.randint(1, q_len + 1, (), generator=torch.Generator().manual_seed(1000 * seed + request)))
        for request, q_len in enumerate(q_lens)
    ]
    return StandInPass(
        batch=requests.batch(mode),
        q_lens=tuple(q_lens),
        input_ids=torch.randint(sizes.vocab_size, (num_tokens,), device=pool.device, generator=generator),
        hidden_states=randn(num_tokens, sizes.hidden_size),
        accept_lens=torch.tensor(accept_lens, dtype=torch.int32, device=pool.device),
        histories=histories,
    )


Project = Callable[[Tensor, Tensor], Tensor]  # rows and a weight to their product


@dataclass(frozen=True, eq=False)
class StandInTruth:
    """The expected output of every row of a pass, and the control output, which is computed in bf16 by plain torch. Both are
    computed only from each request's K and V, without pages, tables or graphs.

    Attributes:
        hidden_states, logits: float64 [num_tokens, hidden_size] and [num_tokens, vocab_size].
        hidden_states_control, logits_control: the same, rounded to bf16 after every step.
        request_of_row: int64 [num_tokens].
        selected: int64 [batch_size], the row of each request's last accepted token; None for requests of different widths.
    """

    hidden_states: Tensor
    logits: Tensor
    hidden_states_control: Tensor
    logits_control: Tensor
    request_of_row: Tensor
    selected: Tensor | None

    def compare(self, outputs: DraftOutputs, form: DraftExtendOutput) -> dict[str, Comparison]:
        """Compare each row's hidden states and logits with the expected ones. `outputs` have no padding rows."""
        rows = torch.arange(self.logits.shape[0], device=self.logits.device)
        if form is DraftExtendOutput.SELECTED_ROW:
            if self.selected is None:
                raise ValueError("the requests have different numbers of rows: there is no row to select")
            rows = self.selected
        groups = self.request_of_row[rows]
        triples = {
            "hidden_states": (outputs.hidden_states, self.hidden_states, self.hidden_states_control),
            "logits": (outputs.logits, self.logits, self.logits_control),
        }
        return {
            name: compare(out.unsqueeze(1), expected[rows].unsqueeze(1), control[rows].unsqueeze(1), groups)
            for name, (out, expected, control) in triples.items()
        }

    def hold(self, outputs: DraftOutputs, form: DraftExtendOutput) -> None:
        """Raise AssertionError if rows are wrong. A top-k output must name the largest of the output's own logits."""
        for name, comparison in self.compare(outputs, form).items():
            if not comparison.passed:
                (worst,) = comparison.worst(1)
                raise AssertionError(
                    f"{int(comparison.wrong.sum())} of {comparison.wrong.numel()} rows of {name} are wrong, the worst row "
                    f"{worst[0]} with error {float(comparison.error[worst]):.3g}, {comparison.worst_ratio:.3g} times what is "
                    "allowed"
                )
        if form is DraftExtendOutput.ALL_ROWS_WITH_TOPK:
            assert outputs.topk_index is not None
            assert outputs.topk_p is not None
            best = outputs.logits.gather(1, outputs.topk_index)
            if not torch.equal(best, outputs.logits.amax(dim=1, keepdim=True)):
                raise AssertionError("topk_index does not name the largest logit of each row")
            if not bool((outputs.topk_p == 1).all()):
                raise AssertionError("topk_p must be 1: a chain takes its token for certain")


def truth_of_pass(model: StandInModel, drawn: StandInPass) -> StandInTruth:
    """Return the expected outputs of a pass. This makes float64 copies of the weights: 4 GB for an LM head of 128K tokens."""
    exact = _hidden_states(model, drawn, _exact, lambda truth: truth.expected)
    rounded = _hidden_states(model, drawn, _rounded, lambda truth: truth.control)
    device = exact.device
    requests = [request for request, q_len in enumerate(drawn.q_lens) for _ in range(q_len)]
    uniform = len(set(drawn.q_lens)) == 1
    return StandInTruth(
        hidden_states=exact,
        logits=_exact(exact, model.head_weight),
        hidden_states_control=rounded,
        logits_control=_rounded(rounded, model.head_weight),
        request_of_row=torch.tensor(requests, dtype=torch.int64, device=device),
        selected=selected_rows(drawn.accept_lens, drawn.q_lens[0]) if uniform else None,
    )


def _exact(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.to(torch.float64) @ weight.to(torch.float64)


def _rounded(rows: Tensor, weight: Tensor) -> Tensor:
    return (rows.to(torch.float32) @ weight.to(torch.float32)).to(DTYPE)


def _hidden_states(
    model: StandInModel, drawn: StandInPass, project: Project, attended: Callable[[Truth], Tensor]
) -> Tensor:
    sizes = model.sizes
    features = torch.cat((model.embedding[drawn.input_ids], drawn.hidden_states), dim=1)
    widths = (sizes.q_size, sizes.kv_size, sizes.kv_size)
    projected = project(features, model.qkv_weight).split(widths, dim=1)
    query, *new = (side.unflatten(1, (-1, sizes.attention.head_dim)) for side in projected)
    new_of_requests = zip(*(side.split(drawn.q_lens) for side in new), strict=True)
    histories = [
        tuple(torch.cat((old.to(added.dtype), added)) for old, added in zip(history, own, strict=True))
        for history, own in zip(drawn.histories, new_of_requests, strict=True)
    ]
    truth = mha_truth(query, histories, drawn.q_lens, model.layer, kv_dtype=DTYPE, out_dtype=DTYPE, arithmetic=DTYPE)
    return project(attended(made(truth)).flatten(1), model.out_weight)
