"""Plans and runs a training, or resumes one. The result is its stream of lines. The memory of each arm is measured in
a separate pass before the steps, and its energy after the steps.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fp8bench import __version__
from fp8bench.errors import NotKept, StoreError, WorkerError, WorkerFault, to_original_error
from fp8bench.features.train.arms import check_training, check_training_memory, choose_device, make_arms
from fp8bench.features.train.beginnings import prepare_text, resolve_start_and_scales
from fp8bench.features.train.kind import ResumePoint, load_training, reopen_training, start_training
from fp8bench.features.train.lab.lab import LAB_MODULE, Lab
from fp8bench.features.train.lab.models import make_config
from fp8bench.features.train.lab.rank_lab import MERGE_BY_METHOD
from fp8bench.features.train.lab.rank_lab import MODULE as RANK_MODULE
from fp8bench.features.train.own_batch import find_largest_arm_batch
from fp8bench.features.train.request import TrainingRequest, parse_optimizer
from fp8bench.features.train.seed import FIRST_CALL_SECONDS, SeedPace, SeedRun, TrainingRun, call_lab
from fp8bench.features.train.values import (
    COVERAGE_EVENT,
    Arm,
    ArmCost,
    ArmState,
    L,
    StoredTraining,
    Training,
    TrainingEvent,
    TrainingObserver,
    TrainingTokens,
    make_empty_text,
)
from fp8bench.features.train.words import explain_coverage
from fp8bench.measure import arm as measured
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import START_SECONDS, LocalWorker, ProcessWorker, Worker, register_process_run
from fp8bench.measure.interrupts import hold_back_interrupts, ignore_interrupts
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.measure.sensors.energy import SourceKind
from fp8bench.measure.sensors.meter import Meter, Meters
from fp8bench.measure.windows import WindowPass, WindowRule
from fp8bench.model import Case, EnergyUse, Level, PlannedCase, Support, Work
from fp8bench.model.raw import Settings
from fp8bench.pipeline import now
from fp8bench.plan.resumable import check_files_exist, describe_environment_changes, make_resume_error
from fp8bench.report.panels import together
from fp8bench.store.runs.run_file import check_store
from fp8bench.user_code import import_user_modules


def train(request: TrainingRequest, store: Path, observer: TrainingObserver, command: str) -> StoredTraining:
    """Trains all arms of all seeds. If the training was interrupted, `finished` of the result is False. If the store
    fails, raises NotKept with the part that was stored. Raises WorkerError if the reference cannot continue.
    """
    request = resolve_start_and_scales(request, store)
    with _prepare_worker_and_text(request, store) as (worker, text):
        training = _plan_arms(request, worker, text, command)
        # A user's model is tested first, so that a model that fails leaves no stored training.
        coverage_events = _examine_own_model(training, worker)
        # The number of parameters is only known once the reference has been built.
        training = replace(training, parameters=_build_reference(training, worker).parameters)
        writer = start_training(training, store)
        if coverage_events:
            writer.append(coverage_events)
            for event in coverage_events:
                observer.note(event.words)
        return _CompleteRun(training, worker, writer, observer).run_training()


def resume(path: Path, store: Path, observer: TrainingObserver) -> tuple[bool, StoredTraining]:
    """Continues a training from its last resume point. The first returned value is False if the training was finished
    already; it is then returned unchanged. Raises UsageError if a file is missing. Also raises UsageError if machine,
    software, commit, text or arms have changed, because losses would differ.
    """
    stored_training = load_training(path)
    if stored_training.finished:
        return False, stored_training
    training = stored_training.training
    request = stored_training.request
    title = f"the training {training.id}"
    # Relative paths belong to the working directory of the original command, which may be a different one.
    check_files_exist(title, request.imports, request.data)
    with _prepare_worker_and_text(request, store) as (worker, text):
        for difference in _list_differences(training, _plan_arms(request, worker, text)):
            raise make_resume_error(title, difference, "The two parts would not form one training; start a new one.")
        writer = reopen_training(path)
        point = writer.points[-1]
        writer.truncate_at_resume_point(point)
        sentence = f"resumed from step {point.step}"
        writer.append((TrainingEvent("", request.seed + point.number, point.step, "resumed", sentence),))
        return True, _CompleteRun(
            replace(training, text=text), worker, writer, observer, is_resumed=True
        ).run_training()


def plan_training(request: TrainingRequest, store: Path) -> tuple[Training, ArmState]:
    """Returns a training that has not started, and the initial state of its reference."""
    request = resolve_start_and_scales(request, store)
    with _prepare_worker_and_text(request, store) as (worker, text):
        training = _plan_arms(request, worker, text)
        _examine_own_model(training, worker)
        return training, _build_reference(training, worker)


def _list_differences(training: Training, today: Training) -> Iterator[str]:
    yield from describe_environment_changes(training.environment, today.environment)
    if training.device.name != today.device.name:
        yield f"{today.device.key} was {training.device.name} and is {today.device.name}"
    if training.text.identity != today.text.identity:
        yield f"its text was {training.text.identity} and is {today.text.identity}"
    for arm, arm_today in itertools.zip_longest(training.arms, today.arms):
        if arm != arm_today:
            names = [which.name if which is not None else "nothing" for which in (arm, arm_today)]
            yield f"an arm would differ today ({names[0]} was, {names[1]} is)"


@contextmanager
def _prepare_worker_and_text(request: TrainingRequest, store: Path) -> Iterator[tuple[Worker, TrainingTokens]]:
    """Checks a request, then yields a worker for the training and the text that it reads."""
    # Modules of the user may register precisions that the request names.
    import_user_modules(request.imports)
    check_training(request)
    settings = request.settings
    # Two trainings in one process would share the global settings of torch.
    with register_process_run(request.isolation):
        check_store(store)
        if settings.make:
            text = make_empty_text("own", f"batches of {settings.make}")
        else:
            sequence = make_config(settings, 1).sequence
            text = prepare_text(request.data, store / "data", sequence)
        worker_settings = Settings(request.threads, request.seed, request.imports)
        worker: Worker
        if request.ranks is not None:
            worker = RanksWorker(worker_settings, request.ranks, module=RANK_MODULE, merges=MERGE_BY_METHOD)
        elif request.isolation:
            worker = ProcessWorker(worker_settings, module=LAB_MODULE)
        else:
            worker = LocalWorker(worker_settings, Lab)
        try:
            yield worker, text
        finally:
            with ignore_interrupts():
                worker.close()


def _plan_arms(request: TrainingRequest, worker: Worker, text: TrainingTokens, command: str = "") -> Training:
    """Returns the training that is planned for the worker's device. Its `parameters` are still 0, because the number of
    parameters is not known yet.
    """
    device = choose_device(request, worker.probe())
    # The stored environment names the modules or files that define a user's model and optimizer.
    user_function_names = request.settings.make, parse_optimizer(request.settings.optimizer)[0]
    imports = (*request.imports, *(target.rpartition(":")[0] for target in user_function_names if ":" in target))
    environment = gather(worker.software(), __version__, request.threads, imports)
    arms = make_arms(request, device)
    return Training(secrets.token_hex(4), now(), command, request, arms, device, environment, text, 0)


def _examine_own_model(training: Training, worker: Worker) -> tuple[TrainingEvent, ...]:
    """Checks that a user's model can be trained. Returns events that say which share of the model each arm converts."""
    if not training.request.settings.make:
        return ()
    try:
        arm_names_and_coverages = call_lab(worker, FIRST_CALL_SECONDS).examine(
            training.make_task(tuple(training.compared_arms))
        )
    except WorkerFault as fault:
        raise to_original_error(fault) from None
    arm_names_by_coverage = together((coverage, name) for name, coverage in arm_names_and_coverages)
    sentences: list[str] = []
    for coverage, names in arm_names_by_coverage.items():
        sentences += explain_coverage(", ".join(names), coverage)
    return tuple(TrainingEvent("", training.request.seed, 0, COVERAGE_EVENT, sentence) for sentence in sentences)


