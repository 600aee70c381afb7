"""The worker's side of a training: all arms of one seed, which live beside each other.

It answers all that a bench does, and is asked in this order: `begin`; `restore`, if the seed was begun before; then
`advance`, `validate` and `save` as the parent likes, until the next `begin`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8bench.errors import UsageError
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import Arm, ArmCost, ArmState, SeedTask, StreamLine
from fp8bench.model.raw import StateCheck
from fp8bench.model.step import Coverage
from fp8bench.protocols import Arithmetic, Device, Phases, Precision, SilentPhases
from fp8bench.registry import precisions, workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.device_layout import EMULATES_NOTHING, OF_SEVERAL, DeviceLedger, Hardware, hardware_for
from fp8bench.worker.faults import DescribedFault, described
from fp8bench.worker.main import main
from fp8bench.worker.memory_pass import Make, PreparedMemory, Told, memory_of_step, try_batch, watch_of
from fp8bench.worker.step_guards import aside
from fp8bench.worker.switches import unchanged, under
from fp8bench.workloads.model import MADE

if TYPE_CHECKING:
    from fp8bench.features.train.lab.trainer import Trainer

# What a ProcessWorker runs to have one.
MODULE = "fp8bench.features.train.lab.lab"
# So many steps before the last one are gone over again: other batches each time, at the rate that a training ends with.
_LAST = 50


class NotFinite(RuntimeError):
    """An arm that has stopped, whose steps are none any more."""


class NotBuilt(RuntimeError):
    """An arm whose model or optimizer could not be made."""


class Lab(Bench):
    """The trainers of a seed by the names of their arms."""

    _task: SeedTask  # of the seed that was begun
    _rank = 0

    def begin(self, task: SeedTask) -> tuple[ArmState, ...]:
        """Forget the seed before, and build every arm of this one. Why one cannot be is said when it is asked for."""
        self._forget(task)
        for arm in task.arms:
            try:
                self._trainers[arm.name] = self._built(task, arm)
            except Exception as error:  # noqa: BLE001 - the others have room, or a sound plan
                self._unbuilt[arm.name] = described(error)
        return tuple(trainer.state() for trainer in self._trainers.values())

    def _built(self, task: SeedTask, arm: Arm) -> Trainer:
        from fp8bench.features.train.lab.own_trainer import trainer_of

        with self._running():
            return trainer_of(task, arm)

    def _forget(self, task: SeedTask) -> Device:
        self._trainers: dict[str, Trainer] = {}
        self._unbuilt: dict[str, DescribedFault] = {}
        MADE.clear()
        gc.collect()
        self._task = task
        device = self._selected(task.facts)
        device.empty_cache()
        return device

    def examine(self, task: SeedTask) -> tuple[tuple[str, Coverage], ...]:  # type: ignore[override]
        """Of a model of the user's own: a step of every arm, and what each converts. Raises for what cannot be."""
        from fp8bench.features.train.lab.own_trainer import examined

        self._forget(task)
        with self._running():
            return examined(task)

    def alone(self, task: SeedTask) -> ArmCost:
        """The memory of a task's one arm with nothing beside it. The seed before is forgotten."""
        (arm,), device, hardware = task.arms, self._forget(task), hardware_of_arm(task)
        with self._running(precisions.get(arm.precision)):
            make = made_alone(task, arm, hardware)
            use, trainer = memory_of_step(make, device, task.facts.index, leaks=False, hardware=hardware)
        if isinstance(use, str):
            return ArmCost(arm.name, task.seed, why=f"nobody counts its memory: {use}")
        count, sizes = trainer.state().parameters, trainer.state().bytes_per_parameter
        kept = tuple((name, round(size * count)) for name, size in sizes)
        return ArmCost(arm.name, task.seed, kept=kept, memory=use)

    def try_alone(self, task: SeedTask, memory_limit: int | None) -> int | None:
        """Whether a task's one arm fits into so much memory with its batch; bytes at the highest point of two steps."""
        (arm,), device = task.arms, self._forget(task)
        with self._running(precisions.get(arm.precision)):
            return try_batch(made_alone(task, arm), device, task.facts.index, memory_limit)

    def advance(self, arm: str, steps: int) -> tuple[StreamLine, ...]:
        """Go on by so many steps: what they say. An arm that has stopped, or is done, says nothing."""
        trainer = self._trainer(arm)
        with self._running(trainer.precision):
            return tuple(line for _ in range(steps) for line in trainer.advance(self._unmarked()))

    def loop(self, key: str, steps: int) -> float:
        """So many further steps of an arm as its last ones, back to back; the seconds of all. Nothing of them is kept,
        and the arm is not what it was."""
        trainer, facts, silent = self._trainer(key), self._task.facts, SilentPhases()
        device = self._selected(facts)
        with self._running(trainer.precision):
            start = time.perf_counter()
            for _ in range(steps):
                another_step(trainer, silent)
            device.synchronise(facts.index)
            return time.perf_counter() - start

    def check(self, key: str) -> StateCheck:
        stopped = self._trainer(key).stopped
        return StateCheck("it has stopped: its numbers are not finite" if stopped else "")

    def validate(self, arm: str, last: bool = False) -> tuple[StreamLine, ...]:
        trainer = self._trainer(arm)
        with self._running(trainer.precision):
            return trainer.validate(last)

    def branch(self, folder: str, arm: str, trial: Arm, settings: TrainerSettings) -> int:
        """Another arm, which goes on from what a folder keeps of one that is there, with a precision and settings of
        its own; from the first step where `folder` is ''. Returns the step that comes next."""
        memory = self._read(folder, arm)[arm] if folder else None
        trainer = self._built(replace(self._task, settings=settings), trial)
        if memory is not None:
            with self._running(trainer.precision):
                trainer.take_over(self._trainers[arm], memory)
        self._trainers[trial.name] = trainer
        return trainer.step

    def rewinds(self, arm: str) -> tuple[tuple[int, int], ...]:
        return self._trainer(arm).rewinds

    def rewind(self, folder: str, arm: str, rewinds: tuple[tuple[int, int], ...]) -> int:
        """Have an arm go on from what a folder keeps of it, from the first step where that is '', past the batches of
        the steps of `rewinds`. Returns the step that comes next."""
        if folder:
            with self._running(self._trainers[arm].precision):
                self._trainers[arm].recall(self._read(folder, arm)[arm])
        else:
            self.drop(arm)  # there may be no room for two of it
            self._trainers[arm] = self._built(self._task, next(own for own in self._task.arms if own.name == arm))
        trainer = self._trainers[arm]
        trainer.rewinds = rewinds
        return trainer.step

    def drop(self, arm: str) -> None:
        self._trainers.pop(arm, None)
        gc.collect()

    def save(self, folder: str) -> tuple[str, ...]:
        """Keep every arm's state in a new folder, whole or not at all. Names the arms that are not finite: nothing is
        kept of them."""
        from fp8bench.features.train.lab.checkpoint import write

        lost = self._lost()
        kept = {name: trainer.memory() for name, trainer in self._trainers.items() if name not in lost}
        write(folder, self._task, kept, self._rank)
        return lost

    def _lost(self) -> tuple[str, ...]:
        from fp8bench.features.train.lab.checkpoint import finite

        return tuple(name for name, trainer in self._trainers.items() if not finite(trainer.memory()))

    def restore(self, folder: str) -> tuple[tuple[str, int], ...]:
        """Go on from what a folder keeps: the step that each arm comes to next. An arm it does not keep has stopped."""
        memories = self._read(folder)
        for name, trainer in self._trainers.items():
            if name in memories:
                trainer.recall(memories[name])
            else:
                trainer.stopped = True
        return tuple((name, trainer.step) for name, trainer in self._trainers.items())

    def _read(self, folder: str, arm: str = "") -> dict[str, dict[str, Any]]:
        from fp8bench.features.train.lab.checkpoint import read

        return read(folder, self._task, self._rank, arm)

    def close(self) -> None:
        self._trainers = {}
        super().close()

    def _trainer(self, arm: str) -> Trainer:
        if arm in self._unbuilt:
            fault = self._unbuilt[arm]
            if fault.kind == UsageError.__name__:
                raise UsageError(fault.text)
            raise NotBuilt(f"{fault.kind}: {fault.text}")
        return self._trainers[arm]

    @contextmanager
    def _running(self, precision: Precision | None = None) -> Iterator[None]:
        """Under a precision, with the process's switches and random state as they were afterwards."""
        import torch

        facts = self._task.facts
        self._selected(facts)
        gpus = [facts.index] if facts.accelerated else []
        scope = under(precision) if precision is not None else nullcontext()
        with torch.random.fork_rng(gpus, device_type=facts.kind), unchanged(), aside(), scope:
            yield


