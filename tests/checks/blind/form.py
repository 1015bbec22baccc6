from dataclasses import replace
import importlib
import inspect
import sys
from pathlib import Path
import time
import torch
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).resolve().parent))
import inputs as I  # noqa: E402
from lab import metadata as MD  # noqa: E402
from lab import references as ref  # noqa: E402
from lab.metadata import DraftAttention, ForwardBatch, ForwardMode, KVPool, SpecInfo  # noqa: E402
from lab.references.quantization import interleave_v_scale_factors, quantize_nvfp4  # noqa: E402
D, C = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
M, R = "trtllm_batch_decode_with_kv_cache_mla", "trtllm_ragged_attention_deepseek"
bf, f16, f32 = torch.bfloat16, torch.float16, torch.float32
g = I.gen(77)
T = torch.tensor


def plain(f):
    """Plain inputs of a call, in several forms."""
    s4 = I.sinks(g, 4)
    return {
        D: [I.decode(), I.decode(dtype=f16, lens=(1, 200, 33), return_lse=True), I.decode(q_len=3, window_left=11),
            I.decode(q_len=4, mask=I.mask_of(g, 3, 4), sinks=s4), I.decode(kv_dtype=I.E4M3, bmm2_scale=0.5)],
        C: [I.context(), I.context(dtype=f16, return_lse=True), I.context(window_left=20), I.context(sinks=s4)],
        M: [I.mla(), I.mla(q_len=3, return_lse=True), I.mla(widths=(3, 1, 5), sinks=I.sinks(g, 16), rank=128, rope=64)],
        R: [I.ragged(), I.ragged(widths=(4, 9), lens=(50, 30)), I.ragged(widths=(7, 7), lens=(90, 10), causal=False)],
    }[f]


def copies(a):
    """Return the arguments with tensors of their own."""

    def of(x):
        if isinstance(x, torch.Tensor):
            return x.clone()
        return type(x)(of(y) for y in x) if isinstance(x, (tuple, list)) else x

    return {k: of(v) for k, v in a.items()}


def verdict(function, a, name=None):
    """Return "right" or the first words of what is wrong, by the inputs as they were before the call."""
    was = copies(a)
    try:
        out = function(**a)
        was |= {name: a[name] for name in ("out", "lse") if a.get(name) is not None}
        ref.assert_close_to_reference(out, **was)
    except AssertionError as e:
        return "WRONG: " + str(e).split(": ", 1)[1].replace("\n", " ")[:110]
    return "right"


def replay(first, second):
    """A case of two calls on the same tensors: `second` rewrites their contents between."""
    return ("replay", first, second)


def rewrite(name, value):
    def do(a):
        a[name].copy_(value if isinstance(value, torch.Tensor) else T(value))

    return do


def many(n, short=20, seed=0):
    return torch.randint(1, short, (n,), generator=I.gen(seed)).tolist()


def lists(lens=(7, 3, 12), topk=2, page_size=1, num_steps=3, dtype=torch.int32, positions_dtype=None, wider=0, width=None, seed=0):
    gg = I.gen(seed)
    n = len(lens)
    width = width or max(lens) + topk * (num_steps + 2 * page_size) + 8
    kv_lens = T(lens)
    total = topk * (int(kv_lens.sum()) + n * num_steps)
    return dict(
        req_pool_indices=torch.randperm(n + 3, generator=gg)[:n].to(dtype),
        req_to_token=torch.randint(1, 10**6, (n + 3, width), generator=gg).to(torch.int32),
        paged_kernel_lens=kv_lens.to(dtype), kv_indices=torch.full((num_steps, total + 5), -7, dtype=dtype),
        kv_indptr=torch.zeros(num_steps, n * topk + 1 + wider, dtype=dtype),
        positions=kv_lens.repeat_interleave(topk).to(positions_dtype or dtype), topk=topk, page_size=page_size)


def lists_verdict(function, a):
    function(**a)
    keys = ("req_pool_indices", "req_to_token", "paged_kernel_lens", "positions", "topk", "page_size")
    want_indices, want_indptr = ref.generate_draft_decode_kv_indices(**{k: a[k] for k in keys}, num_steps=len(a["kv_indices"]))
    for step, (indices, indptr) in enumerate(zip(want_indices, want_indptr)):
        if not torch.equal(a["kv_indptr"][step, : len(indptr)].long(), indptr):
            return f"WRONG: kv_indptr of step {step}"
        got = a["kv_indices"][step, : len(indices)].long()
        if not torch.equal(got, indices):
            return f"WRONG: {int((got != indices).sum())} of kv_indices of step {step}"
    return "right"
