"""The last-level cache's contents when a call begins, and the queue of calls: checked by the step itself."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from fp8bench.analysis.labels import collect_hard_labels
from fp8bench.devices.cpu import Cpu, HostStamper
from fp8bench.model import CELL_PHASES, Case, DeviceFacts, Label, Rotation, Segments, SlotSample, Timing
from fp8bench.model.raw import Filling, RawSlot, Settings
from fp8bench.numerics.operands import describe_host_transfer
from fp8bench.protocols import Device, Phases, Setup, Stamper
from fp8bench.registry import devices, workloads
from fp8bench.worker import prepared
from fp8bench.worker.bench import Bench
from tests.worker.scripted import Stub

KIB = 1 << 10
FACTS = replace(Cpu().available()[0], cache_bytes=64 * KIB, cache_shared=2)


@dataclass
class Held:
    """32 KiB."""

    number: int
    tensor: torch.Tensor = field(default_factory=lambda: torch.zeros(8 * KIB))


class Watched(Stub):
    """Its steps note whose they are; preparing fails beyond `most` states."""

    name = "watched"
    steps: ClassVar[list[int]] = []
    made: ClassVar[int] = 0
    most: ClassVar[int] = 1000

    def prepare(self, setup: Setup) -> Held:
        if Watched.made == self.most:
            raise MemoryError
        Watched.made += 1
        return Held(Watched.made - 1)

    def step(self, state: Held, phase: Phases) -> None:
        Watched.steps.append(state.number)
        if Queue.last is not None:
            Queue.last.work()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for registry, name, kind in ((workloads, "watched", Watched), (devices, "queue", Queue)):
        registry.names()
        monkeypatch.setattr(registry, "_leaves", dict(registry._leaves))
        registry.register(name)(kind)  # type: ignore[attr-defined]
    monkeypatch.setattr(Watched, "steps", [])
    monkeypatch.setattr(Watched, "made", 0)
    opened = Bench(Settings())
    yield opened
    Queue.last = None
    opened.close()


def case(cache: str = "hot", device: str = "cpu") -> Case:
    return Case("watched", () if cache == "hot" else (("cache", cache),), "fp32", device)


def stepped(bench: Bench, calls: int, discard: int = 0) -> list[int]:
    Watched.steps.clear()
    bench.slot("key", calls, discard)
    return list(Watched.steps)


def test_rotating_states_take_turns_and_hot_and_cold_have_one(bench: Bench) -> None:
    bench.prepare("key", case("rotating"), FACTS)
    assert bench.rotation("key") == Rotation(4, 32 * KIB)
    assert stepped(bench, 3, 2) == [0, 1, 2, 3, 0] and stepped(bench, 2) == [1, 2]
    Watched.steps.clear()
    bench.loop("key", 3)
    assert Watched.steps == [3, 0, 1]
    bench.release("key")
    for cache in ("hot", "cold"):
        Watched.made = 0
        bench.prepare("key", case(cache), FACTS)
        assert bench.rotation("key").states == 1 and stepped(bench, 2, 1) == [0, 0, 0]
        bench.release("key")


@pytest.mark.parametrize(
    ("cache_bytes", "most", "states"),
    [
        (64 * KIB, 1000, 4),
        (1 << 40, 1000, prepared.MAX_STATES),  # small states: as many as can be prepared in the time
        (64, 1000, 2),  # large states: two, otherwise nothing would rotate
        (64 * KIB, 1, 1),  # out of memory leaves fewer
        (64 * KIB, 3, 3),
    ],
)
def test_the_number_of_states_is_bounded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, cache_bytes: int, most: int, states: int
) -> None:
    monkeypatch.setattr(Watched, "most", most)
    bench.prepare("key", case("rotating"), replace(FACTS, cache_bytes=cache_bytes))
    assert bench.rotation("key") == Rotation(states, 32 * KIB)


def test_a_cold_cache_is_written_over_before_every_call(bench: Bench) -> None:
    bench.prepare("key", case("cold"), FACTS)
    flush = bench._prepared["key"].flush_cache
    assert flush is not None
    covering = flush.func.__self__  # type: ignore[attr-defined]
    assert covering.numel() * covering.element_size() == 2 * FACTS.cache_bytes
    bench.slot("key", 3, 2)
    assert covering.unique().tolist() == [5]


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the clocks that time steps by `seconds`; the hardware's clock does not agree."""
    ahead = [0.0]
    seconds = time.perf_counter
    nanoseconds = time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter", lambda: seconds() + ahead[0])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: nanoseconds() + round(ahead[0] * 1e9))
    monkeypatch.setattr(prepared, "require_agreeing_clocks", lambda clocks: nullcontext())

    def passing(more: float) -> None:
        ahead[0] += more

    return passing


