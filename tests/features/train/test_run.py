"""A training from its plan to its stream: slices, checkpoints, what faults cost, what a resumption makes again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench import files
from fp8bench.errors import NotKept, StoreError, UsageError, WorkerFault, WorkerLost
from fp8bench.features.train import run as job
from fp8bench.features.train.kind import ResumePlace, TrainingWriter, load_training, reopen_training, training_files
from fp8bench.features.train.page import page_of
from fp8bench.features.train.request import BANDS, TrainingRequest
from fp8bench.features.train.values import (
    REFERENCE_SECONDS,
    ArmCost,
    KeptTraining,
    StepFigure,
    StepRow,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.measure.sensors.looks import Looks, Query
from fp8bench.measure.sensors.meter import Meter, Meters
from fp8bench.measure.sensors.nvml import QUERIES
from fp8bench.model import DeviceFacts, EnergyUse
from fp8bench.model.raw import StateCheck
from fp8bench.model.readings import Reading, Readings, Unavailable
from fp8bench.report.elements import Lines
from tests.facts import H200
from tests.measure.powered import IDLE, Power, sampling
from tests.trainings import LOST, FakeLab, NotedTraining, said, small, strikes

Trained = Callable[..., tuple[KeptTraining, FakeLab, NotedTraining]]


@pytest.fixture
def trained(store: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Train with a lab that trains nothing, or go on with the training that is there."""
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: None)
    Path("text.txt").write_text("every token is a byte of this text. " * 4000)

    def train(lab: FakeLab, request: TrainingRequest | None = None) -> tuple[KeptTraining, FakeLab, NotedTraining]:
        monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: lab)
        seen = NotedTraining()
        kept = job.resume(training_files(store)[0], store, seen)[1] if request is None else job.train(
            request, store, seen, "fp8bench train"
        )  # fmt: skip
        assert lab.closed
        return kept, lab, seen

    return train


def kinds(kept: KeptTraining) -> list[str]:
    return [event.kind for event in kept.of(TrainingEvent)]


def test_every_arm_is_trained_in_every_seed(trained: Trained) -> None:
    """Every step once, with looks at held-out text, and all of it kept; what one ulp does in the first seed alone."""
    kept, lab, seen = trained(FakeLab(), small(bands=BANDS))
    assert kept.finished and not kept.troubles and seen.places[-1] == (1, 20)
    rows = [(row.seed, row.arm, row.step) for row in kept.of(StepRow)]
    arms = ["bf16", "bf16 again", "bf16 other seed", "fp8"]
    assert sorted(rows) == sorted(
        [(seed, arm, step) for seed in (0, 1) for arm in arms for step in range(20)]
        + [(0, "bf16 one ulp", step) for step in range(20)]
    )
    assert len(set(rows)) == len(rows)
    looks = [(one.seed, one.arm, one.step) for one in kept.of(Validation)]
    assert sorted(looks) == sorted(
        [(seed, arm, step) for seed in (0, 1) for arm in arms for step in (0, 10, 20)]
        + [(0, "bf16 one ulp", step) for step in (0, 10, 20)]
    )
    sizes = [(one.arm, one.layer, one.value) for one in kept.of(StepFigure) if one.seed == 0]
    assert ("fp8", "weights", 4.0) in sizes and ("fp8", "moments", 8.0) in sizes
    assert kept.training.parameters == 1000 and lab.restarts == 0


def test_slices_take_turns_in_an_order_of_the_seed(trained: Trained) -> None:
    """Short, of all arms, in different orders, and the same orders whenever it is done again."""
    orders = []
    for _ in range(2):
        _, lab, _ = trained(FakeLab(), small(steps=60, keep=60, evaluate=60))
        slices = [words for words in lab.log if words[0] == "advance"]
        assert {words[2] for words in slices} == {"5"}
        first = [arm for _, arm, _ in slices[:48]]
        rounds = [tuple(first[at : at + 4]) for at in range(0, 48, 4)]
        assert all(sorted(one) == ["bf16", "bf16 again", "bf16 other seed", "fp8"] for one in rounds)
        assert len(set(rounds)) > 4
        orders.append(rounds)
    assert orders[0] == orders[1]


