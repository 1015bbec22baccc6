"""What holds of all four calls: results, their buffers and dtypes, rows without keys, and what must not matter."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lab import references
from lab.calls import CALL_TYPES, AttentionCall
from lab.references import softmax_attention
from tests import cases
from tests.cases import (
    BATCHES,
    CONTEXT,
    DECODE,
    DSV4,
    MLA,
    RAGGED,
    Arguments,
    Batch,
    assert_same,
    expected,
    latent_batch,
    mirrors,
    ragged_batch,
    random_batch,
)
from tests.devices import ON_GPU

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
FUNCTIONS = (DECODE, CONTEXT, MLA, RAGGED)
each_call = pytest.mark.parametrize("function", FUNCTIONS)
each_paged_call = pytest.mark.parametrize("function", [DECODE, CONTEXT, MLA])


def batch_of(function: str, q_lens: list[int], kv_lens: list[int], **options: Any) -> Batch:
    return BATCHES[function](q_lens, kv_lens, **options)


def arguments_of(function: str, batch: Batch, **changes: Any) -> Arguments:
    """Return the call that poses a batch; `sinks` are a ragged call's, too."""
    if function == RAGGED and "sinks" in changes:
        changes["attention_sinks"] = changes.pop("sinks")
    return cases.arguments_of(function, batch, **changes)


def run(function: str, arguments: Arguments) -> Any:
    return getattr(references, function)(**arguments)


def as_rows(out: Tensor) -> Tensor:
    return out.flatten(0, -3)


# --- results ----------------------------------------------------------------------------------------------------------


@each_call
def test_a_sink_takes_its_share_and_gives_no_value(function: str) -> None:
    """By hand: three keys of weight 1 and values of 8; the sinks of two heads weigh 1 and 5."""
    dim = 2 if function == MLA else 1
    batch = Batch([torch.zeros(1, 2, dim)], [torch.zeros(3, 1, dim)], [torch.full((3, 1, 1), 8.0)])
    if function == MLA:
        batch.keys[0][..., 0] = 8.0  # the entry's latent part is the value
    out, lse = run(function, arguments_of(function, batch, sinks=torch.tensor([0.0, math.log(5.0)])))
    torch.testing.assert_close(out.flatten().tolist(), [6.0, 3.0])  # 8 * 3 / (3 + 1) and 8 * 3 / (3 + 5)
    torch.testing.assert_close(lse.flatten().tolist(), [2.0, 3.0])


SINKS = {
    "plain": [0.0, 0.5, -1.0, 3.0],
    "large": [50.0, 300.0, 5000.0, 1e30],
    "none": [-math.inf] * 4,
    "mixed": [-math.inf, 0.0, -1e30, 20.0],
}


@pytest.mark.parametrize("sinks", SINKS.values(), ids=SINKS)
@pytest.mark.parametrize("magnitude", [1.0, 8.0])
@each_call
def test_sinks(function: str, magnitude: float, sinks: list[float]) -> None:
    batch = batch_of(function, [3, 3, 3], [2, 3, 25], magnitude=magnitude)
    rule: Any = {"sinks": torch.tensor(sinks[: batch.queries[0].shape[1]]), "bmm1_scale": 0.25}
    assert_same(run(function, arguments_of(function, batch, **rule)), expected(batch, **rule))


@pytest.mark.parametrize(("q_lens", "window_left"), [([0, 0, 0], -1), ([5, 5, 5], 0), ([5, 5, 5], 49)])
@each_call
def test_no_row_and_windows_that_begin_before_the_first_key(function: str, q_lens: list[int], window_left: int) -> None:
    batch, rule = batch_of(function, q_lens, [3, 5, 41]), {} if function == MLA else {"window_left": window_left}
    assert_same(run(function, arguments_of(function, batch, **rule)), expected(batch, **rule))


