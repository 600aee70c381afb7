"""What a precision costs layer by layer: names are checked before anything is started, cases are made by the plan."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8bench import __version__
from fp8bench.errors import StoreError, UsageError, WorkerError, WorkerFault
from fp8bench.features.sensitivity.study import By, PrecisionMap, Study, Trial, map_of
from fp8bench.features.sensitivity.view import as_json
from fp8bench.files import compact, keeping, sealed, stamp, unsealed, write_whole
from fp8bench.jobs.observer import JobObserver, Tell
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import AskedBench, Worker, claimed
from fp8bench.measure.limits import Limits
from fp8bench.model import Case, DeviceFacts, PlannedCase, Request, Work
from fp8bench.model.codec import Malformed, decode
from fp8bench.model.words import UNTOUCHED
from fp8bench.pipeline import examine, now, worker_for
from fp8bench.plan.asked_suites import reads_corpus
from fp8bench.plan.checked_workload import sound_layers
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.plan.make import check_names, make_plan
from fp8bench.protocols import Layer
from fp8bench.registry import precisions, workloads
from fp8bench.workloads.model import MADE


@dataclass(frozen=True)
class Question:
    """What a person asks: `request` is the run of the two cases, low and reference; `tolerance` is a share."""

    request: Request
    by: By
    steps: int
    tolerance: float
    gradient_tolerance: float | None = None


def studied(question: Question, store: Path, observer: JobObserver) -> Study:
    """Train all that a study needs. An interrupt ends it early: the study comes as far as it was."""
    request = question.request
    check(request)
    corpus = prepare_corpus(request.data, store / "data", write=True) if reads_corpus(request) else None
    with claimed(request.isolation), worker_for(request, corpus) as worker:
        study, bed = opened(question, worker.probe(), corpus.identity if corpus is not None else None, worker)
        environment = gather(worker.software(), __version__, request.threads, request.imports)
        study = replace(study, started=now(), environment=environment)
        try:
            with observer.counting() as tell:
                for further in run(study, bed, worker, tell):
                    study = further
        except KeyboardInterrupt:
            observer.note("interrupted; what was trained is shown")
            return study
        finally:
            MADE.clear()  # what makers gave in this process, where there is no other
        return replace(study, finished=not study.baseline.failure)


def kept(study: Study, store: Path) -> Study:
    path = store / "sensitivity" / f"{stamp(study.started)}-{secrets.token_hex(4)}.json"
    try:
        write_whole(path, compact(sealed(json.loads(as_json(study)))) + "\n")
    except OSError as error:
        raise StoreError(
            f"the study cannot be kept in {path} ({error.strerror}). Choose another --store DIR."
        ) from None
    return replace(study, path=str(path))


def studies_of(store: Path) -> tuple[tuple[Study, ...], list[str]]:
    """What a store has in `sensitivity/*.json`: what can be read, oldest first, and a sentence on each other file."""
    found, troubles = [], []
    for path in sorted((store / "sensitivity").glob("*.json")):
        try:
            found.append(decode(Study, {**unsealed(json.loads(path.read_bytes())), "path": str(path)}))
        except (OSError, ValueError, TypeError, RecursionError, Malformed) as error:
            troubles.append(f"{path} is no study and was left out ({str(error)[:120]})")
    return tuple(found), troubles


def write_map(study: Study, path: Path) -> None:
    """Write the suggested map there, as a file for --precision-map. Raises UsageError where none is suggested."""
    found = study.suggested
    if found is None:
        raise UsageError(f"no map is suggested, so that {path} was not written. The tables above say why.")
    head = f"{study.low} in {found.name}, by `fp8bench sensitivity`; a loss gap within {study.tolerance:.2%}"
    write_map_file(path, head, found.precision_map)


def write_map_file(path: Path, head: str, precision_map: PrecisionMap) -> None:
    """A map as --precision-map takes it, with a remark at its head."""
    with keeping(f"--write-map {path}", "Give another file."):
        write_whole(path, "\n".join([f"# {head}", *(f"{key}={mode}" for key, mode in precision_map), ""]))


def check(request: Request) -> None:
    """Raise for what cannot be meant, before anything is started."""
    check_names(request)
    low, reference = map(precisions.get, (*request.dtypes, request.reference or ""))
    if low.mode == reference.mode:
        raise UsageError(
            f"--dtype and --reference are both {low.mode}, so that no layer would differ. Give --reference a higher "
            "precision."
        )
    if reference.rank > low.rank:
        raise UsageError(
            f"--reference {reference.mode} is a lower precision than --dtype {low.mode}: exchange them, or leave "
            "--reference out."
        )
    if low.float32_products != reference.float32_products:
        raise UsageError(
            f"{low.mode} and {reference.mode} cannot be mixed layer by layer: TF32 is one switch for a whole process. "
            "Give another --reference or --dtype."
        )


def opened(question: Question, facts: Sequence[DeviceFacts], corpus: str | None, worker: Worker) -> tuple[Study, Bed]:
    """The study before its first run, and what all its runs share. Raises for a precision that the device refuses."""
    request, limits = question.request, Limits(question.request.case_timeout)
    plan = make_plan(request, facts, corpus)
    (group,) = plan.groups
    examine(plan, facts, worker, limits)
    by_mode = {planned.case.precision: planned for planned in group.cases}
    low, reference = (by_mode[precisions.canonical(word)] for word in (*request.dtypes, request.reference or ""))
    for planned in (low, reference):
        if planned.skip:
            raise UsageError(f"{planned.case.precision} cannot be run on {planned.case.device}: {planned.skip}.")
    precision = precisions.get(low.case.precision)
    device = next(one for one in facts if one.key == low.case.device)
    layers = _layers_of(low, device, worker.within(limits.numbers(low.work)))
    high = precision.carried_by or precision.mode
    bed = Bed(low.case, reference.case, layers, high, device, low.work, question.steps, limits)
    study = Study(
        low.case.workload, low.case.params, device.key, low.case.precision, reference.case.precision,
        low.support.level.value, question.by, question.steps, question.tolerance, request.seed,
        Trial("reference", "", reference.case.precision), gradient_tolerance=question.gradient_tolerance,
    )  # fmt: skip
    return study, bed


def _layers_of(planned: PlannedCase, device: DeviceFacts, bench: AskedBench) -> tuple[Layer, ...]:
    """Those of a suite by its parameters; those of a model of one's own that can be converted, by its coverage."""
    workload = workloads.get(planned.case.workload)
    if not workload.examined:
        return sound_layers(workload, workload.layers(dict(planned.case.params)))
    coverage = bench.coverage(planned.case, device)
    return tuple(Layer(one.name, one.kind) for one in coverage.holders if one.converted) if coverage else ()


