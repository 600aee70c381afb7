"""The reference runs ahead of the rounds until its device has settled, on a virtual clock that its steps move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.verdicts import decided
from fp8bench.errors import WorkerFault
from fp8bench.measure import group as group_module
from fp8bench.measure.device_watch import Settler
from fp8bench.measure.group import GroupMeasurement, Method
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.model import Label, Level, Record
from fp8bench.model.readings import Reading, Readings, Unavailable
from fp8bench.model.stopping import Settling, StoppingRule
from tests.counts import for_each
from tests.fakes import GPU, FakeWorker, Fault, Listener, Script, arm, by_mode, group, lasting, planned

Temperature = Callable[[float], float]


class Warming(AbsentDevice):
    """Its temperature and clock by the seconds that have gone."""

    def __init__(self, worker: FakeWorker, temperature: Temperature, silent: bool = False) -> None:
        super().__init__("nothing to say")
        self.worker, self.temperature, self.silent = worker, temperature, silent

    def glance(self) -> Readings:
        nothing = {name: Unavailable("lost") for name in ("sm_clock", "memory_clock", "temperature", "throttle")}
        if self.silent:
            return nothing
        heat = self.temperature(self.worker.clock())
        known = {"temperature": Reading(heat, "degC", "test"), "sm_clock": Reading(2e9 - 5e6 * heat, "Hz", "test")}
        return {**nothing, **known}


def warming(seconds: float) -> Temperature:
    return lambda at: 65 - 30 * math.exp(-at / seconds)


def measured(
    monkeypatch: pytest.MonkeyPatch, temperature: Temperature, limit: float = 30.0, silent: bool = False,
    level: Level = Level.NATIVE, scripts: Mapping[str, Script] | None = None,
) -> tuple[dict[str, Record], FakeWorker, Listener]:  # fmt: skip
    """The records of a group on such a device, and what was asked and told."""
    worker, listener = FakeWorker(scripts or {"bf16": lasting(5)}), Listener()
    monkeypatch.setattr(group_module, "Settler", partial(Settler, clock=worker.clock))
    method = Method(rule=StoppingRule(fixed=24), judge=decided, seed=0, warm_up_seconds=limit)
    meter = Meter((), Warming(worker, temperature, silent), "no energy")
    cases = group(planned("fp32", level), planned("bf16", level))
    records = GroupMeasurement(cases, {"cpu": GPU}, worker, listener, method, meter).run()
    return by_mode(records), worker, listener


def warm_up(record: Record) -> Settling | None:
    return record.watch.warm_up if record.watch is not None else None


def test_the_reference_runs_until_clock_and_temperature_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    records, worker, listener = measured(monkeypatch, warming(4.0))
    settling = warm_up(records["fp32"])
    assert settling is not None and settling.settled and 5 < settling.seconds < 15 and settling.limit == 30.0
    first, last = settling.looks[0], settling.looks[-1]
    assert first.temperature == pytest.approx(35.0, abs=1.0) and last.temperature == pytest.approx(65.0, abs=2.5)
    assert first.clock is not None and last.clock is not None and first.clock > last.clock
    names = [entry[0] for entry in worker.log]
    loops = [place for place, name in enumerate(names) if name == "loop"]
    assert {worker.log[place][1] for place in loops} == {"fp32"}
    assert names[loops[-1] + 1 :].count("slot") == 24 * 3 and ("fp32", "warming up", 0.0) in listener.told
    assert not any(Label.UNSETTLED in finding.labels for finding in find(list(records.values()), {}))


def test_a_device_that_still_moves_at_the_limit_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    records, _, _ = measured(monkeypatch, lambda at: 30 + 2 * at, limit=5.0)
    settling = warm_up(records["bf16"])
    assert settling is not None and not settling.settled and 5 <= settling.seconds < 5.5
    for finding in find(list(records.values()), {}):
        reason = dict(finding.label_reasons)[Label.UNSETTLED]
        assert reason.startswith("after 5.1") and reason.endswith("degC, +2.0 a second")
        assert "-0.6% a second" in reason and not finding.hard


@for_each("options", [{"silent": True}, {"limit": 0.0}, {"level": Level.EMULATED}])
def test_nothing_runs_where_nobody_can_say_what_suffices(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    records, worker, _ = measured(monkeypatch, warming(4.0), **options)  # type: ignore[arg-type]
    assert warm_up(records["fp32"]) is None and not [entry for entry in worker.log if entry[0] == "loop"]


def test_a_fault_while_warming_up_is_the_reference_s(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Script(faults=[Fault("loop", WorkerFault("ValueError", "boom", "trace"))])
    records, _, _ = measured(monkeypatch, warming(4.0), scripts={"fp32": faulty})
    assert records["fp32"].status.value == "failed" and "boom" in records["fp32"].reason
    assert records["bf16"].is_reference and warm_up(records["bf16"]) is not None


def test_a_long_step_runs_once_between_two_looks() -> None:
    worker, reference = FakeWorker({"fp32": lasting(2_000)}), arm("fp32")
    reference.prepare(worker)
    settling = Settler(Warming(worker, lambda at: 50.0), 30.0, worker.clock).settle(reference, worker)
    assert settling is not None and {entry[2] for entry in worker.log if entry[0] == "loop"} == {1}
    assert not settling.settled or settling.seconds <= 30.0
