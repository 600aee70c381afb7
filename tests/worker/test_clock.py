"""The phase clock: exact sequences of codes and stamps, and marks from autograd's own threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
import torch

from fp8bench.devices.cpu import HostStamper
from fp8bench.measure.slots import cut_step_into_cells
from fp8bench.model import CELL_PHASES, DeviceFacts
from fp8bench.model.raw import Filling
from fp8bench.model.readings import Reading
from fp8bench.protocols import Device, Phases, SilentPhases, Stamper
from fp8bench.registry import precisions
from fp8bench.worker import prepared as prepared_module
from fp8bench.worker.clock import PhaseStampClock, find_shared_phase_marks, measure_overheads
from fp8bench.worker.finite import InitialFiniteElements
from fp8bench.worker.prepared import PreparedCase, State
from fp8bench.worker.step_guards import RunningTasks
from tests.counts import for_each
from tests.pretended_device import run_pretended
from tests.worker.scripted import Stub

CODE = {name: code for code, name in enumerate(CELL_PHASES)}


class CountingStamper(Stamper):
    """Stamps are 0, 10, 20, ... nanoseconds."""

    def __init__(self) -> None:
        self._ticks: Iterator[int] = count(0, 10)

    def source(self) -> Callable[[], Any]:
        return lambda: next(self._ticks)

    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        return HostStamper().intervals_ns(stamps)


@pytest.fixture
def clock() -> PhaseStampClock:
    begun = PhaseStampClock(CountingStamper())
    begun.begin()
    return begun


def codes(*names: str) -> list[int]:
    return [CODE[name] for name in names]


def test_nested_phases_are_exclusive(clock: PhaseStampClock) -> None:
    with clock.elementwise, clock.gemm:
        with clock.cast:
            pass
        with clock.gemm:
            pass
    found = clock.end()
    assert found[0] == codes(
        "unattributed", "elementwise", "gemm", "cast", "gemm", "gemm", "gemm", "elementwise", "unattributed"
    )
    assert found[1] == [10 * tick for tick in range(10)]
    assert cut_step_into_cells(found[0], CountingStamper().intervals_ns(found[1])).segments.phases == (
        "unattributed",
        "elementwise",
        "gemm",
        "cast",
    )


def two_phases(phase: Any) -> None:
    with phase.cast:
        pass
    with phase.gemm:
        pass


def test_a_phase_begins_at_the_stamp_of_the_one_before(clock: PhaseStampClock) -> None:
    """Only at counted places; a step with other marks ends the sharing for good."""
    clock.share([CODE["cast"], ~CODE["cast"], CODE["gemm"], ~CODE["gemm"]], [2])
    for _ in range(2):
        clock.begin()
        two_phases(clock)
        found = clock.end()
        assert found[0] == codes("unattributed", "cast", "gemm", "unattributed") and len(found[1]) == 5
        clock.begin()  # a step whose phases are not marked
        assert clock.end()[0] == codes("unattributed")
    clock.begin()
    two_phases(clock)
    with clock.elementwise:
        pass
    longer = clock.end()
    assert len(longer[1]) == len(longer[0]) + 1 == 7
    clock.begin()
    two_phases(clock)
    assert clock.end()[0] == codes("unattributed", "cast", "unattributed", "gemm", "unattributed")


def test_only_marks_without_a_launch_between_share_a_stamp() -> None:
    """A view launches nothing; a sum between two phases is unattributed time, which must not move into one."""
    x = torch.ones(8, 8)

    def step(phase: Any) -> None:
        y = x + 1
        with phase.cast:
            z = x.to(torch.bfloat16)
        z = z.t().view(8, 8)[:4]
        with phase.gemm:
            z @ z.t()
        y.sum()
        with phase.elementwise:
            y.relu()
        with phase.elementwise, phase.cast:
            pass

    notes, begins = find_shared_phase_marks(step)
    names = ["cast", "gemm", "elementwise", "elementwise"]
    assert [CELL_PHASES[note] for note in notes if note >= 0] == [*names, "cast"]
    assert begins == [2, 6]


def test_a_phase_left_open_says_which(clock: PhaseStampClock) -> None:
    clock.elementwise.__enter__()
    clock.gemm.__enter__()
    with pytest.raises(RuntimeError, match="ended inside elementwise, gemm: every phase opened must be closed"):
        clock.end()


@for_each("closed", [("gemm",), ("cast", "cast"), ("cast", "gemm", "gemm")])
def test_a_phase_closed_out_of_turn_fails_the_step(clock: PhaseStampClock, closed: tuple[str, ...]) -> None:
    """As threads, generators and hooks do that keep a phase open beyond the surrounding phase."""
    clock.begin()
    clock.gemm.__enter__()
    clock.cast.__enter__()
    for name in closed:
        getattr(clock, name).__exit__(None, None, None)
    with clock.elementwise:
        pass
    with pytest.raises(RuntimeError, match="not the innermost open one"):
        clock.end()
    clock.begin()
    clock.end()


def test_an_exception_closes_the_phases_it_passes(clock: PhaseStampClock) -> None:
    with pytest.raises(ZeroDivisionError), clock.elementwise, clock.gemm:
        _ = 1 / 0
    assert clock.end()[0] == codes("unattributed", "elementwise", "gemm", "elementwise", "unattributed")


def test_silent_phases_mark_nothing_and_nest() -> None:
    silent: Phases = SilentPhases()
    with silent.elementwise, silent.gemm, silent.gemm:
        pass
    assert silent.gemm is silent.cast
    with pytest.raises(AttributeError):
        _ = PhaseStampClock(CountingStamper()).attenton  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError), silent.gemm:
        _ = 1 / 0


class QueuedStamper(Stamper):
    """On a device with a queue: the host takes 5 us to enqueue a stamp, the device half a microsecond to take it."""

    def __init__(self) -> None:
        self.host = self.device = 0

    def source(self) -> Callable[[], Any]:
        def stamp() -> int:
            self.host += 5_000
            self.device = max(self.host, self.device + 500)
            return self.device

        return stamp

    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        return HostStamper().intervals_ns(stamps)


class Queued(Device):
    """A device of which nothing but its queue is known."""

    kind = "queued"

    def __init__(self) -> None:
        self.clock = QueuedStamper()

    def available(self) -> tuple[DeviceFacts, ...]:
        return ()

    def stamper(self, index: int) -> Stamper:
        return self.clock

    def synchronise(self, index: int) -> None:
        self.clock.host = max(self.clock.host, self.clock.device)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return False

    def occupy(self, index: int, seconds: float) -> None:
        self.clock.device = max(self.clock.host, self.clock.device) + round(seconds * 1e9)


def test_the_cost_of_an_event_pair_is_the_device_s() -> None:
    """On an idle device an event waits for the host, which takes ten times as long."""
    assert measure_overheads(Queued(), 0).event_pair == pytest.approx(0.5e-6)


class Waiting(Queued):
    """An accelerator that is done with what it is asked as soon as the host goes on, and stamps by the host's clock."""

    def stamper(self, index: int) -> Stamper:
        return HostStamper()

    def synchronise(self, index: int) -> None:
        pass

    def occupy(self, index: int, seconds: float) -> None:
        time.sleep(seconds)


