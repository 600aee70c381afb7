"""Values of `sensitivity`: trainings that differ in which layers have low precision, their verdicts, and precision
maps.

The loss of a training is the mean over the last fifth of its steps. A gap is the difference from the reference's loss
with the same initial weights and data, as a share of that loss: above 0 is worse.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fp8bench.model import Environment, Params
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.protocols import Layer, find_map_key

# The loss of a trial is the mean over the last fifth of its steps.
_STEPS_PER_AVERAGED_STEP = 5
# Losses with the same initial weights differ by less than this on devices that sum in a different order.
_EQUAL_LOSS_TOLERANCE = 1e-6


class LoweredUnit(StrEnum):
    """The layers that one training of a study sets to low precision: a single layer, or all layers of a kind. With
    FORMAT, each layer is tried in each format of FORMATS.
    """

    LAYER = "layer"
    KIND = "kind"
    FORMAT = "format"


# The FP8 precisions to try, those with the cheapest scales first: per tensor, then per row, then per block.
FORMATS = ("fp8", "fp8-e4m3", "fp8-e5m2", "fp8-rowwise", "fp8-block")
# A cheaper format is proposed if its error is at most this many times the smallest error.
_ERROR_TOLERANCE = 1.1


class LossVerdict(StrEnum):
    """The meaning of a training's loss gap. NOISE means that the gap does not exceed the gaps between random initial
    weights of the reference.
    """

    FAILED = "failed"
    WORSE = "worse"
    WITHIN_NOISE = "within the noise"
    BETTER = "better"
    NOISE_UNKNOWN = "noise unknown"


@dataclass(frozen=True)
class LoweredLayersTrial:
    """One training with the layers `low` in low precision. `draw` is the number of its random initial weights.

    `gradient_error` is the error of the first step's gradients relative to the reference's. If `form` is set, the trial
    ran only this step, with a single layer in the format `form`.
    """

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
        """The mean loss over the last fifth of the steps; None for a failed training."""
        if self.failure or not self.losses:
            return None
        averaged_losses = self.losses[-averaged_steps(len(self.losses)) :]
        return math.fsum(averaged_losses) / len(averaged_losses)


@dataclass(frozen=True)
class SensitivityStudy:
    """All trainings of a study. `candidates` are trainings with precision maps: the first has all layers in low
    precision, and each further one has fewer.

    A suggested map has a gap of at most `tolerance`, and an error of first gradients of at most `gradient_tolerance`.
    """

    workload: str
    params: Params
    device: str
    low: str
    reference: str
    level: str
    by: LoweredUnit
    steps: int
    tolerance: float
    seed: int
    baseline: LoweredLayersTrial
    draws: tuple[LoweredLayersTrial, ...] = ()
    probes: tuple[LoweredLayersTrial, ...] = ()
    candidates: tuple[LoweredLayersTrial, ...] = ()
    finished: bool = False
    started: str = ""
    environment: Environment = field(default_factory=lambda: Environment({}))
    path: str = ""
    gradient_tolerance: float | None = None

    def gap(self, trial: LoweredLayersTrial) -> float | None:
        """Returns the share by which the trial's loss exceeds the reference's; None without a loss."""
        reference, loss = self.baseline.loss, trial.loss
        if reference is None or loss is None:
            return None
        # If the reference's loss is 0, a share is undefined: any difference counts as infinite.
        excess_loss = loss - reference
        return (
            excess_loss / abs(reference) if reference else math.copysign(math.inf, excess_loss) if excess_loss else 0.0
        )

    @property
    def noise(self) -> float | None:
        """The largest absolute loss gap of the `draws`: trainings of the reference with other initial weights.

        None without draws. Also None if all losses are equal, because the user's model sets a seed or loads its
        weights.
        """
        loss_gaps_of_draws = [abs(gap) for draw in self.draws if (gap := self.gap(draw)) is not None]
        largest = max(loss_gaps_of_draws, default=0.0)
        return largest if largest > _EQUAL_LOSS_TOLERANCE else None

    def verdict(self, trial: LoweredLayersTrial) -> LossVerdict:
        gap = self.gap(trial)
        if gap is None:
            return LossVerdict.FAILED
        # If the noise is unknown, even a tiny gap would be called worse.
        if self.noise is None:
            return LossVerdict.NOISE_UNKNOWN
        if abs(gap) <= self.noise:
            return LossVerdict.WITHIN_NOISE
        return LossVerdict.WORSE if gap > 0 else LossVerdict.BETTER

    @property
    def ranking(self) -> tuple[LoweredLayersTrial, ...]:
        """The trials with one layer or kind in low precision, worst first. Failed trials come first. Then come trials
        that are worse by more than the noise, sorted by loss gap, and then all others, sorted by gradient error.
        """

        def sort_key(trial: LoweredLayersTrial) -> tuple[bool, float, float]:
            verdict, gap, error = self.verdict(trial), self.gap(trial), trial.gradient_error
            # Only a gap beyond the noise counts. Without such gaps, sort by the gradient error.
            significant_loss_gap = gap if gap is not None and verdict is LossVerdict.WORSE else 0.0
            # An unknown error counts as the worst one. NaN would make the order undefined.
            finite_error = math.inf if error is None or math.isnan(error) else error
            return verdict is LossVerdict.FAILED, significant_loss_gap, finite_error

        return tuple(sorted(self.probes, key=sort_key, reverse=True))

    def keeps_loss(self, trial: LoweredLayersTrial) -> bool:
        gap, error, max_error = self.gap(trial), trial.gradient_error, self.gradient_tolerance
        # Comparisons with NaN are False, so a NaN is never within its limit.
        has_small_error = max_error is None or (error is not None and error <= max_error)
        return gap is not None and gap <= self.tolerance and has_small_error

    @property
    def is_undecided(self) -> bool:
        """Whether no map can be suggested, because every gap is within the noise, and the user set no limit for the
        error of gradients.
        """
        if self.gradient_tolerance is not None or self.by is LoweredUnit.FORMAT:
            return False
        lowered_trials = (*self.probes, *self.candidates)
        # If every gap is within the noise, any choice among the maps would be random.
        return bool(lowered_trials) and all(
            self.verdict(layer_trial) is LossVerdict.WITHIN_NOISE for layer_trial in lowered_trials
        )

    def format_errors(self, layer: str) -> dict[str, float]:
        """Returns the error of the first gradients by the format of `layer`, without formats that failed."""
        layer_trials = (layer_trial for layer_trial in self.probes if layer_trial.name == layer)
        # `error >= 0` is False for NaN too.
        return {
            layer_trial.form: error
            for layer_trial in layer_trials
            if (error := layer_trial.gradient_error) is not None and error >= 0
        }

    @property
    def proposed_formats(self) -> dict[str, str]:
        """The cheapest format of each layer whose gradient error is close to the layer's smallest error."""
        format_by_layer = {}
        for layer in dict.fromkeys(layer_trial.name for layer_trial in self.probes):
            errors = self.format_errors(layer)
            nearly_best_formats = (
                form for form in FORMATS if form in errors and errors[form] <= _ERROR_TOLERANCE * min(errors.values())
            )
            format_by_layer[layer] = next(nearly_best_formats, self.reference)  # fallback if every format failed
        return format_by_layer

    def explicit_map(self, trial: LoweredLayersTrial) -> PrecisionMap:
        """Returns the precision map of a candidate. A map that is empty because it equals the suite's defaults is
        replaced by a map that names each layer in high precision.
        """
        all_layers = self.candidates[0].low
        return trial.precision_map or tuple((name, self.reference) for name in all_layers if name not in trial.low)

    @property
    def suggestion(self) -> LoweredLayersTrial | None:
        """The candidate with the most layers in low precision that keeps the loss. None if no candidate does, or if
        the noise hides the gaps.
        """
        return None if self.is_undecided else next(filter(self.keeps_loss, self.candidates), None)


