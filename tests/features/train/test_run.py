"""A training from its plan to its stream: slices, checkpoints, what faults cost, and what a resume repeats."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.errors import NotKept, StoreError, UsageError, WorkerFault, WorkerLost
from fp8bench.features.train import run as job
from fp8bench.features.train.kind import KIND, TrainingWriter, load_training, reopen_training
from fp8bench.features.train.request import CHANCE_ARM_ROLES
from fp8bench.features.train.values import (
    ArmCost,
    SeedTask,
    StepFigure,
    StepRow,
    StoredTraining,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.features.train.view import list_training_notes, render_all
from fp8bench.measure.sensors.driver import DeviceValueQuery
from fp8bench.measure.sensors.meter import Meter, Meters
from fp8bench.measure.sensors.nvml import DeviceReader
from fp8bench.model import DeviceFacts, EnergyUse, MemoryUse
from fp8bench.model.raw import StateCheck
from fp8bench.model.readings import Reading, Readings, UnavailableReading
from fp8bench.report.terminal.layout import render
from tests.counts import for_each
from tests.facts import H200
from tests.features.train.conftest import Trained
from tests.measure.powered import IDLE, Power, sampling
from tests.trainings import FakeLab, said, small, strikes

CUT_OFF = KeyboardInterrupt()


def kinds(kept: StoredTraining) -> list[str]:
    return [event.kind for event in kept.select_lines(TrainingEvent)]


def asked(lab: FakeLab, *names: str) -> list[str]:
    return [words[0] for words in lab.log if words[0] in names]


def test_every_arm_is_trained_in_every_seed(trained: Trained) -> None:
    """The one-ulp arm only in the first."""
    kept, lab, seen = trained(FakeLab(), small(bands=CHANCE_ARM_ROLES))
    assert kept.finished and not kept.troubles and seen.places[-1] == (1, 20)
    arms = [(seed, arm) for seed in (0, 1) for arm in ("bf16", "bf16 again", "fp8")]
    arms.append((0, "bf16 one ulp"))
    for kind, steps in ((StepRow, range(20)), (Validation, (0, 10, 20))):
        told = [(line.seed, line.arm, line.step) for line in kept.select_lines(kind)]
        assert sorted(told) == sorted((*arm, step) for arm in arms for step in steps)
    sizes = [
        (figure.layer, figure.value)
        for figure in kept.select_lines(StepFigure)
        if (figure.arm, figure.seed) == ("fp8", 0)
    ]
    assert sizes == [("weights", 4.0), ("moments", 8.0)]
    assert kept.training.parameters == 1000 and lab.restarts == 0


def test_slices_take_turns_in_an_order_of_the_seed(trained: Trained) -> None:
    def rounds() -> list[Sequence[str]]:
        _, lab, _ = trained(FakeLab(), small(steps=60, keep=60, evaluate=60))
        slices = [words for words in lab.log if words[0] == "advance"]
        assert {words[2] for words in slices} == {"5"}
        first = [words[1] for words in slices[:36]]
        return [first[at : at + 3] for at in range(0, 36, 3)]

    orders = rounds()
    assert all(sorted(order) == ["bf16", "bf16 again", "fp8"] for order in orders)
    assert len(set(map(tuple, orders))) > 4 and rounds() == orders


def test_the_last_two_checkpoints_are_kept(trained: Trained) -> None:
    kept, _, _ = trained(FakeLab(strikes("fp8", 19, CUT_OFF, seed=1)), small(steps=30))
    folder = Path(kept.path).parent
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["1-12", "1-18"]
    places = json.loads((folder / "places.json").read_text())["places"]
    assert [(place["number"], place["step"]) for place in places] == [(1, 0), (1, 12), (1, 18)]


def test_a_resumed_training_has_the_same_lines(trained: Trained) -> None:
    """Interrupted anywhere, repeatedly, also without a new checkpoint in between."""
    whole, _, _ = trained(FakeLab(), small())
    for seed, step in ((0, 0), (0, 6), (1, 17)):
        half, _, _ = trained(FakeLab(strikes("fp8", step, CUT_OFF, seed=seed)), small())
        assert not half.finished and said(half) == said(whole)[: len(said(half))] != said(whole)
        rest, _, _ = trained(FakeLab())
        assert rest.finished and said(rest) == said(whole) and kinds(rest) == ["resumed"]
    trained(FakeLab(strikes("fp8", 9, CUT_OFF)), small())
    assert not any(trained(FakeLab(strikes("fp8", 7, CUT_OFF)))[0].finished for _ in range(3))
    rest, _, seen = trained(FakeLab())
    assert said(rest) == said(whole) and kinds(rest) == ["resumed"] * 4
    assert job.resume(Path(rest.path), Path(rest.path).parents[2], seen) == (False, rest)


def test_every_arms_memory_is_measured_once_before_the_first_step(trained: Trained) -> None:
    """Without bands; also if the training is interrupted in between."""
    for arm, name, again in (("", "measure_memory", ["measure_memory"] * 2), ("fp8", "advance", [])):
        trained(FakeLab(strikes(arm, 0, CUT_OFF, name=name)), small())
        kept, lab, _ = trained(FakeLab())
        assert [cost.arm for cost in kept.select_lines(ArmCost)] == ["bf16", "fp8"] and kept.finished
        assert isinstance(kept.lines[-1], Validation) and asked(lab, "measure_memory") == again


def test_a_gpus_memory_is_measured_in_a_process_of_its_own(trained: Trained) -> None:
    class Logged(FakeLab):
        def restart(self) -> None:
            super().restart()
            self.log.append(("restart",))

    kept, lab, _ = trained(Logged(facts=H200), small())
    assert asked(lab, "measure_memory", "restart", "advance")[:4] == [
        "measure_memory",
        "measure_memory",
        "restart",
        "advance",
    ]
    assert lab.restarts == 1 and kept.finished


def test_memory_that_could_not_be_measured_has_a_reason(trained: Trained) -> None:
    kept, lab, _ = trained(FakeLab(strikes("", 0, name="measure_memory")), small())
    first, second = kept.select_lines(ArmCost)
    assert first.memory is None and "could not be measured: the worker crashed" in first.why
    assert second.memory is not None and kept.finished and lab.restarts == 1


@dataclass
class SizedLab(FakeLab):
    """A sequence takes 1,000 bytes and 0.1 s, and the update 0.5 s; a batch above `most` ends the worker's memory."""

    most: int = 100

    def _measure_memory(self, task: SeedTask) -> ArmCost:
        self.task = task
        (arm,) = task.arms
        batch = task.settings.batch or 1
        if batch > self.most:
            raise WorkerFault("OutOfMemoryError", "CUDA out of memory", "", out_of_memory=True)
        return ArmCost(arm.name, task.seed, memory=MemoryUse(1000 * batch))

    def _loop(self, arm: str, steps: int) -> float:
        assert self.task is not None
        return steps * (0.1 * self.task.settings.batch * self.task.settings.micro_batches + 0.5)


