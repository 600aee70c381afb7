"""A training: planned, begun, and gone on with where it was cut off. Its stream is the result."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from fp8bench import __version__
from fp8bench.errors import NotKept, StoreError, WorkerError
from fp8bench.features.train.arms import arms_of_seed, check_training, device_of, make_arms
from fp8bench.features.train.costs import largest_batches, measure_energy, measure_memory
from fp8bench.features.train.kept import (
    TrainingWriter,
    load_head,
    load_training,
    reopen_training,
    start_training,
    training_files,
)
from fp8bench.features.train.lab.lab import MODULE, Lab
from fp8bench.features.train.lab.models import config_of
from fp8bench.features.train.lab.rank_lab import MODULE as RANK_MODULE
from fp8bench.features.train.observer import TrainingObserver
from fp8bench.features.train.ranks_merge import MERGES
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.resumable import refuse_other_training, refuse_training_elsewhere
from fp8bench.features.train.seed import Pace, SeedRun, lab_of
from fp8bench.features.train.texts import prepare_text
from fp8bench.features.train.turns import Turns, turns_of
from fp8bench.features.train.values import (
    Arm,
    ArmCost,
    ArmRole,
    ArmState,
    KeptTraining,
    SeedTask,
    StepRow,
    Training,
    TrainingEvent,
    TrainingText,
)
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import START_SECONDS, LocalWorker, ProcessWorker, Worker, claimed
from fp8bench.measure.interrupts import ignored
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model import DeviceFacts, Environment
from fp8bench.model.raw import Settings
from fp8bench.pipeline import now
from fp8bench.store.runs.run_file import check_store
from fp8bench.user_code import import_user_modules


@dataclass(frozen=True)
class Planned:
    """A training as it would be: its arms on their device, and the reference's model as it was built.

    `seconds` are those of all steps of arms whose precision was trained here before; `unknown` are the other arms.
    """

    arms: tuple[Arm, ...]
    device: DeviceFacts
    reference: ArmState
    seconds: float
    unknown: list[str]


def train(request: TrainingRequest, store: Path, observer: TrainingObserver, command: str) -> KeptTraining:
    """Train all arms of all seeds, and read back what was kept.

    An interrupt ends it early: what was kept is returned, with `finished` False. Raises NotKept, which holds the
    training as far as it was kept, where the store fails, and WorkerError where the reference cannot go on.
    """
    with _ready(request, store) as (worker, text):
        device, arms, environment = _asked(request, worker)
        parameters = _reference(request, worker, arms, device, text).parameters
        training = Training(
            secrets.token_hex(4), now(), command, request, arms, device, environment, text, parameters
        )  # fmt: skip
        return _trained(training, start_training(training, store), worker, observer)


def resume(path: Path, store: Path, observer: TrainingObserver) -> tuple[bool, KeptTraining]:
    """Go on with a training from the last place that was kept; one that is finished is returned, with False."""
    kept = load_training(path)
    if kept.finished:
        return False, kept
    training = kept.training
    refuse_training_elsewhere(training)
    with _ready(training.request, store) as (worker, text):
        device, arms, environment = _asked(training.request, worker)
        refuse_other_training(training, arms, device, environment, text.identity)
        writer = reopen_training(path)
        place = writer.places[-1]
        writer.go_back(place)
        words = f"gone on with from step {place.step}"
        number = turns_of(training, kept.of(ArmCost)).turns[place.number].number
        event = TrainingEvent("", training.request.seed + number, place.step, "resumed", words)
        writer.append((event,))
        return True, _trained(replace(training, text=text), writer, worker, observer, resumed=True)


def planned(request: TrainingRequest, store: Path) -> Planned:
    """What a training would do; nothing is trained."""
    with _ready(request, store) as (worker, text):
        device, arms, _ = _asked(request, worker)
        reference = _reference(request, worker, arms, device, text)
        return Planned(arms, device, reference, *expected_seconds(request, arms, device, store))


@contextmanager
def _ready(request: TrainingRequest, store: Path) -> Iterator[tuple[Worker, TrainingText]]:
    """The text and the worker; everything that can be refused before one is started is."""
    import_user_modules(request.imports)
    check_training(request)
    with claimed(request.isolation):
        check_store(store)
        sequence = config_of(request.settings, 1).sequence
        text = prepare_text(request.data, request.other_data, request.tokens, store / "data", sequence)
        worker = _worker(request, Settings(request.threads, request.seed, request.imports))
        try:
            yield worker, text
        finally:
            with ignored():
                worker.close()


def _asked(request: TrainingRequest, worker: Worker) -> tuple[DeviceFacts, tuple[Arm, ...], Environment]:
    """What the worker says of where it is, and the plan that follows from it."""
    device = device_of(request, worker.probe())
    environment = gather(worker.software(), __version__, request.threads, request.imports)
    return device, make_arms(request, device), environment


def _worker(request: TrainingRequest, settings: Settings) -> Worker:
    if request.ranks is not None:
        return RanksWorker(settings, request.ranks, module=RANK_MODULE, merges=MERGES)
    return ProcessWorker(settings, module=MODULE) if request.isolation else LocalWorker(settings, Lab)


def _reference(
    request: TrainingRequest, worker: Worker, arms: Sequence[Arm], device: DeviceFacts, text: TrainingText
) -> ArmState:
    """The reference's model, built and counted."""
    lead = tuple(arm for arm in arms if arm.role is ArmRole.REFERENCE)
    task = SeedTask(request.seed, lead, request.settings, request.steps, request.stride, text, device)
    (state,) = lab_of(worker, START_SECONDS).begin(task)
    return state