def test_flushing_is_not_timed(
    bench: Bench, pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long calls waited for a core is unknown: the flush may have waited."""
    monkeypatch.setattr("fp8bench.worker.bench.make_cache_flush", lambda facts: partial(pass_time, 1000.0))
    bench.prepare("key", case("cold"), FACTS)
    slot = bench.slot("key", 3, 0)
    assert max(step.seconds for step in slot.steps) < 1000 < 3000 <= slot.wall_seconds
    assert slot.waited_seconds is None


class Queue(Device):
    """A device whose work takes 50 us of device time and 200 us of host time to enqueue; times are the host's clock."""

    kind = "queue"
    last: ClassVar[Queue | None] = None

    def __init__(self) -> None:
        self.free = 0
        Queue.last = self

    def available(self) -> tuple[DeviceFacts, ...]:
        return ()

    def work(self) -> None:
        begun = time.perf_counter_ns()
        while time.perf_counter_ns() < begun + 200_000:
            pass
        self.free = max(self.free, time.perf_counter_ns()) + 50_000

    def stamper(self, index: int) -> Stamper:
        return QueueStamper(self)

    def synchronise(self, index: int) -> None:
        self.free = time.perf_counter_ns()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return False

    def occupy(self, index: int, seconds: float) -> None:
        self.free = max(self.free, time.perf_counter_ns()) + round(seconds * 1e9)


class QueueStamper(HostStamper):
    """Takes a stamp when all work before it is done."""

    def __init__(self, device: Queue) -> None:
        self.device = device

    def source(self) -> Callable[[], Any]:
        return lambda: max(self.device.free, time.perf_counter_ns())


QUEUE = DeviceFacts("queue", 0, "a model", 1 << 30, "2.13", cache_bytes=KIB)


def timing(slot: RawSlot) -> Timing:
    calls = tuple((sum(step.intervals_ns),) for step in slot.steps)
    return Timing(Segments(("gemm",), (0,)), (SlotSample(0, calls, 1.0, 1.0, slot.host_seconds),))


def test_no_call_meets_an_empty_queue(bench: Bench) -> None:
    """In a filled queue calls take the device's time, to the nanosecond; with an empty queue the host's.

    If the host takes longer than the device, there is no verdict.
    """
    bench.prepare("key", case(device="queue:0"), QUEUE)
    empty = bench.slot("key", 3, 0)
    filled = bench.slot("key", 3, 0, Filling(3, 60.0))
    assert all(step.seconds >= 200e-6 for step in empty.steps)
    assert [step.intervals_ns for step in filled.steps] == [(50_000,)] * 3
    assert filled.host_seconds >= 200e-6
    (label,) = collect_hard_labels(timing(filled), None, None, "queue:0")
    assert label.label is Label.LAUNCH_BOUND and label.hard


def test_a_replay_is_one_stretch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.prepare("key", case(device="queue:0"), QUEUE)
    assert bench.capture("key") == "steps on queue devices cannot be replayed"

    graphs = weakref.WeakSet[Any]()

    def captured(self: Queue, index: int, step: Callable[[], object]) -> Callable[[], object]:
        step()

        def replay() -> None:
            self.free += 7_000

        graphs.add(replay)
        return replay

    monkeypatch.setattr(Queue, "captured", captured)
    assert bench.capture("key") == ""
    Watched.steps.clear()
    slot = bench.replay("key", 3, 1, Filling(3, 60.0))
    assert [step.intervals_ns for step in slot.steps] == [(7_000,)] * 3 and Watched.steps == []
    assert stepped(bench, 2) == [0, 0]  # and steps are still steps
    assert len(graphs) == 1
    bench.release("key")
    assert not graphs  # captured graphs are freed with the state, and their memory too


def test_rotating_states_are_replayed_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch steps each state once, and a step counts as their mean; not if all states stay in the cache."""

    def captured(self: Queue, index: int, step: Callable[[], object]) -> Callable[[], object]:
        step()
        return lambda: setattr(self, "free", self.free + 28_000)

    monkeypatch.setattr(Queue, "captured", captured)
    bench.prepare("key", case("rotating", "queue:0"), replace(QUEUE, cache_bytes=64 * KIB))
    Watched.steps.clear()
    assert bench.capture("key") == ""
    assert Watched.steps[-4:] == [0, 1, 2, 3]
    slot = bench.replay("key", 12, 1, Filling(3, 60.0))
    assert [step.intervals_ns for step in slot.steps] == [(7_000,)] * 3
    bench.release("key")
    monkeypatch.setattr(prepared, "MAX_STATES", 2)
    bench.prepare("key", case("rotating", "queue:0"), replace(QUEUE, cache_bytes=64 * KIB))
    assert bench.capture("key") == f"its 2 states ({64 * KIB} B) fit in the last-level cache ({64 * KIB} B)"


def test_fewer_steps_are_marked_where_stamps_take_more_than_their_share(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 50 us with two stamps inside: 0.5% are 125 ns a stamp."""

    def step(self: Watched, state: Held, phase: Phases) -> None:
        with phase.gemm:
            assert Queue.last is not None
            Queue.last.work()

    monkeypatch.setattr(Watched, "step", step)
    marked = {}
    for nanoseconds in (100, 300, 1e6):
        monkeypatch.setattr(prepared, "stamp_cost", lambda device, index, cost=nanoseconds: cost * 1e-9)
        bench.prepare("key", case(device="queue:0"), QUEUE)
        for _ in range(2):  # the first slot shows what its steps take
            slot = bench.slot("key", 40, 0, Filling(40, 60.0))
        marked[nanoseconds] = [number for number, step in enumerate(slot.steps) if len(step.codes) > 1]
        assert all(abs(step.seconds - 50e-6) < 1e-9 for step in slot.steps)
        bench.release("key")
    assert marked == {100: list(range(40)), 300: list(range(0, 40, 3)), 1e6: [0, 32]}


def test_marks_share_stamps_in_suites_whose_launches_are_known(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with a work queue, but not if a user's suite may launch kernels itself."""

    def step(self: Watched, state: Held, phase: Phases) -> None:
        with phase.cast:
            pass
        with phase.gemm:
            pass

    monkeypatch.setattr(Watched, "step", step)
    counts = []
    for module, facts in (("tests.own", QUEUE), ("fp8bench.workloads.own", QUEUE), ("fp8bench.workloads.own", FACTS)):
        monkeypatch.setattr(Watched, "__module__", module)
        bench.prepare("key", case(device=facts.key), facts)
        counts.append(len(bench.slot("key", 1, 0).steps[0].codes))
        bench.release("key")
    assert counts == [5, 4, 5]


def test_a_graph_with_marks_takes_its_stamps_in_each_replay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest replay counts; a device whose events cannot be captured has none."""

    def step(self: Watched, state: Held, phase: Phases) -> None:
        with phase.gemm:
            pass

    class Captured(HostStamper):
        """Stamps are places; what a replay writes there is read afterwards."""

        times: ClassVar[list[int]] = []

        def source(self) -> Callable[[], Any]:
            Captured.times.clear()
            return lambda: Captured.times.append(0) or len(Captured.times) - 1  # type: ignore[func-returns-value]

        def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
            return super().intervals_ns([Captured.times[stamp] for stamp in stamps])

    replays = iter(range(900, 100, -10))

    def captured(self: Queue, index: int, step: Callable[[], object]) -> Callable[[], object]:
        step()

        def replay() -> None:
            length = next(replays)
            Captured.times[:] = [0, 10, 10 + length, 20 + length]

        return replay

    monkeypatch.setattr(Watched, "step", step)
    bench.prepare("key", case(device="queue:0"), QUEUE)
    assert bench.replay_phases("key") is None
    monkeypatch.setattr(Queue, "captured", captured)
    monkeypatch.setattr(Queue, "captured_stamper", lambda self, index: Captured())
    marked = bench.replay_phases("key")
    assert marked is not None and marked.intervals_ns == (10, 810, 10)
    assert [CELL_PHASES[code] for code in marked.codes] == ["unattributed", "gemm", "unattributed"]


def test_what_replays_take_is_loaded_ahead_of_each(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []

    def load(self: Watched, state: Held) -> None:
        loads.append(len(Watched.steps))
        assert Queue.last is not None
        Queue.last.work()

    def captured(self: Queue, index: int, step: Callable[[], object]) -> Callable[[], object]:
        step()
        return lambda: setattr(self, "free", self.free + 7_000)

    monkeypatch.setattr(Watched, "load", load)
    monkeypatch.setattr(Queue, "captured", captured)
    bench.prepare("key", case(device="queue:0"), QUEUE)
    assert bench.capture("key") == "" and not loads  # a suite that does not declare its loads is not asked to
    monkeypatch.setattr(Watched, "loads", "its batches")
    Watched.steps.clear()
    assert bench.capture("key") == "" and loads == [0] and len(Watched.steps) == 2
    Watched.steps.clear()
    slot = bench.replay("key", 3, 1, Filling(1, 60.0))
    assert loads == [0] * 5 and [step.intervals_ns for step in slot.steps] == [(7_000,)] * 3


def test_a_step_that_needs_its_host_is_not_captured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "step", lambda self, state, phase: state.tensor.to("meta"))
    bench.prepare("key", case(device="queue:0"), QUEUE)
    assert bench.capture("key").startswith("its step takes data from the host (aten._to_copy")


def test_what_moves_between_host_and_device() -> None:
    host = torch.zeros(2)
    device = torch.zeros(2, device="meta")
    number = torch.tensor(1.0)
    assert (
        describe_host_transfer("aten.add.Tensor", [device, number], [device])
        == describe_host_transfer("aten.add.Tensor", [host], [host])
        == ""
    )
    assert (
        describe_host_transfer("aten._scaled_dot_product_efficient_attention.default", [device], [device, number]) == ""
    )
    assert "takes data from the host" in describe_host_transfer("aten.copy_.default", [device, number], [device])
    assert "waits for a value" in describe_host_transfer("aten._local_scalar_dense.default", [device], [])
    assert "waits for a value" in describe_host_transfer("aten._local_scalar_dense.default", [device.sum()], [])
    assert "waits for a value" in describe_host_transfer("aten._to_copy.default", [device], [host])
