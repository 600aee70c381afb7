"""Trains with one layer or kind low at a time, then with maps that leave out the worst, until one keeps the loss."""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8bench import __version__
from fp8bench.errors import UsageError, WorkerError, WorkerFault
from fp8bench.features.sensitivity.study import (
    FORMATS,
    By,
    LayerTrial,
    PrecisionMap,
    Study,
    map_alone,
    map_of,
    shorten_map,
    value_of,
)
from fp8bench.files import compact, keeping, read_file, seal, unseal, write_whole
from fp8bench.jobs.observer import JobObserver, Tell
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import Worker, claim_process
from fp8bench.measure.limits import Limits
from fp8bench.model import Case, DeviceFacts, PlannedCase, Request, Work
from fp8bench.model.codec import Malformed, decode
from fp8bench.model.file_names import stamp
from fp8bench.model.words import UNTOUCHED
from fp8bench.pipeline import examine, now, worker_for
from fp8bench.plan.checked_workload import products_of
from fp8bench.plan.make import check_names, make_plan
from fp8bench.plan.resolve import resolve
from fp8bench.protocols import Layer
from fp8bench.registry import precisions, workloads
from fp8bench.workloads.model import MADE

if TYPE_CHECKING:
    from fp8bench.measure.handle import AskedBench


@dataclass(frozen=True)
class StudyQuestion:
    """`request` is a run of two cases, the low precision and the reference; tolerances are shares."""

    request: Request
    by: By
    steps: int
    tolerance: float
    gradient_tolerance: float | None = None


def run_study(question: StudyQuestion, store: Path, observer: JobObserver) -> Study:
    """Trains all runs of a study; after an interrupt, returns what was trained until then."""
    request = question.request
    check_precisions(request)
    corpus = resolve(request, os.environ).corpus(store)
    with claim_process(request.isolation), worker_for(request, corpus) as worker:
        runs = open_study(question, worker.probe(), corpus.identity if corpus is not None else None, worker)
        environment = gather(worker.software(), __version__, request.threads, request.imports)
        runs.add(started=now(), environment=environment)
        try:
            with observer.counting() as tell:
                runs.run(tell)
            runs.add(finished=not runs.study.baseline.failure)
        except KeyboardInterrupt:
            observer.note("interrupted; what was trained is shown")
        finally:
            MADE.clear()  # models of this process, with --no-isolation
        return runs.study


def keep_study(study: Study, store: Path) -> Study:
    """Writes the study into the store, and returns it with its path."""
    path = store / "sensitivity" / f"{stamp(study.started)}-{secrets.token_hex(4)}.json"
    with keeping(f"the study {path}", "Choose another --store DIR."):
        write_whole(path, compact(seal(value_of(study))) + "\n")
    return replace(study, path=str(path))


def studies_of(store: Path) -> tuple[tuple[Study, ...], list[str]]:
    """Reads a store's studies, oldest first, and returns a sentence for each unreadable file."""
    studies, troubles = [], []
    for path in sorted((store / "sensitivity").glob("*.json")):
        try:
            studies.append(decode(Study, {**unseal(json.loads(read_file(path))), "path": str(path)}))
        except (OSError, ValueError, TypeError, RecursionError, Malformed) as error:
            troubles.append(f"{path} is not a study and was left out ({str(error)[:120]})")
    return tuple(studies), troubles


def write_map(study: Study, path: Path) -> None:
    """Writes the suggested map as a file for --precision-map. Raises UsageError if none is suggested."""
    trial = study.suggestion
    if trial is None:
        raise UsageError(f"no map is suggested, so {path} was not written. The tables above show the reason.")
    head = f"{study.low} in {trial.name}, by `fp8bench sensitivity`; a loss gap within {study.tolerance:.2%}"
    precision_map = study.stated_map(trial) or tuple((name, study.low) for name in trial.low)
    with keeping(f"--write-map {path}", "Give another file."):
        write_whole(path, "\n".join([f"# {head}", *(f"{key}={mode}" for key, mode in precision_map), ""]))


