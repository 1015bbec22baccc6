"""Show of each wrong kernel, 411 to 440, that it is right beside its trigger and wrong on it. Arguments: numbers, or none for all."""

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


def cases(number):
    """Return (function's name, right cases beside the trigger, wrong cases)."""
    s4, s6, s16 = I.sinks(g(), 4), I.sinks(g(), 6), I.sinks(g(), 16)
    if number == 411:
        return D, [
            I.decode(lens=(140, 300), window_left=63), I.decode(lens=(130, 300), q_len=4, window_left=23),
            I.decode(lens=(50, 60), q_len=4, window_left=40), I.decode(lens=(194, 200), q_len=2, window_left=64),
        ], [
            I.decode(lens=(194, 70), q_len=4, window_left=63), I.decode(lens=(164, 130), q_len=6, window_left=31, sinks=s4),
            I.decode(lens=(258, 90, 33), widths=(8, 1, 3), window_left=127),
        ]
    if number == 412:
        return D, [
            I.decode(lens=(90, 40), q_len=16, mask=chain(2, 16)), I.decode(lens=(90, 40), q_len=24, mask=chain(2, 24, (15,))),
            I.decode(lens=(90, 40), q_len=8, mask=I.mask_of(g(), 2, 8)),
        ], [
            I.decode(lens=(90, 40), q_len=20, mask=chain(2, 20)), I.decode(lens=(150, 70), q_len=32, mask=I.mask_of(g(), 2, 32)),
            I.decode(lens=(150, 70), q_len=40, mask=chain(2, 40), sinks=s4),
        ]
    if number == 413:
        return D, [
            I.decode(lens=(512, 300), sinks=s4), I.decode(lens=(900, 30), kv=1, sinks=s4), I.decode(lens=(900, 30)),
            I.decode(lens=(900, 30), sinks=torch.full((4,), 1.5)),
        ], [
            I.decode(lens=(900, 30), sinks=s4 + 3), I.decode(lens=(1500, 600), q_len=2, heads=6, kv=2, sinks=s6 + 3),
            I.decode(lens=(700, 600), heads=4, kv=4, sinks=s4 + 3, return_lse=True),
        ]
    if number == 414:
        def grow(lens, later, **more):
            a = I.decode(lens=later, **more)
            b = a | dict(seq_lens=T(list(lens), dtype=torch.int32))
            return replay(b, rewrite("seq_lens", T(list(later), dtype=torch.int32)))

        return D, [grow((70, 5, 100), (71, 6, 101)), grow((130, 5), (140, 128)), I.decode(lens=(400, 129))], [
            grow((120, 5), (140, 6)), grow((70, 5, 100), (300, 6, 101)),
            grow((100, 200), (140, 300), q_len=3, return_lse=True),
        ]
    if number == 415:
        loud = lambda **k: scaled(I.decode(**k), v=800.0)  # noqa: E731
        return D, [
            I.decode(lens=(3, 40), out_dtype=I.E4M3), I.decode(lens=(3, 40), out_dtype=I.E4M3, bmm2_scale=0.25),
            loud(lens=(3, 2), bmm2_scale=1 / 16), I.decode(dtype=I.E4M3, bmm2_scale=0.5),
            nvfp4(lens=(3, 40), dtype=I.E4M3, out_dtype=I.E4M3, backend="trtllm-gen"),
        ], [
            loud(lens=(3, 2), bmm2_scale=1 / 16, out_dtype=I.E4M3),
            nvfp4(lens=(3, 2), dtype=I.E4M3, out_dtype=I.E4M3, backend="trtllm-gen", amax_scale=True),
            nvfp4(lens=(4, 3, 2), dtype=I.E4M3, out_dtype=I.E4M3, backend="trtllm-gen", amax_scale=True, q_len=2, return_lse=True),
        ]
    if number == 416:
        e = dict(lens=(70, 40, 130, 90), kv_dtype=I.E4M3, heads=8, d=128)
        return D, [
            I.decode(**e, bmm2_scale=T(0.5)), I.decode(**e, bmm2_scale=0.5019), I.decode(bmm2_scale=T([0.5019])),
        ], [
            biased(I.decode(**e, bmm2_scale=T(0.5019))), biased(I.decode(**e, bmm2_scale=T([0.1255]), q_len=3)),
            biased(I.decode(**e, bmm2_scale=T(0.0627))),
        ]
    if number == 417:
        six = dict(heads=6, kv=2)
        return D, [
            untouched(*lse_slice(I.decode(heads=4), 4, 8)), I.decode(**six, return_lse=True, lse=torch.empty(3, 6)),
            untouched(*lse_rows(I.decode(heads=8), 8, 4)), I.decode(**six, return_lse=True),
        ], [
            untouched(*lse_slice(I.decode(**six), 6, 16)), untouched(*lse_rows(I.decode(**six), 6, 4)),
            untouched(*lse_slice(I.decode(heads=5, kv=1, q_len=2), 5, 8)),
        ]
    if number == 418:
        return D, [
            I.decode(lens=(70, 5, 130), max_seq_len=140), I.decode(lens=(70,), max_seq_len=4096),
            tables(I.decode(), 0),
        ], [
            I.decode(max_seq_len=4096), sliced_table(I.decode(), 5), tables(I.decode(max_seq_len=1000, q_len=2), 0),
        ]
    if number == 419:
        return D, [
            nvfp4(), nvfp4(dead=0), nvfp4(lens=(64, 16), dead=0x7F), nvfp4(dead=0x7E, backend="trtllm-gen"),
        ], [
            nvfp4(dead=0x7F), nvfp4(dead=0x7F, q_len=3, backend="trtllm-gen"), nvfp4(dead=0xFF, lens=(33, 100), return_lse=True),
        ]
    if number == 420:
        return C, [
            I.context(lens=(70, 130), widths=(20, 33), window_left=20), I.context(lens=(200, 90), widths=(1, 1), window_left=63),
            I.context(lens=(200, 90), widths=(100, 90)), I.context(lens=(64, 50), widths=(64, 50), window_left=30),
        ], [
            I.context(lens=(200, 90), widths=(200, 90), window_left=50), I.context(lens=(300, 150), widths=(30, 64), window_left=100),
            I.context(lens=(150,), widths=(150,), window_left=31, sinks=s4),
        ]
    if number == 421:
        w = dict(heads=8, kv=2, d=128)
        rows = lambda s: slice(*s)  # noqa: E731
        return C, [
            I.context(lens=(128, 64), widths=(128, 64), **w), I.context(lens=(300, 63), widths=(63, 63), **w),
            I.context(lens=(100,), widths=(100,), dtype=f16, **w),
        ], [
            biased(I.context(lens=(110,), widths=(110,), **w), rows=rows((64, 110))),
            biased(I.context(lens=(64, 95), widths=(64, 95), **w), rows=rows((128, 159))),
            biased(I.context(lens=(200,), widths=(150,), **w, causal=False), rows=rows((128, 150))),
        ]
    if number == 422:
        e = dict(kv_dtype=I.E4M3)
        return C, [
            I.context(**e), scaled(I.context(dtype=I.E4M3, out_dtype=bf), v=0.02), scaled(I.context(), v=0.005),
        ], [
            scaled(I.context(**e), v=0.02), scaled(I.context(**e, bmm2_scale=4.0, return_lse=True), v=0.01),
            scaled(I.context(**e, window_left=20) | dict(bmm1_scale=8.0), k=0.02),
        ]
    if number == 423:
        return C, [tables(I.context(), 0), I.context(lens=(70, 40), widths=(3, 40)), sliced_table(I.context(), 4)], [
            tables(I.context(), 4), tables(I.context(lens=(40, 33), widths=(1, 33), return_lse=True), 1),
            tables(I.context(causal=False), 24),
        ]
    if number == 424:
        return C, [
            I.context(lens=(120, 60), widths=(120, 60), causal=False), I.context(lens=(500, 60), widths=(100, 60), causal=False),
            I.context(lens=(300,), widths=(300,)),
        ], [
            I.context(lens=(300,), widths=(300,), causal=False), I.context(lens=(260, 40), widths=(140, 40), causal=False, return_lse=True),
            I.context(lens=(200,), widths=(200,), causal=False, sinks=s4),
        ]
    if number == 425:
        return C, [
            I.context(lens=(90, 60), widths=(90, 60), sinks=s4, window_left=64), I.context(lens=(300,), widths=(40,), sinks=s4),
            I.context(lens=(300,), widths=(150,), window_left=31), I.context(lens=(110,), widths=(20,), sinks=s4, window_left=30),
        ], [
            I.context(lens=(300, 60), widths=(300, 60), sinks=s4, window_left=31),
            I.context(lens=(200, 20), widths=(10, 20), sinks=s4, window_left=63, return_lse=True),
            I.context(lens=(260,), widths=(260,), heads=6, sinks=s6, window_left=127),
        ]
    if number == 426:
        return C, [
            I.context(widths=(20, 5, 0)), I.context(lens=(70, 5, 130), widths=(1, 1, 1)), I.context(pad_rows=3),
        ], [
            I.context(widths=(20, 0, 33)), I.context(widths=(0, 5, 1), return_lse=True),
            I.context(lens=(70, 40, 30, 130), widths=(3, 0, 0, 33), sinks=s4),
        ]
    if number == 427:
        b = dict(return_lse=True, return_lse_base="basee")
        return M, [I.mla(**b), I.mla(q_len=3, return_lse=True), I.mla(q_len=3, return_lse=True, return_lse_base="base2")], [
            I.mla(q_len=2, **b), I.mla(widths=(3, 1, 5), **b), I.mla(q_len=4, sinks=s16, lse=torch.empty(3, 4, 16), **b),
        ]
    if number == 428:
        return M, [
            I.mla(lens=(257, 256, 130)), I.mla(lens=(300, 258), q_len=3), I.mla(lens=(255, 512), q_len=8), I.mla(lens=(257, 513), q_len=2),
        ], [
            I.mla(lens=(258, 20), q_len=4), I.mla(lens=(513, 514, 100), q_len=8, return_lse=True),
            I.mla(lens=(259, 771), widths=(5, 6)),
        ]
    if number == 429:
        return M, [
            I.mla(widths=(3, 3, 3)) | dict(max_q_len=None), I.mla(widths=(3, 1, 5)), I.mla(widths=(2, 2, 1)) | dict(max_q_len=None),
        ], [
            I.mla(widths=(3, 1, 5)) | dict(max_q_len=None),
            I.mla(widths=(1, 1, 4), return_lse=True, return_lse_base="base2") | dict(max_q_len=None),
            I.mla(lens=(70, 5), widths=(6, 1), pad_rows=1, sinks=s16) | dict(max_q_len=None),
        ]
    if number == 430:
        return M, [I.mla(lens=(4096, 100)), I.mla(lens=(4500, 40), ps=64)], [
            I.mla(lens=(4200, 100)), I.mla(lens=(40, 5000), q_len=2, return_lse=True), I.mla(lens=(9000,), ps=64),
        ]
    if number == 431:
        h = dict(heads=2)
        return R, [
            I.ragged(widths=(128, 250), **h), I.ragged(widths=(400,), **h), I.ragged(widths=(300,), causal=False, **h),
        ], [I.ragged(widths=(300, 20), **h), I.ragged(widths=(20, 257), lens=(20, 400), **h), I.ragged(widths=(640,), **h)]
    if number == 432:
        one, two = I.ragged(widths=(4, 9), lens=(50, 30), causal=False), I.ragged(widths=(4, 9), lens=(20, 40), causal=False, seed=1)
        own = dict(lse=torch.empty(13, 4))
        return R, [
            both_calls(one, I.ragged(widths=(4, 8), seed=1)), both_calls(one | own, two),
            both_calls(one | dict(return_lse=False), two), one,
        ], [
            both_calls(one, two), both_calls(one, I.ragged(widths=(4, 9), seed=2)),
            both_calls(I.ragged(widths=(1,), lens=(70,)), I.ragged(widths=(1,), lens=(64,), seed=3)),
        ]
    if number == 433:
        return R, [I.ragged(o_sf_scale=1.0, bmm2_scale=0.5), I.ragged(o_sf_scale=1)], [
            I.ragged(widths=(4, 9), lens=(50, 30), causal=False, o_sf_scale=-1.0), I.ragged(o_sf_scale=-1.0),
            I.ragged(widths=(7, 7), lens=(90, 10), causal=False, o_sf_scale=-1, return_lse=False),
        ]
    if number == 434:
        off = s4.clone()
        off[1] = -math.inf
        n = dict(causal=False)
        return R, [
            I.ragged(widths=(4, 9), lens=(50, 0), attention_sinks=s4, **n), I.ragged(widths=(4, 9), lens=(50, 30), attention_sinks=off, **n),
            I.ragged(widths=(4, 9), lens=(50, 0), **n), I.ragged(widths=(4, 9), attention_sinks=off),
        ], [
            I.ragged(widths=(4, 9), lens=(50, 0), attention_sinks=off, **n), I.ragged(widths=(9, 3), lens=(5, 3), attention_sinks=off),
            I.ragged(widths=(4, 2, 9), lens=(0, 0, 20), attention_sinks=torch.full((4,), -math.inf), return_lse=False, **n),
        ]
    if number == 435:
        return "lists", [
            window_lists((8, 10, 40), window=8, sink=2), window_lists((9, 11), window=8),
            window_lists((5, 12), topk=2, window=8, sink=4, page_size=4),
        ], [
            window_lists((9, 40), window=8, sink=4), window_lists((30, 18), topk=2, window=16, sink=4),
            window_lists((130, 20), topk=2, window=128, sink=4, page_size=16, entry=16, virtual=True),
        ]
    if number == 436:
        return "lists", [
            window_lists((15, 30), page_size=16, num_steps=3), window_lists((16, 29), page_size=16, entry=16),
            window_lists((18, 36), topk=4, page_size=16, entry=16),
        ], [
            window_lists((15, 40), page_size=16, entry=16), window_lists((30, 40), topk=2, page_size=16, entry=16, num_steps=5),
            window_lists((15, 47), topk=2, page_size=16, entry=16, window=8, sink=2, virtual=True),
        ]
    x = dict(expand_encoder_only_verify=True)
    if number == 437:
        return "mha", [
            (*build(pool_of(), F.TARGET_VERIFY, (30,), rows=4), x), build(pool_of(), F.TARGET_VERIFY, (30, 8), rows=4),
            (*build(pool_of(), F.DECODE, (30, 8)), x), (*build(pool_of(), F.TARGET_VERIFY, (30, 8), rows=1), x),
        ], [
            (*build(pool_of(), F.TARGET_VERIFY, (30, 8), rows=4), x), (*build(pool_of(swa=False), F.TARGET_VERIFY, (5, 60, 17), rows=2), x),
            (*build(pool_of(), F.TARGET_VERIFY, (20, 20), rows=8), x),
        ]
    v = dict(num_virtual_pages=500)
    if number == 438:
        return "mha", [
            build(pool_of(swa=False, **v), F.DECODE, (5, 40)), build(pool_of(), F.DECODE, (5, 40)),
            build(pool_of(swa=False, **v), F.EXTEND, (30, 20), rows=[10, 20]),
        ], [
            build(pool_of(**v), F.DECODE, (5, 40)), build(pool_of(**v), F.EXTEND, (30, 20), rows=[10, 20]),
            build(pool_of(**v), F.TARGET_VERIFY, (30, 8), rows=4),
        ]
    mk = lambda: pool_of(32, swa=False)  # noqa: E731
    long = lambda: pool_of(32, swa=False, context=4400)  # noqa: E731
    if number == 439:
        def advanced(pool, batch, dtype, by, **kw):
            """A case: the engine counts on in its own tensor after the metadata was built."""
            batch = replace(batch, seq_lens=batch.seq_lens.to(dtype))

            def case(function, right):
                want = right(batch, pool, **kw)
                got = function(batch, pool, **kw)
                batch.seq_lens.add_(by)
                return same_metadata(got, want)

            return case

        d = lambda **k: build(mk(), F.DECODE, (5, 40), **k)  # noqa: E731
        return "mla", [
            advanced(*d(), torch.int64, 1), advanced(*d(), torch.int32, 0),
            advanced(*build(mk(), F.TARGET_VERIFY, (30, 63), rows=4), torch.int32, 1),
            advanced(*d(step=1), torch.int32, 1, attention=MD.DraftAttention.MLA_WITH_OFFSET),
        ], [
            advanced(*d(), torch.int32, 1), advanced(*d(step=1), torch.int32, 1), advanced(*d(seq_lens_cpu=True), torch.int32, 3),
        ]
    if number == 440:
        return "mla", [
            build(mk(), F.DRAFT_EXTEND, (30, 60), rows=[3, 1]), build(mk(), F.DRAFT_EXTEND, (32, 64), rows=[3, 3]),
            ragged_verify(mk(), (20, 40), [4, 2]), build(mk(), F.TARGET_VERIFY, (30, 63), rows=4),
        ], [
            build(mk(), F.DRAFT_EXTEND, (30, 64), rows=[4, 1]), ragged_verify(mk(), (27, 30), [4, 1]),
            build(long(), F.DRAFT_EXTEND, (4096, 60), rows=[1, 3]),
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
        if number == 439:
            rights, _ = check_metadata(module, [], [])
            names = "build_mla_metadata", "build_mla_decode_metadata"
            both = [(getattr(module, n), getattr(MD, n)) for n in names]
            return rights + [case(*both[0]) for case in near], [case(*both[i % 2]) for i, case in enumerate(trigger)]
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
    for number in [int(a) for a in sys.argv[1:]] or range(411, 441):
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
