"""What each arm of a training takes by itself, in passes of their own before and after its steps."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.errors import WorkerError, WorkerFault
from fp8bench.jobs.observer import TrainingObserver
from fp8bench.jobs.train.seed import lab_of
from fp8bench.measure.handle import START_SECONDS, Worker
from fp8bench.measure.interrupts import held_back
from fp8bench.model.training import Arm, ArmCost, ArmRole, SeedTask, Training
from fp8bench.store.trainings import TrainingWriter, load_training


def measure_memory(training: Training, worker: Worker, writer: TrainingWriter, observer: TrainingObserver) -> None:
    """The memory of every arm alone, ahead of all steps; a training that is gone on with has it already."""
    known = {one.arm for one in load_training(writer.path).of(ArmCost)}
    missing = [arm for arm in arms_of_their_own(training) if arm.name not in known]
    for arm in missing:
        observer.working(arm.name, "measuring the memory")
        try:
            cost = lab_of(worker, START_SECONDS).alone(task_of(training, arm))
        except WorkerError as error:
            if not isinstance(error, WorkerFault):
                worker.restart()
            cost = ArmCost(arm.name, training.request.seed, why=f"its memory could not be measured: {error}")
        with held_back():
            writer.append((cost,))
    if missing and training.device.accelerated:
        worker.restart()  # no GPU is timed in a process that has listened to its memory


def arms_of_their_own(training: Training) -> Iterator[Arm]:
    """Repeats and other seeds of the reference take what it takes."""
    return (arm for arm in training.arms if not arm.skip and arm.role in (ArmRole.REFERENCE, ArmRole.CANDIDATE))


def task_of(training: Training, *arms: Arm) -> SeedTask:
    """Of the first seed."""
    request = training.request
    return SeedTask(
        request.seed, arms, request.settings, request.steps, request.stride, training.text, training.device
    )  # fmt: skip