def test_each_native_arm_has_its_largest_batch_and_its_pace(trained: Trained) -> None:
    """A real run gives the batch, doubling the micro-batches the update's time. fp8 is emulated on a CPU."""
    kept, *_ = trained(SizedLab(), small(own_batch=12_500))
    (cost,) = [cost for cost in kept.select_lines(ArmCost) if cost.capacity is not None]
    found = cost.capacity
    assert found is not None and (cost.arm, found.batch, found.beyond, found.peak) == ("bf16", 12, 13, 12_000)
    assert (
        found.seconds == pytest.approx([1.7] * 8) and found.update == pytest.approx(0.5) and "500 B more" in found.why
    )
    shown = " ".join(render(render_all(JudgedTraining(kept))).split())
    assert "Each arm at its own batch" in shown and "h for 1 G tokens" in shown
    full, _, _ = trained(SizedLab(most=7), small(own_batch=12_500))
    assert [cost.capacity.batch for cost in full.select_lines(ArmCost) if cost.capacity] == [7]
    faulty, _, _ = trained(SizedLab(strikes("", 0, name="loop")), small(own_batch=12_500))
    assert faulty.finished and "bf16: no largest batch was found: the worker crashed" in " ".join(
        render(render_all(JudgedTraining(faulty))).split()
    )


