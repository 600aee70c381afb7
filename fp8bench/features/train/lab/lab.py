"""The worker's side of a training: trains all arms of one seed side by side.

The parent calls `begin`, then `restore` if the seed was begun before, then `advance`, `validate` and `save` in any
order until the next `begin`. A lab also answers everything that a bench does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.features.train.values import COVERAGE, Arm, ArmCost, ArmState, SeedTask, State, StreamLine
from fp8bench.model.raw import StateCheck
from fp8bench.model.step import Coverage
from fp8bench.protocols import Arithmetic, Device, Phases, Precision, SilentPhases
from fp8bench.registry import precisions, workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.device_layout import OF_SEVERAL, DeviceLedger, Hardware, hardware_for
from fp8bench.worker.faults import DescribedFault, describe_fault
from fp8bench.worker.main import main
from fp8bench.worker.memory_pass import Make, PreparedMemory, Told, memory_of_step, watch_of
from fp8bench.worker.step_guards import aside
from fp8bench.worker.switches import restore_switches, under
from fp8bench.workloads.model import MADE

if TYPE_CHECKING:
    from fp8bench.features.train.lab.trainer import Trainer

# The module that a ProcessWorker runs as a lab.
MODULE = "fp8bench.features.train.lab.lab"
# A finished arm repeats this many of its last steps for measurements: with other batches each time, at the final
# learning rate.
_REPEATED_STEPS = 50


class NotFinite(RuntimeError):
    """Steps of a stopped arm cannot be timed."""


class NotBuilt(RuntimeError):
    """The model or optimizer of an arm could not be made."""


class Lab(Bench):
    """The trainers of one seed, by the names of their arms."""

    _task: SeedTask
    _rank = 0

    def begin(self, task: SeedTask) -> tuple[ArmState, ...]:
        """Drops the previous seed and builds every arm. An arm that cannot be built raises when it is used."""
        from fp8bench.features.train.lab.trainer import Trainer

        self._start_over(task)
        for arm in task.arms:
            try:
                with self._running():
                    self._trainers[arm.name] = Trainer(task, arm)
            except Exception as error:  # noqa: BLE001 - the other arms may fit, or have a sound plan
                self._unbuilt[arm.name] = describe_fault(error)
        return tuple(trainer.state() for trainer in self._trainers.values())

    def _start_over(self, task: SeedTask) -> Device:
        self._trainers: dict[str, Trainer] = {}
        self._unbuilt: dict[str, DescribedFault] = {}
        MADE.clear()
        # The arms of the previous seed must leave the device before the next ones are built.
        gc.collect()
        self._task = task
        device = self._select_device(task.facts)
        device.empty_cache()
        return device

    def examine(self, task: SeedTask) -> tuple[tuple[str, Coverage], ...]:  # type: ignore[override]
        """Takes a step of every arm of a user's model; returns what each converts. Raises for untrainable ones."""
        from fp8bench.features.train.step import examine_arms

        self._start_over(task)
        with self._running():
            return examine_arms(task)

    def alone(self, task: SeedTask) -> ArmCost:
        """Measures the memory of the task's only arm with no other arm loaded. Drops the previous seed."""
        (arm,), device, hardware = task.arms, self._start_over(task), hardware_of_arm(task)
        with self._running(precisions.get(arm.precision)):
            make = made_alone(task, arm, hardware)
            use, trainer = memory_of_step(make, device, task.facts.index, leaks=False, hardware=hardware)
        if isinstance(use, str):
            return ArmCost(arm.name, task.seed, why=f"its memory cannot be counted: {use}")
        count, sizes = trainer.state().parameters, trainer.state().bytes_per_parameter
        sizes_kept = tuple((name, round(size * count)) for name, size in sizes)
        return ArmCost(arm.name, task.seed, kept=sizes_kept, memory=use)

    def advance(self, arm: str, steps: int) -> tuple[StreamLine, ...]:
        """Takes up to `steps` steps and returns their lines. An arm that has stopped or is done returns none."""
        from fp8bench.features.train import step

        lines: list[StreamLine] = []
        for _ in range(steps):
            lines += self._change(arm)
            trainer = self._trainer(arm)
            with self._running(trainer.precision):
                lines += step.advance(trainer, self._unmarked())
        return tuple(lines)

    def _change(self, arm: str) -> Iterator[StreamLine]:
        """Changes an arm to its later precision, once that is due, and yields an event."""
        from fp8bench.features.train.lab.trainer import change_precision

        trainer = self._trainer(arm)
        if trainer.stopped or trainer.change is None or trainer.step < trainer.change[1]:
            return
        with self._running():
            self._trainers[arm] = change_precision(trainer)
        word, first = trainer.change
        yield trainer.event(COVERAGE, f"{arm} is trained in {word} from step {first} on")

    def loop(self, key: str, steps: int) -> float:
        """Returns the seconds of `steps` further steps, back to back. They change the arm and return no lines."""
        trainer, facts, silent = self._trainer(key), self._task.facts, SilentPhases()
        device = self._select_device(facts)
        with self._running(trainer.precision):
            # Host time around all of them; work still queued at the end counts for the last step.
            start = time.perf_counter()
            for _ in range(steps):
                another_step(trainer, silent)
            device.synchronise(facts.index)
            return time.perf_counter() - start

    def check(self, key: str) -> StateCheck:
        stopped = self._trainer(key).stopped
        return StateCheck("the arm has stopped: its numbers are not finite" if stopped else "")

    def validate(self, arm: str, last: bool = False) -> tuple[StreamLine, ...]:
        trainer = self._trainer(arm)
        with self._running(trainer.precision):
            return trainer.validate(last)

    def drop(self, arm: str) -> None:
        self._trainers.pop(arm, None)
        gc.collect()

    def save(self, folder: str) -> tuple[str, ...]:
        """Saves the state of every arm, or of none if writing fails; arms with a state that is not finite are skipped
        and returned."""
        from fp8bench.features.train.lab.checkpoint import write

        not_finite = self._not_finite()
        states = {name: trainer.memory() for name, trainer in self._trainers.items() if name not in not_finite}
        write(folder, self._task, states, self._rank)
        return not_finite

    def _not_finite(self) -> tuple[str, ...]:
        from fp8bench.features.train.lab.checkpoint import finite

        return tuple(name for name, trainer in self._trainers.items() if not finite(trainer.memory()))

    def restore(self, folder: str) -> tuple[tuple[str, int], ...]:
        """Restores a checkpoint and returns the next step of each arm. An arm that it lacks has stopped."""
        from fp8bench.features.train.lab.trainer import change_precision

        # An arm that was not finite is in no checkpoint, and stays stopped.
        memories = self._read(folder)
        for name, trainer in list(self._trainers.items()):
            if name in memories:
                trainer.step = int(memories[name]["step"])
                if memories[name].get("precision", trainer.arm.precision) != trainer.arm.precision:
                    with self._running():
                        self._trainers[name] = change_precision(trainer)
                self._trainers[name].recall(memories[name])
            else:
                trainer.stopped = True
        return tuple((name, trainer.step) for name, trainer in self._trainers.items())

    def _read(self, folder: str) -> dict[str, State]:
        from fp8bench.features.train.lab.checkpoint import read

        return read(folder, self._task, self._rank)

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
        """Applies a precision's switches; afterwards restores switches and random state."""
        import torch

        facts = self._task.facts
        self._select_device(facts)
        gpus = [facts.index] if facts.accelerated else []
        scope = under(precision) if precision is not None else nullcontext()
        with torch.random.fork_rng(gpus, device_type=facts.kind), restore_switches(), aside(), scope:
            yield


