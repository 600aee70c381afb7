"""Values of `sensitivity`: training runs that differ in which layers are low, their verdicts, and precision maps.

A loss is the mean over the last fifth of the steps. A gap is relative to the reference's loss from the same weights and
data: above 0 is worse.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fp8bench.model import Environment, Params
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.protocols import Layer, key_of

_LAST = 5
# Losses of the same weights differ by less than this on devices that sum in a different order.
_SAME = 1e-6


class By(StrEnum):
    """The unit that is lowered at a time; FORMAT: a layer, in each of FORMATS."""

    LAYER = "layer"
    KIND = "kind"
    FORMAT = "format"


# The formats and scales of FP8 that a layer may get, the cheapest first: one scale a tensor, a row, a block.
FORMATS = ("fp8", "fp8-e4m3", "fp8-e5m2", "fp8-rowwise", "fp8-block")
# A cheaper format is proposed if its error is at most this many times the least one.
_NEAR = 1.1


class LossVerdict(StrEnum):
    """The meaning of a run's gap. NOISE: no larger than gaps between random initial weights of the reference."""

    FAILED = "failed"
    WORSE = "worse"
    NOISE = "within the noise"
    BETTER = "better"
    UNKNOWN = "noise unknown"


@dataclass(frozen=True)
class LayerTrial:
    """One training run with the layers `low`, from the random initial weights `draw`; `gradient_error` is the first
    step's. With a `form` only that step was run, with the layer in that format."""

    name: str
    kind: str
    precision: str
    precision_map: tuple[tuple[str, str], ...] = ()
    low: tuple[str, ...] = ()
    draw: int = 0
    losses: tuple[float, ...] = ()
    gradient_error: float | None = None
    failure: str = ""
    form: str = ""

    @property
    def loss(self) -> float | None:
        """The mean over the last fifth of the steps; None for a failed run."""
        if self.failure or not self.losses:
            return None
        last = self.losses[-last_of(len(self.losses)) :]
        return math.fsum(last) / len(last)


@dataclass(frozen=True)
class Study:
    """All runs of a study; `candidates` begin with all layers low, and each has fewer than the previous one.

    A suggested map's gap is at most `tolerance`, the error of its first gradients at most `gradient_tolerance`.
    """

    workload: str
    params: Params
    device: str
    low: str
    reference: str
    level: str
    by: By
    steps: int
    tolerance: float
    seed: int
    baseline: LayerTrial
    draws: tuple[LayerTrial, ...] = ()
    probes: tuple[LayerTrial, ...] = ()
    candidates: tuple[LayerTrial, ...] = ()
    finished: bool = False
    started: str = ""
    environment: Environment = field(default_factory=lambda: Environment({}))
    path: str = ""
    gradient_tolerance: float | None = None

    def gap(self, trial: LayerTrial) -> float | None:
        """Returns the share by which its loss exceeds the reference's, None without a loss, infinite if that is 0."""
        reference, loss = self.baseline.loss, trial.loss
        if reference is None or loss is None:
            return None
        # A loss of 0 has no relative excess: any positive one counts as infinite.
        excess = loss - reference
        return excess / abs(reference) if reference else math.copysign(math.inf, excess) if excess else 0.0

    @property
    def noise(self) -> float | None:
        """The largest absolute gap of other initial weights of the reference; None without them, or if all are equal,
        because a maker sets a seed or loads its weights."""
        gaps = [abs(gap) for draw in self.draws if (gap := self.gap(draw)) is not None]
        largest = max(gaps, default=0.0)
        return largest if largest > _SAME else None

    def verdict(self, trial: LayerTrial) -> LossVerdict:
        gap = self.gap(trial)
        if gap is None:
            return LossVerdict.FAILED
        # Without noise even a tiny gap would be called worse.
        if self.noise is None:
            return LossVerdict.UNKNOWN
        if abs(gap) <= self.noise:
            return LossVerdict.NOISE
        return LossVerdict.WORSE if gap > 0 else LossVerdict.BETTER

    @property
    def ranking(self) -> tuple[LayerTrial, ...]:
        """The probes, worst first: failed ones, then gaps beyond the noise, then errors of first gradients."""

        def badness(trial: LayerTrial) -> tuple[bool, float, float]:
            verdict, gap, error = self.verdict(trial), self.gap(trial), trial.gradient_error
            # Gaps within the noise are random, so gradients decide.
            beyond = gap if gap is not None and verdict is LossVerdict.WORSE else 0.0
            return verdict is LossVerdict.FAILED, beyond, math.inf if error is None or math.isnan(error) else error

        return tuple(sorted(self.probes, key=badness, reverse=True))

    def keeps(self, trial: LayerTrial) -> bool:
        gap, error, most = self.gap(trial), trial.gradient_error, self.gradient_tolerance
        # NaN fails either comparison.
        exact = most is None or (error is not None and error <= most)
        return gap is not None and gap <= self.tolerance and exact

    @property
    def is_undecided(self) -> bool:
        """Whether every gap is within the noise, and gradients are not used to decide."""
        if self.gradient_tolerance is not None or self.by is By.FORMAT:
            return False
        trials = (*self.probes, *self.candidates)
        # Choosing a map among equals would be arbitrary.
        return bool(trials) and all(self.verdict(trial) is LossVerdict.NOISE for trial in trials)

    def form_errors(self, layer: str) -> dict[str, float]:
        """Returns the error of the first gradients with the layer in each format, without failed ones."""
        trials = (trial for trial in self.probes if trial.name == layer)
        return {trial.form: error for trial in trials if (error := trial.gradient_error) is not None and error >= 0}

    @property
    def proposed_forms(self) -> dict[str, str]:
        """The cheapest format of each layer whose error is near the least of all."""
        proposed = {}
        for layer in dict.fromkeys(trial.name for trial in self.probes):
            errors = self.form_errors(layer)
            near = (form for form in FORMATS if form in errors and errors[form] <= _NEAR * min(errors.values()))
            proposed[layer] = next(near, self.reference)  # no format worked
        return proposed

    def stated_map(self, trial: LayerTrial) -> PrecisionMap:
        """Returns a candidate's map. If it needs none, because suites leave the same layers high, names those."""
        every = self.candidates[0].low
        return trial.precision_map or tuple((name, self.reference) for name in every if name not in trial.low)

    @property
    def suggestion(self) -> LayerTrial | None:
        """The candidate that keeps the loss with the most layers low; None if none does, or noise hides it."""
        return None if self.is_undecided else next(filter(self.keeps, self.candidates), None)


