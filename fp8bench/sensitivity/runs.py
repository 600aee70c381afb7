"""The runs of a study: the reference, other draws of its weights, one layer low at a time, and maps until one keeps
the loss. A run that crashes, hangs or diverges is a trial with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fp8bench.errors import WorkerError, WorkerFault
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import Limits
from fp8bench.model import Case, DeviceFacts, Work
from fp8bench.protocols import Layer
from fp8bench.sensitivity.maps import map_of
from fp8bench.sensitivity.study import By, Study, Trial

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


# Told what runs, as which of how many; the last number may grow.
Tell = Callable[[str, int, int], None]


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
        one = Trial(name, kind, bed.reference.precision, ((name, bed.low.precision),), names)
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
        trained = runs.trained(name, one, gradients=len(left) == len(bed.layers))
        study = replace(study, candidates=(*study.candidates, trained))
        yield study
        if study.keeps(trained) or not waiting:
            return
        worst = waiting.pop(0)
        name = f"{_ALL} but {worst.name}" if name == _ALL else f"{name}, {worst.name}"
        for gone in worst.low:
            del left[gone]
        runs.total += 1


class Runs:
    """Asks the worker for one training run after the other."""

    def __init__(self, bed: Bed, worker: Worker, tell: Tell, total: int) -> None:
        self.total = total
        self._bed = bed
        self._worker = worker
        self._tell = tell
        self._done = 0

    def trained(self, words: str, trial: Trial, gradients: bool = False) -> Trial:
        """The trial with its losses, and the error of its first gradients; or with the reason why it has none."""
        self._tell(words, self._done, self.total)
        self._done += 1
        bed = self._bed
        case = replace(bed.low, precision=trial.precision, precision_map=trial.precision_map)
        limit = bed.limits.numbers(bed.work) + bed.limits.steps(bed.work, bed.steps)
        try:
            if gradients:
                error = self._worker.gradient_error(case, bed.reference, bed.facts, limit)
                trial = replace(trial, gradient_error=error)
            losses = self._worker.losses(case, bed.facts, bed.steps, trial.draw, limit)
        except WorkerError as error:
            if not (isinstance(error, WorkerFault) and error.out_of_memory):
                self._worker.restart()  # after an error on a GPU nothing in that process works any more
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