@dataclass
class PoweredLab(FakeLab):
    """Further steps take 10 ms, at the arm's watts. `stopped` names an arm that has no more steps."""

    power: Power = field(default_factory=Power)
    stopped: str = ""

    def _check(self, key: str) -> StateCheck:
        return StateCheck("it has stopped" if key == self.stopped else "")

    def _loop(self, key: str, steps: int) -> float:
        assert key != self.stopped and key in self.steps
        end = self.power.clock.now() + 0.01 * steps
        self.power.set(400.0 if key == "bf16" else 300.0)
        if sampling():
            self.power.clock.wait(lambda: self.power.clock.now() >= end)
        else:
            self.power.state.now_ns = round(end * 1e9)
        self.power.set(IDLE)
        return 0.01 * steps


@pytest.fixture
def powered(monkeypatch: pytest.MonkeyPatch) -> PoweredLab:
    lab = PoweredLab()

    class OneMeter(Meters):
        def of(self, facts: DeviceFacts) -> Meter:
            return lab.power.meter()

    monkeypatch.setattr(job, "Meters", OneMeter)
    return lab


def energies(kept: StoredTraining) -> dict[str, EnergyUse]:
    return {cost.arm: cost.energy for cost in kept.select_lines(ArmCost) if cost.energy}


def test_every_arm_has_the_energy_of_its_own_power(trained: Trained, powered: PoweredLab) -> None:
    """The counter's truth is known; a stopped arm has a reason."""
    powered.stopped = "mxfp8"
    kept, _, seen = trained(powered, small(energy=True, dtypes=("bf16", "fp8", "mxfp8")))
    for arm, watts, count in (("bf16", 400.0, 3), ("fp8", 300.0, 1)):  # an emulated arm has one: its energy is a cost
        windows = energies(kept)[arm].windows
        assert len(windows) == count and all(window.steps > 0 for window in windows)
        assert [window.joules / window.seconds for window in windows] == [pytest.approx(watts, rel=0.01)] * count
    assert energies(kept)["mxfp8"] == EnergyUse("counter", why="it has stopped") and kept.finished
    assert "measuring the energy of fp8" in seen.doings and isinstance(kept.lines[-1], ArmCost)


def test_an_empty_cell_of_energy_has_a_reason(trained: Trained, powered: PoweredLab) -> None:
    training, _, _ = trained(powered, small(energy=True))
    lines = [
        replace(line, energy=EnergyUse("counter")) if isinstance(line, ArmCost) and line.energy else line
        for line in training.lines
    ]
    notes = list(list_training_notes(JudgedTraining(replace(training, lines=tuple(lines)))))
    assert "energy of bf16 and fp8: no window was measured" in notes


def test_without_a_counter_the_reason_is_kept_and_no_further_step_taken(trained: Trained, powered: PoweredLab) -> None:
    powered.power.broken = "the counter is gone"
    kept, lab, _ = trained(powered, small(energy=True))
    assert {use.why for use in energies(kept).values()} == {"counter: the counter is gone"} and not asked(lab, "loop")
    assert not energies(trained(PoweredLab(), small())[0])


class BusyDevice(DeviceReader):
    """A driver that reports part of how busy the device is."""

    def _read_queries(self, wanted: tuple[DeviceValueQuery, ...]) -> Readings:
        return {
            "use": Reading(0.75, "share", "x"),
            "memory_use": UnavailableReading("no"),
            "power": Reading(300.0, "W", "x"),
        }