LISTS_PLAIN = [lists(), lists(topk=1, page_size=16), lists(dtype=torch.int64), lists(num_steps=5)]


def same_bytes(x, y):
    if isinstance(x, (tuple, list)):
        return all(same_bytes(*both) for both in zip(x, y))
    return not isinstance(x, torch.Tensor) or torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def untouched(a, *memory):
    """A case: the results are right by the arguments as they were, and no input nor other `memory` has changed."""

    def case(function):
        was, around = copies(a), [m.clone() for m in memory]
        out = function(**a)
        for name in a:
            if name not in ("out", "lse") and not same_bytes(a[name], was[name]):
                return f"WRONG: {name} has changed"
        if not all(same_bytes(*both) for both in zip(memory, around)):
            return "WRONG: memory beside the results has changed"
        was |= {name: a[name] for name in ("out", "lse") if a.get(name) is not None}
        return verdict(lambda **_: out, was)

    return case


def twice(a):
    """A case: two calls on the same tensors, each right by the arguments as they were before the first."""

    def case(function):
        was = copies(a)
        first = function(**a)
        said = verdict(lambda **_: first, was)
        second = function(**a)
        return "first call " + said if said != "right" else verdict(lambda **_: second, was)

    return case


def biased(a, rows=None, columns=None):
    """A case: the slope of the rows and columns concerned on float64 is off, that of the others is not."""

    def case(function):
        out = function(**a)
        out = (out[0] if isinstance(out, tuple) else out).double()
        exact = getattr(ref, function.__name__)(**a | dict(out=torch.empty(out.shape, dtype=torch.float64)))
        exact = exact[0] if isinstance(exact, tuple) else exact
        which = torch.zeros(out.shape, dtype=torch.bool)
        which[slice(None) if rows is None else rows, :, slice(None) if columns is None else columns] = True
        of, others = (float((out[m] * exact[m]).sum() / (exact[m] ** 2).sum()) if m.any() else 1.0 for m in (which, ~which))
        wrong = abs(of - 1) > 0.003 and abs(others - 1) < 0.001
        return f"WRONG: slope {of:.5f}, of the others {others:.5f}" if wrong else "right"

    return case


def list_cells(a):
    """A case: every cell of kv_indices and kv_indptr is as it should be, the lists cut at their rows' ends, the rest as before."""

    def case(function):
        a_now = copies(a)
        keys = ("req_pool_indices", "req_to_token", "paged_kernel_lens", "positions", "topk", "page_size")
        want_indices, want_indptr = ref.generate_draft_decode_kv_indices(**{k: a[k] for k in keys}, num_steps=len(a["kv_indices"]))
        want, bounds = a["kv_indices"].clone(), a["kv_indptr"].clone()
        for step, (indices, indptr) in enumerate(zip(want_indices, want_indptr)):
            cut = indices[: want.shape[1]]
            want[step, : len(cut)], bounds[step, 1 : len(indptr)] = cut.to(want.dtype), indptr[1:].to(bounds.dtype)
        function(**a_now)
        if not torch.equal(a_now["kv_indptr"], bounds):
            return "WRONG: kv_indptr"
        wrong = int((a_now["kv_indices"] != want).sum())
        return f"WRONG: {wrong} cells of kv_indices" if wrong else "right"

    return case


def pool_of(page_size=16, swa=True, context=200, requests=12, pages=400, **more):
    return KVPool(num_requests=requests, max_context_len=context, page_size=page_size, num_pages=pages,
                  swa_num_pages=pages if swa else None, **more)


def batch_of(pool, mode, lens, rows=None, step=None, pad=0, prefixes=None, seq_lens_cpu=False):
    """lens: tokens as the engine counts them in the mode. Requests are admitted with room for drafts."""
    extra = (step or 0) + 1 if step is not None else rows if mode is ForwardMode.TARGET_VERIFY else 0
    ids = [pool.add_request(n + extra) for n in lens]
    extend = mode.query_rows.in_extend_seq_lens
    counts = rows if extend else [rows or 1] * len(lens)
    slots = [pool.slots(i, max(n + extra - c, 0), n + extra) for i, n, c in zip(ids, lens, counts)]
    kwargs = {}
    if extend:
        kwargs = dict(extend_seq_lens=T(rows), extend_seq_lens_cpu=list(rows))
        if mode.is_prefill:
            pre = [n - c for n, c in zip(lens, rows)]
            kwargs |= dict(extend_prefix_lens=T(pre), extend_prefix_lens_cpu=pre)
    spec = SpecInfo.of(mode, rows if isinstance(rows, int) else -1, draft_step=step) if mode is not ForwardMode.IDLE else (None if step is None else SpecInfo(speculative_step_id=step))
    return ForwardBatch(forward_mode=mode, req_pool_indices=T(ids), seq_lens=T(list(lens)), out_cache_loc=torch.cat(slots)[: sum(counts)],
                        num_tokens=sum(counts) + pad, spec_info=spec, seq_lens_cpu=list(lens) if seq_lens_cpu else None, **kwargs)