def another_step(trainer: Trainer, phase: Phases) -> None:
    """Takes a step; an arm that is done repeats one of its last. Raises NotFinite."""
    from fp8bench.features.train import step

    trainer.repeat(_REPEATED_STEPS)
    for _ in step.advance(trainer, phase, watched=False):
        pass
    if trainer.stopped:
        raise NotFinite(f"it stopped at step {trainer.step}: its numbers were not finite")


def hardware_of_arm(task: SeedTask) -> Hardware:
    """Returns what hardware with the formats would store for the arithmetic that the task's only arm emulates."""
    (arm,) = task.arms
    settings = arm.merge_settings(task.settings)
    if task.facts.ranks > 1:
        return Hardware(why=OF_SEVERAL)
    carried_by = precisions.get(arm.precision).carried_by
    modes = dict.fromkeys(filter(None, (arm.precision, carried_by, *dict(settings.precision_map).values())))
    hardware = hardware_for(((mode, mode) for mode in modes), task.facts)
    reason = workloads.get("conv").not_on_device if settings.arch == "cnn" and not settings.make else ""
    if settings.attention != "auto":
        reason = f"--attention {settings.attention} rounds values that no fused kernel stores"
    return replace(hardware, why=hardware.why or reason) if hardware.arithmetics else hardware


def made_alone(task: SeedTask, arm: Arm, hardware: Hardware) -> Make:
    """Returns how to make an arm without readings of its tensors, which would use memory."""
    from fp8bench.features.train.lab.trainer import Trainer

    def make(listener: Told | None, ledger: DeviceLedger | None) -> Callable[[], PreparedMemory]:
        def with_hardware(mode: str, inner: Arithmetic) -> Arithmetic:
            assert ledger is not None
            return hardware.beside(mode, inner, ledger)

        def prepare() -> PreparedMemory:
            watch = None if listener is None else watch_of(listener)
            trainer = Trainer(task, arm, watch, None if ledger is None else with_hardware)
            return PreparedMemory(trainer, lambda phase: another_step(trainer, phase))

        return prepare

    return make


if __name__ == "__main__":
    main(Lab)
