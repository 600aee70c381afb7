"""Plans and runs a training, or resumes one. Its stream of lines is the result.

Memory and energy of each arm are measured in separate passes, before and after the steps.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fp8bench import __version__
from fp8bench.errors import NotKept, StoreError, WorkerError, WorkerFault, as_usage
from fp8bench.features.train.arms import check_room, check_training, device_of, make_arms
from fp8bench.features.train.beginnings import prepare_text, started_from, with_scales
from fp8bench.features.train.kind import ResumePlace, load_training, reopen_training, start_training
from fp8bench.features.train.lab.lab import MODULE, Lab
from fp8bench.features.train.lab.models import config_of
from fp8bench.features.train.lab.rank_lab import MERGES
from fp8bench.features.train.lab.rank_lab import MODULE as RANK_MODULE
from fp8bench.features.train.own_batch import find_own_batch
from fp8bench.features.train.request import TrainingRequest, parse_optimizer
from fp8bench.features.train.seed import FIRST_SECONDS, SeedPace, SeedRun, TrainingRun, lab_of
from fp8bench.features.train.values import (
    COVERAGE,
    Arm,
    ArmCost,
    ArmState,
    KeptTraining,
    L,
    TokenSpan,
    Training,
    TrainingEvent,
    TrainingObserver,
    TrainingText,
)
from fp8bench.features.train.words import coverage_words
from fp8bench.measure import arm as measured
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import START_SECONDS, LocalWorker, ProcessWorker, Worker, claim_process
from fp8bench.measure.interrupts import hold_back_interrupts, ignore_interrupts
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.measure.sensors.energy import SourceKind
from fp8bench.measure.sensors.meter import Meter, Meters
from fp8bench.measure.windows import WindowPass, WindowRule
from fp8bench.model import Case, EnergyUse, Level, PlannedCase, Support, Work
from fp8bench.model.raw import Settings
from fp8bench.pipeline import now
from fp8bench.plan.resumable import cannot_resume, refuse_files_elsewhere, surroundings_differ
from fp8bench.report.panels import together
from fp8bench.store.runs.run_file import check_store
from fp8bench.user_code import import_user_modules


def train(request: TrainingRequest, store: Path, observer: TrainingObserver, command: str) -> KeptTraining:
    """Trains all arms of all seeds; after an interrupt `finished` is False. Raises NotKept with what was stored if the
    store fails, and WorkerError if the reference cannot continue."""
    request = with_scales(started_from(request, store), store)
    with _ready(request, store) as (worker, text):
        training = _plan(request, worker, text, command)
        # A user's model is tried before anything is written, so that a failing model leaves no stored training.
        covered = _coverage_events(training, worker)
        # The number of parameters is known once the reference was built.
        training = replace(training, parameters=_reference(training, worker).parameters)
        writer = start_training(training, store)
        if covered:
            writer.append(covered)
            for event in covered:
                observer.note(event.words)
        return _WholeRun(training, worker, writer, observer).run_all()


def resume(path: Path, store: Path, observer: TrainingObserver) -> tuple[bool, KeptTraining]:
    """Continues from the last place that was stored; False for a finished training. Raises UsageError if a file is
    missing, or machine, software, commit, text or plan have changed: losses would differ."""
    stored = load_training(path)
    if stored.finished:
        return False, stored
    training, request = stored.training, stored.request
    title = f"the training {training.id}"
    # Paths of the first command may be relative to a folder that is no longer the working directory.
    refuse_files_elsewhere(title, request.imports, request.data)
    with _ready(request, store) as (worker, text):
        for difference in _differences(training, _plan(request, worker, text)):
            raise cannot_resume(title, difference, "The two parts would not form one training; start a new one.")
        writer = reopen_training(path)
        place = writer.places[-1]
        writer.go_back(place)
        words = f"resumed from step {place.step}"
        writer.append((TrainingEvent("", request.seed + place.number, place.step, "resumed", words),))
        return True, _WholeRun(replace(training, text=text), worker, writer, observer, resumed=True).run_all()


def plan_training(request: TrainingRequest, store: Path) -> tuple[Training, ArmState]:
    """Returns a training as planned, and its reference's state."""
    request = with_scales(started_from(request, store), store)
    with _ready(request, store) as (worker, text):
        training = _plan(request, worker, text)
        _coverage_events(training, worker)
        return training, _reference(training, worker)