def test_the_last_two_checkpoints_are_kept(trained: Trained, store: Path) -> None:
    """Of the seed that goes on: at steps 6, 12 and 18; the seed before needs none."""
    interrupted = FakeLab(strikes("fp8", 19, KeyboardInterrupt(), seed=1))
    kept, _, _ = trained(interrupted, small(steps=30))
    folder = Path(kept.path).parent
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["1-12", "1-18"]
    places = json.loads((folder / "places.json").read_text())
    assert [(one["number"], one["step"]) for one in places["places"]] == [(1, 0), (1, 12), (1, 18)]


@pytest.mark.parametrize("step", [0, 3, 6, 10, 17])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_was_cut_off_is_gone_on_with_to_the_same_lines(trained: Trained, step: int, seed: int) -> None:
    """Interrupted anywhere: nothing is there twice, nothing is missing, and it says when it was gone on with."""
    whole, _, _ = trained(FakeLab(), small())
    half, _, _ = trained(FakeLab(strikes("fp8", step, KeyboardInterrupt(), seed=seed)), small())
    assert not half.finished and said(half) == said(whole)[: len(said(half))] != said(whole)
    rest, _, _ = trained(FakeLab())
    assert rest.finished and said(rest) == said(whole) and kinds(rest) == ["resumed"]


def test_every_arm_is_looked_at_alone_before_the_first_step(trained: Trained) -> None:
    """Once, but for the repeat and the other seed, also where the training is cut off in between and gone on with."""
    for arm, name, again in (("", "alone", ["alone"] * 2), ("fp8", "advance", [])):
        trained(FakeLab(strikes(arm, 0, KeyboardInterrupt(), name=name)), small())
        kept, lab, _ = trained(FakeLab())
        assert [one.arm for one in kept.of(ArmCost)] == ["bf16", "fp8"] and kept.finished
        assert (
            isinstance(kept.lines[-1], Validation) and [words[0] for words in lab.log if words[0] == "alone"] == again
        )


def test_no_gpu_is_trained_on_in_a_process_that_has_listened_to_its_memory(trained: Trained) -> None:
    """A fresh worker takes its place between the last measurement and the first step."""
    log: list[tuple[str, ...]] = []

    class Logged(FakeLab):
        def restart(self) -> None:
            super().restart()
            self.log.append(("restart",))

    kept, lab, _ = trained(Logged(facts=H200, log=log), small())
    steps = [words[0] for words in log if words[0] in ("alone", "restart", "advance")]
    assert steps[:4] == ["alone", "alone", "restart", "advance"] and lab.restarts == 1 and kept.finished


def test_memory_that_nobody_could_measure_has_a_reason(trained: Trained) -> None:
    """A lost worker is replaced, and the training goes on."""
    kept, lab, _ = trained(FakeLab(strikes("", 0, name="alone")), small())
    first, second = kept.of(ArmCost)
    assert first.memory is None and "could not be measured: the worker crashed" in first.why
    assert second.memory is not None and kept.finished and lab.restarts == 1


