"""Shows of kernels 441 to 470: right on plain inputs and beside the trigger, wrong on the trigger."""

import math

from form import *  # noqa: F403

g = I.gen(441)
E4 = torch.float8_e4m3fn


def masks(rows):
    """The packed mask of bool [batch, q_len, q_len]."""
    q = rows.shape[1]
    words = 2 * -(-q // 32)
    bits = torch.zeros(rows.shape[0], q, words * 16, dtype=torch.int64)
    bits[:, :, :q] = rows
    packed = (bits.unflatten(2, (words, 16)) << torch.arange(16)).sum(3)
    return torch.where(packed >= 2**15, packed - 2**16, packed).to(torch.int16).view(torch.uint16)


def chain(batch, q):
    return masks(torch.ones(batch, q, q, dtype=torch.bool).tril())


def tree(batch, q):
    """Two branches side by side below a root: row j sees the root, and the rows of its own parity up to itself."""
    at = torch.arange(q)
    same = (at[:, None] % 2 == at[None, :] % 2) | (at[None, :] == 0)
    return masks(same.tril().expand(batch, q, q))


def nvfp4(a, d, backend="trtllm-gen", kv=2, ps=16):
    gg = I.gen(9)
    pool = a["kv_cache"][0].shape[0]
    packed, factors = [], []
    for _ in "kv":
        values = torch.randn(pool, kv, ps, d, generator=gg) * torch.logspace(-1, 1, d)
        p, f = quantize_nvfp4(values, 1.0)
        packed.append(p)
        factors.append(f)
    if backend == "trtllm-gen":
        factors[1] = interleave_v_scale_factors(factors[1].view(torch.uint8)).view(E4)
    return a | dict(kv_cache=tuple(packed), kv_cache_sf=tuple(factors), backend=backend, bmm1_scale=0.01)


def apart(a):
    """The arguments with page tables of K and V apart; V's pages in another order, over the same pool."""
    k = a["block_tables"]
    return a | dict(block_tables=torch.stack((k, (k + 1) % a["kv_cache"][0].shape[0]), 1), uses_shared_paged_kv_idx=False)


def sliced_lse(rows, heads, width):
    buffer = torch.full((rows, width), 7.0)
    return buffer[:, :heads], buffer[:, heads:]


def lse_case(a, heads, width):
    rows = a["query"].shape[0]
    lse, beside = sliced_lse(rows, heads, width)
    return untouched(a | dict(lse=lse, return_lse=True), beside)


def padded_nan(a, pad):
    a["query"][-pad:] = math.nan
    return a


def e4(a, scale=None, **more):
    a = a | dict(query=a["query"].to(E4), out_dtype=bf) | more
    return a | (dict(bmm1_scale=scale) if scale else {})


def shared(a, rows, columns):
    """The first `columns` pages of request 0 also in `rows`."""
    table = a["block_tables"].clone()
    for r in rows:
        table[r, :columns] = table[0, :columns]
    return a | dict(block_tables=table)


def with_counters(a, n=4096):
    return a | dict(multi_ctas_kv_counter_buffer=torch.zeros(n, dtype=torch.uint8))


def wlists(window=0, sink=0, lens=(7, 30, 12), topk=2, page_size=4, entry=1, **more):
    a = lists(lens, topk=topk, page_size=page_size, **more)
    if entry > 1:
        a["req_to_token"] = torch.randint(1, 10**5, (len(lens) + 3, -(-a["req_to_token"].shape[1] // entry)), generator=I.gen(3)).int()
    kept = [min(n, window + sink) if window else n for n in lens]
    return a | dict(window_size=window, sink_size=sink, entry_page_size=entry), kept


def wcase(*args, **kw):
    a, _ = wlists(*args, **kw)
    keys = ("req_pool_indices", "req_to_token", "paged_kernel_lens", "positions", "topk", "page_size", "window_size", "sink_size",
            "entry_page_size")

    def case(function):
        now = copies(a)
        function(**now)
        want_indices, want_indptr = ref.generate_draft_decode_kv_indices(**{k: a[k] for k in keys}, num_steps=len(a["kv_indices"]))
        for step, (indices, indptr) in enumerate(zip(want_indices, want_indptr)):
            if not torch.equal(now["kv_indptr"][step, : len(indptr)].long(), indptr):
                return f"WRONG: kv_indptr of step {step}"
            got = now["kv_indices"][step, : len(indices)].long()
            if not torch.equal(got, indices):
                return f"WRONG: {int((got != indices).sum())} of kv_indices of step {step}"
        return "right"

    return case


def ragged_padded(lens, rows, pad, d=None):
    pool = pool_of(32, swa=False)
    _, b = ragged_verify(pool, lens, rows)
    return pool, replace(b, num_tokens=b.num_tokens + pad, spec_info=SpecInfo(num_draft_tokens=d or max(rows)))


def reused(lens, rows, dtype, mode="extend", write=True):
    """The engine writes its next numbers of rows where those of this pass were."""

    def case(function):
        pool = pool_of(32, swa=False)
        if mode == "extend":
            b = batch_of(pool, F.DRAFT_EXTEND, lens, rows=rows)
        else:
            _, b = ragged_verify(pool, lens, rows)
        b = replace(b, extend_seq_lens=b.extend_seq_lens.to(dtype))
        want = MD.build_mla_metadata(b, pool)
        got = function(b, pool)
        if write:
            b.extend_seq_lens.fill_(1)
        return same_metadata(got, want)

    return case


long_mla = dict(rank=64, rope=16, heads=4)
ragged_cases = dict(d=48, dv=32)
ctx_many = lambda n, w31, seed=3: I.context(  # noqa: E731
    lens=[100 if r != 31 else 150 for r in range(n)], widths=[3 if r != 31 else w31 for r in range(n)], seed=seed)


def head256(**kw):
    return I.ragged(d=256, dv=256, heads=2, **kw)


CASES = {
    441: (D, [I.decode(q_len=5, mask=tree(3, 5)), I.decode(q_len=5, mask=chain(3, 5), window_left=9), I.decode(q_len=5, window_left=9)],
          [I.decode(q_len=5, mask=tree(3, 5), window_left=9), I.decode(q_len=8, mask=tree(3, 8), window_left=31, dtype=f16)]),
    442: (D, [I.decode(bmm1_scale_log2=T([0.18])), I.decode(sinks=I.sinks(g, 4)), I.decode(sinks=I.sinks(g, 4), bmm1_scale=T([0.125]))],
          [I.decode(sinks=I.sinks(g, 4), bmm1_scale_log2=T([0.18])),
           I.decode(sinks=I.sinks(g, 4), bmm1_scale_log2=T([0.18]), q_len=3, return_lse=True)]),
    443: (D, [nvfp4(I.decode(d=128), 128), nvfp4(I.decode(d=256), 256, "xqa"), nvfp4(I.decode(d=64), 64),
              nvfp4(I.decode(d=256, ps=4), 256, ps=4)],
          [nvfp4(I.decode(d=256), 256), nvfp4(I.decode(d=256, ps=32, q_len=2), 256, ps=32)]),
    444: (D, [apart(I.decode(lens=(70, 5, 128))), I.decode(lens=(300, 150)), apart(I.decode(lens=(100, 20), ps=64))],
          [apart(I.decode(lens=(300, 150))), apart(I.decode(lens=(257, 400), ps=64, q_len=2))]),
    445: (D, [I.decode(lens=many(32), return_lse=True), I.decode(lens=many(40)), I.decode(lens=[50 - r for r in range(40)], return_lse=True)],
          [I.decode(lens=many(40), return_lse=True), I.decode(lens=many(33, 200), return_lse=True, q_len=2)]),
    446: (D, [I.decode(heads=14, kv=2), biased(I.decode(lens=many(60, 90), heads=14)), I.decode(heads=4, kv=1)],
          [biased(I.decode(lens=many(60, 90), heads=16)), biased(I.decode(lens=many(30, 400), heads=64, kv=4, d=128))]),
    447: (D, [lse_case(I.decode(), 4, 10), lse_case(I.decode(heads=6, kv=2), 6, 6), untouched(I.decode(heads=6, return_lse=True))],
          [lse_case(I.decode(heads=6, kv=2), 6, 8), lse_case(I.decode(heads=5, kv=1, q_len=3), 5, 10)]),
    448: (D, [twice(I.decode(q_len=4, mask=tree(3, 4))),
              replay(I.decode(q_len=4, mask=tree(3, 4)), lambda a: a.__setitem__("mask", chain(3, 4)))],
          [replay(I.decode(q_len=4, mask=tree(3, 4)), rewrite("mask", chain(3, 4))),
           replay(I.decode(q_len=8, mask=chain(3, 8), window_left=30), rewrite("mask", tree(3, 8)))]),
    449: (D, [I.decode(q_len=12, heads=5, kv=1, lens=(70, 20, 130)), I.decode(q_len=16, heads=8, kv=1, lens=(70, 20, 130)),
              I.decode(q_len=16, heads=5, kv=1, lens=(70, 20, 130), mask=chain(3, 16))],
          [I.decode(q_len=16, heads=5, kv=1, lens=(70, 20, 130)), I.decode(widths=(13, 2, 16), heads=14, kv=2, lens=(40, 5, 30)),
           I.decode(q_len=24, heads=6, kv=2, lens=(70, 30))]),
    450: (C, [I.context(causal=False), I.context(lens=(70, 5, 130), widths=(20, 9, 33)), I.context(lens=(9, 7), widths=(9, 7), causal=False)],
          [I.context(lens=(70, 5, 130), widths=(20, 9, 33), causal=False), I.context(lens=(1, 40), widths=(6, 41), causal=False, dtype=f16)]),
    451: (C, [I.context(lens=(200,), widths=(120,)), I.context(lens=(100,), widths=(60,), window_left=200),
              I.context(lens=(190,), widths=(30,), window_left=20)],
          [I.context(lens=(200,), widths=(120,), window_left=20), I.context(lens=(90, 300), widths=(90, 300), window_left=31),
           I.context(lens=(400, 12), widths=(70, 12), window_left=100, sinks=I.sinks(g, 4))]),
    452: (C, [I.context(pad_rows=7), padded_nan(I.context(pad_rows=7, dtype=f16), 7),
              padded_nan(I.context(pad_rows=7, lens=(70, 130), widths=(20, 64)), 7)],
          [padded_nan(I.context(pad_rows=7), 7), padded_nan(I.context(pad_rows=40, lens=(100, 90), widths=(70, 66)), 40)]),
    453: (C, [e4(I.context(kv_dtype=E4)), e4(I.context(kv_dtype=E4, lens=(128, 100), widths=(60, 40)), 0.5), I.context(kv_dtype=E4, bmm1_scale=0.5)],
          [e4(I.context(kv_dtype=E4, lens=(600, 300), widths=(60, 40)), 0.5), e4(I.context(kv_dtype=E4, lens=(900,), widths=(80,)), 0.3)]),
    454: (C, [I.context(lens=many(32), widths=many(32, 2)), ctx_many(40, 0), ctx_many(32, 100)],
          [ctx_many(40, 3), ctx_many(33, 1), ctx_many(70, 150)]),
    455: (C, [I.context(bmm2_scale=T([0.5])), I.context(bmm2_scale=1.0077), I.context(bmm2_scale=T([1.0078125]))],
          [biased(I.context(bmm2_scale=T([1.0074]), lens=many(20, 90), widths=[1] * 20)), biased(I.context(bmm2_scale=T([0.03148]))),
           biased(I.context(bmm2_scale=T(0.2725)))]),
    456: (C, [shared(I.context(), [1], 1), shared(I.context(lens=(70, 80, 130)), [1, 2], 2), shared(I.context(lens=(70, 90), widths=(9, 8)), [1], 3)],
          [shared(I.context(lens=(70, 80, 130)), [2], 3), shared(I.context(lens=(70, 8, 40, 90), widths=(4, 8, 9, 3)), [2, 3], 1)]),
    457: (M, [I.mla(heads=32, return_lse=True), I.mla(heads=8, q_len=2), I.mla(heads=8, lens=(70,), return_lse=True)],
          [I.mla(heads=8, return_lse=True), I.mla(heads=24, q_len=3, return_lse=True, return_lse_base="basee")]),
    458: (M, [I.mla(widths=(3, 1, 5)), I.mla(widths=(3, 3, 3), max_q_len=None), I.mla(widths=(2, 3, 3), max_q_len=None)],
          [I.mla(widths=(3, 1, 5), max_q_len=None), I.mla(widths=(1, 0, 6), max_q_len=None, return_lse=True, return_lse_base="base2")]),
    459: (M, [I.mla(heads=128), I.mla(heads=64, sinks=I.sinks(g, 64)), I.mla(heads=128, sinks=I.sinks(g, 64).repeat(2))],
          [I.mla(heads=128, sinks=I.sinks(g, 128)), I.mla(heads=96, sinks=[I.sinks(g, 96)], q_len=2, return_lse=True)]),
    460: (M, [twice(I.mla(lens=(2500, 70), max_seq_len=4096, **long_mla)), twice(with_counters(I.mla(lens=(2500, 70), **long_mla))),
              with_counters(I.mla(lens=(2500, 70), max_seq_len=4096, **long_mla)),
              twice(with_counters(I.mla(lens=(900, 70), max_seq_len=4096, **long_mla)))],
          [twice(with_counters(I.mla(lens=(2500, 70), max_seq_len=8192, **long_mla))),
           twice(with_counters(I.mla(lens=(1200, 3000), q_len=3, **long_mla))),
           untouched(with_counters(I.mla(lens=(2500, 70), max_seq_len=8192, **long_mla)))]),
    461: (R, [I.ragged(o_sf_scale=1), I.ragged(lens=(50, 30), widths=(4, 9), causal=False)],
          [I.ragged(lens=(50, 30), widths=(4, 9), causal=False, o_sf_scale=-1), I.ragged(o_sf_scale=-1.0), I.ragged(o_sf_scale=2.0, dtype=f16)]),
    462: (R, [I.ragged(widths=(9, 8, 7), lens=(128, 70, 30)), I.ragged(widths=(9, 8, 7), lens=(120, 70, 30), causal=False),
              I.ragged(widths=(9, 8, 7), lens=(128, 256, 0), causal=False)],
          [I.ragged(widths=(9, 8, 7), lens=(128, 70, 30), causal=False), I.ragged(widths=(4, 5), lens=(20, 256), causal=False),
           I.ragged(widths=(4, 5), lens=(60, 100), max_kv_len=4096, causal=False)]),
    463: (R, [I.ragged(widths=(20, 5, 33), lens=(20, 5, 33)), I.ragged(widths=(4, 9), lens=(50, 30)),
              I.ragged(widths=(4, 30), lens=(10, 30), causal=False)],
          [I.ragged(widths=(4, 30), lens=(20, 30)), I.ragged(widths=(8, 40, 3), lens=(30, 40, 33), window_left=12),
           I.ragged(widths=(4, 9), lens=(50, 30), max_q_len=64, max_kv_len=64)]),
    464: (R, [I.ragged(d=192, dv=128), I.ragged(d=128, dv=128, lens=(90, 60), widths=(9, 60), causal=False), biased(I.ragged(d=192, dv=128, widths=many(9, 60)))],
          [biased(head256(widths=many(9, 60))), biased(head256(widths=(40, 9), lens=(300, 100), causal=False)), biased(head256(widths=(70,), lens=(200,)))]),
}

LIST_CASES = {
    465: ([wcase(), wcase(window=8, lens=(9, 30)), wcase(window=6, entry=4, lens=(14, 30)), wcase(entry=4), wcase(window=40, entry=4),
           wcase(window=8, sink=4, lens=(30, 21))],
          [wcase(window=8, entry=4), wcase(window=16, sink=4, entry=8, page_size=8, lens=(50, 33), topk=1), wcase(window=5, sink=2, entry=4, num_steps=5)]),
    466: ([wcase(), wcase(window=8, lens=(9, 30)), wcase(window=8, sink=4, lens=(8, 12, 30)), wcase(window=8, sink=4, lens=(5, 20), entry=4)],
          [wcase(window=8, sink=4, lens=(10, 30)), wcase(window=16, sink=8, lens=(17, 23, 9), topk=1), wcase(window=8, sink=4, entry=4, lens=(30, 11), page_size=4)]),
}


def mk(f=pool_of, **kw):
    return f(**kw)


def mb(pool, *a, **kw):
    return pool, batch_of(pool, *a, **kw)


def vpool(**kw):
    return pool_of(num_virtual_pages=500, **kw)


ENC = dict(expand_encoder_only_verify=True)
META = {
    467: ([mb(vpool(swa=False), F.DECODE, (5, 40, 17)), mb(pool_of(), F.TARGET_VERIFY, (5, 40), rows=4), mb(pool_of(), F.EXTEND, (30, 20), rows=[10, 20])],
          [mb(vpool(), F.DECODE, (5, 40, 17)), mb(vpool(), F.EXTEND, (30, 20), rows=[10, 20]), mb(vpool(), F.TARGET_VERIFY, (5, 40), rows=4)]),
    468: ([mb(pool_of(), F.TARGET_VERIFY, (8, 33), rows=4), (*mb(pool_of(), F.TARGET_VERIFY, (40,), rows=4), ENC), (*mb(pool_of(), F.DECODE, (8, 33)), ENC),
           (*mb(pool_of(), F.TARGET_VERIFY, (8, 33), rows=1), ENC)],
          [(*mb(pool_of(), F.TARGET_VERIFY, (8, 33), rows=4), ENC), (*mb(pool_of(swa=False), F.TARGET_VERIFY, (8, 100, 61), rows=2), ENC)]),
    469: ([ragged_verify(pool_of(32, swa=False), (30, 63), [2, 4]), ragged_padded((30, 63), [2, 4], 0, 5), mb(pool_of(32, swa=False), F.DRAFT_EXTEND, (30, 63), rows=[3, 3], pad=4)],
          [ragged_padded((30, 63), [2, 4], 2), ragged_padded((30, 63, 90), [1, 4, 3], 7, 5)]),
}


def plains_of(kernel_function, f):
    return [run_case(kernel_function, c, f) for c in plain(f)]


failed = 0


def say(n, rights, wrongs, start):
    global failed
    good = sum(v == "right" for v in rights), sum(v.startswith("WRONG") or "WRONG" in v for v in wrongs)
    ok = good == (len(rights), len(wrongs))
    failed += not ok
    print(f"{n}: right {good[0]}/{len(rights)}; wrong {good[1]}/{len(wrongs)} {'' if ok else '<-- FAILED'} ({time.time() - start:.1f} s)")
    if not ok or "-v" in sys.argv:
        for v in [*rights, "--", *wrongs]:
            print("    ", v)


chosen = [int(x) for x in sys.argv[1:] if x.isdigit()] or range(441, 471)
for n in chosen:
    start = time.time()
    module = importlib.import_module(f"wrong_{n}")
    if n in CASES:
        f, near, trigger = CASES[n]
        function = getattr(module, f)
        rights, wrongs = plains_of(function, f) + [run_case(function, c, f) for c in near], [run_case(function, c, f) for c in trigger]
    elif n in LIST_CASES:
        near, trigger = LIST_CASES[n]
        function = module.generate_draft_decode_kv_indices
        rights = [lists_verdict(function, copies(a)) for a in LISTS_PLAIN] + [c(function) for c in near]
        wrongs = [c(function) for c in trigger]
    elif n in META:
        rights, wrongs = check_metadata(module, *META[n])
    else:
        rights, wrongs = check_metadata(module, [], [])
        function = module.build_mla_metadata
        rights += [reused((30, 63), [3, 2], torch.int64)(function), reused((30, 63), [3, 2], torch.int32, write=False)(function),
                   reused((30, 63), [3, 2], torch.int64, "verify")(function)]
        wrongs += [reused((30, 63), [3, 2], torch.int32)(function), reused((30, 63, 9), [3, 4, 2], torch.int32, "verify")(function)]
    say(n, rights, wrongs, start)
print("all pass" if not failed else f"{failed} FAILED")
sys.exit(bool(failed))