class Moving(Stub):
    """Moves the first stamp of each step by a share of the time that the step takes, however long a loaded machine lets
    it sleep."""

    def step(self, state: Any, phase: Any) -> None:
        begun = time.perf_counter_ns()
        time.sleep(2e-3)
        phase._stamps[0] += round(state * (time.perf_counter_ns() - begun))


FILLING = Filling(4, 1e-3)


def ready_to_move(share: float, device: Device | None = None) -> PreparedCase:
    device = device or Waiting()
    stamper = HostStamper()
    states = (State(share, None, InitialFiniteElements(None), ()),)
    return PreparedCase(
        Moving(), precisions.get("fp32"), device, 0, states, PhaseStampClock(stamper), stamper, RunningTasks()
    )


@for_each(("moved", "filling"), [(0.0, None), (0.0, FILLING), (0.85, None), (0.85, FILLING), (-4.5, None)])
def test_stamps_of_an_accelerator_are_held_against_the_wall_clock(moved: float, filling: Filling | None) -> None:
    prepared = ready_to_move(moved)
    for _ in range(3):
        prepared.slot(8, 0, filling)
    wrong = prepared.check().wrong
    assert wrong.startswith("its steps take a different time than the phase clock counted") if moved else not wrong


class Late(Waiting):
    """Notices 10 ms late that it is done."""

    def synchronise(self, index: int) -> None:
        time.sleep(10e-3)