def check_precisions(request: Request) -> None:
    check_names(request)
    low, reference = map(precisions.get, (*request.dtypes, request.reference or ""))
    # These would only fail within the study, after minutes of training.
    if low.mode == reference.mode:
        raise UsageError(
            f"--dtype and --reference are both {low.mode}: no layer would differ. Give --reference a higher precision."
        )
    for precision in (low, reference):
        if precision.unit_scaled:
            raise UsageError(
                f"{precision.mode} needs a model that is unit-scaled as a whole: its layers mix with no others. "
                "Choose fp8."
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


def open_study(question: StudyQuestion, facts: Sequence[DeviceFacts], corpus: str | None, worker: Worker) -> StudyRuns:
    """Plans a study without running it. Raises UsageError for a precision that the device refuses."""
    request, limits = question.request, Limits(question.request.case_timeout)
    # 1. Plan the two cases, and check that this device runs them.
    plan = make_plan(request, facts, corpus)
    (group,) = plan.groups
    examine(plan, facts, worker, limits)
    by_mode = {planned.case.precision: planned for planned in group.cases}
    low, reference = (by_mode[precisions.canonical(word)] for word in (*request.dtypes, request.reference or ""))
    for planned in (low, reference):
        if planned.skip:
            raise UsageError(f"{planned.case.precision} cannot be run on {planned.case.device}: {planned.skip}.")
    # 2. Find the layers that can differ, which requires building the model.
    precision = precisions.get(low.case.precision)
    device = next(fact for fact in facts if fact.key == low.case.device)
    layers = _layers(low, device, worker.within(limits.numbers(low.work)))
    high = precision.carried_by or precision.mode
    # 3. Create a study without results.
    study = Study(
        low.case.workload,
        low.case.params,
        device.key,
        low.case.precision,
        reference.case.precision,
        low.support.level.value,
        question.by,
        question.steps,
        question.tolerance,
        request.seed,
        LayerTrial("reference", "", reference.case.precision),
        gradient_tolerance=question.gradient_tolerance,
    )
    return StudyRuns(study, low.case, reference.case, layers, high, device, low.work, limits, worker)


def _layers(planned: PlannedCase, device: DeviceFacts, bench: AskedBench) -> tuple[Layer, ...]:
    """Returns a suite's layers by its parameters, or those of a user's model that can be converted."""
    workload = workloads.get(planned.case.workload)
    if not workload.examined:
        return products_of(workload, dict(planned.case.params))
    coverage = bench.coverage(planned.case, device)
    holders = coverage.holders if coverage else ()
    return tuple(Layer(holder.name, holder.kind, group=holder.group) for holder in holders if holder.converted)


# The number of other random initial weights of the reference, which show how much of a gap is noise.
DRAWS = 2
_ALL = "all layers"


@dataclass
class StudyRuns:
    """Runs one training after the other in the worker; `study` grows with each.

    `low` and `reference` are the cases without a map; `high` is the default mode of layers that stay high.
    """

    study: Study
    low: Case
    reference: Case
    layers: tuple[Layer, ...]
    high: str
    facts: DeviceFacts
    work: Work
    limits: Limits
    worker: Worker
    done: int = 0

    def add(self, **changes: Any) -> None:
        self.study = replace(self.study, **changes)

    def run(self, tell: Tell) -> None:
        groups = groups_of(self.layers, self.study.by)
        total = 1 + DRAWS + len(groups) + 1

        def train(words: str, trial: LayerTrial, gradients: bool = False, extra: int = 0) -> LayerTrial:
            tell(self.done, total + extra, "trainings", f"training with {words}")
            self.done += 1
            return self._train(trial, gradients)

        self.add(baseline=train("the reference", self.study.baseline))
        if self.study.baseline.failure:
            return
        for draw in range(1, DRAWS + 1):
            trial = replace(self.study.baseline, name=f"draw {draw}", draw=draw, losses=())
            self.add(draws=(*self.study.draws, train(f"the reference, draw {draw}", trial)))
        if self.study.by is By.FORMAT:
            self._choose_formats(tell)
            return
        for name, kind, names in groups:
            layer_map: PrecisionMap
            if self.reference.precision != UNTOUCHED:
                precision = self.reference.precision
                layer_map = map_alone(self.layers, name, names, (self.low.precision, precision))
            else:  # an unconverted model has no layers to map; in a converted copy, other layers are unchanged
                precision, layer_map = self.low.precision, self._map_of(names)
            trial = LayerTrial(name, kind, precision, layer_map, names)
            self.add(probes=(*self.study.probes, train(f"{name} low", trial, gradients=True)))
        for extra, (name, low_layers) in enumerate(self._candidates()):
            trial = LayerTrial(name, "", self.low.precision, self._map_of(low_layers), low_layers)
            gradients = extra == 0 or self.study.gradient_tolerance is not None
            self.add(candidates=(*self.study.candidates, train(name, trial, gradients, extra)))
            if self.study.keeps(self.study.candidates[-1]):
                return

    def _choose_formats(self, tell: Tell) -> None:
        """Finds the error of each layer's formats, then trains with the proposed ones, and with one format in all."""
        total = len(self.layers) * len(FORMATS)
        for number, (layer, form) in enumerate(itertools.product(self.layers, FORMATS)):
            tell(number, total, "formats", f"{layer.name} in {form}")
            if self.reference.precision == UNTOUCHED:
                precision = form
                layer_map = map_of(self.layers, (layer.name,), (form, UNTOUCHED), form)
            else:
                precision = self.reference.precision
                layer_map = map_alone(self.layers, layer.name, (layer.name,), (form, precision))
            trial = LayerTrial(layer.name, layer.kind, precision, layer_map, (layer.name,), form=form)
            self.add(probes=(*self.study.probes, self._measure(trial)))
        names = tuple(layer.name for layer in self.layers)
        usual = {layer.name: self.high if layer.high else self.low.precision for layer in self.layers}
        forms = {"the proposed formats": self.study.proposed_forms, "every layer": dict.fromkeys(names, self.study.low)}
        for name, by_layer in forms.items():
            tell(total, total, "formats", f"training with {name}")
            trial = LayerTrial(name, "", self.low.precision, shorten_map(self.layers, by_layer, usual), names)
            self.add(candidates=(*self.study.candidates, self._train(trial, gradients=True)))

    def _candidates(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        low_layers = {layer.name: None for layer in self.layers}
        name = _ALL
        yield name, tuple(low_layers)
        for worst in self.study.ranking:
            name = f"{_ALL} but {worst.name}" if name == _ALL else f"{name}, {worst.name}"
            for layer_name in worst.low:
                del low_layers[layer_name]
            if low_layers:
                yield name, tuple(low_layers)

    def _map_of(self, names: Sequence[str]) -> PrecisionMap:
        return map_of(self.layers, names, (self.low.precision, self.reference.precision), self.high)

    def _train(self, trial: LayerTrial, gradients: bool) -> LayerTrial:
        """Returns the trial with its losses, or with the reason why it failed."""
        if gradients and (trial := self._measure(trial)).failure:
            return trial
        steps = self.study.steps
        try:
            losses = self._bench.losses(self._case(trial), self.facts, steps, trial.draw)
        except WorkerError as error:
            return self._failed(trial, error)
        return replace(trial, losses=losses, failure=_why_unsound(losses, steps))

    def _measure(self, trial: LayerTrial) -> LayerTrial:
        """Returns the trial with the error of its first gradients, or with the reason why it is missing."""
        try:
            error = self._bench.gradient_error(self._case(trial), self.reference, self.facts)
        except WorkerError as fault:
            return self._failed(trial, fault)
        return replace(trial, gradient_error=error)

    @property
    def _bench(self) -> AskedBench:
        return self.worker.within(self.limits.numbers(self.work) + self.limits.first(self.work, self.study.steps))

    def _case(self, trial: LayerTrial) -> Case:
        return replace(self.low, precision=trial.precision, precision_map=trial.precision_map)

    def _failed(self, trial: LayerTrial, error: WorkerError) -> LayerTrial:
        if not (isinstance(error, WorkerFault) and error.out_of_memory):
            self.worker.restart()  # after an error on a GPU that process is unusable
        return replace(trial, failure=str(error))


def groups_of(layers: Sequence[Layer], by: By) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns the groups to lower one at a time: (name, kind, names of layers)."""
    if by is By.LAYER:
        return [(layer.name, layer.kind, (layer.name,)) for layer in layers]
    names: dict[str, list[str]] = {}
    for layer in layers:
        names.setdefault(layer.kind, []).append(layer.name)
    return [(kind, kind, tuple(members)) for kind, members in names.items()]


def _why_unsound(losses: Sequence[float], steps: int) -> str:
    """Returns why losses cannot be compared; '' if they can."""
    wrong = next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    if wrong is not None:
        return f"the loss is {losses[wrong - 1]} in step {wrong}"
    return "" if len(losses) == steps else f"it gave {len(losses)} losses in {steps} steps"