@pytest.mark.parametrize("wrap", [float, lambda value: torch.tensor([value]), torch.tensor])
@each_call
def test_scales_as_numbers_and_tensors(function: str, wrap: Callable[[float], Any]) -> None:
    batch = batch_of(function, [3, 3], [3, 30], dtype=E4M3)
    scales: Any = {"bmm1_scale": 0.375, "bmm2_scale": -1.75}
    wrapped = {name: wrap(value) for name, value in scales.items()}
    assert_same(run(function, arguments_of(function, batch, **wrapped)), expected(batch, **scales))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [*((each, each) for each in (BF16, FP16, E4M3, torch.float32, torch.float64)), (BF16, E4M3), (FP16, E4M3)],
    ids=str,
)
@each_call
def test_dtypes(function: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    if function == RAGGED and kv_dtype != dtype:
        pytest.skip("a ragged call's keys have the query's dtype")
    batch = batch_of(function, [2] * 4, [0, 1, 16, 37], dtype=dtype, kv_dtype=kv_dtype)
    assert_same(run(function, arguments_of(function, batch, bmm1_scale=0.25)), expected(batch, bmm1_scale=0.25))


@each_call
def test_rows_and_keys_after_the_last_request_are_nobodys(function: str) -> None:
    """As a CUDA graph has them that was captured with room for more rows."""
    batch = batch_of(function, [2, 3, 4], [9, 30, 4], dtype=torch.float64)
    options = {"ragged": True} if function in (DECODE, MLA) else {}
    arguments = arguments_of(function, batch, **options)
    for name in ("seq_lens", "block_tables"):
        if name in arguments:
            arguments[name] = arguments[name][:2]
    for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
        if name in arguments:
            arguments[name] = arguments[name][:3]
    for name, end in (("query", 5), ("key", 39), ("value", 39)):
        if name in arguments:
            arguments[name][end:] = math.nan
    if "batch_size" in arguments:
        arguments["batch_size"] = 2
    out, lse = run(function, arguments)
    assert_same((out[:5], lse[:5]), expected(Batch(batch.queries[:2], batch.keys[:2], batch.values[:2])))
    assert (out[5:] == 0).all()
    assert (lse[5:] == -math.inf).all()


@pytest.mark.parametrize(("function", "form"), [*((name, {}) for name in FUNCTIONS), (MLA, {"ragged": True})])
def test_an_empty_batch(function: str, form: Arguments) -> None:
    arguments = arguments_of(function, batch_of(function, [1], [7]), **form)
    of_requests = ("query", "block_tables", "seq_lens", "out")
    arguments |= {name: arguments[name][:0] for name in of_requests if arguments.get(name) is not None}
    for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
        if name in arguments:
            arguments[name] = arguments[name][:1]
    arguments |= {name: 0 for name in ("batch_size", "max_q_len", "max_kv_len", "max_seq_len") if name in arguments}
    out, lse = run(function, arguments)
    assert arguments.get("out") is None or out is arguments["out"]
    assert (out.shape[0], lse.shape, lse.dtype) == (0, (0, out.shape[-2]), torch.float32)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@each_call
def test_on_a_gpu(function: str, device: str) -> None:
    batch = batch_of(function, [3] * 4, [3, 2, 16, 37], dtype=E4M3)
    arguments = arguments_of(function, batch)

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        return value.to(device) if isinstance(value, Tensor) else value

    arguments = {name: moved(value) for name, value in arguments.items()}
    out, lse = run(function, arguments | (mirrors(batch) if function == RAGGED else {}))
    assert_same((out.cpu(), lse.cpu()), expected(batch))


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Arguments, tuple[Tensor, Tensor]]:
    """A call with ragged or equal rows, and any rule that it has, over poison; and its truth."""
    function, seed = draw(st.sampled_from(FUNCTIONS)), draw(st.integers(0, 1000))
    lengths = draw(st.lists(st.tuples(st.integers(0, 24), st.integers(0, 40)), min_size=1, max_size=4))
    group, num_kv_heads = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    dims = draw(st.sampled_from([(1, 1), (8, 8), (20, 20), (12, 8), (3, 2)]))
    of_dtype: Arguments = {"dtype": draw(st.sampled_from([BF16, FP16, E4M3])), "seed": seed}
    equal_rows, with_sinks, causal, other_form = draw(st.tuples(*[st.booleans()] * 4))
    q_lens, kv_lens = [max(lengths[0][0], 1), *(q for q, _ in lengths[1:])], [kv for _, kv in lengths]
    if equal_rows or (function == DECODE and other_form):
        q_lens = q_lens[:1] * len(q_lens)
    heads = (group * num_kv_heads, num_kv_heads)
    form: Arguments = {}
    if function != RAGGED:
        page_size = draw(st.sampled_from([1, 4, 16, 32, 64]))
        form = {"page_size": page_size, "poison": math.nan, "foreign_id": 2**31 - 1, "seed": seed}
    if function in (DECODE, MLA):
        form["ragged"] = not equal_rows
    if function == MLA:
        batch = latent_batch(q_lens, kv_lens, heads=group, rank=dims[1], rope=dims[0] - dims[1], **of_dtype)
    elif function == RAGGED:
        batch = ragged_batch(q_lens, kv_lens, heads=heads, dims=dims, **of_dtype)
    else:
        batch = random_batch(q_lens, kv_lens, heads=heads, head_dim=dims[0], magnitude=2.0, **of_dtype)
        form |= {"kv_layout": "NHD" if other_form else "HND", "separate_tables": with_sinks != causal}
    is_causal = causal or function in (DECODE, MLA)
    if function in (CONTEXT, RAGGED):
        form["is_causal" if function == RAGGED else "causal"] = is_causal
    if function != MLA and is_causal:
        form["window_left"] = draw(st.sampled_from([-1, -1, 0, 3, 17]))
    rule: Arguments = {"bmm1_scale": 0.3, "bmm2_scale": 1.5}
    if with_sinks:
        rule["sinks"] = torch.linspace(-1, 2, batch.queries[0].shape[1])
    truth = expected(batch, causal=is_causal, window_left=form.get("window_left", -1), **rule)
    return function, arguments_of(function, batch, **form, **rule), truth


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls(), st.sampled_from([1, 300, 5000, 2**26]), st.sampled_from([1, 500, 2**19]))
def test_any_call(call: tuple[str, Arguments, tuple[Tensor, Tensor]], piece_elements: int, tile_elements: int) -> None:
    """In pieces and tiles of any size."""
    function, arguments, truth = call
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(softmax_attention.PIECE_ELEMENTS, "cpu", piece_elements)
        patch.setattr(softmax_attention, "TILE_ELEMENTS", tile_elements)
        assert_same(run(function, arguments), truth)


