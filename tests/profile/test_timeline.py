"""A device's account of a step, from recorded events to operators' times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.profile import steps, timeline
from diptych.profile.ours import Ours
from diptych.profile.recorder import RECORDING, Drawing, Timed
from diptych.profile.timeline import Kernel, Order, Untold
from diptych.profile.work import Operator, Work
from diptych.workers.model.config import ModelConfig
from tests.support.families import make_tiny

ONE, TWO, IDLE = Operator("one", "linear"), Operator("two", "attention"), Operator("idle", "other")
BETWEEN = Operator("between operators", "other")
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


class Device:
    """Writes down what a device would: kernels one after the other on its clock."""

    def __init__(self) -> None:
        self.now, self.told = 1_000_000, list[Kernel]()

    def runs(self, name: str, long: int, gap: int = 0) -> None:
        start = self.now + gap
        self.now = start + long
        self.told.append(Kernel(name, start, self.now))

    def pauses(self) -> None:
        self.runs(SPIN, 2_000_000)

    def step(self, slower: int = 0) -> None:
        self.pauses()
        self.runs("gemm", 5_000 + slower, gap=1_000)
        self.runs("softmax", 3_000, gap=500)
        self.runs("gemm", 5_000)

    def marked_step(self) -> None:
        self.pauses()
        for at, name in enumerate(("", "gemm", "", "softmax", "", "gemm")):
            self.runs(SPIN, 1_500, gap=700)
            if name:
                self.runs(name, 4_000 + at)
        self.runs(SPIN, 1_500)


PIECES = (BETWEEN, ONE, BETWEEN, TWO, BETWEEN, ONE)


def chrome(kernels: list[Kernel]) -> str:
    """As torch.profiler writes it: microseconds with three decimals, and much else."""
    events = ['{"ph": "M", "name": "process_name", "ts": 0, "args": {}}']
    for kernel in kernels:
        long = kernel.end - kernel.start
        at, dur = (f"{ns // 1000}.{ns % 1000:03}" for ns in (kernel.start, long))
        events.append('{"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1.5, "dur": 2}')
        events.append(f'{{"ph": "X", "cat": "kernel", "name": {json.dumps(kernel.name)}, "ts": {at}, "dur": {dur}}}')
    return f'{{"schemaVersion": 1, "traceEvents": [{", ".join(events)}]}}'


def test_a_trace_is_read_to_the_nanosecond() -> None:
    late = 1_796_000_000_000_000_123  # since 1970: more digits than a float holds
    kernels = [Kernel("b", late + 7, late + 12), Kernel("a", late, late + 5)]
    assert timeline.parse(chrome(kernels)) == sorted(kernels, key=lambda kernel: kernel.start)
    copies = '{"traceEvents": [{"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 3, "dur": 1}]}'
    assert timeline.parse(copies) == [Kernel("Memset (Device)", 3000, 4000)]
    broken = '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": -5.0, "dur": 1}]}'
    assert timeline.parse(broken) == []  # a time that CUPTI lost


def test_an_account_adds_up_to_the_step() -> None:
    device = Device()
    for slower in (0, 0, 0, 0, 4_000_000):
        device.step(slower)
    device.marked_step()
    found = timeline.account(timeline.parse(chrome(device.told)), PIECES, IDLE)
    assert found.operators == pytest.approx({ONE: 10e-6, TWO: 3e-6, IDLE: 0.5e-6})
    assert sum(found.operators.values()) == pytest.approx(
        13.5e-6
    )  # from the first kernel's start to the last one's end
    assert (found.steps, found.broken, found.kernels) == (5, 0, 3)


def test_a_kernel_that_was_let_in_early_waits_for_its_predecessor() -> None:
    step = (Kernel("a", 0, 100), Kernel("b", 10, 130), Kernel("c", 20, 90), Kernel("d", 150, 160))
    owned = timeline.cut(step, (ONE, TWO, ONE, TWO), IDLE)
    assert owned == pytest.approx({ONE: 100e-9, TWO: 40e-9, IDLE: 20e-9})
    assert sum(owned.values()) == pytest.approx(160e-9)


def test_steps_that_lack_events_are_left_out() -> None:
    device = Device()
    for _ in range(3):
        device.step()
    for _ in range(2):
        device.marked_step()
    found = timeline.account(device.told[2:], PIECES, IDLE)  # the first pause and kernel are gone, so that step is
    assert (found.steps, found.broken) == (2, 0)
    # Of the second step, and of the first with marks: its third mark.
    lost = {6, next(at for at, k in enumerate(device.told) if k.is_mark and at > 12) + 5}
    found = timeline.account([kernel for at, kernel in enumerate(device.told) if at not in lost], PIECES, IDLE)
    assert (found.steps, found.broken) == (2, 1)


def test_what_does_not_fit_is_said() -> None:
    device = Device()
    device.step()
    with pytest.raises(Untold, match="of 1 steps 0 have marks"):
        timeline.account(device.told, PIECES, IDLE)
    device.marked_step()
    with pytest.raises(Untold, match="6 pieces instead of 5"):
        timeline.account(device.told, PIECES[1:], IDLE)
    with pytest.raises(Untold, match="told of no kernel"):
        timeline.account([], PIECES, IDLE)
    device.told = [Kernel("tanh", k.start, k.end) if k.name == "softmax" else k for k in device.told[4:]]
    device.step()
    with pytest.raises(Untold, match="differ from the 1th on, where it has softmax,gemm and the other tanh,gemm"):
        timeline.account(device.told, PIECES, IDLE)
    order = Order(("gemm", "softmax"), (ONE, TWO))
    assert "3 kernels and 2 with marks; they differ from the 2th on, where it has gemm and the other nothing" in (
        timeline.difference(timeline.steps_of(device.told)[1], order)
    )


def test_the_mean_leaves_out_the_slowest_and_the_fastest() -> None:
    assert timeline.middle([{ONE: float(n)} for n in (1, 2, 3, 100)]) == {ONE: 2.5}
    assert timeline.middle([{ONE: 4.0}]) == {ONE: 4.0}


class Watched:
    """Steps of a device, as `by_timeline` asks for them; each is marked or not."""

    captured, idle = True, IDLE

    def __init__(self) -> None:
        self.device = Device()

    def begin(self) -> None:
        pass

    def run(self) -> None:
        self.device.step()

    def plain(self) -> float:
        self.device.step()
        return 13.5e-6

    def recorded(self) -> dict[Operator, Timed]:
        return {ONE: Timed(1, 14e-6), RECORDING: Timed(0, 1e-6)}

    def marked(self) -> Drawing:
        self.device.marked_step()
        return Drawing(PIECES, ((ONE, Work(1, 2)), (TWO, Work(3, 4)), (ONE, Work(1, 2))))


def test_a_step_measured_by_its_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()

    @timeline.contextmanager
    def traced(found: list[Kernel]) -> Any:
        watched.device.told.clear()
        yield
        found += watched.device.told

    monkeypatch.setattr(timeline, "traced", traced)
    found = steps.by_timeline(watched, rounds=5)
    assert found.method == "timeline"
    assert found.operators[ONE] == Timed(2, pytest.approx(10e-6), Work(2, 4))
    assert found.operators[IDLE].calls == 0
    assert (found.step, found.recorded, len(found.plain)) == (13.5e-6, 13.5e-6, 10)
    assert found.details["kernels"] == 3


def test_without_a_timeline_borders_are_drawn_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    @timeline.contextmanager
    def traced(found: list[Kernel]) -> Any:
        yield  # as where CUPTI may not be used

    monkeypatch.setattr(timeline, "traced", traced)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = steps.measure(Watched(), 5, torch.device("cuda"))
    assert (found.method, found.note) == ("borders", "no timeline: CUPTI told of no kernel")
    assert found.operators == {ONE: Timed(1, 14e-6)}
    assert found.recorded == pytest.approx(15e-6)


def test_a_marked_step_has_a_mark_at_every_border(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our decoder's own step, launched: what it calls between the marks are the pieces, in order."""
    make_tiny("mixtral", tmp_path)
    engine = Ours(tmp_path, ModelConfig.from_folder(tmp_path), torch.float32, torch.device("cpu"), "auto")
    engine.begin(1, 12, 2)
    marks: list[None] = []
    monkeypatch.setattr(timeline, "mark", lambda: marks.append(None))
    drawing = steps.Launched(engine, engine.prefill).marked()
    assert len(marks) == len(drawing.pieces) + 1
    assert {operator for operator, _ in drawing.called} | {BETWEEN} == set(drawing.pieces)
    assert [operator.name for operator in drawing.pieces[:6]] == [
        "between operators", "batch", "between operators", "embedding", "between operators", "norm + qkv",
    ]  # fmt: skip
