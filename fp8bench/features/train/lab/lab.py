"""The worker's side of a training, which trains all arms of one seed in turns. The parent calls `begin`, then `restore`
if the seed was begun before, then `advance`, `validate` and `save` in any order until the next `begin`. Lab extends
Bench, so that its arms can be measured like those of a run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.features.train.values import COVERAGE_EVENT, Arm, ArmCost, ArmState, SeedTask, State, StreamLine
from fp8bench.model.raw import StateCheck
from fp8bench.model.step import Coverage
from fp8bench.protocols import Arithmetic, Device, Phases, Precision, SilentPhases
from fp8bench.registry import precisions, workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.device_layout import SEVERAL_RANKS_REASON, DeviceLedger, EmulatedHardware, find_hardware_for_modes
from fp8bench.worker.faults import FaultDescription, describe_fault
from fp8bench.worker.main import main
from fp8bench.worker.memory_pass import (
    MakeMemoryPreparation,
    ReportMemoryRole,
    StateWithStep,
    make_cast_watch,
    measure_step_memory,
)
from fp8bench.worker.step_guards import stdout_to_stderr
from fp8bench.worker.switches import precision_scope, restore_switches
from fp8bench.workloads.model import LOADED_MODELS, load_target_model

if TYPE_CHECKING:
    from fp8bench.features.train.lab.trainer import Trainer

# The module that a ProcessWorker runs as a lab.
LAB_MODULE = "fp8bench.features.train.lab.lab"
# A finished arm is timed by repeating its last 50 steps.
_TIMED_REPEAT_STEPS = 50


class NotFinite(RuntimeError):
    """Raised when the steps of an arm should be timed, but the arm has stopped at NaN or infinity."""


class NotBuilt(RuntimeError):
    """Raised when an arm is used, but its model or optimizer could not be built."""


class Lab(Bench):
    """Holds one Trainer per arm of a seed, and runs the parent's calls on them."""

    _seed_task: SeedTask
    _rank = 0

    def begin(self, task: SeedTask) -> tuple[ArmState, ...]:
        """Drops the trainers of the previous seed, and builds one for each arm. If an arm cannot be built, its error
        is raised when the arm is used.
        """
        from fp8bench.features.train.lab.trainer import Trainer

        self._begin_seed_task(task)
        for arm in task.arms:
            try:
                with self._apply_precision_switches():
                    self._trainers[arm.name] = Trainer(task, arm)
            except Exception as error:  # noqa: BLE001 - the other arms may fit, or have a sound plan
                self._unbuilt[arm.name] = describe_fault(error)
        return tuple(trainer.describe_arm_state() for trainer in self._trainers.values())

    def _begin_seed_task(self, task: SeedTask) -> Device:
        self._trainers: dict[str, Trainer] = {}
        self._unbuilt: dict[str, FaultDescription] = {}
        LOADED_MODELS.clear()
        # The arms of the previous seed must leave the device before the next ones are built.
        gc.collect()
        self._seed_task = task
        device = self._select_device(task.facts)
        device.empty_cache()
        return device

    def examine(self, task: SeedTask) -> tuple[tuple[str, Coverage], ...]:  # type: ignore[override]
        """Trains every arm of a user's model for one step, and returns which layers each arm converts. Raises an
        error if an arm cannot be trained."""
        from fp8bench.features.train.step import examine_arm_coverages

        self._begin_seed_task(task)
        with self._apply_precision_switches():
            return examine_arm_coverages(task)

    def measure_memory(self, task: SeedTask) -> ArmCost:
        """Measures the memory that the task's only arm needs. First drops the arms of the previous seed, so that no
        other arm is on the device.
        """
        (arm,) = task.arms
        device = self._begin_seed_task(task)
        hardware = find_hardware(task)
        with self._apply_precision_switches(precisions.get(arm.precision)):
            # The process keeps a user's model for all arms, so load it before an arm's memory is counted.
            if make_target := task.settings.make:
                load_target_model(make_target, task.seed, task.facts)
            build_arm = make_arm_builder(task, arm, hardware)
            memory_use, trainer = measure_step_memory(
                build_arm, device, task.facts.index, leaks=False, hardware=hardware
            )
        if isinstance(memory_use, str):
            return ArmCost(arm.name, task.seed, why=f"its memory cannot be counted: {memory_use}")
        parameter_count = trainer.describe_arm_state().parameters
        sizes = trainer.describe_arm_state().bytes_per_parameter
        state_bytes_by_name = tuple((name, round(size * parameter_count)) for name, size in sizes)
        return ArmCost(arm.name, task.seed, kept=state_bytes_by_name, memory=memory_use)

    def advance(self, arm: str, steps: int) -> tuple[StreamLine, ...]:
        """Trains an arm for up to `steps` steps and returns their output lines. Returns no lines if the arm has stopped
        or finished.
        """
        from fp8bench.features.train import step

        lines: list[StreamLine] = []
        for _ in range(steps):
            lines += self._change_precision(arm)
            trainer = self._get_arm_trainer(arm)
            with self._apply_precision_switches(trainer.precision):
                lines += step.advance(trainer, self._make_unmarked_phases())
        return tuple(lines)

    def _change_precision(self, arm: str) -> Iterator[StreamLine]:
        """Switches an arm to its second precision and yields an event, if the next step is the first one in that
        precision.
        """
        from fp8bench.features.train.lab.trainer import change_precision

        trainer = self._get_arm_trainer(arm)
        if trainer.stopped or trainer.precision_change is None or trainer.step < trainer.precision_change[1]:
            return
        with self._apply_precision_switches():
            self._trainers[arm] = change_precision(trainer)
        precision, first_step = trainer.precision_change
        yield trainer.event(COVERAGE_EVENT, f"{arm} is trained in {precision} from step {first_step} on")

    def loop(self, key: str, steps: int) -> float:
        """Trains an arm for `steps` further steps without any pause between them, and returns their seconds. These
        steps change the arm's weights, but make no output lines.
        """
        trainer = self._get_arm_trainer(key)
        facts = self._seed_task.facts
        silent_phases = SilentPhases()
        device = self._select_device(facts)
        with self._apply_precision_switches(trainer.precision):
            # Time all steps together, until the device has finished. Waiting for each step would make pauses between
            # steps.
            start = time.perf_counter()
            for _ in range(steps):
                take_extra_step(trainer, silent_phases)
            device.synchronise(facts.index)
            return time.perf_counter() - start

    def check(self, key: str) -> StateCheck:
        stopped = self._get_arm_trainer(key).stopped
        return StateCheck("the arm has stopped: its numbers are not finite" if stopped else "")

    def validate(self, arm: str, last: bool = False) -> tuple[StreamLine, ...]:
        trainer = self._get_arm_trainer(arm)
        with self._apply_precision_switches(trainer.precision):
            return trainer.validate(last)

    def drop(self, arm: str) -> None:
        self._trainers.pop(arm, None)
        gc.collect()

    def save(self, folder: str) -> tuple[str, ...]:
        """Writes the state of every arm, or of none if writing fails. Skips arms whose state has NaN or infinity, and
        returns their names."""
        from fp8bench.features.train.lab.checkpoint import write_checkpoint

        not_finite_arms = self._list_nonfinite_arms()
        trainer_states = {
            name: trainer.get_state() for name, trainer in self._trainers.items() if name not in not_finite_arms
        }
        write_checkpoint(folder, self._seed_task, trainer_states, self._rank)
        return not_finite_arms

    def _list_nonfinite_arms(self) -> tuple[str, ...]:
        from fp8bench.features.train.lab.checkpoint import is_finite

        return tuple(name for name, trainer in self._trainers.items() if not is_finite(trainer.get_state()))

    def restore(self, folder: str) -> tuple[tuple[str, int], ...]:
        """Loads a checkpoint and returns the next step of each arm. An arm that is missing in the checkpoint is
        marked as stopped.
        """
        from fp8bench.features.train.lab.trainer import change_precision

        # Checkpoints leave out arms whose state has NaN or infinity. Such an arm stays stopped.
        trainer_states = self._read_checkpoint(folder)
        for name, trainer in list(self._trainers.items()):
            if name in trainer_states:
                trainer.step = int(trainer_states[name]["step"])
                if trainer_states[name]["precision"] != trainer.arm.precision:
                    with self._apply_precision_switches():
                        self._trainers[name] = change_precision(trainer)
                self._trainers[name].set_state(trainer_states[name])
            else:
                trainer.stopped = True
        return tuple((name, trainer.step) for name, trainer in self._trainers.items())

    def _read_checkpoint(self, folder: str) -> dict[str, State]:
        from fp8bench.features.train.lab.checkpoint import read_checkpoint

        return read_checkpoint(folder, self._seed_task, self._rank)

    def close(self) -> None:
        self._trainers = {}
        super().close()

    def _get_arm_trainer(self, arm: str) -> Trainer:
        if arm in self._unbuilt:
            arm_build_fault = self._unbuilt[arm]
            if arm_build_fault.kind == UsageError.__name__:
                raise UsageError(arm_build_fault.text)
            raise NotBuilt(f"{arm_build_fault.kind}: {arm_build_fault.text}")
        return self._trainers[arm]

    @contextmanager
    def _apply_precision_switches(self, precision: Precision | None = None) -> Iterator[None]:
        """Sets torch's global switches for a precision inside the `with` block. Then restores the switches and the
        random state.
        """
        import torch

        facts = self._seed_task.facts
        self._select_device(facts)
        gpus = [facts.index] if facts.accelerated else []
        precision_context = precision_scope(precision) if precision is not None else nullcontext()
        forked_random_state = torch.random.fork_rng(gpus, device_type=facts.kind)
        with forked_random_state, restore_switches(), stdout_to_stderr(), precision_context:
            yield