def another_step(trainer: Trainer, phase: Phases) -> None:
    """A step as any other, however many there were; of an arm that is done, one of its last once more."""
    trainer.repeat(_LAST)
    for _ in trainer.advance(phase, watched=False):
        pass
    if trainer.stopped:
        raise NotFinite(f"its steps were not finite after {trainer.step}, and it stopped")


def hardware_of_arm(task: SeedTask) -> Hardware:
    """What would keep what a task's one arm emulates, by its modes."""
    (arm,) = task.arms
    settings = arm.taken(task.settings)
    if task.facts.ranks > 1:
        return Hardware(why=OF_SEVERAL)
    own = precisions.get(arm.precision)
    modes = dict.fromkeys(filter(None, (arm.precision, own.carried_by, *dict(settings.precision_map).values())))
    hardware = hardware_for(((mode, mode) for mode in modes), task.facts)
    why = workloads.get("conv").not_on_device if settings.arch == "cnn" and not settings.make else ""
    if settings.attention != "auto":
        why = f"--attention {settings.attention} rounds what no kernel keeps"
    return replace(hardware, why=hardware.why or why) if hardware.arithmetics else hardware


def made_alone(task: SeedTask, arm: Arm, hardware: Hardware = EMULATES_NOTHING) -> Make:
    """How an arm is made that nobody watches: readings of tensors take memory, too, every so many steps."""
    from fp8bench.features.train.lab.own_trainer import trainer_of

    def make(told: Told | None, ledger: DeviceLedger | None) -> Callable[[], PreparedMemory]:
        def beside(mode: str, inner: Arithmetic) -> Arithmetic:
            assert ledger is not None
            return hardware.beside(mode, inner, ledger)

        def prepare() -> PreparedMemory:
            watch = None if told is None else watch_of(told)
            trainer = trainer_of(task, arm, watch, None if ledger is None else beside)
            return PreparedMemory(trainer, lambda phase: another_step(trainer, phase))

        return prepare

    return make


if __name__ == "__main__":
    main(Lab)