# Other draws of the reference's weights, whose losses show what a gap means.
DRAWS = 2
_ALL = "all layers"


@dataclass(frozen=True)
class Bed:
    """What all runs of a study share: the two cases without a map, the layers, and what high ones have without one."""

    low: Case
    reference: Case
    layers: tuple[Layer, ...]
    high: str
    facts: DeviceFacts
    work: Work
    steps: int
    limits: Limits

    def alone(self, name: str, names: Sequence[str]) -> tuple[str, PrecisionMap]:
        """The precision and the map of a case that has these layers low and no others."""
        if self.reference.precision != UNTOUCHED:
            return self.reference.precision, ((name, self.low.precision),)
        # What came untouched has no layers of ours: the others of a converted copy stay as they came.
        modes = self.low.precision, self.reference.precision
        return self.low.precision, map_of(self.layers, names, modes, self.high)


def run(study: Study, bed: Bed, worker: Worker, tell: Tell) -> Iterator[Study]:
    """The study after every run that adds to it."""
    groups = groups_of(bed.layers, study.by)
    total = 1 + DRAWS + len(groups) + 1
    runs = Runs(bed, worker, tell, total)
    study = replace(study, baseline=runs.trained("the reference", study.baseline))
    yield study
    if study.baseline.failure:
        return
    for draw in range(1, DRAWS + 1):
        one = replace(study.baseline, name=f"draw {draw}", draw=draw, losses=())
        study = replace(study, draws=(*study.draws, runs.trained(f"the reference, draw {draw}", one)))
        yield study
    for name, kind, names in groups:
        one = Trial(name, kind, *bed.alone(name, names), names)
        study = replace(study, probes=(*study.probes, runs.trained(f"{name} low", one, gradients=True)))
        yield study
    yield from _candidates(study, bed, runs)


def _candidates(study: Study, bed: Bed, runs: Runs) -> Iterator[Study]:
    """All layers low, then without the worst of those that are left, until a map keeps the loss."""
    left = {layer.name: None for layer in bed.layers}
    modes = bed.low.precision, bed.reference.precision
    waiting = list(study.ranking)
    name = _ALL
    while left:
        one = Trial(name, "", bed.low.precision, map_of(bed.layers, left, modes, bed.high), tuple(left))
        every = study.gradient_tolerance is not None
        trained = runs.trained(name, one, gradients=every or len(left) == len(bed.layers))
        study = replace(study, candidates=(*study.candidates, trained))
        yield study
        if study.keeps(trained) or not waiting:
            return
        worst = waiting.pop(0)
        name = f"{_ALL} but {worst.name}" if name == _ALL else f"{name}, {worst.name}"
        for gone in worst.low:
            del left[gone]
        runs.total += 1


@dataclass
class Runs:
    """Asks the worker for one training run after the other."""

    bed: Bed
    worker: Worker
    tell: Tell
    total: int
    done: int = 0

    def trained(self, words: str, trial: Trial, gradients: bool = False) -> Trial:
        """The trial with its losses, and the error of its first gradients; or with the reason why it has none."""
        self.tell(self.done, self.total, "trainings", f"training with {words}")
        self.done += 1
        bed = self.bed
        case = replace(bed.low, precision=trial.precision, precision_map=trial.precision_map)
        limit = bed.limits.numbers(bed.work) + bed.limits.first(bed.work, bed.steps)
        try:
            if gradients:
                error = self.worker.within(limit).gradient_error(case, bed.reference, bed.facts)
                trial = replace(trial, gradient_error=error)
            losses = self.worker.within(limit).losses(case, bed.facts, bed.steps, trial.draw)
        except WorkerError as error:
            if not (isinstance(error, WorkerFault) and error.out_of_memory):
                self.worker.restart()  # after an error on a GPU nothing in that process works any more
            return replace(trial, failure=str(error))
        return replace(trial, losses=losses, failure=_unsound(losses, bed.steps))


def groups_of(layers: Sequence[Layer], by: By) -> list[tuple[str, str, tuple[str, ...]]]:
    """What is taken low at a time: a name for it, its kind, and the layers."""
    if by is By.LAYER:
        return [(layer.name, layer.kind, (layer.name,)) for layer in layers]
    kinds = dict.fromkeys(layer.kind for layer in layers)
    return [(kind, kind, tuple(layer.name for layer in layers if layer.kind == kind)) for kind in kinds]


def _unsound(losses: Sequence[float], steps: int) -> str:
    """Why losses are none to compare; '' if they are."""
    wrong = next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    if wrong is not None:
        return f"the loss is {losses[wrong - 1]} in step {wrong}"
    return "" if len(losses) == steps else f"it gave {len(losses)} losses in {steps} steps"