def take_extra_step(trainer: Trainer, phase: Phases) -> None:
    """Trains an arm for one step. A finished arm repeats one of its last steps. Raises NotFinite if the arm has
    stopped.
    """
    from fp8bench.features.train import step

    trainer.prepare_repeat(_TIMED_REPEAT_STEPS)
    for _ in step.advance(trainer, phase, watched=False):
        pass
    if trainer.stopped:
        raise NotFinite(f"it stopped at step {trainer.step}: its numbers were not finite")


def find_hardware(task: SeedTask) -> EmulatedHardware:
    """Returns the hardware that is assumed for an emulated arm: it multiplies natively in the arm's formats. The
    arm's memory is counted as if the arm ran on this hardware.
    """
    (arm,) = task.arms
    settings = arm.merge_settings(task.settings)
    if task.facts.ranks > 1:
        return EmulatedHardware(why=SEVERAL_RANKS_REASON)
    carrier_precision = precisions.get(arm.precision).carried_by
    modes = dict.fromkeys(filter(None, (arm.precision, carrier_precision, *dict(settings.precision_map).values())))
    hardware = find_hardware_for_modes(((mode, mode) for mode in modes), task.facts)
    reason = workloads.get("conv").not_on_device if settings.arch == "cnn" and not settings.make else ""
    if settings.attention != "auto":
        reason = f"--attention {settings.attention} rounds values that no fused kernel stores"
    return replace(hardware, why=hardware.why or reason) if hardware.arithmetics else hardware


def make_arm_builder(task: SeedTask, arm: Arm, hardware: EmulatedHardware) -> MakeMemoryPreparation:
    """Returns a function that builds the task's arm in order to count its memory. Tensors of this arm are not measured,
    because measuring would use memory.
    """
    from fp8bench.features.train.lab.trainer import Trainer

    def make(listener: ReportMemoryRole | None, ledger: DeviceLedger | None) -> Callable[[], StateWithStep]:
        def wrap_with_hardware(mode: str, inner: Arithmetic) -> Arithmetic:
            assert ledger is not None
            return hardware.wrap_arithmetic(mode, inner, ledger)

        def prepare() -> StateWithStep:
            cast_watch = None if listener is None else make_cast_watch(listener)
            trainer = Trainer(task, arm, cast_watch, None if ledger is None else wrap_with_hardware)
            return StateWithStep(trainer, lambda phase: take_extra_step(trainer, phase))

        return prepare

    return make


if __name__ == "__main__":
    main(Lab)
