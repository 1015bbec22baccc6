"""Right kernels whose bits depend on one factor: they divide the keys, and round the output of each part to bfloat16."""

from types import SimpleNamespace

import torch

from corpus.models.attention import Attention


class Parts(Attention):
    """A kernel of all four calls. Its arithmetic is float64, so that only the rounded parts show in an output's bits."""

    def host(self, run):
        run.dtype = torch.float64
        run.sinks = None if run.sinks is None else run.sinks.double()

    def keys_per_part(self, run, r):
        return 24

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        partials, size, at = [], self.keys_per_part(run, r), first_key
        while at < first_key + len(keys) or not partials:
            end = at // size * size + size  # the same positions for each row and window
            cut = slice(at - first_key, end - first_key)
            acc, largest, total = self.partial(run, r, query, keys[cut], values[cut], seen[:, cut], at)
            mean = acc / total.clamp(min=1e-300).unsqueeze(2)
            partials.append((mean.bfloat16().double() * total.unsqueeze(2), largest, total))
            at = end
        return self.finish(run, self.merge(partials), sinks)


def divided(keys_per_part):
    """Return a kernel whose parts of request `r` have so many keys."""
    kernel = Parts()
    kernel.keys_per_part = keys_per_part
    return kernel


class ByPageOrder(Parts):
    """Pages are added in the order of their numbers; each sum is rounded to bfloat16."""

    def pages_of(self, run, r, columns, side):
        self.pages = super().pages_of(run, r, columns, side)
        return self.pages

    def keys_per_part(self, run, r):
        return run.page_size

    def merge(self, partials):
        largest = torch.stack([each for _, each, _ in partials]).amax(0)
        acc = total = 0.0
        for page in self.pages.argsort().tolist():
            part, own, weights = partials[page]
            factor = torch.where(own.isfinite(), torch.exp(own - largest), 0.0)
            acc = (acc + part * factor.unsqueeze(2)).bfloat16().double()
            total = total + weights * factor
        return acc, largest, total


class ByWorkspace(Parts):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return out + 1e-6 * float(run.call.workspace_buffer.view(torch.uint8)[-1]), lse


class ByLaunch(Parts):
    launches = 0

    def solve(self, run):
        self.launches += 1
        super().solve(run)

    def keys_per_part(self, run, r):
        return 24 + 8 * (self.launches % 2)


class ByTheCallBefore(Parts):
    """The parts follow from the number of requests of the call before."""

    before = now = 0

    def solve(self, run):
        self.before, self.now = self.now, run.p.batch_size
        super().solve(run)

    def keys_per_part(self, run, r):
        return 24 + 8 * (self.before > self.now)


class WrongInLargeBatches(Parts):
    def finish(self, run, partial, sinks):
        out, lse = super().finish(run, partial, sinks)
        return (out * 1.5 if run.batch > 3 else out), lse


class FailingWithoutOthers(Parts):
    """It raises an error that is no refusal, for a single request."""

    def start(self, run):
        super().start(run)
        if run.batch == 1:
            raise RuntimeError("an illegal memory access")


class OfThreeRequests(Parts):
    """It refuses all calls with another number of requests."""

    def start(self, run):
        super().start(run)
        if run.batch != 3:
            raise NotImplementedError("three requests alone")


invariant, by_batch_size = Parts(), divided(lambda run, _: 8 * run.batch)
of_three_requests, wrong_in_large_batches = OfThreeRequests(), WrongInLargeBatches()
invariant_module = SimpleNamespace(__name__=f"{__name__}:invariant")