def averaged_steps(steps: int) -> int:
    return max(1, steps // _STEPS_PER_AVERAGED_STEP)


PrecisionMap = tuple[tuple[str, str], ...]


def make_precision_map(
    layers: Sequence[Layer], low_layers: Collection[str], modes: tuple[str, str], high: str
) -> PrecisionMap:
    """Returns the precision map that gives `low_layers` the first of `modes`, and all other layers the second. `high`
    is the default precision of layers that suites keep in high precision.
    """
    requested_modes = {layer.name: modes[0] if layer.name in low_layers else modes[1] for layer in layers}
    default_modes = {layer.name: high if layer.high else modes[0] for layer in layers}
    return shorten_precision_map(layers, requested_modes, default_modes)


def shorten_precision_map(
    layers: Sequence[Layer], requested_modes: Mapping[str, str], defaults: Mapping[str, str]
) -> PrecisionMap:
    """Returns the map without entries that equal the defaults. The name of a kind replaces the names of all its
    layers where that is possible.
    """
    keys: dict[str, str] = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        names = [layer.name for layer in layers if layer.kind == kind]
        modes = {requested_modes[name] for name in names}
        # If all layers of a kind have the same mode, one entry suffices. The default needs none.
        if len(modes) == 1 and any(requested_modes[name] != defaults[name] for name in names):
            keys[kind] = modes.pop()
    return _add_layer_exceptions(layers, keys, requested_modes, defaults)


def make_single_key_map(
    layers: Sequence[Layer], key: str, low_layers: Collection[str], modes: tuple[str, str]
) -> PrecisionMap:
    """Returns the precision map that gives the layer or kind `key` the first of `modes`, and all other layers the
    second. `low_layers` are the names of the layers of `key`.
    """
    default_modes = {layer.name: modes[1] for layer in layers}
    return _add_layer_exceptions(
        layers, {key: modes[0]}, {**default_modes, **dict.fromkeys(low_layers, modes[0])}, default_modes
    )


def _add_layer_exceptions(
    layers: Sequence[Layer], keys: dict[str, str], requested_modes: Mapping[str, str], defaults: Mapping[str, str]
) -> PrecisionMap:
    """Returns the map `keys` with an entry added for each layer that would not get its requested mode. This happens if
    a layer has the same name as the kind of a different layer.
    """
    # The loop ends because each iteration adds entries for layers that had none.
    while True:
        modes = {layer.name: keys.get(find_map_key(layer, keys) or "", defaults[layer.name]) for layer in layers}
        exceptions = {name: requested_modes[name] for name, mode in modes.items() if mode != requested_modes[name]}
        if not exceptions:
            return tuple(keys.items())
        keys |= exceptions


def format_map(precision_map: PrecisionMap) -> str:
    return ",".join(f"{key}={mode}" for key, mode in precision_map)


def encode_study(study: SensitivityStudy) -> dict[str, Any]:
    document = {"schema": SCHEMA, **encode(study), "noise": encode(study.noise)}
    # Verdicts and gaps are included, so that readers of the JSON need not know how they are computed.
    document["baseline"] = _encode_trial(study, study.baseline)
    for part in ("draws", "probes", "candidates"):
        document[part] = [_encode_trial(study, layer_trial) for layer_trial in getattr(study, part)]
    document["ranking"] = [layer_trial.name for layer_trial in study.ranking]
    suggested_map_trial = study.suggestion
    document["suggested"] = None if suggested_map_trial is None else format_map(suggested_map_trial.precision_map)
    return document


def _encode_trial(study: SensitivityStudy, trial: LoweredLayersTrial) -> dict[str, Any]:
    figures = {"loss": trial.loss, "loss_gap": study.gap(trial), "says": study.verdict(trial).value}
    return {**encode(trial), **encode(figures)}