def _differences(training: Training, today: Training) -> Iterator[str]:
    yield from surroundings_differ(training.environment, today.environment)
    if training.device.name != today.device.name:
        yield f"{today.device.key} was {training.device.name} and is {today.device.name}"
    if training.text.identity != today.text.identity:
        yield f"its text was {training.text.identity} and is {today.text.identity}"
    for arm, arm_today in itertools.zip_longest(training.arms, today.arms):
        if arm != arm_today:
            names = [which.name if which is not None else "nothing" for which in (arm, arm_today)]
            yield f"an arm would differ today ({names[0]} was, {names[1]} is)"


@contextmanager
def _ready(request: TrainingRequest, store: Path) -> Iterator[tuple[Worker, TrainingText]]:
    """Yields a worker and the text, after all checks that are possible without a worker."""
    # User modules may register precisions that the request names.
    import_user_modules(request.imports)
    check_training(request)
    settings = request.settings
    # Two trainings in one process would share torch's settings.
    with claim_process(request.isolation):
        check_store(store)
        if settings.make:
            text = no_text(settings.make)
        else:
            sequence = config_of(settings, 1).sequence
            text = prepare_text(request.data, store / "data", sequence)
        worker = _worker(request, Settings(request.threads, request.seed, request.imports))
        try:
            yield worker, text
        finally:
            with ignore_interrupts():
                worker.close()


def no_text(make: str) -> TrainingText:
    nothing = TokenSpan("", 0, 0)
    return TrainingText(nothing, nothing, 0, "own", f"batches of {make}")


def _plan(request: TrainingRequest, worker: Worker, text: TrainingText, command: str = "") -> Training:
    """Returns the training as planned for the worker's machine; `parameters` is still 0."""
    device = device_of(request, worker.probe())
    # The environment includes the modules or files of a user's maker and optimizer.
    targets = request.settings.make, parse_optimizer(request.settings.optimizer)[0]
    imports = (*request.imports, *(target.rpartition(":")[0] for target in targets if ":" in target))
    environment = gather(worker.software(), __version__, request.threads, imports)
    arms = make_arms(request, device)
    return Training(secrets.token_hex(4), now(), command, request, arms, device, environment, text, 0)


def _worker(request: TrainingRequest, settings: Settings) -> Worker:
    if request.ranks is not None:
        return RanksWorker(settings, request.ranks, module=RANK_MODULE, merges=MERGES)
    return ProcessWorker(settings, module=MODULE) if request.isolation else LocalWorker(settings, Lab)


def _coverage_events(training: Training, worker: Worker) -> tuple[TrainingEvent, ...]:
    """Checks that a user's model can be trained; the events have how much of it each arm converts."""
    if not training.request.settings.make:
        return ()
    try:
        coverages = lab_of(worker, FIRST_SECONDS).examine(training.task(tuple(training.compared_arms)))
    except WorkerFault as fault:
        raise as_usage(fault) from None
    by_coverage = together((coverage, name) for name, coverage in coverages)
    words: list[str] = []
    for coverage, names in by_coverage.items():
        words += coverage_words(", ".join(names), coverage)
    return tuple(TrainingEvent("", training.request.seed, 0, COVERAGE, sentence) for sentence in words)


def _reference(training: Training, worker: Worker) -> ArmState:
    reference, lab = training.arms[0], lab_of(worker, START_SECONDS)
    try:
        if not (states := lab.begin(training.task((reference,)))):
            lab.validate(reference.name)  # raises the reason if it could not be built
        if training.request.settings.metric:
            lab_of(worker, FIRST_SECONDS).validate(reference.name, True)  # a metric should fail before any step
    except WorkerFault as fault:
        raise as_usage(fault) from None
    (state,) = states
    return state


SEVERAL = "several ranks train together, and energy is measured for one process only"
# Steps that are timed to estimate the duration of one.
_FEW_STEPS = 3


