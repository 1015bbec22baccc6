"""Show of each wrong kernel, 561 to 590, that it is right beside its trigger and wrong on it. Arguments: numbers, or none for all."""

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import inputs as I  # noqa: E402
import torch  # noqa: E402
from form import (  # noqa: E402
    C, D, F, M, MD, R, T, biased, build, check_metadata, copies, f16, plain, pool_of, ragged_verify, ref,
    replay, rewrite, run_case, same_metadata, untouched, verdict,
)
from lab.references.quantization import interleave_v_scale_factors, quantize_nvfp4  # noqa: E402

bf = torch.bfloat16


def g(seed=3):
    return I.gen(seed)


def scaled(a, k=1.0, v=1.0):
    """Scale the values of a cache of floats or e4m3."""
    both = zip(a["kv_cache"], (k, v))
    return a | dict(kv_cache=tuple((side.float() * s).to(side.dtype) for side, s in both))


def chain(batch, q_len, without=()):
    """Return the packed causal mask of a chain, without some tokens (a token sees itself all the same unless left out)."""
    shown = torch.ones(q_len, q_len, dtype=torch.bool).tril()
    shown[:, list(without)] = False
    return packed(shown.expand(batch, -1, -1))


def packed(shown):
    batch, q_len, _ = shown.shape
    words = 2 * -(-q_len // 32)
    bits = torch.zeros(batch, q_len, words * 16, dtype=torch.int64)
    bits[:, :, :q_len] = shown
    joined = (bits.unflatten(2, (words, 16)) << torch.arange(16)).sum(3)
    return torch.where(joined >= 2**15, joined - 2**16, joined).to(torch.int16).view(torch.uint16)


def lse_slice(a, heads, width):
    """Give a call an LSE that is the first columns of a wider buffer; return (arguments, the columns after them)."""
    buffer = torch.full((len(a["query"]), width), 7.0)
    return a | dict(lse=buffer[:, :heads], return_lse=True), buffer[:, heads:]


def lse_rows(a, heads, more):
    """Give a call an LSE that is the first rows of a longer buffer; return (arguments, the rows after them)."""
    buffer = torch.full((len(a["query"]) + more, heads), 7.0)
    return a | dict(lse=buffer[: len(a["query"])], return_lse=True), buffer[len(a["query"]) :]


def nvfp4(lens=(70, 5, 130), q_len=1, heads=4, kv=2, d=64, ps=16, dtype=bf, amax_scale=False, dead=None, loud=1.0, seed=0, **more):
    """A decode over an NVFP4 cache for XQA, factors in plain order; `dead`: V's factors after each request's end."""
    a = I.decode(lens, heads, kv, d, ps, q_len, seed=seed)
    k, v = (side.float() * loud for side in a["kv_cache"])
    scales = [float(x.abs().max()) / (448 * 6) if amax_scale else 1.0 for x in (k, v)]
    (k4, kf), (v4, vf) = quantize_nvfp4(k, scales[0]), quantize_nvfp4(v, scales[1])
    if dead is not None:
        for r, n in enumerate(lens):
            if n % ps:
                vf.view(torch.uint8)[int(a["block_tables"][r, n // ps]), :, n % ps :] = dead
    backend = more.get("backend", "xqa")
    if backend == "trtllm-gen":
        vf = interleave_v_scale_factors(vf.view(torch.uint8)).view(I.E4M3)
    a |= dict(query=a["query"].to(dtype), kv_cache=(k4, v4), kv_cache_sf=(kf, vf), backend=backend)
    a |= dict(bmm1_scale=d**-0.5 * scales[0] / loud, bmm2_scale=scales[1] / loud)
    return a | more


def tables(a, spare, layout_columns=None):
    """Give separate tables of K and V, a slice of tables with so many spare columns, which hold other pages."""
    table, gg = a["block_tables"], g(9)
    batch, columns = table.shape
    pages = a["kv_cache"][0].shape[0]
    wide = torch.randint(0, pages, (batch, 2, columns + spare), generator=gg, dtype=torch.int32)
    order = torch.randperm(pages, generator=gg)
    back = torch.empty_like(order)
    back[order] = torch.arange(pages)
    wide[:, 0, :columns] = table
    wide[:, 1, :columns] = back[table.long()].to(torch.int32)
    k, v = a["kv_cache"]
    return a | dict(kv_cache=(k, v[order]), block_tables=wide[:, :, :columns], uses_shared_paged_kv_idx=False)


def sliced_table(a, spare):
    wide = torch.zeros(a["block_tables"].shape[0], a["block_tables"].shape[1] + spare, dtype=torch.int32)
    wide[:, : a["block_tables"].shape[1]] = a["block_tables"]
    return a | dict(block_tables=wide[:, : a["block_tables"].shape[1]])


def both_calls(a, b):
    """A case: an engine keeps the results of two calls, as it does to merge them; each is right by its own arguments."""

    def case(function):
        first, second = function(**a), function(**b)
        said = verdict(lambda **_: first, a)
        return "first call " + said if said != "right" else verdict(lambda **_: second, b)

    return case


def window_lists(lens, topk=1, page_size=1, num_steps=3, window=0, sink=0, entry=1, virtual=False, seed=0):
    gg = g(seed)
    n = len(lens)
    width = max(lens) + topk * (num_steps + 2 * page_size) + 8
    width = -(-width // page_size) * page_size
    kv_lens = T(lens)
    kept = kv_lens.clamp(max=window + sink) if window else kv_lens
    total = topk * (int(kept.sum()) + n * num_steps)
    entries = torch.randint(1, 10**5, (n + 3, width // entry), generator=gg).to(torch.int32)
    v2p = None
    if virtual:
        pages = 64
        entries = torch.randint(0, pages * page_size // entry, (n + 3, width // entry), generator=gg).to(torch.int32)
        v2p = torch.randperm(pages, generator=gg)
    return dict(
        req_pool_indices=torch.randperm(n + 3, generator=gg)[:n].to(torch.int32), req_to_token=entries,
        paged_kernel_lens=kv_lens.to(torch.int32), kv_indices=torch.full((num_steps, total + 5), -7, dtype=torch.int32),
        kv_indptr=torch.zeros(num_steps, n * topk + 1, dtype=torch.int32),
        positions=kv_lens.repeat_interleave(topk).to(torch.int32), topk=topk, page_size=page_size, window_size=window,
        sink_size=sink, entry_page_size=entry, v2p=v2p)


def window_lists_verdict(function, a):
    a = copies(a)
    function(**a)
    given = {k: v for k, v in a.items() if k not in ("kv_indices", "kv_indptr")}
    want_indices, want_indptr = ref.generate_draft_decode_kv_indices(**given, num_steps=len(a["kv_indices"]))
    for step, (indices, indptr) in enumerate(zip(want_indices, want_indptr)):
        if not torch.equal(a["kv_indptr"][step, : len(indptr)].long(), indptr):
            return f"WRONG: kv_indptr of step {step}"
        got = a["kv_indices"][step, : len(indices)].long()
        if not torch.equal(got, indices):
            return f"WRONG: {int((got != indices).sum())} of kv_indices of step {step}"
    return "right"


WINDOW_LISTS_PLAIN = [
    window_lists((7, 3, 12), topk=2), window_lists((20, 40), window=8), window_lists((20, 40, 5), topk=2, window=8, sink=2),
    window_lists((17, 33), topk=2, page_size=16), window_lists((17, 33), page_size=16, entry=16),
    window_lists((18, 36), topk=2, page_size=16, entry=16, virtual=True),
]


def with_lse_left(a):
    """A case: a given lse is written although return_lse is False."""

    def case(function):
        buffer = torch.full(a["query"].shape[:2], 7.0)
        out = function(**a | dict(lse=buffer, return_lse=False))
        return verdict(lambda **_: (out, buffer), a | dict(return_lse=True))

    return case


def layers(a, of=3):
    """Give an MLA call the cache of one layer of a pool that has all layers of a page together."""
    cache = a["kv_cache"]
    pool = I.rnd(g(5), cache.shape[0], of, *cache.shape[1:]).to(cache.dtype)
    pool[:, 1] = cache
    return a | dict(kv_cache=pool[:, 1])


def joined(a, how):
    """Give a call a cache that is one tensor: "packed" [pages, 2, ...], "planes" [2, pages, ...], or "gaps" between K and V."""
    k, v = a["kv_cache"]
    if how == "packed":
        return a | dict(kv_cache=torch.stack((k, v), 1))
    if how == "planes":
        return a | dict(kv_cache=torch.stack((k, v)).transpose(0, 1))
    return a | dict(kv_cache=torch.stack((k, torch.zeros_like(k), v), 1)[:, ::2])


def nhd(a):
    """Give a call its caches, and scale factors, in the layout NHD."""
    a = a | dict(kv_layout="NHD", kv_cache=tuple(x.transpose(1, 2).contiguous() for x in a["kv_cache"]))
    if "kv_cache_sf" in a:
        a["kv_cache_sf"] = tuple(
            x.view(torch.uint8).transpose(1, 2).contiguous().view(I.E4M3) for x in a["kv_cache_sf"]
        )
    return a


def louder(a, by):
    return a | dict(query=(a["query"].float() * by).to(a["query"].dtype))


def steps(*rewrites):
    def do(a):
        for each in rewrites:
            each(a)

    return do


def bound(n):
    return lambda a: a.update(max_seq_len=n)


def wide(a, columns):
    """Give a call a table of so many columns, all of pages of the pool."""
    more = torch.randint(0, a["kv_cache"][0].shape[0], (a["block_tables"].shape[0], columns), generator=g(8), dtype=torch.int32)
    more[:, : a["block_tables"].shape[1]] = a["block_tables"]
    return a | dict(block_tables=more)


def other_pages(side, seed=4):
    """Rewrite K's (0) or V's (1) table of separate tables."""

    def do(a):
        table = a["block_tables"][:, side]
        table.copy_(torch.randint(0, a["kv_cache"][0].shape[0], table.shape, generator=g(seed), dtype=torch.int32))

    return do


def other_cache(a):
    for seed, side in enumerate(a["kv_cache"]):
        side.copy_(I.rnd(g(20 + seed), *side.shape, dtype=side.dtype))


def head_slice(a, name, spare=2):
    x = a[name]
    more = I.rnd(g(6), x.shape[0], x.shape[1] + spare, x.shape[2]).to(x.dtype)
    more[:, : x.shape[1]] = x
    return a | {name: more[:, : x.shape[1]]}


def fused_value(a, nope=32):
    v = a["value"]
    more = I.rnd(g(6), *v.shape[:2], nope + v.shape[2]).to(v.dtype)
    more[..., nope:] = v
    return a | dict(value=more[..., nope:])


def mirrors(a, dtype):
    return a | dict(q_seq_lens_cpu=a["cum_seq_lens_q"].diff().to(dtype), kv_seq_lens_cpu=a["seq_lens"].to(dtype))


def cases(number):
    """Return (function's name, right cases beside the trigger, wrong cases)."""
    s4, s6, s16 = I.sinks(g(), 4), I.sinks(g(), 6), I.sinks(g(), 16)
    one = lambda x: T([x], dtype=torch.float32)  # noqa: E731
    if number == 561:
        return D, [
            I.decode(lens=(900, 300)), I.decode(lens=(280, 200), window_left=31), I.decode(lens=(900, 700), window_left=650),
        ], [
            I.decode(lens=(900, 70), window_left=31), I.decode(lens=(600, 1100), q_len=3, window_left=15, return_lse=True),
            I.decode(lens=(400, 1300), window_left=63, widths=(2, 5)),
        ]
    if number == 562:
        base = lambda **m: wide(I.decode(lens=(70, 100), **m), 40)  # noqa: E731
        return D, [
            replay(base(max_seq_len=640), rewrite("seq_lens", [600, 500])),
            replay(base(), rewrite("seq_lens", [20, 101 - 1])), I.decode(lens=(900, 700)),
        ], [
            replay(base(), steps(rewrite("seq_lens", [600, 500]), bound(600))),
            replay(base(q_len=2, sinks=s4), steps(rewrite("seq_lens", [130, 200]), bound(640))),
            replay(base(return_lse=True), steps(rewrite("seq_lens", [170, 100]), bound(170))),
        ]
    if number == 563:
        return D, [
            tables(I.decode(), 0), replay(tables(I.decode(), 0), other_pages(0)), replay(I.decode(), rewrite("seq_lens", [3, 5, 100])),
        ], [
            replay(tables(I.decode(), 0), other_pages(1)), replay(tables(I.decode(q_len=3), 4), other_pages(1)),
            replay(tables(I.decode(widths=(2, 1, 4)), 0), steps(other_pages(0), other_pages(1))),
        ]
    if number == 564:
        return D, [
            I.decode(sinks=s4, return_lse=True), I.decode(lens=(0, 40), return_lse=True), I.decode(lens=(0, 40), sinks=s4),
            I.decode(lens=(2, 40), q_len=4, return_lse=True),
        ], [
            I.decode(lens=(0, 40), sinks=s4, return_lse=True), I.decode(lens=(2, 40), q_len=4, sinks=s4, return_lse=True),
            I.decode(lens=(0, 9), widths=(3, 2), sinks=s4, return_lse=True),
        ]
    if number == 565:
        log2 = lambda x: one(x / math.log(2.0))  # noqa: E731
        return D, [
            I.decode(bmm1_scale_log2=log2(0.2), bmm1_scale=1.0), I.decode(bmm1_scale_log2=log2(0.125), bmm1_scale=0.125),
            I.decode(bmm1_scale=one(0.2)),
        ], [
            I.decode(bmm1_scale_log2=log2(0.25)), I.decode(bmm1_scale_log2=log2(0.05), bmm1_scale=one(0.125)),
            I.decode(bmm1_scale_log2=log2(0.3), bmm1_scale=0.1, q_len=2, sinks=s4),
        ]
    if number == 566:
        w = lambda n, s: torch.randint(1, 4, (n,), generator=g(s)).tolist()  # noqa: E731
        l = lambda n, s: torch.randint(4, 30, (n,), generator=g(s)).tolist()  # noqa: E731
        return D, [I.decode(lens=l(512, 1), widths=w(512, 2)), I.decode(lens=l(700, 1), q_len=2)], [
            I.decode(lens=l(600, 1), widths=w(600, 2)), I.decode(lens=l(1000, 3), widths=[1] * 1000, return_lse=True),
            I.decode(lens=l(520, 3), widths=w(520, 5), sinks=s4),
        ]
    if number == 567:
        return D, [nvfp4(), nhd(nvfp4(kv=1)), nhd(I.decode()), nvfp4(backend="trtllm-gen"), nhd(I.decode(kv_dtype=I.E4M3))], [
            nhd(nvfp4(loud=3.0)), nhd(nvfp4(kv=4, q_len=2)), nhd(nvfp4(backend="trtllm-gen", lens=(40, 90))),
        ]
    if number == 568:
        return D, [
            I.decode(q_len=4, mask=I.mask_of(g(), 3, 4)), I.decode(q_len=4, window_left=9),
            I.decode(q_len=4, mask=I.mask_of(g(), 3, 4), window_left=500),
            I.decode(lens=(50, 60), q_len=4, mask=I.mask_of(g(), 2, 4), window_left=59),
        ], [
            I.decode(q_len=4, mask=I.mask_of(g(), 3, 4), window_left=9), I.decode(q_len=8, mask=chain(3, 8), window_left=32, sinks=s4),
            I.decode(q_len=16, lens=(90, 40), mask=chain(2, 16), window_left=20, return_lse=True),
        ]
    if number == 569:
        return D, [joined(I.decode(), "packed"), I.decode(), I.decode() | dict(kv_cache=I.decode()["kv_cache"][0].unsqueeze(1))], [
            joined(I.decode(), "planes"), joined(I.decode(q_len=3), "gaps"), joined(I.decode(kv_dtype=I.E4M3, lens=(40, 300)), "planes"),
        ]
    if number == 570:
        return D, [
            I.decode(heads=6, kv=2), I.decode(heads=8, kv=2, q_len=5), I.decode(heads=6, kv=2, q_len=3, mask=I.mask_of(g(), 3, 3)),
        ], [
            I.decode(heads=6, kv=2, q_len=4, lens=(30, 12)), I.decode(heads=5, kv=1, q_len=3, lens=(9, 20)),
            I.decode(heads=14, kv=2, widths=(9, 1, 7), lens=(9, 30, 20)),
        ]
    if number == 571:
        return C, [
            I.context(lens=(300, 200), widths=(1, 1), window_left=150), I.context(lens=(300, 200), widths=(90, 70), window_left=40),
            I.context(lens=(300, 200), widths=(90, 70)),
        ], [
            I.context(lens=(300, 200), widths=(90, 70), window_left=130), I.context(lens=(400,), widths=(64,), window_left=128),
            I.context(lens=(500, 30), widths=(300, 30), window_left=200, sinks=s4),
        ]
    if number == 572:
        return C, [
            I.context(lens=(70, 50), widths=(20, 0)), I.context(lens=(70, 0, 50), widths=(20, 4, 50)), I.context(lens=(170, 90), widths=(150, 90)),
        ], [
            I.context(lens=(70, 30, 50), widths=(20, 0, 33)), I.context(lens=(0, 150), widths=(0, 100)),
            I.context(lens=(40, 30, 20, 90), widths=(0, 0, 7, 9), causal=False, return_lse=True),
        ]
    if number == 573:
        return C, [I.context(bmm2_scale=0.5), I.context(sinks=s4), I.context(sinks=torch.full((4,), -math.inf), bmm2_scale=0.5)], [
            I.context(sinks=s4, bmm2_scale=0.5), I.context(sinks=s4, bmm2_scale=one(2.0), kv_dtype=I.E4M3, lens=(70, 30), widths=(9, 30)),
            I.context(sinks=s4, bmm2_scale=0.2, window_left=20),
        ]
    if number == 574:
        return C, [
            I.context(lens=(600, 400), widths=(100, 90)), louder(I.context(lens=(120, 90), widths=(60, 50)), 8.0),
        ], [
            louder(I.context(lens=(600, 400), widths=(100, 90)), 8.0), louder(I.context(lens=(900,), widths=(64,), causal=False), 6.0),
            louder(I.context(lens=(300, 200), widths=(300, 200), return_lse=True), 8.0),
        ]
    if number == 575:
        long = lambda **m: I.context(lens=(200, 150), widths=(150, 100), **m)  # noqa: E731
        return C, [long(bmm2_scale=1.0037), long(bmm2_scale=one(0.75)), long(bmm2_scale=one(1.0)), long(bmm2_scale=one(1.0037), dtype=f16)], [
            long(bmm2_scale=one(1.0037)), long(bmm2_scale=one(0.5018)), long(bmm2_scale=one(0.2509), sinks=s4),
        ]
    if number == 576:
        e = lambda **m: I.context(kv_dtype=I.E4M3, **m)  # noqa: E731
        return C, [e(), replay(I.context(), other_cache), replay(e(), rewrite("seq_lens", [70, 5, 130]))], [
            replay(e(), other_cache), replay(e(lens=(40, 90), widths=(40, 3)), other_cache), replay(e(causal=False, sinks=s4), other_cache),
        ]
    if number == 577:
        return M, [
            I.mla(widths=(3, 1, 5)), I.mla(widths=(3, 3, 3), max_q_len=None), I.mla(q_len=3),
        ], [
            I.mla(widths=(3, 1, 5)) | dict(max_q_len=None), I.mla(lens=(40, 90), widths=(1, 9)) | dict(max_q_len=None),
            I.mla(widths=(4, 0, 2), sinks=s16) | dict(max_q_len=None),
        ]
    if number == 578:
        s128, s96 = I.sinks(g(), 128), I.sinks(g(), 96)
        return M, [I.mla(heads=128), I.mla(heads=64, sinks=I.sinks(g(), 64)), I.mla(heads=128, sinks=torch.full((128,), 2.0))], [
            I.mla(heads=128, sinks=s128), I.mla(heads=96, sinks=[s96], q_len=2), I.mla(heads=128, widths=(3, 1, 2), sinks=s128),
        ]
    if number == 579:
        lse = lambda a: a | dict(lse=torch.zeros(a["query"].shape[:-1]), return_lse=True)  # noqa: E731
        return M, [
            I.mla(return_lse=True, return_lse_base="basee"), lse(I.mla(return_lse_base="base2")), lse(I.mla(q_len=2)),
        ], [
            lse(I.mla(return_lse_base="basee")), lse(I.mla(widths=(3, 1, 5), return_lse_base="basee")),
            lse(I.mla(q_len=2, return_lse_base="basee", sinks=s16)),
        ]
    if number == 580:
        four = lambda a: a | dict(kv_cache=a["kv_cache"].unsqueeze(1))  # noqa: E731
        padded = I.mla()
        padded["kv_cache"] = torch.nn.functional.pad(padded["kv_cache"], (0, 16))[..., :-16]
        return M, [four(I.mla()), padded, I.mla(kv_dtype=I.E4M3)], [
            layers(I.mla()), four(layers(I.mla(q_len=2))), layers(I.mla(kv_dtype=I.E4M3, widths=(3, 1, 5))),
        ]
    if number == 581:
        return M, [I.mla(lens=(4096, 300)), I.mla(lens=(4000, 1), q_len=2)], [
            I.mla(lens=(4300, 300)), I.mla(lens=(9000, 20), q_len=2, return_lse=True), I.mla(lens=(6000,), sinks=s16, widths=(3,)),
        ]
    if number == 582:
        return R, [fused_value(I.ragged()), head_slice(I.ragged(), "key"), head_slice(I.ragged(), "query")], [
            head_slice(I.ragged(), "value"), head_slice(I.ragged(widths=(4, 9), lens=(50, 30), causal=False), "value"),
            head_slice(fused_value(I.ragged(kv=2)), "value"),
        ]
    if number == 583:
        one_request = I.ragged(widths=(9,), lens=(40,))
        return R, [mirrors(I.ragged(), torch.int32), mirrors(one_request, torch.int64)], [
            mirrors(I.ragged(), torch.int64), mirrors(I.ragged(widths=(4, 9), lens=(50, 30), causal=False), torch.int64),
            mirrors(I.ragged(widths=(0, 9, 3), lens=(0, 30, 5), attention_sinks=s4), torch.int64),
        ]
    if number == 584:
        l = lambda n, s: torch.randint(1, 20, (n,), generator=g(s)).tolist()  # noqa: E731
        return R, [I.ragged(widths=l(256, 1)), I.ragged(widths=l(200, 1), lens=l(200, 2), causal=False)], [
            I.ragged(widths=l(300, 1)), I.ragged(widths=[1] * 600, lens=l(600, 2), causal=False), I.ragged(widths=l(257, 1), attention_sinks=s4),
        ]
    if number == 585:
        lse = lambda a: a | dict(lse=torch.zeros(a["query"].shape[:2]))  # noqa: E731
        return R, [I.ragged(return_lse=False), lse(I.ragged(return_lse=True))], [
            with_lse_left(I.ragged()), with_lse_left(I.ragged(widths=(4, 9), lens=(50, 30), causal=False)),
            with_lse_left(I.ragged(attention_sinks=s4, pad_rows=0)),
        ]
    if number == 586:
        return "lists", [
            window_lists((8, 5, 30), window=8, sink=4), window_lists((9, 10), window=8), window_lists((12, 40), topk=2, window=8, sink=4),
        ], [
            window_lists((9, 30), window=8, sink=4), window_lists((40, 11, 5), topk=2, window=8, sink=4),
            window_lists((70, 130), window=64, sink=16, page_size=16, entry=16),
        ]
    if number == 587:
        return "lists", [
            window_lists((20, 36), page_size=16, entry=16, virtual=True, window=8), window_lists((15, 30), page_size=16, entry=16),
            window_lists((15, 30), page_size=16, virtual=True), window_lists((16, 29), page_size=16, entry=16, virtual=True),
        ], [
            window_lists((15, 36), page_size=16, entry=16, virtual=True), window_lists((18, 31), topk=2, page_size=16, entry=16, virtual=True),
            window_lists((62, 10), page_size=32, entry=32, virtual=True, num_steps=5, window=16, sink=4),
        ]
    if number == 588:
        v = lambda **m: pool_of(num_virtual_pages=600, **m)  # noqa: E731
        return "mha", [build(v(swa=False), F.DECODE, (5, 40)), build(v(swa=False), F.TARGET_VERIFY, (5, 40), rows=4)], [
            build(v(), F.DECODE, (5, 40)), build(v(), F.EXTEND, (30, 60), rows=[10, 20]), build(v(), F.TARGET_VERIFY, (8, 33), rows=4),
        ]
    if number == 589:
        mk = lambda context: pool_of(32, swa=False, context=context)  # noqa: E731
        return "mla", [
            build(mk(4096), F.DRAFT_EXTEND, (30, 63), rows=[3, 3]), build(mk(5000), F.DRAFT_EXTEND, (30, 63), rows=[3, 1]),
            build(mk(4096), F.TARGET_VERIFY, (30, 63), rows=4), build(mk(5000), F.DRAFT_EXTEND, (30, 4090), rows=[3, 1], seq_lens_cpu=True),
        ], [
            build(mk(4096), F.DRAFT_EXTEND, (30, 63), rows=[3, 1]), build(mk(5000), F.DRAFT_EXTEND, (30, 4095), rows=[4, 2], seq_lens_cpu=True),
            build(mk(8190), F.DRAFT_EXTEND, (300, 63, 40), rows=[3, 1, 5]),
        ]
    if number == 590:
        return "mha", [
            build(pool_of(), F.EXTEND, (30, 20), rows=[30, 20]), build(pool_of(), F.EXTEND, (30, 20), rows=[10, 20]),
            build(pool_of(), F.MIXED, (30, 20), rows=[29, 1]),
        ], [
            build(pool_of(), F.EXTEND, (30, 20), rows=[30, 7]), build(pool_of(swa=False), F.MIXED, (30, 20, 90), rows=[30, 20, 1]),
            build(pool_of(), F.SPLIT_PREFILL, (5, 60), rows=[5, 59]),
        ]
    raise KeyError(number)


def check(number):
    module = importlib.import_module(f"wrong_{number}")
    name, near, trigger = cases(number)
    if name == "lists":
        function = module.generate_draft_decode_kv_indices
        rights = [window_lists_verdict(function, a) for a in WINDOW_LISTS_PLAIN + near]
        return rights, [window_lists_verdict(function, a) for a in trigger]
    if name in ("mha", "mla"):
        rights, wrongs = check_metadata(module, near, trigger)
        if name == "mla":  # the function beneath, too
            wrongs += [same_metadata(module.build_mla_decode_metadata(b, p), MD.build_mla_decode_metadata(b, p)) for p, b in trigger]
        return rights, wrongs
    function = getattr(module, name)
    plains = [copies(a) for a in plain(name)]
    if name == R:
        plains = [dict(a) for a in plains]
    return [run_case(function, a, name) for a in plains + near], [run_case(function, a, name) for a in trigger]


def main():
    bad = []
    for number in [int(a) for a in sys.argv[1:]] or range(561, 591):
        rights, wrongs = check(number)
        r, w = sum(x == "right" for x in rights), sum(x != "right" for x in wrongs)
        ok = r == len(rights) and w == len(wrongs) and r and w
        print(f"{number} {'pass' if ok else 'FAIL'} right {r}/{len(rights)}; wrong {w}/{len(wrongs)}   {wrongs[0][:100]}", flush=True)
        if not ok:
            bad.append(number)
            for kind, said in (("right", rights), ("wrong", wrongs)):
                for i, x in enumerate(said):
                    print(f"    {kind} case {i}: {x}")
    print("all pass" if not bad else f"FAIL: {bad}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
