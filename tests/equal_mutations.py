"""Mutations that change nothing that a test could see."""

from collections.abc import Iterator

Key = tuple[str, str, str]  # file, line before and line after
# Below the name of a file: a line (-), mutations of it (+), and the reason why each is equal (=). A line marked by ~ zips what
# has equal lengths however a room is called: both sides are made from one list, tensor or batch.
TEXT = r"""
lab/calls/allowed.py
- remedy = f"use {'one of ' if len(backends) > 1 else ''}{', '.join(backends)}"
+ remedy = f"use {'one of ' if len(backends) != 1 else ''}{', '.join(backends)}"
= every call has a backend
lab/calls/arguments.py
~ for stride, size in sorted(zip(strides, shape, strict=True)):
~ elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
lab/calls/dsv4_decode.py
- no_pages = torch.empty((batch_size, 0), dtype=torch.int32, device=rows.device)
+ no_pages = torch.empty((batch_size, 1), dtype=torch.int32, device=rows.device)
= a problem of two pools has chosen entries, and nothing reads its page tables
lab/calls/problem.py
- return self.k_block_tables.dim() == 3
+ return self.k_block_tables.dim() >= 3
= a call refuses a table that has not two or three dimensions
lab/checks/explain/diagnosis.py
- share = f" All share: {'; '.join(each.phrase('is', True) for each in shared[:MOST_SHARED])}." if shared else ""
+ share = f" All share: {'; '.join(each.phrase('is', False) for each in shared[:MOST_SHARED])}." if shared else ""
= only conditions are true, and their words depend on the operator alone
~ features_of_units, wrong, results_of, cases_of = zip(*units, strict=True) if units else ((), (), (), ())
~ features = [each for each, is_wrong in zip(units.features, units.wrong, strict=True) if is_wrong]
lab/checks/explain/failure_rules.py
- MOST_PAIRS = 150  # pairs of literals, the best ones, to which a third literal is added
+ MOST_PAIRS = 149  # pairs of literals, the best ones, to which a third literal is added
+ MOST_PAIRS = 151  # pairs of literals, the best ones, to which a third literal is added
= it limits the search's effort
- MOST_UNITS = 4000  # of wrong units, and of right units, in the sample in which rules are searched
+ MOST_UNITS = 3999  # of wrong units, and of right units, in the sample in which rules are searched
+ MOST_UNITS = 4001  # of wrong units, and of right units, in the sample in which rules are searched
= it limits the search's effort
~ firsts, seconds = (np.array(side) for side in zip(*pairs, strict=True))
lab/checks/explain/feature.py
- return _ALTERNATIVES.sub(lambda found: found[1 if operator == "is" else 2], self.text)
+ return _ALTERNATIVES.sub(lambda found: found[1 if operator <= "is" else 2], self.text)
= a condition has the tests is and is not alone
lab/checks/explain/literal.py
~ costs, literals, columns = zip(*sorted(found.values(), key=lambda each: each[0]), strict=True)
lab/checks/explain/request_features.py
- "after_no_keys": request > 0 and kv_lens[request - 1] == 0,
+ "after_no_keys": request > 0 and kv_lens[request - 1] <= 0,
= a length is not negative
lab/kernels/support/peers.py
- honours=PACKAGES_HONOUR | LSES | {Feature.SINKS},
+ honours=PACKAGES_HONOUR ^ LSES | {Feature.SINKS},
= the sets have no feature in common
- return 64 if problem.window_left >= 0 else 80
+ return 64 if problem.window_left >= 0 else 79
= a page size is a power of two, and so neither
~ span = sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True))
lab/kernels/support/portable.py
- {*RAGGED_DIMS} | {high + low for high in RAGGED_DIMS[:-1] for low in RAGGED_DIMS if low < high},
+ {*RAGGED_DIMS} | {high | low for high in RAGGED_DIMS[:-1] for low in RAGGED_DIMS if low < high},
= they are different powers of two
lab/kernels/support/trtllm_gen.py
- HALVES | OF_E4M3 | OF_NVFP4 | WIDER_QUERIES,
+ HALVES | OF_E4M3 ^ OF_NVFP4 | WIDER_QUERIES,
= the sets have no element in common
~ fits = [[value in values for value, values in zip(wanted, vars(each).values(), strict=True)] for each in built]
~ near = max(zip(fits, built, strict=True), key=lambda pair: (pair[0][1], pair[0][0], sum(pair[0])))
~ return ", and ".join(word for word, fit in zip(words, fits, strict=True) if not fit)
~ if any(stride == 0 and size > 1 for size, stride in zip(query.shape[:2], query.stride()[:2], strict=True)):
lab/kernels/support/xqa.py
- if head_dim > 256:  # `gen_xqa_module`
+ if head_dim > 257:  # `gen_xqa_module`
= a head_dim is a multiple of 16 there
~ ranges = list(zip(edges[::2], edges[1::2], strict=True))
lab/metadata/engine/forward_batch.py
- return self.seq_lens.shape[0]
+ return self.seq_lens.shape[ -1]
= seq_lens has one dimension
lab/metadata/mha/context_parallel.py
- if min(lengths, default=0) < 2 * num_ranks:
+ if min(lengths, default= 1) < 2 * num_ranks:
= there are two ranks or more, so that both are less
lab/metadata/speculation/plan_stream.py
- self.parents = chain.repeat(max(batch_sizes, default=0), 1)
+ self.parents = chain.repeat(max(batch_sizes, default= 1), 1)
= no sizes are refused afterwards
lab/references/assertion.py
- if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
+ if problem.query.device.type > "cpu":  # on a CPU the call has been checked already
= it is cpu or cuda
~ k, v = (_entries(*side, at, problem.page_size) for side, at in zip(sides, places, strict=True))
lab/references/errors.py
- ranked = torch.where(self.faulty, self.ratio, self.ratio - self.ratio.amax() - 1)
+ ranked = torch.where(self.faulty, self.ratio, self.ratio - self.ratio.amax() ** 1)
= a ratio at fault exceeds 1, and the others less the largest are at most 0
- return torch.where(expected == -math.inf, torch.where(lse == expected, 0.0, math.inf), ratio)
+ return torch.where(expected <= -math.inf, torch.where(lse == expected, 0.0, math.inf), ratio)
+ return torch.where(expected == -math.inf, torch.where(lse <= expected, 0.0, math.inf), ratio)
= nothing is less than minus infinity
- bound = COMMON + (control_total / count).abs() + DEVIATIONS * of_one_vector / independent.clamp(min=1).sqrt()
+ bound = COMMON + (control_total / count).abs() + DEVIATIONS * of_one_vector / independent.clamp(min=0).sqrt()
= it is less than 1 in a group of vectors of zeros alone, whose slope is 1
- count = int(groups.max()) + 1 if groups.numel() else 0
+ count = int(groups.max()) + 1 if groups.numel() else 1
= without rows nothing reads the group's bound
- slopes.new_zeros(len(words)).index_add(0, of_vectors.flatten(), side.expand_as(of_vectors).flatten())
+ slopes.new_zeros(len(words)).index_add( -1, of_vectors.flatten(), side.expand_as(of_vectors).flatten())
= the sums have one dimension
lab/references/forward_metadata.py
- whole = max(seen, 0) // index_kpool * index_kpool
+ whole = max(seen, -1) // index_kpool * index_kpool
= a row that sees no position has none after its whole groups either: both numbers cancel
~ return [live_pages(row, n, pool, *full_to_swa) for row, n in zip(rows, key_lens, strict=True)]
~ for row, own, most in zip(batch.req_pool_indices.tolist(), seen, padded, strict=True):
~ padded = [keys + block - rows for keys, rows in zip(seen, query_lens, strict=True)]
~ for row, prefix in zip(batch.req_pool_indices.tolist(), batch.extend_prefix_lens.tolist(), strict=True)
lab/references/paged_attention.py
- return unseen.nonzero().to(self.request.device, non_blocking=True).unbind(1)
+ return unseen.nonzero().to(self.request.device, non_blocking=False).unbind(1)
= only a GPU reads it, and only its time depends on it
- max_q_len=1,
+ max_q_len= 0,
= only a mask needs it, and a call that selects entries has none
- rows_at_once = max(1, most // (num_qo_heads * max(kv_len, 1)))
+ rows_at_once = max(1, most // (num_qo_heads * max(kv_len, 2)))
= it changes how many rows are computed together, and so the memory that is used, and no result
- if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
+ if problem.query.device.type > "cpu":  # on a CPU the call has been checked already
= it is cpu or cuda
- rows = pages = 0
+ rows = pages = -1
= each is the largest of numbers that are not negative
~ return [part.view(each.shape) for part, each in zip(parts, indices, strict=True)]
~ self.v_pages = dict(zip(self.tiles, pages[len(self.tiles) :], strict=True))
lab/references/ragged_attention.py
- if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
+ if not problem.query.device.type != "cpu":  # on a CPU the call has been checked already
= only a GPU needs it, and a second check finds nothing
lab/references/softmax_attention.py
- GPU_TILE_ELEMENTS = 2**25
+ GPU_TILE_ELEMENTS = 2-25
+ GPU_TILE_ELEMENTS = 2|25
= only a GPU reads it, and only its time depends on it
- out = sums.view(*by_row, kv.v_head_dim).div_(denominator.masked_fill(denominator == 0, 1.0)).mul_(bmm2_scale)
+ out = sums.view(*by_row, kv.v_head_dim).div_(denominator.masked_fill(denominator <= 0, 1.0)).mul_(bmm2_scale)
= a denominator is a sum of exponentials and never negative
- elements = max(sum(side.numel() for side in histories[requests[0]]), kv_len * q_len * query.shape[1], 1)
+ elements = max(sum(side.numel() for side in histories[requests[0]]), kv_len * q_len ** query.shape[1], 1)
+ elements = max(sum(side.numel() for side in histories[requests[0]]), kv_len * q_len * query.shape[1], 2)
= it changes which requests are computed together, and so the memory that is used, and no result
- rows_at_once = max(1, most // (query.shape[1] * max(keys.shape[1], 1)))
+ rows_at_once = max(1, most // (query.shape[1] * max(keys.shape[1], 2)))
= it changes how many rows are computed together, and so the memory that is used, and no result
- LARGEST_SHARE = 1 - 2.0**-40
+ LARGEST_SHARE = 1 - 2.0**~40
= an error of such a share exceeds all others by far
- return every.index_select(0, values.view(torch.uint8).flatten().to(torch.int32)).view(values.shape)
+ return every.index_select( -1, values.view(torch.uint8).flatten().to(torch.int32)).view(values.shape)
= the table has one dimension
- if out.is_cuda or out.is_contiguous():
+ if not out.is_cuda or out.is_contiguous():
= both ways compute the same products, and only the time depends on it
- visible = visible & (keys <= rows)
+ visible = visible * (keys <= rows)
= both are bool
- visible = visible & (keys >= rows - window_left)
+ visible = visible * (keys >= rows - window_left)
= both are bool
- query: Tensor, histories: Sequence[History], q_lens: Sequence[int], rules: Rules, *, with_control: bool = False
+ query: Tensor, histories: Sequence[History], q_lens: Sequence[int], rules: Rules, *, with_control: bool = True
= the reference that leaves it out does not read the control
~ for request, ((keys, _), q_len) in enumerate(zip(histories, q_lens, strict=True)):
lab/references/truth.py
~ for (keys, values), rows in zip(histories, selected, strict=True)
~ for (keys, values), own in zip(histories, seen, strict=True)
~ places, exact, lse_log2, control, skipped = map(torch.cat, zip(*pieces, strict=True))
lab/timing/gpu_time.py
- check = asked[0].redraw.check_of(asked[0].seeds, whole=asked[0].whole)
+ check = asked[ -1].redraw.check_of(asked[0].seeds, whole=asked[0].whole)
= all of one group have the same redraw
- call = random.Random(f"{self._seed} call {turn} {number}").getrandbits(60)
+ call = random.Random(f"{self._seed} call {turn} {number}").getrandbits( 61)
= it is a seed, and any one will do
- read_every = max(1, count // 10)
+ read_every = max(1, count // 9)
= only a GPU reads it, and only its time depends on it
- kernels=tuple(dict.fromkeys(activity.name for activity in records[0])),
+ kernels=tuple(dict.fromkeys(activity.name for activity in records[ -1])),
= every replay of a graph has the same kernels
lab/timing/sampling.py
- LEAD_CYCLES = 2_000_000
+ LEAD_CYCLES = 2000001
= one cycle of a millisecond
- start, end = CudaEvent(enable_timing=True), CudaEvent(enable_timing=True)
+ start, end = CudaEvent(enable_timing=False), CudaEvent(enable_timing=True)
= only a GPU has events: its tests see it
- QUEUED_SLACK_US = 25.0
+ QUEUED_SLACK_US = 24.0
= an empirical margin: a test of its value would repeat it
~ us, host_us = (statistics.median(side) for side in zip(*both, strict=True))
lab/timing/staging.py
~ for work, each in zip(buffers, seeds, strict=True):
~ for work, each in list(zip(buffers, seeds, strict=True))[: 1 if buffers[0].redraw else None]:
~ graph = _captured([step for pair in zip(wipes, calls, strict=True) for step in pair], stream)
"""


def _parsed(text: str) -> Iterator[tuple[Key, str]]:
    path, before, afters = "", "", list[str]()
    for line in text.strip().splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "-":
            before, afters = rest, []
        elif mark == "+":
            afters.append(rest)
        elif mark == "=":
            yield from (((path, before, after), rest) for after in afters)
        elif mark == "~":
            yield (
                (path, rest, rest.replace("strict=True", "strict=False")),
                "the sides have equal lengths by construction",
            )
        else:
            path = line


EQUAL = dict(_parsed(TEXT))