def test_the_drivers_figures_of_use_are_kept(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """About once a second, for no particular arm; never on a CPU."""
    opened = []

    class Driver(Meters):
        def of(self, facts: DeviceFacts) -> Meter:
            opened.append(facts.kind)
            return Meter((), BusyDevice())

    monkeypatch.setattr(job, "Meters", Driver)
    kept, _, _ = trained(FakeLab(facts=H200), small(device="cuda"))
    use = {(figure.name, figure.value) for figure in kept.select_lines(StepFigure) if not figure.arm}
    assert use == {("device_use", 0.75)}
    trained(FakeLab(), small())
    assert opened == ["cuda"]


def test_arms_that_do_not_fit_together_are_refused_once_they_are_measured(trained: Trained) -> None:
    """FakeLab's arms store 12,000 bytes each, and need 8,000 more in a step."""
    lab = FakeLab()
    lab.facts = replace(lab.facts, memory_bytes=40_000)
    with pytest.raises(UsageError, match=r"the 3 arms need 43\.0 KiB together, and there are 35\.2 KiB"):
        trained(lab, small())
    assert not asked(lab, "advance")


def test_a_damaged_checkpoint_is_skipped(trained: Trained) -> None:
    """The previous one is used, or the first step. A truncated stream does not reach its last place."""
    whole, _, _ = trained(FakeLab(), small())
    for damaged in (["0-18"], ["0-12", "0-18"], []):
        half, _, _ = trained(FakeLab(strikes("fp8", 18, CUT_OFF)), small())
        path = Path(half.path)
        for name in damaged:
            (path.parent / "checkpoints" / name / "state.json").write_text("{")
        if not damaged:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            assert load_training(path).troubles
        rest, _, seen = trained(FakeLab())
        assert said(rest) == said(whole) and len(seen.notes) == len(damaged) and not rest.troubles
        assert all("holds no complete checkpoint" in note for note in seen.notes)


def test_a_lost_worker_costs_the_steps_since_the_checkpoint(trained: Trained) -> None:
    whole, _, _ = trained(FakeLab(), small())
    kept, lab, _ = trained(FakeLab(strikes("fp8", 15)), small())
    assert kept.finished and lab.restarts == 1 and said(kept) == said(whole)
    (event,) = kept.select_lines(TrainingEvent)
    assert (event.kind, event.arm, event.seed, event.step) == ("restarted", "fp8", 0, 12)
    assert "the worker crashed" in event.words


@for_each("name", ["begin", "save", "restore"])
def test_a_worker_lost_between_slices_is_replaced_once(trained: Trained, name: str) -> None:
    whole, _, _ = trained(FakeLab(), small())
    if name == "restore":
        trained(FakeLab(strikes("fp8", 7, CUT_OFF)), small())
    request = None if name == "restore" else small()
    # the first counts parameters
    counted = strikes("", 0, times=2, name=name)
    spared = [name == "begin"]

    def fault(*words: Any) -> BaseException | None:
        if words[0] == name and spared[0]:
            spared[0] = False
            return None
        return counted(*words)

    with pytest.raises(WorkerLost):
        trained(FakeLab(fault), request)
    kept, lab, _ = trained(FakeLab(strikes("", 0, name=name)))
    assert said(kept) == said(whole) and lab.restarts == 1
    assert [event.arm for event in kept.select_lines(TrainingEvent) if event.kind == "restarted"] == ["", ""]


@for_each("error", [WorkerLost("gone"), WorkerFault("RuntimeError", "out of memory", "", True)])
def test_an_arm_that_fails_twice_is_out(trained: Trained, error: WorkerLost) -> None:
    kept, lab, _ = trained(FakeLab(strikes("fp8", 15, error, times=2)), small(dtypes=("bf16", "fp8", "mxfp8")))
    assert kept.finished and lab.restarts == 2 and kinds(kept) == ["restarted", "out"]
    assert str(error) in kept.select_lines(TrainingEvent)[1].words
    rows = {(row.seed, row.arm): row.step for row in kept.select_lines(StepRow)}
    assert rows[0, "fp8"] == 11 and (1, "fp8") not in rows
    assert {rows[seed, arm] for seed in (0, 1) for arm in ("bf16", "mxfp8")} == {19}


def test_an_arm_that_is_out_stays_out_after_a_resumption(trained: Trained) -> None:
    fault = strikes("fp8", 7, times=2)
    stop = strikes("bf16", 18, CUT_OFF)
    half, _, _ = trained(FakeLab(lambda *words: fault(*words) or stop(*words)), small())
    rest, lab, _ = trained(FakeLab())
    assert not half.finished and kinds(half) == ["restarted", "out"]
    assert rest.finished and kinds(rest) == ["restarted", "out", "resumed"] and ("drop", "fp8") in lab.log
    assert {(row.seed, row.step) for row in rest.select_lines(StepRow) if row.arm == "fp8"} == {
        (0, step) for step in range(6)
    }


def test_without_its_reference_a_training_ends(trained: Trained, store: Path) -> None:
    whole, _, _ = trained(FakeLab(), small())
    with pytest.raises(WorkerLost, match="crashed"):
        trained(FakeLab(strikes("bf16", 8, times=2)), small())
    half = load_training(KIND.files(store)[0])
    assert not half.finished and kinds(half) == ["restarted"]
    assert said(trained(FakeLab())[0]) == said(whole)


@for_each("what", ["append", "store_point", "make_checkpoint_folder"])
def test_a_full_disk_ends_it_with_what_was_kept(trained: Trained, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """In any write, also the worker's; with free space it can be resumed."""
    whole, _, _ = trained(FakeLab(), small())
    plain = getattr(TrainingWriter, what)
    calls = [0]

    def full(self: TrainingWriter, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise StoreError("no space left on device")
        return plain(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingWriter, what, full)
        with pytest.raises(NotKept, match="no space left") as caught:
            trained(FakeLab(), small())
    assert isinstance(caught.value.run, StoredTraining) and not caught.value.run.finished
    error = WorkerFault("StoreError", "the checkpoint cannot be written (No space left on device). Make room.")
    with pytest.raises(NotKept, match=r"^the checkpoint cannot be written"):
        trained(FakeLab(strikes("", 0, error, name="save")))
    assert said(trained(FakeLab())[0]) == said(whole)


OTHERS: dict[str, Callable[[FakeLab], object]] = {
    "torch was 2.13.0 and is 2.14.0": lambda lab: setattr(lab, "facts", replace(lab.facts, torch="2.14.0")),
    "cpu was a processor and is another": lambda lab: setattr(lab, "facts", replace(lab.facts, name="another")),
    r"its text was text:.* and is text:": lambda lab: Path("text.txt").write_text("another text. " * 10_000),
    r"it reads text\.txt, which does not exist here": lambda lab: Path("text.txt").unlink(),
}  # fmt: skip


def test_a_training_resumes_only_where_it_began(trained: Trained) -> None:
    """Another torch, device or text would change losses. Two processes never write one training."""
    half, _, _ = trained(FakeLab(strikes("fp8", 7, CUT_OFF)), small())
    before = Path(half.path).read_bytes()
    writer = reopen_training(Path(half.path))
    assert (writer.points[-1].number, writer.points[-1].step, writer.points[-1].folder) == (0, 6, "0-6")
    with pytest.raises(StoreError, match="another process is writing the training"):
        trained(FakeLab())
    writer.close()
    for why, change in OTHERS.items():
        lab = FakeLab()
        change(lab)
        with pytest.raises(UsageError, match=f"{half.training.id}.*{why}"):
            trained(lab)
        assert Path(half.path).read_bytes() == before
