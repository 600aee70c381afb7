"""Trains with one layer, or all layers of a kind, in low precision at a time. Then trains with precision maps that keep
more and more of the worst layers in high precision, until one map keeps the loss.
"""

from __future__ import annotations

import itertools
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
    LoweredLayersTrial,
    LoweredUnit,
    PrecisionMap,
    SensitivityStudy,
    encode_study,
    make_precision_map,
    make_single_key_map,
    shorten_precision_map,
)
from fp8bench.files import (
    add_checksum,
    convert_write_errors,
    format_compact_json,
    parse_json,
    read_file,
    remove_checksum,
    write_whole,
)
from fp8bench.jobs.observer import JobObserver, ReportProgress
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import Worker, register_process_run
from fp8bench.measure.limits import RequestTimeLimits
from fp8bench.model import Case, DeviceFacts, PlannedCase, Request, Work
from fp8bench.model.codec import MalformedValueError, decode
from fp8bench.model.file_names import format_start_time
from fp8bench.model.words import UNTOUCHED
from fp8bench.pipeline import examine, now, open_worker
from fp8bench.plan.checked_workload import checked_products
from fp8bench.plan.make import check_request, make_plan
from fp8bench.plan.resolve import resolve_request
from fp8bench.protocols import Layer
from fp8bench.registry import precisions, workloads
from fp8bench.workloads.model import LOADED_MODELS

if TYPE_CHECKING:
    from fp8bench.measure.handle import RemoteBench


@dataclass(frozen=True)
class StudyRequest:
    """The settings of a study. `request` is planned as two cases: one in the low, one in the reference precision.
    `lowered_unit` is what one training sets to low precision, such as a single layer. `tolerance` is the largest
    acceptable loss gap, and `gradient_tolerance` the largest acceptable error of first gradients, both as shares.
    """

    request: Request
    lowered_unit: LoweredUnit
    steps: int
    tolerance: float
    gradient_tolerance: float | None = None


def run_study(question: StudyRequest, store: Path, observer: JobObserver) -> SensitivityStudy:
    """Trains all runs of a study. After an interrupt it returns what was trained until then."""
    request = question.request
    check_precisions(request)
    corpus = resolve_request(request, os.environ).corpus(store)
    with register_process_run(request.isolation), open_worker(request, corpus) as worker:
        runs = plan_sensitivity_study(question, worker.probe(), corpus.identity if corpus is not None else None, worker)
        environment = gather(worker.software(), __version__, request.threads, request.imports)
        runs.add(started=now(), environment=environment)
        try:
            with observer.counting() as report_progress:
                runs.run(report_progress)
            runs.add(finished=not runs.study.baseline.failure)
        except KeyboardInterrupt:
            observer.note("interrupted; what was trained is shown")
        finally:
            LOADED_MODELS.clear()  # frees the models that --no-isolation has made in this process
        return runs.study


def store_study(study: SensitivityStudy, store: Path) -> SensitivityStudy:
    """Writes the study into the store, and returns it with its path."""
    path = store / "sensitivity" / f"{format_start_time(study.started)}-{secrets.token_hex(4)}.json"
    with convert_write_errors(f"the study {path}", "Choose another --store DIR."):
        write_whole(path, format_compact_json(add_checksum(encode_study(study))) + "\n")
    return replace(study, path=str(path))


def read_sensitivity_studies(store: Path) -> tuple[tuple[SensitivityStudy, ...], list[str]]:
    """Reads the studies of a store, oldest first. Also returns a sentence on each unreadable file."""
    studies, troubles = [], []
    for path in sorted((store / "sensitivity").glob("*.json")):
        try:
            studies.append(
                decode(SensitivityStudy, {**remove_checksum(parse_json(read_file(path))), "path": str(path)})
            )
        except (OSError, ValueError, TypeError, MalformedValueError) as error:
            troubles.append(f"{path} is not a study and was left out ({str(error)[:120]})")
    return tuple(studies), troubles