# --- where results go -------------------------------------------------------------------------------------------------


def new_dtype(function: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of an output that nobody gives: MLA's is bfloat16, a ragged call's of e4m3 too."""
    return BF16 if function == MLA or (function == RAGGED and dtype == E4M3) else dtype


@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3, torch.float32, torch.float64])
@each_call
def test_a_new_output(function: str, dtype: torch.dtype) -> None:
    batch = batch_of(function, [2, 2], [7, 30], dtype=dtype)
    none = {"out": None} if function in (MLA, RAGGED) else {"out_dtype": None}
    out = run(function, arguments_of(function, batch, return_lse=False, **none))
    truth = expected(batch)[0]
    assert out.dtype == new_dtype(function, dtype)
    torch.testing.assert_close(
        as_rows(out).double(), truth.to(out.dtype).double(), rtol=torch.finfo(out.dtype).eps, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16, FP16, E4M3])
@each_call
def test_a_given_output_has_its_own_dtype_and_is_returned(function: str, dtype: torch.dtype) -> None:
    if (function, dtype) == (RAGGED, E4M3):
        pytest.skip("a ragged call writes no e4m3")
    batch = batch_of(function, [2, 2], [7, 30], dtype=E4M3 if function == RAGGED else BF16)
    shape = (*arguments_of(function, batch)["query"].shape[:-1], batch.values[0].shape[2])
    changes: Arguments = {"out": torch.full(shape, math.nan).to(dtype), "return_lse": False}
    changes |= {"out_dtype": None} if function in (DECODE, CONTEXT) else {}
    out = run(function, arguments_of(function, batch, **changes))
    assert out is changes["out"]
    if function in (DECODE, CONTEXT):  # where a dtype may be named alone
        named = run(function, arguments_of(function, batch, out_dtype=dtype, return_lse=False))
        assert named.dtype == dtype
        assert torch.equal(named.double(), out.double())
    truth = expected(batch)[0].to(dtype).double()
    torch.testing.assert_close(as_rows(out).double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-12)


@pytest.mark.parametrize(
    ("transposed", "return_lse"), [(False, True), (True, True), (False, False)], ids=["rows", "columns", "not returned"]
)
@each_call
def test_a_given_lse_is_filled(function: str, transposed: bool, return_lse: bool) -> None:
    if function == MLA and (transposed or not return_lse):
        pytest.skip("MLA's LSE is dense, and asked for")
    batch = batch_of(function, [2, 2], [7, 30])
    heads = batch.queries[0].shape[1]
    lse = torch.full((heads, 4), math.nan).T if transposed else torch.full((4, heads), math.nan)
    result = run(function, arguments_of(function, batch, lse=lse, return_lse=return_lse))
    assert isinstance(result, tuple) == return_lse
    assert not return_lse or result[1] is lse
    torch.testing.assert_close(lse.double(), expected(batch)[1], rtol=1e-6, atol=1e-6)


# --- what must not matter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("foreign_id", [None, -1, 2**31 - 1])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@each_paged_call
def test_dead_memory_changes_no_bit(
    function: str, kv_dtype: torch.dtype, foreign_id: int | None, poison: float
) -> None:
    batch = batch_of(function, [2] * 5, [0, 1, 15, 16, 33], kv_dtype=kv_dtype)
    rules: list[Arguments] = [{}, {"causal": False}] if function == CONTEXT else [{}]
    for rule in rules:
        clean = run(function, arguments_of(function, batch, **rule))
        poisoned = run(function, arguments_of(function, batch, poison=poison, foreign_id=foreign_id, **rule))
        assert poisoned[0].isfinite().all()
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


@each_call
def test_rows_may_lie_apart(function: str) -> None:
    """Keys and values too: an up-projection leaves values after each head's part of the keys."""
    batch = batch_of(function, [2, 2], [9, 30])
    arguments = arguments_of(function, batch)
    for name in {"query", "key", "value"} & arguments.keys():
        *rows, heads, dim = arguments[name].shape
        wide = torch.full((*rows, heads + 1, dim + 7), math.nan, dtype=torch.bfloat16)
        arguments[name] = wide[..., 1:, 7:].copy_(arguments[name])
    assert_same(run(function, arguments), expected(batch))


def read_tensors(arguments: Arguments) -> dict[str, Tensor]:
    """Return the tensors that a call reads, K and V apart."""
    sides = dict(zip("kv", arguments.get("kv_cache", ()), strict=False)) if "kv_cache" in arguments else {}
    if isinstance(arguments.get("kv_cache"), Tensor):
        sides = {"kv": arguments["kv_cache"]}
    names = ("query", "key", "value", "block_tables", "seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv")
    return {name: arguments[name] for name in names if name in arguments} | sides


@each_call
def test_nothing_that_is_read_is_written(function: str) -> None:
    batch = batch_of(function, [2, 2], [5, 30], dtype=E4M3)
    tensors = read_tensors(arguments := arguments_of(function, batch))
    before = {name: tensor.clone().view(torch.uint8) for name, tensor in tensors.items()}
    run(function, arguments)
    assert all(torch.equal(tensor.view(torch.uint8), before[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
@each_call
def test_nan_that_is_read_is_not_hidden(function: str, poisoned: str) -> None:
    """A sink does not hide it either. MLA's values are a part of its keys."""
    batch = batch_of(function, [1, 1], [5, 20])
    heads = batch.queries[0].shape[1]
    side = {"query": batch.queries, "key": batch.keys, "value": batch.keys if function == MLA else batch.values}[
        poisoned
    ]
    side[1][-1, -1, 0 if function == MLA and poisoned == "value" else -1] = math.nan
    nan = as_rows(run(function, arguments_of(function, batch, sinks=torch.zeros(heads)))[0]).isnan().all(dim=-1)
    group = heads // batch.keys[0].shape[1]
    if poisoned == "query":
        assert nan.tolist() == [[False] * heads, [False] * (heads - 1) + [True]]
    elif function == MLA or poisoned == "key":
        assert nan.tolist() == [[False] * heads, [False] * (heads - group) + [True] * group]
    else:  # one element of the last head's values
        out = run(function, arguments_of(function, batch))[0]
        assert out.isnan().nonzero()[:, [0, -1]].unique(dim=0).tolist() == [[1, out.shape[-1] - 1]]


@each_call
def test_arguments_that_change_no_result_are_free(function: str) -> None:
    batch = batch_of(function, [2, 2], [7, 4])
    free: Arguments = {"workspace_buffer": torch.zeros(8, device="meta"), "enable_pdl": True}
    if function != RAGGED:
        free |= {"multi_ctas_kv_counter_buffer": torch.zeros(8, device="meta")}
    if function == MLA:
        free |= {"qk_nope_head_dim": 128}
    if function == RAGGED:
        free |= {"o_sf_scale": -1.0, "skip_all_rows_active_check": False, "window_left": 10**6}
        free |= mirrors(batch, torch.int64)
    for backend in ("auto", "xqa", "trtllm-gen") if function in (DECODE, MLA) else (None,):
        chosen = {} if backend is None else {"backend": backend}
        for dtype in (torch.int32, torch.uint32):
            lengths = {"seq_lens": torch.tensor([7, 4], dtype=dtype)}
            assert_same(run(function, arguments_of(function, batch) | free | chosen | lengths), expected(batch))


@pytest.mark.parametrize(
    ("function", "name", "place", "bad", "message"),
    [
        *((name, "block_tables", (0, 0), 1000, "page id 1000") for name in (DECODE, CONTEXT, MLA)),
        *((name, "seq_lens", (0,), 10**6, "widen the table") for name in (DECODE, CONTEXT)),
        (RAGGED, "cum_seq_lens_kv", (1,), 8, "running sum"),
    ],
)
def test_values_can_be_checked_on_request(
    function: str, name: str, place: tuple[int, ...], bad: int, message: str
) -> None:
    """What a GPU call does not read, `check_values` does."""
    batch = batch_of(function, [1, 1], [7, 30])
    arguments = arguments_of(function, batch)
    problem = CALL_TYPES[AttentionCall(function)](**arguments).problem()
    problem.check_values()
    assert (problem.head_dim, problem.v_head_dim) == (batch.keys[0].shape[2], batch.values[0].shape[2])
    assert (problem.num_kv_heads, problem.batch_size) == (batch.keys[0].shape[1], 2)
    if function == MLA:
        assert problem.v_cache.data_ptr() == problem.k_cache.data_ptr()
    arguments[name][place] = bad
    with pytest.raises(ValueError, match=message):
        problem.check_values()


# --- as a stand-in ----------------------------------------------------------------------------------------------------


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function", [*FUNCTIONS, DSV4])
def test_parameters_are_flashinfers(function: str) -> None:
    """A reference drops into somebody else's test by changing an import; `tests/test_architecture.py` has what that brings."""
    call_type = CALL_TYPES[AttentionCall(function)]
    module = pytest.importorskip(call_type.module, reason="flashinfer is not installed")
    flashinfers = parameters(getattr(module, function))
    assert parameters(getattr(references, function)) == flashinfers
    assert parameters(call_type) == flashinfers


def without_values(tensor: Tensor) -> list[Tensor]:
    """Return tensors of the same shape that have no values, or no strides, to read."""
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(tensor)
    return [fake, tensor.to_sparse(), torch.nested.nested_tensor(list(tensor))]


@each_call
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_values_is_refused_before_anything_is_written(function: str) -> None:
    scales = dict.fromkeys(("bmm1_scale", "bmm2_scale"), torch.ones(1, 1))
    arguments = arguments_of(function, batch_of(function, [1, 1], [7, 30]), **scales)
    if isinstance(arguments.get("kv_cache"), tuple):
        arguments["kv_cache"] = torch.stack(arguments["kv_cache"], dim=1)
    out = torch.full_like(run(function, arguments)[0], 7.0)
    for name in set(arguments) - {"workspace_buffer"}:
        if isinstance(arguments[name], Tensor):
            for each in without_values(arguments[name]):
                with pytest.raises(TypeError, match=f"{name} must be a (plain torch.Tensor|dense tensor), got "):
                    run(function, arguments | {"out": out, name: each})
    for each in without_values(out):
        with pytest.raises(TypeError, match=r"out must be a (plain|dense)"):
            run(function, arguments | {"out": each})
    with pytest.raises(ValueError, match="out must not require grad"):
        run(function, arguments | {"out": out.clone().requires_grad_()})
    assert bool((out == 7).all())


@each_call
def test_a_number_is_no_tensor(function: str) -> None:
    arguments = arguments_of(function, batch_of(function, [1, 1], [7, 30]))
    for name, value in arguments.items():
        if type(value) is int:
            with pytest.raises(TypeError, match=f"{name} must be an int, got tensor"):
                run(function, arguments | {name: torch.tensor(value)})