def _tell(training: Training, turns: Turns, writer: TrainingWriter, observer: TrainingObserver) -> None:
    """Why arms are not all trained together, or not at all."""
    seed = training.request.seed
    events = [TrainingEvent(arm, seed, 0, "out", words) for arm, words in turns.out.items()]
    if turns.cut:
        events.append(TrainingEvent("", seed, 0, "pairs", turns.cut))
    told = {(event.kind, event.arm) for event in load_training(writer.path).of(TrainingEvent)}
    if events := [event for event in events if (event.kind, event.arm) not in told]:
        writer.append(events)
        observer.trained(0, 0, events)


def _trained(
    training: Training, writer: TrainingWriter, worker: Worker, observer: TrainingObserver, resumed: bool = False
) -> KeptTraining:
    """The seeds one after the other, from the last place that was kept."""
    first, step = (writer.places[-1].number, writer.places[-1].step) if writer.places else (0, 0)
    out = dict(writer.places[-1].out if writer.places else ())
    pace, fresh = Pace(), not resumed or first == step == 0
    observer.begun(training)
    try:
        measure_memory(training, worker, writer, observer)
        turns = turns_of(training, load_training(writer.path).of(ArmCost))
        if (first, step) == (0, 0):
            out |= turns.out
            _tell(training, turns, writer, observer)
        for place, turn in enumerate(turns.turns[first:], first):
            SeedRun(training, place, turn, worker, writer, observer, pace, out).run(fresh)
            fresh = True
        measure_energy(training, worker, writer, observer, apart=bool(turns.cut))
        largest_batches(training, worker, writer, observer)
        writer.finish("finished")
    except KeyboardInterrupt:
        with ignored(), contextlib.suppress(StoreError):  # without an end line it is unfinished, too
            writer.finish("interrupted")
    except StoreError as error:
        raise NotKept(str(error), load_training(writer.path)) from None
    except WorkerError:
        with contextlib.suppress(StoreError):
            writer.finish("interrupted")
        observer.note(f"what was trained is kept; `fp8bench train --resume {training.id}` goes on with it")
        raise
    finally:
        writer.close()
    with ignored():
        return load_training(writer.path)


_LOOKED_AT = 20
# What makes a step as long as it is, beside the precision.
_SAME = ("model", "arch", "batch", "sequence", "micro_batches", "checkpointing", "compile", "parallel")


def expected_seconds(
    request: TrainingRequest, arms: Sequence[Arm], device: DeviceFacts, store: Path
) -> tuple[float, list[str]]:
    """The seconds of all steps of arms whose precision was trained here before, and the names of the others."""
    known = _known(request, device, store)
    seconds, unknown = 0.0, []
    for number in range(request.seeds):
        for arm in arms_of_seed(arms, number):
            if arm.precision in known:
                seconds += request.steps * known[arm.precision]
            elif arm.name not in unknown:
                unknown.append(arm.name)
    return seconds, unknown


def _known(request: TrainingRequest, device: DeviceFacts, store: Path) -> dict[str, float]:
    """The median step by precision, of the newest trainings of this model on this device that have it."""
    known: dict[str, float] = {}
    for path in training_files(store)[:_LOOKED_AT]:
        with contextlib.suppress(StoreError):
            head = load_head(path)
            asked = request.threads, request.ranks
            if (head.device.name, head.request.threads, head.request.ranks) != (device.name, *asked) or any(
                getattr(head.request.settings, name) != getattr(request.settings, name) for name in _SAME
            ):
                continue
            modes = {arm.name: arm.precision for arm in head.arms}
            seconds: dict[str, list[float]] = {}
            for row in load_training(path).of(StepRow):
                if row.seconds > 0 and modes.get(row.arm, "") not in known:
                    seconds.setdefault(modes[row.arm], []).append(row.seconds)
            known |= {mode: median(times) for mode, times in seconds.items()}
    return known