def _build_reference(training: Training, worker: Worker) -> ArmState:
    reference = training.arms[0]
    lab = call_lab(worker, START_SECONDS)
    try:
        if not (arm_states := lab.begin(training.make_task((reference,)))):
            lab.validate(reference.name)  # raise the error that prevented the reference from being built
        if training.request.settings.metric:
            # Score the reference now, so that a metric that fails does so before any step.
            call_lab(worker, FIRST_CALL_SECONDS).validate(reference.name, True)
    except WorkerFault as fault:
        raise to_original_error(fault) from None
    (state,) = arm_states
    return state


NO_RANK_ENERGY_REASON = "several ranks train together, and energy is measured for one process only"
# The duration of a step is estimated from this many timed steps.
_STEPS_FOR_TIME_ESTIMATE = 3


@dataclass
class _CompleteRun(TrainingRun):
    is_resumed: bool = False

    def run_training(self) -> StoredTraining:
        try:
            self.observer.begun(self.training)
            # Memory is measured before all arms are loaded, because each arm is measured alone.
            self._measure_memory()
            # Check the memory as soon as sizes are known. Refusing now costs seconds, but running out of memory later
            # would cost hours.
            check_training_memory(self.training, self._load_stream_lines(ArmCost))
            self._train_seeds()
            # Measuring energy takes further training steps, so it begins after the losses of all arms are stored.
            self._measure_energy()
            self._find_largest_batches()
            self.writer.finish("finished")
        except KeyboardInterrupt:
            with (
                ignore_interrupts(),
                contextlib.suppress(StoreError),
            ):  # a training whose file does not say how it ended also counts as unfinished
                self.writer.finish("interrupted")
        except StoreError as error:
            raise NotKept(str(error), load_training(self.writer.path)) from None
        except WorkerError:
            with contextlib.suppress(StoreError):
                self.writer.finish("interrupted")
            self.observer.note(f"the trained part is stored; `fp8bench train --resume {self.training.id}` continues it")
            raise
        finally:
            self.writer.close()
        with ignore_interrupts():
            return load_training(self.writer.path)

    def _train_seeds(self) -> None:
        point = self.writer.points[-1] if self.writer.points else ResumePoint(0, 0, 0)
        excluded_arms = dict(point.out)
        pace = SeedPace()
        starts_at_first_step = not self.is_resumed or point.number == point.step == 0
        run = self.training, self.worker, self.writer, self.observer
        with Meters(energy=False) as meters:
            device = meters.of(self.training.device).device if self.training.device.accelerated else None
            for seed_number in range(point.number, self.training.request.seeds):
                SeedRun(*run, seed_number, pace, excluded_arms, device).run(starts_at_first_step)
                starts_at_first_step = True

    def _load_stream_lines(self, kind: type[L]) -> tuple[L, ...]:
        return load_training(self.writer.path).select_lines(kind)

    def _list_unmeasured_arms(self, is_measured: Callable[[ArmCost], object]) -> list[Arm]:
        """Returns the arms whose cost still has to be measured: no stored cost satisfies `is_measured`. Repeats of the
        reference are left out, because they cost as much as the reference.
        """
        measured_arm_names = {cost.arm for cost in self._load_stream_lines(ArmCost) if is_measured(cost)}
        return [arm for arm in self.training.compared_arms if arm.name not in measured_arm_names]

    def _store_costs(self, *costs: ArmCost) -> None:
        with hold_back_interrupts():
            self.writer.append(costs)

    def _measure_memory(self) -> None:
        """Measures the memory of each arm alone on the device. This happens before all steps, and only for arms whose
        memory is not stored yet.
        """
        unmeasured_arms = self._list_unmeasured_arms(lambda cost: not cost.energy and not cost.capacity)
        for arm in unmeasured_arms:
            self.observer.working(arm.name, "measuring the memory")
            try:
                cost = call_lab(self.worker, FIRST_CALL_SECONDS).measure_memory(self.training.make_task((arm,)))
            except WorkerError as error:
                if not isinstance(error, WorkerFault):
                    self.worker.restart()
                reason = f"its memory could not be measured: {error}"
                cost = ArmCost(arm.name, self.training.request.seed, why=reason)
            self._store_costs(cost)
        if unmeasured_arms and self.training.device.accelerated:
            self.worker.restart()  # A process that has recorded a GPU's memory is slower. So it must not time steps.

    def _find_largest_batches(self) -> None:
        """Finds the largest batch of each native arm. Other arms are left out, because the speed of emulation is
        meaningless.
        """
        memory_limit = self.training.request.own_batch
        if memory_limit is None:
            return
        for arm in self._list_unmeasured_arms(lambda cost: cost.capacity):
            if arm.native:
                self.observer.working(arm.name, "finding the largest batch")
                capacity = find_largest_arm_batch(self.training, arm, memory_limit, self.worker)
                self._store_costs(ArmCost(arm.name, self.training.request.seed, capacity=capacity))

    def _measure_energy(self) -> None:
        """Measures the energy of each arm, unless it is stored already. The arms, still in memory after the last seed,
        take further steps in separate time windows.
        """
        request = self.training.request
        unmeasured_arms = self._list_unmeasured_arms(lambda cost: cost.energy) if request.energy else []
        if not unmeasured_arms:
            return

        def explain_missing_energy(reason: str) -> dict[str, EnergyUse]:
            return {arm.name: EnergyUse(SourceKind.NONE.value, why=reason) for arm in unmeasured_arms}

        # If energy cannot be measured, the reason is stored, so that the report can give it.
        if request.ranks is not None:
            energy_by_arm = explain_missing_energy(NO_RANK_ENERGY_REASON)
        else:
            with Meters() as meters:
                device_meter = meters.of(self.training.device)
                energy_by_arm = (
                    self._measure_energy_in_windows(unmeasured_arms, device_meter)
                    if device_meter.kind is not SourceKind.NONE
                    else explain_missing_energy(device_meter.why)
                )
        self._store_costs(
            *(ArmCost(name, request.seed, request.steps, energy=use) for name, use in energy_by_arm.items())
        )

    def _measure_energy_in_windows(self, arms: Sequence[Arm], meter: Meter) -> dict[str, EnergyUse]:
        energy_by_arm: dict[str, EnergyUse] = {}
        arms_with_windows = []
        facts = self.training.device
        request = self.training.request
        lab = self.worker.with_time_limit(FIRST_CALL_SECONDS)
        for arm in arms:
            try:
                reason = lab.check(arm.name).wrong
                # Estimate the duration of a step, which determines the length of an energy window.
                seconds = 0.0 if reason else lab.loop(arm.name, _STEPS_FOR_TIME_ESTIMATE) / _STEPS_FOR_TIME_ESTIMATE
            except WorkerError as error:
                reason = str(error)
            if reason:
                energy_by_arm[arm.name] = EnergyUse(meter.kind.value, why=reason)
                continue
            support = Support(Level.NATIVE if arm.native else Level.EMULATED, "")
            planned_case = PlannedCase(Case("train", (), arm.precision, facts.key), support, Work())
            arms_with_windows.append(
                measured.MeasuredArm(arm.name, planned_case, facts, step_seconds=max(seconds, 1e-7))
            )
        # A training with one seed gives only a first impression, so a single short energy window is enough.
        rule = WindowRule(windows=1, idle_seconds=1.5) if request.seeds == 1 else WindowRule()
        windows = WindowPass(
            meter, rule, request.seed, lambda arm, share: self.observer.working(arm.key, "measuring the energy")
        )
        return energy_by_arm | {
            name: taken.energy_use for name, taken in windows.measure(arms_with_windows, self.worker).items()
        }