def write_map(study: SensitivityStudy, path: Path) -> None:
    """Writes the suggested map as a file for --precision-map. Raises UsageError if no map is suggested."""
    trial = study.suggestion
    if trial is None:
        raise UsageError(f"no map is suggested, so {path} was not written. The tables above show the reason.")
    header = (
        f"`fp8bench sensitivity` suggests {study.low} in {trial.name}: the loss gap is within {study.tolerance:.2%}"
    )
    precision_map = study.explicit_map(trial) or tuple((name, study.low) for name in trial.low)
    with convert_write_errors(f"--write-map {path}", "Give another file."):
        write_whole(path, "\n".join([f"# {header}", *(f"{key}={mode}" for key, mode in precision_map), ""]))


def check_precisions(request: Request) -> None:
    check_request(request)
    low, reference = map(precisions.get, (*request.dtypes, request.reference or ""))
    # Without these checks, a wrong request would fail only after minutes of training.
    if low.mode == reference.mode:
        raise UsageError(
            f"--dtype and --reference are both {low.mode}: no layer would differ. Give --reference a higher precision."
        )
    for precision in (low, reference):
        if precision.unit_scaled:
            raise UsageError(
                f"{precision.mode} needs a fully unit-scaled model: its layers cannot be mixed with others. Choose fp8."
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


def plan_sensitivity_study(
    question: StudyRequest, facts: Sequence[DeviceFacts], corpus: str | None, worker: Worker
) -> StudyRunner:
    """Plans a study without running it. Raises UsageError for a precision that the device does not support."""
    request, limits = question.request, RequestTimeLimits(question.request.case_timeout)
    # 1. Plan the two cases, and check that the device can run them.
    plan = make_plan(request, facts, corpus)
    (group,) = plan.groups
    examine(plan, facts, worker, limits)
    case_by_mode = {planned.case.precision: planned for planned in group.cases}
    low, reference = (
        case_by_mode[precisions.find_canonical_name(name)] for name in (*request.dtypes, request.reference or "")
    )
    for planned in (low, reference):
        if planned.skip:
            raise UsageError(f"{planned.case.precision} cannot be run on {planned.case.device}: {planned.skip}.")
    # 2. Build the model to find its layers.
    precision = precisions.get(low.case.precision)
    device = next(fact for fact in facts if fact.key == low.case.device)
    layers = _find_layers(low, device, worker.with_time_limit(limits.for_untimed_pass(low.work)))
    high_layer_precision = precision.carried_by or precision.mode
    # 3. Create a study without results.
    study = SensitivityStudy(
        low.case.workload,
        low.case.params,
        device.key,
        low.case.precision,
        reference.case.precision,
        low.support.level.value,
        question.lowered_unit,
        question.steps,
        question.tolerance,
        request.seed,
        LoweredLayersTrial("reference", "", reference.case.precision),
        gradient_tolerance=question.gradient_tolerance,
    )
    return StudyRunner(study, low.case, reference.case, layers, high_layer_precision, device, low.work, limits, worker)


def _find_layers(planned_case: PlannedCase, device: DeviceFacts, bench: RemoteBench) -> tuple[Layer, ...]:
    """Returns the layers whose precision can be set: those of a suite with its parameters, or the convertible layers of
    a user's model.
    """
    workload = workloads.get(planned_case.case.workload)
    if not workload.examined:
        return checked_products(workload, dict(planned_case.case.params))
    coverage = bench.coverage(planned_case.case, device)
    holders = coverage.holders if coverage else ()
    return tuple(
        Layer(weight_holder.name, weight_holder.kind, group=weight_holder.group)
        for weight_holder in holders
        if weight_holder.converted
    )


# The number of times that the reference is retrained with other initial weights. The differences between the losses are
# noise.
WEIGHT_DRAW_COUNT = 2
_ALL_LAYERS = "all layers"


@dataclass
class StudyRunner:
    """Runs the trainings of a study one by one in the worker, and adds each to `study`.

    `low_precision_case` and `reference_case` are the cases that have all layers in the low or in the reference
    precision. `high_precision_mode` is the precision of those layers that the suite keeps in high precision by default.
    """

    study: SensitivityStudy
    low_precision_case: Case
    reference_case: Case
    layers: tuple[Layer, ...]
    high_precision_mode: str
    facts: DeviceFacts
    work: Work
    limits: RequestTimeLimits
    worker: Worker
    finished_training_count: int = 0

    def add(self, **changes: Any) -> None:
        self.study = replace(self.study, **changes)

    def append(self, part: str, trial: LoweredLayersTrial) -> None:
        """Appends a trial to `draws` (the reference from other initial weights), `probes` (one layer or kind in low
        precision) or `candidates` (precision maps) of the study."""
        self.add(**{part: (*getattr(self.study, part), trial)})

    def run(self, report_progress: ReportProgress) -> None:
        groups = group_layers(self.layers, self.study.by)
        # How many maps will be trained is unknown, so the total counts one map and grows with every further one.
        training_count = 1 + WEIGHT_DRAW_COUNT + len(groups) + 1

        def train_trial(
            description: str, trial: LoweredLayersTrial, gradients: bool = False, number: int = 0
        ) -> LoweredLayersTrial:
            report_progress(
                self.finished_training_count, training_count + number, "trainings", f"training with {description}"
            )
            self.finished_training_count += 1
            return self._train_layer_trial(trial, gradients)

        # 1. Train the reference. Without its loss, there is nothing to compare with.
        self.add(baseline=train_trial("the reference", self.study.baseline))
        if self.study.baseline.failure:
            return
        # 2. Repeat the reference with other initial weights, to learn how large the noise is.
        for draw in range(1, WEIGHT_DRAW_COUNT + 1):
            trial = replace(self.study.baseline, name=f"draw {draw}", draw=draw, losses=())
            self.append("draws", train_trial(f"the reference, draw {draw}", trial))
        if self.study.by is LoweredUnit.FORMAT:
            self._measure_and_train_formats(report_progress)
            return
        # 3. Lower one group of layers at a time, to rank the groups.
        for name, kind, names in groups:
            precision, layer_map = self._make_lowered_precision(name, names, self.low_precision_case.precision)
            trial = LoweredLayersTrial(name, kind, precision, layer_map, names)
            self.append("probes", train_trial(f"{name} low", trial, gradients=True))
        # 4. Lower all layers, then all but more and more of the worst groups, until the loss is kept.
        for number, (name, low_layers) in enumerate(self._yield_candidate_layers()):
            trial = LoweredLayersTrial(
                name, "", self.low_precision_case.precision, self._lower_layers(low_layers), low_layers
            )
            gradients = number == 0 or self.study.gradient_tolerance is not None
            self.append("candidates", train_trial(name, trial, gradients, number))
            if self.study.keeps_loss(self.study.candidates[-1]):
                return

    def _measure_and_train_formats(self, report_progress: ReportProgress) -> None:
        """Measures the gradient error of each format in each layer, then trains with the proposed formats, and with
        the low precision in all layers.
        """
        # 1. Try each format in each layer. One step is enough, because only its gradients are compared.
        trial_count = len(self.layers) * len(FORMATS)
        for number, (layer, number_format) in enumerate(itertools.product(self.layers, FORMATS)):
            report_progress(number, trial_count, "formats", f"{layer.name} in {number_format}")
            precision, layer_map = self._make_lowered_precision(layer.name, (layer.name,), number_format)
            format_trial = LoweredLayersTrial(
                layer.name, layer.kind, precision, layer_map, (layer.name,), form=number_format
            )
            self.append("probes", self._measure_gradients(format_trial))
        # 2. Train with the best formats. Also train with the low precision in every layer, for comparison.
        names = tuple(layer.name for layer in self.layers)
        default_modes = {
            layer.name: self.high_precision_mode if layer.high else self.low_precision_case.precision
            for layer in self.layers
        }
        formats_by_layer = {
            "the proposed formats": self.study.proposed_formats,
            "every layer": dict.fromkeys(names, self.study.low),
        }
        for name, format_by_layer in formats_by_layer.items():
            report_progress(trial_count, trial_count, "formats", f"training with {name}")
            format_trial = LoweredLayersTrial(
                name,
                "",
                self.low_precision_case.precision,
                shorten_precision_map(self.layers, format_by_layer, default_modes),
                names,
            )
            self.append("candidates", self._train_layer_trial(format_trial, gradients=True))

    def _yield_candidate_layers(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        low_precision_layers = {layer.name: None for layer in self.layers}
        name = _ALL_LAYERS
        yield name, tuple(low_precision_layers)
        for worst_trial in self.study.ranking:
            name = f"{_ALL_LAYERS} but {worst_trial.name}" if name == _ALL_LAYERS else f"{name}, {worst_trial.name}"
            for layer_name in worst_trial.low:
                del low_precision_layers[layer_name]
            # A map without layers in low precision would repeat the reference.
            if low_precision_layers:
                yield name, tuple(low_precision_layers)

    def _make_lowered_precision(self, key: str, names: tuple[str, ...], mode: str) -> tuple[str, PrecisionMap]:
        """Returns the precision and the precision map with which only one layer or kind of layer, `key`, runs in
        `mode`. `names` are the layers of `key`."""
        reference = self.reference_case.precision
        if reference != UNTOUCHED:
            return reference, make_single_key_map(self.layers, key, names, (mode, reference))
        # Maps have no effect on an unconverted model. So convert the model, with a map that leaves all layers but
        # `names` unchanged.
        return mode, make_precision_map(self.layers, names, (mode, reference), self.high_precision_mode)

    def _lower_layers(self, names: Sequence[str]) -> PrecisionMap:
        return make_precision_map(
            self.layers,
            names,
            (self.low_precision_case.precision, self.reference_case.precision),
            self.high_precision_mode,
        )

    def _train_layer_trial(self, trial: LoweredLayersTrial, gradients: bool) -> LoweredLayersTrial:
        """Returns the trial with its losses, or with the reason why the training failed."""
        if gradients and (trial := self._measure_gradients(trial)).failure:
            return trial
        steps = self.study.steps
        try:
            losses = self._time_limited_worker.losses(self._make_case(trial), self.facts, steps, trial.draw)
        except WorkerError as error:
            return self._mark_trial_failure(trial, error)
        return replace(trial, losses=losses, failure=_explain_invalid_losses(losses, steps))

    def _measure_gradients(self, trial: LoweredLayersTrial) -> LoweredLayersTrial:
        """Returns the trial with its `gradient_error`, or with the reason why this error is missing."""
        try:
            error = self._time_limited_worker.gradient_error(self._make_case(trial), self.reference_case, self.facts)
        except WorkerError as fault:
            return self._mark_trial_failure(trial, fault)
        return replace(trial, gradient_error=error)

    @property
    def _time_limited_worker(self) -> RemoteBench:
        limits = self.limits
        return self.worker.with_time_limit(
            limits.for_untimed_pass(self.work) + limits.for_first_step(self.work, self.study.steps)
        )

    def _make_case(self, trial: LoweredLayersTrial) -> Case:
        return replace(self.low_precision_case, precision=trial.precision, precision_map=trial.precision_map)

    def _mark_trial_failure(self, trial: LoweredLayersTrial, error: WorkerError) -> LoweredLayersTrial:
        if not (isinstance(error, WorkerFault) and error.out_of_memory):
            self.worker.restart()  # after an error on a GPU, the worker process is unusable
        return replace(trial, failure=str(error))


def group_layers(layers: Sequence[Layer], by: LoweredUnit) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns the groups of layers that a study lowers one by one: each layer, or all layers of a kind (see `by`). A
    group is its name, its kind, and the names of its layers.
    """
    if by is LoweredUnit.LAYER:
        return [(layer.name, layer.kind, (layer.name,)) for layer in layers]
    names: dict[str, list[str]] = {}
    for layer in layers:
        names.setdefault(layer.kind, []).append(layer.name)
    return [(kind, kind, tuple(members)) for kind, members in names.items()]


def _explain_invalid_losses(losses: Sequence[float], steps: int) -> str:
    """Returns why losses cannot be compared; '' if they can."""
    invalid_step = next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    if invalid_step is not None:
        return f"the loss is {losses[invalid_step - 1]} in step {invalid_step}"
    return "" if len(losses) == steps else f"it gave {len(losses)} losses in {steps} steps"