def test_the_largest_batch_of_every_arm_is_looked_for_after_the_last_step(trained: Trained) -> None:
    """Alone, with its own settings; also where the training is cut off there, and gone on with."""
    request = small(max_batch=True, memory_limit=100_000, sweep=(("micro-batches", ("1", "2")),))
    for fault in (lambda *asked: None, strikes("", 0, KeyboardInterrupt(), name="try_alone", seed=1)):
        kept, _, _ = trained(FakeLab(fault), request)
        if not kept.finished:
            kept, _, _ = trained(FakeLab())
        found = {one.arm: one.capacity for one in kept.of(ArmCost) if one.capacity}
        tokens = {arm: one.tokens // one.batch for arm, one in found.items() if one.batch}
        assert kept.finished and tokens == {"bf16": 96, "fp8": 96, "fp8 micro-batches=2 batch=1": 192}
        assert all(one and (one.batch, one.beyond, one.peak) == (100, 101, 100_000) for one in found.values())
    assert not any(words[0] == "try_alone" for words in trained(FakeLab(), small())[1].log)


@dataclass
class PoweredLab(FakeLab):
    """A lab whose further steps take 10 ms, and their arm's watts of the device. `stopped` has no more steps."""

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


def test_every_arm_has_the_energy_of_its_own_power(trained: Trained, powered: PoweredLab) -> None:
    """In three windows after the last step, by a counter whose truth is known; one that has stopped has a reason."""
    powered.stopped = "mxfp8"
    kept, _, seen = trained(powered, small(energy=True, dtypes=("bf16", "fp8", "mxfp8")))
    found = {one.arm: one.energy for one in kept.of(ArmCost) if one.energy}
    for arm, watts in (("bf16", 400.0), ("fp8", 300.0)):
        assert len(found[arm].windows) == (1 if arm == "fp8" else 3), "an emulated arm has one: its energy is a cost"
        for window in found[arm].windows:
            assert window.joules / window.seconds == pytest.approx(watts, rel=0.01) and window.steps > 0
    assert found["mxfp8"] == EnergyUse("counter", why="it has stopped") and kept.finished
    assert "measuring the energy of fp8" in seen.doings and isinstance(kept.lines[-1], ArmCost)


def test_without_a_counter_the_reason_is_kept_and_no_step_more_is_run(trained: Trained, powered: PoweredLab) -> None:
    powered.power.broken = "the counter is gone"
    kept, lab, _ = trained(powered, small(energy=True))
    (why,) = {one.energy.why for one in kept.of(ArmCost) if one.energy}
    assert why == "counter: the counter is gone" and not any(words[0] == "loop" for words in lab.log)
    assert not [one for one in trained(PoweredLab(), small())[0].of(ArmCost) if one.energy]
    powered.power.broken = ""
    apart = trained(powered, small(energy=True, memory_limit=33_000))[0].of(ArmCost)
    assert {one.energy.why for one in apart if one.energy} == {job.APART}


class BusyDevice(Looks):
    """A driver that tells how busy the device is, in part."""

    def _read(self, wanted: tuple[Query, ...]) -> Readings:
        return {"use": Reading(0.75, "share", "x"), "memory_use": Unavailable("no"), "power": Reading(300.0, "W", "x")}

    queries = QUERIES


def test_what_the_driver_says_of_use_is_kept(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """About once a second, of no arm; nobody asks a processor's."""
    opened = []

    class Driver(Meters):
        def of(self, facts: DeviceFacts) -> Meter:
            opened.append(facts.kind)
            return Meter((), BusyDevice())

    monkeypatch.setattr(job, "Meters", Driver)
    kept, _, _ = trained(FakeLab(facts=H200), small(device="cuda"))
    use = [(one.arm, one.value) for one in kept.of(StepFigure) if one.name.startswith("device_")]
    assert use and set(use) == {("", 0.75)}
    assert {one.name for one in kept.of(StepFigure) if not one.arm} == {"device_use"}
    page = page_of(kept, verdicts_of(kept.training, kept.lines))
    charts = {one.name: one for part in page.parts for one in part.elements if isinstance(one, Lines)}
    assert charts.get("device-use") is None or charts["device-use"].series[0][0] == "kernels"
    trained(FakeLab(), small())
    assert opened == ["cuda"]


# FakeLab's arms keep 12,000 bytes each, and need 8,000 more in a step: two fit.
PAIRS = {"memory_limit": 33_000, "dtypes": ("bf16", "fp8", "mxfp8")}
MORE_PAIRS = (pytest.param(*one, marks=pytest.mark.slow) for one in (("fp8", 7, 0), ("bf16", 7, 1)))


def test_arms_that_do_not_fit_together_are_trained_in_pairs(trained: Trained) -> None:
    """To the same lines as together, each once, with the times of the reference beside each; it says so."""
    whole, _, _ = trained(FakeLab(), small(dtypes=PAIRS["dtypes"]))
    kept, lab, _ = trained(FakeLab(), small(**PAIRS))
    begun = [words for words in lab.log if words[0] == "begin"]
    assert len(begun) == 1 + 4 + 4 and kept.finished and lab.restarts == 0, "one to count the reference's parameters"
    for kind in (StepRow, Validation):
        assert sorted(kept.of(kind), key=str) == sorted(whole.of(kind), key=str)
    beside = [one for one in kept.of(StepFigure) if one.name == REFERENCE_SECONDS]
    assert {(one.seed, one.arm) for one in beside} == {
        (seed, arm) for seed in (0, 1) for arm in ("bf16 other seed", "fp8", "mxfp8")
    }
    assert all(one.value == 0.5 for one in beside) and len(beside) == 6 * 20
    (event,) = kept.of(TrainingEvent)
    assert event.kind == "pairs" and "all arms need 66.4 KiB together, and there are 32.2 KiB: " in event.words


@pytest.mark.parametrize(("arm", "at", "seed"), [("bf16", 0, 0), ("mxfp8", 19, 1), *MORE_PAIRS])
def test_pairs_are_gone_on_with_to_the_same_lines(trained: Trained, arm: str, at: int, seed: int) -> None:
    """Interrupted in any of them, or having lost the worker there."""
    whole, _, _ = trained(FakeLab(), small(**PAIRS))
    for error in (KeyboardInterrupt(), LOST):
        half, _, _ = trained(FakeLab(strikes(arm, at, error, seed=seed)), small(**PAIRS))
        rest = half if half.finished else trained(FakeLab())[0]
        assert rest.finished and said(rest) == said(whole)


def test_an_arm_that_fits_alone_only_has_no_speed(trained: Trained) -> None:
    """And one that fits nowhere is out before the first step, with the bytes."""
    kept, _, _ = trained(FakeLab(), small(memory_limit=31_000))
    assert kinds(kept) == ["pairs", *["unpaired"] * 6] and kept.finished
    with pytest.raises(UsageError, match=r"the reference bf16 needs .* Choose a smaller --model"):
        trained(FakeLab(), small(memory_limit=19_000))


def test_a_limit_is_asked_for_where_the_machine_would_run_full(trained: Trained) -> None:
    with pytest.raises(UsageError, match=r"--max-batch on cpu needs --memory-limit SIZE"):
        trained(FakeLab(), small(max_batch=True))


def test_a_finished_training_is_not_touched(trained: Trained, store: Path) -> None:
    kept, _, seen = trained(FakeLab(), small(seeds=1))
    assert job.resume(Path(kept.path), store, seen) == (False, kept)


def test_it_is_resumed_again_and_again(trained: Trained) -> None:
    """Without a new checkpoint in between too; every resumption is told."""
    whole, _, _ = trained(FakeLab(), small())
    trained(FakeLab(strikes("fp8", 9, KeyboardInterrupt())), small())
    for _ in range(3):
        half, _, _ = trained(FakeLab(strikes("fp8", 7, KeyboardInterrupt())))
        assert not half.finished
    rest, _, _ = trained(FakeLab())
    assert said(rest) == said(whole) and kinds(rest) == ["resumed"] * 4


def test_a_damaged_checkpoint_is_passed_over(trained: Trained, store: Path) -> None:
    """The one before it is taken, or the first step where all are damaged."""
    whole, _, _ = trained(FakeLab(), small())
    for damaged in (["0-18"], ["0-12", "0-18"]):
        half, _, _ = trained(FakeLab(strikes("fp8", 18, KeyboardInterrupt())), small())
        for name in damaged:
            (Path(half.path).parent / "checkpoints" / name / "state.json").write_text("{")
        rest, _, seen = trained(FakeLab())
        assert said(rest) == said(whole) and len(seen.notes) == len(damaged)
        assert damaged[-1] in seen.notes[0] and "holds no whole checkpoint" in seen.notes[0]


def test_a_stream_that_lost_its_end_is_made_again(trained: Trained) -> None:
    """By a power failure, say: a place that it does not reach to is none."""
    whole, _, _ = trained(FakeLab(), small())
    half, _, _ = trained(FakeLab(strikes("fp8", 18, KeyboardInterrupt())), small())
    path = Path(half.path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert load_training(path).troubles
    rest, _, _ = trained(FakeLab())
    assert said(rest) == said(whole) and not rest.troubles


def test_a_lost_worker_costs_the_steps_since_the_checkpoint(trained: Trained) -> None:
    """A fresh one goes on, and the stream is as if nothing had happened, but for the event."""
    whole, _, _ = trained(FakeLab(), small())
    kept, lab, _ = trained(FakeLab(strikes("fp8", 15)), small())
    assert kept.finished and lab.restarts == 1 and said(kept) == said(whole)
    (event,) = kept.of(TrainingEvent)
    assert (event.kind, event.arm, event.seed, event.step) == ("restarted", "fp8", 0, 12)
    assert "the worker crashed" in event.words


@pytest.mark.parametrize("name", ["begin", "save", "restore"])
def test_a_worker_lost_between_slices_is_replaced_once(trained: Trained, name: str) -> None:
    """It is no arm's fault; the second time the training ends, and what was kept stays."""
    whole, _, _ = trained(FakeLab(), small())
    if name == "restore":
        trained(FakeLab(strikes("fp8", 7, KeyboardInterrupt())), small())
    request = None if name == "restore" else small()
    counted = strikes("", 0, times=2, name=name)
    asked = [1 if name == "begin" else 0]  # the first one is asked to count the reference's parameters

    def fault(*words: object) -> BaseException | None:
        if words[0] == name and asked[0]:
            asked[0] -= 1
            return None
        return counted(*words)  # type: ignore[arg-type]

    with pytest.raises(WorkerLost):
        trained(FakeLab(fault), request)
    kept, lab, _ = trained(FakeLab(strikes("", 0, name=name)))
    assert said(kept) == said(whole) and lab.restarts == 1
    assert [event.arm for event in kept.of(TrainingEvent) if event.kind == "restarted"] == ["", ""]


@pytest.mark.parametrize("error", [WorkerLost("gone"), WorkerFault("RuntimeError", "out of memory", "", True)])
def test_an_arm_that_fails_twice_is_out(trained: Trained, error: Exception) -> None:
    """With the reason, in the seeds to come too; the others go on to their ends."""
    lab = FakeLab(strikes("fp8", 15, error, times=2))
    kept, lab, _ = trained(lab, small(dtypes=("bf16", "fp8", "mxfp8")))
    assert kept.finished and lab.restarts == 2 and kinds(kept) == ["restarted", "out"]
    assert str(error) in kept.of(TrainingEvent)[1].words
    rows = {(row.seed, row.arm): row.step for row in kept.of(StepRow)}
    assert rows[0, "fp8"] == 11 and (1, "fp8") not in rows
    assert {rows[seed, arm] for seed in (0, 1) for arm in ("bf16", "mxfp8", "bf16 other seed")} == {19}


def test_an_arm_that_is_out_stays_out_after_a_resumption(trained: Trained) -> None:
    fault, stop = strikes("fp8", 7, times=2), strikes("bf16", 18, KeyboardInterrupt())
    half, _, _ = trained(FakeLab(lambda *asked: fault(*asked) or stop(*asked)), small())
    assert kinds(half) == ["restarted", "out"] and not half.finished
    rest, lab, _ = trained(FakeLab())
    assert rest.finished and kinds(rest) == ["restarted", "out", "resumed"] and ("drop", "fp8") in lab.log
    assert {row.seed for row in rest.of(StepRow) if row.arm == "fp8"} == {0}
    assert max(row.step for row in rest.of(StepRow) if row.arm == "fp8") == 5


def test_without_its_reference_a_training_ends(trained: Trained, store: Path) -> None:
    whole, _, _ = trained(FakeLab(), small())
    with pytest.raises(WorkerLost, match="crashed"):
        trained(FakeLab(strikes("bf16", 8, times=2)), small())
    half = load_training(training_files(store)[0])
    assert not half.finished and kinds(half) == ["restarted"]
    rest, _, _ = trained(FakeLab())
    assert said(rest) == said(whole)


@pytest.mark.parametrize("what", ["append", "keep", "checkpoint"])
def test_a_full_disk_ends_it_with_what_was_kept(trained: Trained, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """In the middle of any write; there is room again when it is gone on with."""
    whole, _, _ = trained(FakeLab(), small())
    plain, calls = getattr(TrainingWriter, what), [0]

    def full(self: TrainingWriter, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise StoreError("no space left on device")
        return plain(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingWriter, what, full)
        with pytest.raises(NotKept, match="no space left") as caught:
            trained(FakeLab(), small())
    assert isinstance(caught.value.run, KeptTraining) and not caught.value.run.finished
    rest, _, _ = trained(FakeLab())
    assert said(rest) == said(whole)


def test_the_worker_s_full_disk_is_the_store_s(trained: Trained) -> None:
    error = WorkerFault("StoreError", "the checkpoint cannot be written (No space left on device). Make room.")
    fault = strikes("", 0, error, name="save")
    with pytest.raises(NotKept, match=r"^the checkpoint cannot be written"):
        trained(FakeLab(fault), small())


OTHERS: dict[str, Callable[[FakeLab], None]] = {
    "torch was 2.13.0 and is 2.14.0": lambda lab: setattr(lab, "facts", replace(lab.facts, torch="2.14.0")),
    "cpu was a processor and is another": lambda lab: setattr(lab, "facts", replace(lab.facts, name="another")),
}  # fmt: skip


@pytest.mark.parametrize("why", OTHERS)
def test_it_goes_on_only_where_it_began(trained: Trained, why: str) -> None:
    """Another torch or device would not go on to the same losses: nothing is changed."""
    half, _, _ = trained(FakeLab(strikes("fp8", 7, KeyboardInterrupt())), small())
    before = Path(half.path).read_bytes()
    other = FakeLab()
    OTHERS[why](other)
    with pytest.raises(UsageError, match=f"{half.training.id} cannot be resumed here: {why}"):
        trained(other)
    assert Path(half.path).read_bytes() == before


def test_another_text_is_no_resumption(trained: Trained) -> None:
    trained(FakeLab(strikes("fp8", 7, KeyboardInterrupt())), small())
    Path("text.txt").write_text("another text. " * 10_000)
    with pytest.raises(UsageError, match=r"its text was text:.* and is text:"):
        trained(FakeLab())
    Path("text.txt").unlink()
    with pytest.raises(UsageError, match=r"there is no file text\.txt here, which it reads"):
        trained(FakeLab())


def test_two_processes_never_write_one_training(trained: Trained, store: Path) -> None:
    half, _, _ = trained(FakeLab(strikes("fp8", 7, KeyboardInterrupt())), small())
    writer = reopen_training(Path(half.path))
    assert replace(writer.places[-1], digest="") == ResumePlace(0, 6, writer.places[-1].length, "0-6")
    with pytest.raises(StoreError, match="another process is writing the training"):
        trained(FakeLab())
    writer.close()
    assert trained(FakeLab())[0].finished


def steep(row: StepRow) -> StepRow:
    """Gradients of fp8 that jump in a step, unless they are clipped harder."""
    ill = row.arm.startswith("fp8") and "clip" not in row.arm and row.step == 27
    return replace(row, gradient_norm=50.0 if ill else 1.0)


def test_remedies_of_an_alarm_are_tried(trained: Trained) -> None:
    """Once a seed, from the checkpoint before it, beside the arm as it was; the training goes on as if nothing was."""
    request = small(steps=40, keep=12, seeds=1)
    plain = trained(FakeLab(change=steep), request)[0]
    assert kinds(plain) == ["alarm"]
    kept, lab, _ = trained(FakeLab(change=steep), replace(request, try_fix=True))
    assert kinds(kept) == ["alarm", "tried-fix"] and kept.finished
    event = kept.of(TrainingEvent)[1]
    assert (event.arm, event.step, event.remedy) == ("fp8", 27, "clip gradients harder")
    assert "from step 24 on" in event.words
    branched = [words for words in lab.log if words[0] == "branch"]
    assert len(branched) == 3 and all(words[1].endswith("0-24") for words in branched)
    assert sorted(words[1] for words in lab.log if words[0] == "drop") == [
        "fp8: a lower learning rate", "fp8: as it was", "fp8: clip gradients harder",
    ]  # fmt: skip
    assert kept.of(StepRow) == plain.of(StepRow), "lines of trials are no lines of the training"


def test_remedies_are_tried_from_the_first_step_where_no_checkpoint_keeps_the_arm(trained: Trained) -> None:
    """Also where the worker is lost meanwhile: they are not tried again, and the training goes on."""
    request = small(steps=40, keep=40, seeds=1, try_fix=True)
    kept, _, _ = trained(FakeLab(change=steep), request)
    assert "from step 0 on" in kept.of(TrainingEvent)[1].words
    lost = FakeLab(strikes("fp8: as it was", 10), change=steep)
    kept, lab, _ = trained(lost, request)
    assert kept.finished and lab.restarts == 1
    assert kinds(kept) == ["restarted", "alarm"]


def test_a_training_that_is_gone_on_with_tries_nothing_twice(trained: Trained) -> None:
    """What was tried before the checkpoint stands; what came after it is done again, and says the same."""
    request = small(steps=40, keep=12, seeds=1, try_fix=True)
    whole = trained(FakeLab(change=steep), request)[0]
    for at in (30, 36):
        trained(FakeLab(strikes("fp8", at, KeyboardInterrupt()), change=steep), request)
        kept, lab, _ = trained(FakeLab(change=steep))
        assert said(kept) == said(whole)
        assert ("branch" in {words[0] for words in lab.log}) == (at == 30)
