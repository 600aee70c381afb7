"""Device readings while arms alternate, and how long the reference runs until they settle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.labels import label_shared_device
from fp8bench.analysis.verdicts import is_case_decided
from fp8bench.measure import group as group_module
from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.device_watch import SessionWatch, Settler
from fp8bench.measure.group import GroupMeasurement, MeasurementMethod
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.model import DeviceWatch, Label, Level, Record, SlotSample
from fp8bench.model.readings import Reading, ReadingOrUnavailable, Readings, UnavailableReading
from fp8bench.model.stopping import DeviceSettling, StoppingRule
from tests.counts import for_each
from tests.fakes import GPU, MS, FakeWorker, Listener, Script, arm, by_mode, group, lasting, planned


def reading(value: float) -> Reading:
    return Reading(value, "", "test")


class Device(AbsentDevice):
    """Says what it is given, look by look; violations grow by a second each time."""

    def __init__(
        self,
        *looks: Mapping[str, float | None],
        violations: tuple[ReadingOrUnavailable, ReadingOrUnavailable] | None = None,
    ) -> None:
        super().__init__("not asked")
        self.looks, self.asked = looks, 0
        self._violations = list(violations or (reading(1.0), reading(1.0)))

    def read_changing_state(self) -> Readings:
        look = self.looks[self.asked]
        self.asked += 1
        names = ("throttle", "sm_clock", "temperature")
        return {name: UnavailableReading("lost") if (value := look[name]) is None else reading(value) for name in names}

    def read_throttled_seconds(self) -> Readings:
        return {"thermal": self._violations.pop(0), "power-cap": reading(0.0)}


def look(throttle: int = 0, clock: float | None = 1.5e9, temperature: float | None = 50) -> dict[str, float | None]:
    return {"throttle": throttle, "sm_clock": clock, "temperature": temperature}


class Shared(Device):
    """On which others have work, more of them when it is over; two parts of it are somebody else's."""

    mig_instance_count = 3

    def count_other_processes(self, pid: int) -> Reading:
        assert pid == 42
        self.asked_for_others = getattr(self, "asked_for_others", 0) + 1
        return reading(self.asked_for_others)


def test_other_processes_on_the_device_are_labelled() -> None:
    for device, pid, counted, reason in (
        (Shared(), 42, (2, 2), "2 other processes on the device, 2 other slices of the device"),
        (Device(), 42, (None, 0), ""),
        (Device(), None, (None, 0), ""),
    ):
        watch = SessionWatch(device, pid=pid)
        watch.finish()
        seen = watch.summarise_arm(arm("bf16"))
        assert (seen.others, seen.slices) == counted
        assert [(label.label, label.reason, label.hard) for label in label_shared_device(seen)] == [
            (Label.SHARED, reason, False) for _ in "." if reason
        ]
    assert list(label_shared_device(None)) == []


class Clock:
    """Moved by a test."""

    now = 10.0

    def __call__(self) -> float:
        return self.now


def watched(
    device: Device, *rounds: tuple[str, ...], slot_seconds: float = 1.0, look_seconds: float = 0.0
) -> dict[str, tuple[DeviceWatch, MeasuredArm]]:
    """Readings of each arm by precision, in `rounds` rounds."""
    clock = Clock()
    arms = {name: arm(name) for name in chain.from_iterable(rounds)}
    worker = FakeWorker({})
    for one in arms.values():
        one.prepare(worker)
    watch = SessionWatch(device, clock=clock)

    def read_changing_state(plain: Callable[[], Readings] = device.read_changing_state) -> Readings:
        clock.now += look_seconds
        return plain()

    device.read_changing_state = read_changing_state  # type: ignore[method-assign]
    for number, names in enumerate(rounds):
        for name in names:
            arms[name].run(worker, number)
            clock.now += slot_seconds
            watch.read_state_after_slot(arms[name])
    watch.finish()
    return {name: (watch.summarise_arm(one), one) for name, one in arms.items()}


def test_readings_belong_to_the_arm_of_the_last_slot() -> None:
    device = Device(look(0x4), look(0x40, 1.2e9, 80), look(0x4, 1.4e9, 60), look(0x1, 1.6e9, 40))
    found = watched(device, ("fp32", "bf16"), ("fp32",), ("fp32",))
    (a, first), (b, _) = found["fp32"], found["bf16"]
    assert (a.looks, a.throttle, a.sm_clock, a.sm_clock_lowest, a.temperature) == (3, 0x5, 1.5e9, 1.4e9, 60)
    assert (b.looks, b.throttle, b.sm_clock) == (1, 0x40, 1.2e9)
    assert [slot.clock for slot in first.slots] == [1.5e9, 1.4e9, 1.6e9]
    assert a.seconds == b.seconds == 4 and a.held == () and a.why == ""


def test_a_mean_clock_counts_slots_by_how_long_they_took() -> None:
    one = arm("fp32")
    one.prepare(FakeWorker({}))
    slots = [
        SlotSample(number, ((10 * MS,),), wall, wall, clock=clock)
        for number, (wall, clock) in enumerate([(3.0, 1e9), (1.0, 2e9), (50.0, None)])
    ]
    assert replace(one.timing(), slots=tuple(slots)).clock == pytest.approx(1.25e9)
    assert one.timing().clock is None