def same_metadata(got, want):
    for name, value in vars(want).items():
        other = getattr(got, name)
        if isinstance(value, torch.Tensor):
            if not isinstance(other, torch.Tensor) or other.dtype != value.dtype or not torch.equal(other, value):
                return f"WRONG: {name}"
        elif other != value:
            return f"WRONG: {name} {other} not {value}"
    return "right"
F = ForwardMode


def mha_plain():
    p = pool_of()
    q = pool_of()
    return [(p, batch_of(p, F.DECODE, (5, 40, 17))), (q, batch_of(q, F.EXTEND, (30, 20), rows=[10, 20])),
            (pool_of(swa=False),) * 1 and (lambda p: (p, batch_of(p, F.TARGET_VERIFY, (8, 33), rows=4)))(pool_of(swa=False)),
            (lambda p: (p, batch_of(p, F.DECODE, (8, 33), step=2)))(pool_of())]


def mla_plain():
    mk = lambda: pool_of(32, swa=False)  # noqa: E731
    return [(lambda p: (p, batch_of(p, F.DECODE, (5, 40))))(mk()), (lambda p: (p, batch_of(p, F.TARGET_VERIFY, (30, 63), rows=4)))(mk()),
            (lambda p: (p, batch_of(p, F.DRAFT_EXTEND, (30, 63), rows=[3, 3])))(mk()), (lambda p: (p, batch_of(p, F.EXTEND, (30, 63), rows=[3, 7])))(mk())]


def build(pool, *args, **kw):
    return pool, batch_of(pool, *args, **kw)


def check_metadata(module, near, trigger):
    name = "build_mha_metadata" if hasattr(module, "build_mha_metadata") else "build_mla_metadata"
    function, right = getattr(module, name), getattr(MD, name)
    judge = lambda pool, batch, kw={}: same_metadata(function(batch, pool, **kw), right(batch, pool, **kw))  # noqa: E731
    plains = mha_plain() if "mha" in name else mla_plain()
    rights, wrongs = [judge(*c) for c in plains + near], [judge(*c) for c in trigger]
    return rights, wrongs


def lens_as(a, dtype):
    return a | dict(seq_lens=a["seq_lens"].to(dtype))


def ragged_verify(pool, lens, rows):
    ids = [pool.add_request(n + max(rows)) for n in lens]
    slots = [pool.slots(i, n, n + c) for i, n, c in zip(ids, lens, rows)]
    return pool, ForwardBatch(forward_mode=F.RAGGED_VERIFY, req_pool_indices=T(ids), seq_lens=T(list(lens)), out_cache_loc=torch.cat(slots),
                              num_tokens=sum(rows), extend_seq_lens=T(rows), extend_seq_lens_cpu=list(rows), spec_info=SpecInfo(num_draft_tokens=max(rows)))


def run_case(function, case, f):
    if callable(case):
        return case(function)
    if isinstance(case, tuple):
        _, first, second = case
        said = verdict(function, first)
        if said != "right":
            return "first call " + said
        second(first)
        return verdict(function, first)
    return verdict(function, case)


def slope(function, a, number):
    """Return the slope of the output on float64's, of the vectors concerned and of the others."""
    out = function(**a)
    out = out[0] if isinstance(out, tuple) else out
    name = getattr(function, "__name__")
    exact = dict(a) | ({"out": torch.empty(*out.shape, dtype=torch.float64)} )
    want = getattr(ref, name)(**exact)
    want = want[0] if isinstance(want, tuple) else want
    o, w = out.double().flatten(0, -3), want.flatten(0, -3)
    which = torch.ones(o.shape[:2], dtype=torch.bool)
    if number == 30:
        which[: a["cum_seq_lens_q"][-2]] = False
    if number == 39:
        which[:] = torch.arange(o.shape[1]) % 16 == 15
    if number == 47:
        for s, e in zip(a["cum_seq_lens_q"].tolist(), a["cum_seq_lens_q"].tolist()[1:]):
            which[s:e] = (torch.arange(e - s) % 64 == 63)[:, None]
    per = lambda m: float((o[m] * w[m]).sum() / (w[m] * w[m]).sum()) if m.any() else 1.0  # noqa: E731
    return f"WRONG: slope {per(which):.5f}, of the others {per(~which):.5f}"