@for_each(("waited", "accused"), [(0.0, True), (20e-3, False)])
def test_a_host_that_waits_for_a_core_is_not_a_step_that_lies(
    waited: float, accused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot's end, which a machine with too much work notices late, is not accused for that."""
    totals = count(0.0, waited)
    read = {name: Reading(0.0, "", "test") for name in ("preemptions", "steal")}
    monkeypatch.setattr(
        prepared_module, "read_counters", lambda: {**read, "waited": Reading(next(totals), "s", "test")}
    )
    prepared = ready_to_move(0.0, Late())
    for _ in range(3):
        prepared.slot(2, 0)
    assert bool(prepared.check().wrong) is accused


@for_each(("moved", "accused"), [(0.0, False), (0.85, True)])
def test_a_step_is_looked_at_again_before_it_is_accused(moved: float, accused: bool) -> None:
    """A loaded machine lengthens two of the three slots of a short run."""
    prepared = ready_to_move(moved)
    prepared._unexplained_slot_seconds[:] = [1e-3, -1e-3, 1e-3]
    assert bool(prepared.check().wrong) is accused
    assert len(prepared._unexplained_slot_seconds) > 5


@for_each(("moved", "accused"), [(0.0, False), (0.85, True)])
def test_ranks_take_as_many_slots_as_one_of_them_needs(moved: float, accused: bool) -> None:
    """Each asks the others before each slot, which all must begin."""
    prepared = ready_to_move(moved)
    elsewhere = [True] * 4 + [False] * 99
    prepared.is_true_on_any_rank = lambda here: elsewhere.pop(0) or here
    prepared.slot(8, 0)
    assert bool(prepared.check().wrong) is accused
    assert len(prepared._unexplained_slot_seconds) > 4


DEVICE_THREAD = """
from fp8bench.devices.cpu import HostStamper
from fp8bench.protocols import Markers, ReportingMarker
from fp8bench.tape.recorder import OperatorTape
from fp8bench.tape.replay import Recording
from fp8bench.tape.replay import CannotReplay
from fp8bench.worker.clock import PhaseStampClock

threads, local = {}, threading.local()
local.seen = True

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, phase):
        ctx.phase = phase
        threads["forward"] = threading.get_ident(), hasattr(local, "seen")
        with phase.gemm:
            return x * 2

    @staticmethod
    def backward(ctx, gradient):
        threads["backward"] = threading.get_ident(), hasattr(local, "seen")
        with ctx.phase.cast:
            pass
        with ctx.phase.gemm:
            return gradient * 2, None

clock = PhaseStampClock(HostStamper())
for _ in range(2):
    x = Pretended(torch.ones(4)).requires_grad_()
    clock.begin()
    with clock.elementwise:
        y = Doubled.apply(x, clock)
    with clock.elementwise:
        y.backward(Pretended(torch.ones(4)))
    codes, stamps = clock.end()
    assert stamps == sorted(stamps) and len(stamps) == len(codes) + 1
    assert threads["forward"] == (threading.get_ident(), True)
    print(threads["backward"][0] != threading.get_ident(), threads["backward"][1], *codes)

tape = OperatorTape()
with tape:
    x = Pretended(torch.ones(4)).requires_grad_()
    Doubled.apply(x, tape.phases).backward(Pretended(torch.ones(4)))
print(threads["backward"][0] != threading.get_ident(), *((one.phase, one.backward) for one in tape.calls))

class Outside(Doubled):
    @staticmethod
    def forward(ctx, x, phase):
        ctx.phase = phase
        return x * 2

stack = ["unattributed"]
recording = Recording("gemm", stack, 1 << 20, False)
with recording:
    x = Pretended(torch.ones(4)).requires_grad_()
    Outside.apply(x, Markers(lambda name: ReportingMarker(name, stack, str))).backward(Pretended(torch.ones(4)))
try:
    recording.replay()
except CannotReplay as why:
    print(why)
"""


@pytest.mark.slow
def test_marks_of_a_backward_on_another_thread_arrive_in_the_same_clock() -> None:
    """On CUDA backward has a separate thread, which does not see the main thread's thread-locals."""
    expected = codes(
        "unattributed",
        "elementwise",
        "gemm",
        "elementwise",
        "unattributed",
        "elementwise",
        "cast",
        "elementwise",
        "gemm",
        "elementwise",
        "unattributed",
    )
    *clocked, taped, recorded = run_pretended(DEVICE_THREAD)
    assert clocked == [" ".join(["True", "False", *map(str, expected)])] * 2
    # A tape sees that thread's operators, marked as backward, in that thread's phases. So does the recording of a
    # phase, which refuses such tensors.
    assert recorded == "aten.mul.Tensor takes a Pretended, which is a tensor subclass"
    assert taped.startswith("True") and taped.count("('gemm', False)") == taped.count("('gemm', True)") == 1