def test_reading_the_driver_takes_at_most_a_twentieth_of_the_time() -> None:
    device = Device(*[look()] * 300)
    found = watched(device, *[("fp32", "bf16")] * 100, slot_seconds=0.01, look_seconds=0.002)
    (_, first), (_, second) = found.values()
    rounds = {slot.round for slot in first.slots if slot.clock is not None}
    assert 0 in rounds and rounds == {slot.round for slot in second.slots if slot.clock is not None}
    assert 0.03 * 2.0 < 0.002 * device.asked <= 0.05 * (2.0 + 0.002 * device.asked) + 2 * 0.002
    for slot_seconds in (0.01, 0.0):  # readings that take no time are always due, even with a coarse clock
        quick = Device(*[look()] * 200)
        watched(quick, *[("fp32", "bf16")] * 100, slot_seconds=slot_seconds)
        assert quick.asked == 200


@for_each(
    ("after", "held", "why"),
    [
        (reading(5.25), (("thermal", 0.25),), ""),
        (UnavailableReading("it fell off the bus"), (), "thermal: it fell off the bus"),
        (reading(4.0), (), "thermal: test went back from 5.0 to 4.0 "),
    ],
)
def test_throttled_seconds_are_counted_over_the_session(
    after: ReadingOrUnavailable, held: tuple[tuple[str, float], ...], why: str
) -> None:
    watch = SessionWatch(Device(violations=(reading(5.0), after)), clock=Clock())
    watch.finish()
    seen = watch.summarise_arm(arm("fp32"))
    assert seen.held == held and seen.why == why and seen.looks == 0 and seen.throttle is None


Temperature = Callable[[float], float]


class Warming(AbsentDevice):
    """Its temperature and clock by the seconds that have gone."""

    def __init__(self, worker: FakeWorker, temperature: Temperature, silent: bool = False) -> None:
        super().__init__("nothing to say")
        self.worker, self.temperature, self.silent = worker, temperature, silent

    def read_changing_state(self) -> Readings:
        nothing = {name: UnavailableReading("lost") for name in ("sm_clock", "temperature", "throttle")}
        if self.silent:
            return nothing
        heat = self.temperature(self.worker.clock())
        known = {"temperature": Reading(heat, "degC", "test"), "sm_clock": Reading(2e9 - 5e6 * heat, "Hz", "test")}
        return {**nothing, **known}


def warming(seconds: float) -> Temperature:
    return lambda at: 65 - 30 * math.exp(-at / seconds)


def measured(
    monkeypatch: pytest.MonkeyPatch,
    temperature: Temperature,
    limit: float = 30.0,
    silent: bool = False,
    level: Level = Level.NATIVE,
    scripts: Mapping[str, Script] | None = None,
) -> tuple[dict[str, Record], FakeWorker, Listener]:
    """The records of a group on such a device, with its requests and reports."""
    worker, listener = FakeWorker(scripts or {"bf16": lasting(5)}), Listener()
    monkeypatch.setattr(group_module, "Settler", partial(Settler, clock=worker.clock))
    method = MeasurementMethod(rule=StoppingRule(fixed=24), judge=is_case_decided, seed=0, warm_up_seconds=limit)
    meter = Meter((), Warming(worker, temperature, silent), "no energy")
    cases = group(planned("fp32", level), planned("bf16", level))
    records = GroupMeasurement(cases, {"cpu": GPU}, worker, listener, method, meter).run()
    return by_mode(records), worker, listener


def warm_up(record: Record) -> DeviceSettling | None:
    return record.watch.warm_up if record.watch is not None else None


def test_the_reference_runs_until_the_device_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    records, worker, listener = measured(monkeypatch, warming(4.0))
    settling = warm_up(records["fp32"])
    assert settling.settled and 5 < settling.seconds < 15 and settling.limit == 30.0
    first, last = settling.looks[0], settling.looks[-1]
    assert first.temperature == pytest.approx(35.0, abs=1.0) and last.temperature == pytest.approx(65.0, abs=2.5)
    assert first.clock is not None and last.clock is not None and first.clock > last.clock
    names = [entry[0] for entry in worker.log]
    loops = [place for place, name in enumerate(names) if name == "loop"]
    assert {worker.log[place][1] for place in loops} == {"fp32"}
    assert names[loops[-1] + 1 :].count("slot") == 24 * 3 and ("fp32", "warming up", 0.0) in listener.told
    assert not any(Label.UNSETTLED in finding.labels for finding in find(list(records.values()), {}))


def test_a_device_that_has_not_settled_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    records, _, _ = measured(monkeypatch, lambda at: 30 + 2 * at, limit=5.0)
    settling = warm_up(records["bf16"])
    assert not settling.settled and 5 <= settling.seconds < 5.5
    for finding in find(list(records.values()), {}):
        reason = dict(finding.label_reasons)[Label.UNSETTLED]
        assert reason.startswith("after 5.1") and reason.endswith("degC, +2.0 a second")
        assert "-0.6% a second" in reason and not finding.hard


@for_each("options", [{"silent": True}, {"limit": 0.0}, {"level": Level.EMULATED}])
def test_without_sensors_there_is_no_warm_up(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    records, worker, _ = measured(monkeypatch, warming(4.0), **options)  # type: ignore[arg-type]
    assert warm_up(records["fp32"]) is None and not [entry for entry in worker.log if entry[0] == "loop"]
