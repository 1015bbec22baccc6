"""Samples between two events, on a simulated GPU whose clock moves when it is told to."""

import torch

from lab.timing import sampling
from lab.timing.device_state import DeviceState
from lab.timing.sampling import LEAD_CYCLES, Sample, between_events


class Gpu:
    """A clock of the GPU and the host at once, in µs, which work moves."""

    def __init__(self, monkeypatch) -> None:
        self.now_us, self.leads, self.readings = 0.0, 0, 0
        monkeypatch.setattr(sampling, "CudaEvent", lambda enable_timing: {})
        monkeypatch.setattr(sampling, "_record", lambda event: event.update(us=self.now_us))
        monkeypatch.setattr(sampling, "_elapsed_ms", lambda start, end: (end["us"] - start["us"]) / 1000)
        monkeypatch.setattr(sampling, "_synchronize", lambda: None)
        monkeypatch.setattr(sampling, "_now_ns", lambda: int(1000 * self.now_us))
        monkeypatch.setattr(torch.cuda, "_sleep", self._lead, raising=False)

    def _lead(self, cycles: int) -> None:
        assert cycles == LEAD_CYCLES
        self.leads, self.now_us = self.leads + 1, self.now_us + 1000

    def work(self, us: float) -> None:
        self.now_us += us

    def samples(self, *, queued: bool) -> list[Sample]:
        state = DeviceState()
        state.read = lambda device: setattr(self, "readings", self.readings + 1)
        steps = [(lambda: self.work(7000), lambda us=us: self.work(us)) for us in (100.0, 200.0, 300.0, 400.0)]
        return between_events(steps, state, 0, queued=queued)


def test_a_queued_sample_is_the_work_alone_by_both_clocks(monkeypatch) -> None:
    """Every third has a reading of the device in place of the host's time; what goes before a sample is in neither."""
    gpu = Gpu(monkeypatch)
    assert gpu.samples(queued=True) == [
        Sample(100.0, None),
        Sample(200.0, 200.0),
        Sample(300.0, 300.0),
        Sample(400.0, None),
    ]
    assert (gpu.leads, gpu.readings) == (8, 2)


def test_a_sample_on_an_idle_gpu_has_no_lead(monkeypatch) -> None:
    gpu = Gpu(monkeypatch)
    assert [sample.us for sample in gpu.samples(queued=False)] == [100.0, 200.0, 300.0, 400.0]
    assert gpu.leads == 0
