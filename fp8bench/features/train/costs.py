"""What each arm of a training takes by itself, in passes of their own before and after its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8bench.errors import WorkerError, WorkerFault
from fp8bench.features.train.arms import supported
from fp8bench.features.train.kept import TrainingWriter, load_training
from fp8bench.features.train.lab.models import config_of
from fp8bench.features.train.observer import TrainingObserver
from fp8bench.features.train.request import SETTINGS_RULES, TrainingRequest
from fp8bench.features.train.seed import FIRST_SECONDS, lab_of
from fp8bench.features.train.values import Arm, ArmCost, ArmRole, SeedTask, Training
from fp8bench.measure import arm as measured
from fp8bench.measure.capacity import Batches, BatchSearch
from fp8bench.measure.handle import Worker
from fp8bench.measure.interrupts import held_back
from fp8bench.measure.sensors.meter import Meter, Meters
from fp8bench.measure.sensors.sampler_thread import SourceKind
from fp8bench.measure.windows import WindowPass, WindowRule
from fp8bench.model import Case, EnergyUse, Level, PlannedCase, Support, Work

APART = "its arms do not fit into memory together, and windows of one beside the other are what compares"
SEVERAL = "several ranks train together, and energy is measured of one process"
# Steps that say how long one takes.
_FEW_STEPS = 3


def measure_memory(training: Training, worker: Worker, writer: TrainingWriter, observer: TrainingObserver) -> None:
    """The memory of every arm alone, ahead of all steps; a training that is gone on with has it already."""
    missing = _without(training, writer, lambda cost: not (cost.capacity or cost.energy))
    for arm in missing:
        observer.working(arm.name, "measuring the memory")
        try:
            cost = lab_of(worker, FIRST_SECONDS).alone(task_of(training, arm))
        except WorkerError as error:
            if not isinstance(error, WorkerFault):
                worker.restart()
            cost = ArmCost(arm.name, training.request.seed, why=f"its memory could not be measured: {error}")
        with held_back():
            writer.append((cost,))
    if missing and training.device.accelerated:
        worker.restart()  # no GPU is timed in a process that has listened to its memory


def measure_energy(
    training: Training, worker: Worker, writer: TrainingWriter, observer: TrainingObserver, apart: bool
) -> None:
    """Of every arm in windows of its own, by further steps of what the last seed has left in memory."""
    request, facts = training.request, training.device
    missing = _without(training, writer, lambda cost: cost.energy is not None) if request.energy else []
    if not missing:
        return
    if request.ranks is not None:
        _keep_energy(writer, request, {arm.name: EnergyUse(SourceKind.NONE, why=SEVERAL) for arm in missing})
        return
    with Meters() as meters:
        meter = meters.of(facts)
        if meter.kind is SourceKind.NONE:
            found = {arm.name: EnergyUse(SourceKind.NONE, why=meter.why) for arm in missing}
        elif apart:
            found = {arm.name: EnergyUse(meter.kind.value, why=APART) for arm in missing}
        else:
            found = _in_windows(training, missing, worker, meter, observer)
    _keep_energy(writer, request, found)


def _keep_energy(writer: TrainingWriter, request: TrainingRequest, found: Mapping[str, EnergyUse]) -> None:
    with held_back():
        writer.append([ArmCost(name, request.seed, request.steps, energy=use) for name, use in found.items()])


def _in_windows(
    training: Training, arms: Sequence[Arm], worker: Worker, meter: Meter, observer: TrainingObserver
) -> dict[str, EnergyUse]:
    """What the meter says of each arm, or why it says nothing."""
    found: dict[str, EnergyUse] = {}
    running = []
    for arm in arms:
        try:
            why = worker.within(FIRST_SECONDS).check(arm.name).wrong
            seconds = 0.0 if why else worker.within(FIRST_SECONDS).loop(arm.name, _FEW_STEPS) / _FEW_STEPS
        except WorkerError as error:
            why = str(error)
        if why:
            found[arm.name] = EnergyUse(meter.kind.value, why=why)
        else:
            running.append(_windowed(training, arm, seconds))
    rule = WindowRule(windows=1, idle_seconds=1.5) if training.request.seeds == 1 else WindowRule()
    windows = WindowPass(
        meter, rule, training.request.seed, lambda arm, share: observer.working(arm.key, "measuring the energy")
    )
    return found | {name: one.use for name, one in windows.measure(running, worker).items()}


def _windowed(training: Training, arm: Arm, seconds: float) -> measured.Arm:
    """The arm as windows know one: a case whose step takes so long."""
    facts = training.device
    support = Support(Level.NATIVE if arm.native else Level.EMULATED, "")
    case = Case("train", (), arm.precision, facts.key)
    return measured.Arm(arm.name, PlannedCase(case, support, Work()), facts, step_seconds=max(seconds, 1e-7))


def largest_batches(training: Training, worker: Worker, writer: TrainingWriter, observer: TrainingObserver) -> None:
    """Of every arm that was trained, after all steps: what runs out of memory may take the worker with it."""
    request, facts = training.request, training.device
    missing = _without(training, writer, lambda cost: cost.capacity is not None) if request.max_batch else []
    for arm in missing:
        batches = _OfArm(training, arm, worker, observer)
        found = BatchSearch(
            batches, request.memory_limit, request.memory_limit or facts.memory_bytes, worker.restart
        ).found()
        with held_back():
            writer.append((ArmCost(arm.name, request.seed, request.steps, capacity=found),))


@dataclass(frozen=True)
class _OfArm(Batches):
    """The batches of an arm: sequences in a micro-batch."""

    _training: Training
    _arm: Arm
    _worker: Worker
    _observer: TrainingObserver

    @property
    def axis(self) -> str:
        return "batch"

    @property
    def start(self) -> int:
        return config_of(self._training.request.settings, 1).batch

    def level(self, batch: int) -> Level | None:
        if not SETTINGS_RULES["batch"].holds(batch):
            return None
        request = self._training.request
        settings = replace(request.settings, batch=batch)
        found = supported(self._arm, replace(request, settings=settings), self._training.device)
        return Level.REFUSED if found.skip else Level.NATIVE if found.native else Level.EMULATED

    def tokens(self, batch: int) -> int:
        settings = self._training.request.settings
        return batch * config_of(settings, 1).sequence * self._arm.taken(settings).micro_batches

    def run(self, batch: int) -> int | None:
        self._observer.working(self._arm.name, f"trying a batch of {batch}")
        task = task_of(self._training, self._arm)
        task = replace(task, settings=replace(task.settings, batch=batch))
        return lab_of(self._worker, FIRST_SECONDS).try_alone(task, self._training.request.memory_limit)


def _without(training: Training, writer: TrainingWriter, has: Callable[[ArmCost], bool]) -> list[Arm]:
    """The arms that have no such line yet. Repeats and other seeds of the reference take what it takes."""
    known = {cost.arm for cost in load_training(writer.path).of(ArmCost) if has(cost)}
    own = (ArmRole.REFERENCE, ArmRole.CANDIDATE)
    return [arm for arm in training.arms if not arm.skip and arm.role in own and arm.name not in known]


def task_of(training: Training, *arms: Arm) -> SeedTask:
    """Of the first seed."""
    request = training.request
    return SeedTask(
        request.seed, arms, request.settings, request.steps, request.stride, training.text, training.device
    )  # fmt: skip