@dataclass
class _WholeRun(TrainingRun):
    resumed: bool = False

    def run_all(self) -> KeptTraining:
        try:
            self.observer.begun(self.training)
            # Measure memory before all arms are loaded, because each is measured alone.
            self._measure_memory()
            # Check sizes now that they are known: refusing now costs seconds, overflowing later costs hours.
            check_room(self.training, self._lines_of(ArmCost))
            self._train_seeds()
            # Windows need steps like the last ones, so they follow them, when losses no longer depend on it.
            self._measure_energy()
            self._find_own_batches()
            self.writer.finish("finished")
        except KeyboardInterrupt:
            with (
                ignore_interrupts(),
                contextlib.suppress(StoreError),
            ):  # without its last line it counts as unfinished, too
                self.writer.finish("interrupted")
        except StoreError as error:
            raise NotKept(str(error), load_training(self.writer.path)) from None
        except WorkerError:
            with contextlib.suppress(StoreError):
                self.writer.finish("interrupted")
            self.observer.note(f"what was trained is kept; `fp8bench train --resume {self.training.id}` continues it")
            raise
        finally:
            self.writer.close()
        with ignore_interrupts():
            return load_training(self.writer.path)

    def _train_seeds(self) -> None:
        place = self.writer.places[-1] if self.writer.places else ResumePlace(0, 0, 0)
        out, pace = dict(place.out), SeedPace()
        from_start = not self.resumed or place.number == place.step == 0
        run = self.training, self.worker, self.writer, self.observer
        with Meters(energy=False) as meters:
            device = meters.of(self.training.device).device if self.training.device.accelerated else None
            for number in range(place.number, self.training.request.seeds):
                SeedRun(*run, number, pace, out, device).run(from_start)
                from_start = True

    def _lines_of(self, kind: type[L]) -> tuple[L, ...]:
        return load_training(self.writer.path).of(kind)

    def _without(self, has: Callable[[ArmCost], object]) -> list[Arm]:
        """Returns the trained arms without such a line. Bands of the reference cost as much as it does, and are left
        out."""
        measured = {cost.arm for cost in self._lines_of(ArmCost) if has(cost)}
        return [arm for arm in self.training.compared_arms if arm.name not in measured]

    def _keep(self, *costs: ArmCost) -> None:
        with hold_back_interrupts():
            self.writer.append(costs)

    def _measure_memory(self) -> None:
        """Measures every arm's memory alone, before all steps; a resumed training already has it."""
        missing = self._without(lambda cost: not cost.energy and not cost.capacity)
        for arm in missing:
            self.observer.working(arm.name, "measuring the memory")
            try:
                cost = lab_of(self.worker, FIRST_SECONDS).alone(self.training.task((arm,)))
            except WorkerError as error:
                if not isinstance(error, WorkerFault):
                    self.worker.restart()
                reason = f"its memory could not be measured: {error}"
                cost = ArmCost(arm.name, self.training.request.seed, why=reason)
            self._keep(cost)
        if missing and self.training.device.accelerated:
            self.worker.restart()  # a process that has recorded a GPU's memory must not be used for timing

    def _find_own_batches(self) -> None:
        """Finds the largest batch of each native arm, since the speed of an emulation means nothing."""
        limit = self.training.request.own_batch
        if limit is None:
            return
        for arm in self._without(lambda cost: cost.capacity):
            if arm.native:
                self.observer.working(arm.name, "finding the largest batch")
                found = find_own_batch(self.training, arm, limit, self.worker)
                self._keep(ArmCost(arm.name, self.training.request.seed, capacity=found))

    def _measure_energy(self) -> None:
        """Measures energy in separate windows per arm, with further steps of the arms that the last seed left in
        memory."""
        request = self.training.request
        missing = self._without(lambda cost: cost.energy) if request.energy else []
        if not missing:
            return
        uses: Mapping[str, EnergyUse]
        if request.ranks is not None:
            uses = {arm.name: EnergyUse(SourceKind.NONE, why=SEVERAL) for arm in missing}
        else:
            with Meters() as meters:
                meter = meters.of(self.training.device)
                if meter.kind is SourceKind.NONE:
                    uses = {arm.name: EnergyUse(meter.kind.value, why=meter.why) for arm in missing}
                else:
                    uses = self._in_windows(missing, meter)
        self._keep(*(ArmCost(name, request.seed, request.steps, energy=use) for name, use in uses.items()))

    def _in_windows(self, arms: Sequence[Arm], meter: Meter) -> dict[str, EnergyUse]:
        uses: dict[str, EnergyUse] = {}
        running, facts, request = [], self.training.device, self.training.request
        lab = self.worker.within(FIRST_SECONDS)
        for arm in arms:
            try:
                reason = lab.check(arm.name).wrong
                # The size of a window depends on the duration of a step, which a few steps show.
                seconds = 0.0 if reason else lab.loop(arm.name, _FEW_STEPS) / _FEW_STEPS
            except WorkerError as error:
                reason = str(error)
            if reason:
                uses[arm.name] = EnergyUse(meter.kind.value, why=reason)
                continue
            support = Support(Level.NATIVE if arm.native else Level.EMULATED, "")
            planned = PlannedCase(Case("train", (), arm.precision, facts.key), support, Work())
            running.append(measured.MeasuredArm(arm.name, planned, facts, step_seconds=max(seconds, 1e-7)))
        # One seed is a first look, which need not wait for three windows.
        rule = WindowRule(windows=1, idle_seconds=1.5) if request.seeds == 1 else WindowRule()
        windows = WindowPass(
            meter, rule, request.seed, lambda arm, share: self.observer.working(arm.key, "measuring the energy")
        )
        return uses | {name: taken.use for name, taken in windows.measure(running, self.worker).items()}
