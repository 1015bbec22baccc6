"""Right kernels that differ from the model in their arithmetic, written without a look at the checks."""

import math

import torch

from corpus.models.attention import E4M3, Attention


class Right1(Attention):
    """An online softmax over tiles of 128 keys, from the last tile to the first."""

    def partial(self, run, r, query, keys, values, seen, first_key):
        rows, heads = query.shape[:2]
        acc = query.new_zeros(rows, heads, values.shape[2])
        largest = query.new_full((rows, heads), -math.inf)
        total = query.new_zeros(rows, heads)
        for start in reversed(range(0, len(keys), 128)):
            part = slice(start, start + 128)
            a, m, l = super().partial(run, r, query, keys[part], values[part], seen[:, part], first_key + start)
            new = torch.maximum(largest, m)
            origin = torch.where(new.isfinite(), new, 0.0)
            old, own = torch.exp(largest - origin), torch.where(m.isfinite(), torch.exp(m - origin), 0.0)
            acc = acc * old.unsqueeze(2) + a * own.unsqueeze(2)
            total = total * old + l * own
            largest = new
        return acc, largest, total


class Right2(Attention):
    """The keys in two unequal splits, whose normalised results merge by their LSE."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        cut = len(keys) // 3
        outs, lses = [], []
        for part, own_sinks in ((slice(0, cut), None), (slice(cut, None), sinks)):
            partial = self.partial(
                run, r, query, keys[part], values[part], seen[:, part], first_key + (part.start or 0)
            )
            out, lse = self.finish(run, partial, own_sinks)
            outs.append(out)
            lses.append(lse)
        both = torch.stack(lses)
        lse = torch.logaddexp2(*lses)
        weight = torch.where(both > -math.inf, torch.exp2(both - torch.where(lse > -math.inf, lse, 0.0)), 0.0)
        return (torch.stack(outs) * weight.unsqueeze(3)).sum(0), lse


class Right3(Attention):
    """PyTorch's scaled_dot_product_attention per request; the sink shrinks its result."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        s = self.scores(run, r, query, keys, seen, first_key)
        logsum = s.logsumexp(3) if s.shape[3] else s.new_full(s.shape[:3], -math.inf)
        logsum = logsum.transpose(0, 1).flatten(1, 2)
        some = seen.any(1)
        mask = (seen | ~some.unsqueeze(1)).repeat_interleave(
            run.group, 0
        )  # a row that sees nothing is set to zero below
        out = query.new_zeros(*query.shape[:2], values.shape[2])
        if len(keys):
            q = query.unflatten(1, (run.num_kv_heads, run.group)).transpose(0, 1).flatten(1, 2)
            k, v = (side.transpose(0, 1).contiguous().unsqueeze(0) for side in (keys, values))
            out = torch.nn.functional.scaled_dot_product_attention(
                q.unsqueeze(0), k, v, attn_mask=mask, scale=run.scale1
            )[0]
            out = out.unflatten(1, (-1, run.group)).transpose(0, 1).flatten(1, 2)
        out = torch.where(some[:, None, None], out, 0.0) * run.scale2
        if sinks is not None:
            both = torch.logaddexp(logsum, sinks)
            out = out * torch.where(
                both > -math.inf, torch.exp(logsum - torch.where(both > -math.inf, both, 0.0)), 0.0
            ).unsqueeze(2)
            logsum = both
        return out, logsum / math.log(2.0)


class Right4(Attention):
    """Weights are rounded to the query's 16 bits (bfloat16 for e4m3) before P.V, sums are of unrounded ones."""

    def operand(self, run, weights):
        dtype = run.p.query.dtype
        if dtype in (torch.float32, torch.float64):
            return weights
        return weights.to(torch.bfloat16 if dtype == E4M3 else dtype).to(weights.dtype)


class Right5(Attention):
    """Softmax in base 2, with log2(e) folded into the query's scale, and the heads of a group one by one."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        log2e = 1.0 / math.log(2.0)
        q = (query * (run.scale1 * log2e)).unflatten(1, (run.num_kv_heads, run.group))
        hidden = ~seen.unsqueeze(0)
        outs, lses = [], []
        for g in range(run.group):
            s = (q[:, :, g].transpose(0, 1) @ keys.permute(1, 2, 0)).masked_fill(
                hidden, -math.inf
            )  # [kv_heads, rows, keys]
            largest = s.amax(2, keepdim=True) if len(keys) else s.new_full((*s.shape[:2], 1), -math.inf)
            sink = None if sinks is None else sinks.unflatten(1, (-1, run.group))[:, :, g].t().unsqueeze(2) * log2e
            if sink is not None:
                largest = torch.maximum(largest, sink)
            largest = torch.where(largest.isfinite(), largest, 0.0)
            weights = torch.exp2(s - largest)
            total = weights.sum(2, keepdim=True)
            if sink is not None:
                total = total + torch.exp2(sink - largest)
            outs.append((weights / torch.where(total > 0, total, 1.0)) @ values.transpose(0, 1))
            lses.append((largest + torch.log2(total)).squeeze(2))
        out, lse = torch.stack(outs, 1).flatten(0, 1), torch.stack(lses, 1).flatten(0, 1)
        return out.transpose(0, 1) * run.scale2, lse.t()


class Right6(Attention):
    """Two passes, the LSE of all keys in tiles of 96 first, then normalised weights times V tile by tile."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        rows, heads = query.shape[:2]
        tiles = [slice(start, start + 96) for start in range(0, len(keys), 96)]
        logsum = query.new_full((rows, heads), -math.inf) if sinks is None else sinks.clone()
        for tile in tiles:
            s = self.scores(run, r, query, keys[tile], seen[:, tile], first_key)
            logsum = torch.logaddexp(logsum, s.logsumexp(3).transpose(0, 1).flatten(1, 2))
        known = torch.where(logsum > -math.inf, logsum, 0.0).unflatten(1, (-1, run.group)).transpose(0, 1).unsqueeze(3)
        out = query.new_zeros(rows, heads, values.shape[2])
        for tile in tiles:
            weights = torch.exp(self.scores(run, r, query, keys[tile], seen[:, tile], first_key) - known)
            part = weights.flatten(1, 2) @ values[tile].transpose(0, 1)
            out += part.unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)
        return out * run.scale2, logsum / math.log(2.0)


right1, right2, right3, right4, right5, right6 = Right1(), Right2(), Right3(), Right4(), Right5(), Right6()