def last_of(steps: int) -> int:
    return max(1, steps // _LAST)


PrecisionMap = tuple[tuple[str, str], ...]


def map_of(layers: Sequence[Layer], low: Collection[str], modes: tuple[str, str], high: str) -> PrecisionMap:
    """Returns the map that gives the layers `low` the first of the modes and all others the second.

    `high` is the default of layers that suites leave high.
    """
    requested = {layer.name: modes[0] if layer.name in low else modes[1] for layer in layers}
    usual = {layer.name: high if layer.high else modes[0] for layer in layers}
    return shorten_map(layers, requested, usual)


def shorten_map(layers: Sequence[Layer], requested: Mapping[str, str], usual: Mapping[str, str]) -> PrecisionMap:
    """Returns the map with kinds replacing the names of all their layers, and without defaults."""
    keys: dict[str, str] = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        names = [layer.name for layer in layers if layer.kind == kind]
        modes = {requested[name] for name in names}
        # Use one key for a kind whose layers agree, unless that is their default.
        if len(modes) == 1 and any(requested[name] != usual[name] for name in names):
            keys[kind] = modes.pop()
    return _correct_map(layers, keys, requested, usual)


def map_alone(layers: Sequence[Layer], word: str, low: Collection[str], modes: tuple[str, str]) -> PrecisionMap:
    """Returns the map that gives the layers `low`, named by their name or kind `word`, the first mode if all others
    have the second."""
    usual = {layer.name: modes[1] for layer in layers}
    return _correct_map(layers, {word: modes[0]}, {**usual, **dict.fromkeys(low, modes[0])}, usual)


def _correct_map(
    layers: Sequence[Layer], keys: dict[str, str], requested: Mapping[str, str], usual: Mapping[str, str]
) -> PrecisionMap:
    """Corrects keys that are one layer's name and another's kind, by naming the layers with a wrong mode."""
    # Each pass names more layers, so the loop ends.
    while wrong := [name for name, mode in _modes(layers, keys, usual).items() if mode != requested[name]]:
        keys.update({name: requested[name] for name in wrong})
    return tuple(keys.items())


def _modes(layers: Sequence[Layer], keys: Mapping[str, str], usual: Mapping[str, str]) -> dict[str, str]:
    return {layer.name: keys.get(key_of(layer, keys) or "", usual[layer.name]) for layer in layers}


def as_words(precision_map: PrecisionMap) -> str:
    return ",".join(f"{key}={mode}" for key, mode in precision_map)


def value_of(study: Study) -> dict[str, Any]:
    document = {"schema": SCHEMA, **encode(study), "noise": encode(study.noise)}
    # Verdicts and gaps are included, so that readers of JSON need none of these rules.
    document["baseline"] = _trial_value(study, study.baseline)
    for part in ("draws", "probes", "candidates"):
        document[part] = [_trial_value(study, trial) for trial in getattr(study, part)]
    document["ranking"] = [trial.name for trial in study.ranking]
    suggested = study.suggestion
    document["suggested"] = None if suggested is None else as_words(suggested.precision_map)
    return document


def _trial_value(study: Study, trial: LayerTrial) -> dict[str, Any]:
    figures = {"loss": trial.loss, "loss_gap": study.gap(trial), "says": study.verdict(trial).value}
    return {**encode(trial), **{name: encode(value) for name, value in figures.items()}}
