"""What a study of layers is made of: training runs that differ in which layers are low, what they say, their maps.

Losses are means over the last fifth of the steps. A gap is relative to the loss of the reference from the same weights
and data: above 0 is worse. All here is a pure function of losses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fp8bench.model import Environment, Params
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.protocols import Layer, key_of

_LAST = 5


class By(StrEnum):
    """What is taken low at a time."""

    LAYER = "layer"
    KIND = "kind"


class Suffers(StrEnum):
    """What a run's gap says. NOISE: no more than other draws of the reference's weights."""

    FAILED = "failed"
    WORSE = "worse"
    NOISE = "within the noise"
    BETTER = "better"


@dataclass(frozen=True)
class LayerTrial:
    """One training run. `low` names the layers that are low; `failure` says why its loss is none.

    `precision` and `precision_map` are those of the case that was run, `draw` that of its initial weights.
    `gradient_error` is that of the first step, against the reference's.
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

    @property
    def loss(self) -> float | None:
        """The mean of the last fifth of its steps; None for a run that failed."""
        if self.failure or not self.losses:
            return None
        last = self.losses[-last_of(len(self.losses)) :]
        return math.fsum(last) / len(last)


@dataclass(frozen=True)
class Study:
    """Everything that was run, in that order: `candidates` begin with all layers low, each has one less.

    `tolerance` is the largest gap that a suggested map may have, `gradient_tolerance` the largest error of its first
    gradients, where that is asked for: it tells layers apart that no loss of a few steps does.
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
        """How much larger its loss is than the reference's, as a share; infinite beside a loss of 0 that it has not.

        None without a loss.
        """
        wanted, loss = self.baseline.loss, trial.loss
        if wanted is None or loss is None:
            return None
        more = loss - wanted
        return more / abs(wanted) if wanted else math.copysign(math.inf, more) if more else 0.0

    @property
    def noise(self) -> float | None:
        """The largest gap of another draw of the reference's weights, either way; None without one."""
        gaps = [abs(gap) for draw in self.draws if (gap := self.gap(draw)) is not None]
        return max(gaps, default=None)

    def suffers(self, trial: LayerTrial) -> Suffers:
        gap = self.gap(trial)
        if gap is None:
            return Suffers.FAILED
        if abs(gap) <= (self.noise or 0.0):
            return Suffers.NOISE
        return Suffers.WORSE if gap > 0 else Suffers.BETTER

    @property
    def ranking(self) -> tuple[LayerTrial, ...]:
        """The probes, worst first: failed ones, then gaps beyond the noise, the rest by their first gradients."""

        def badness(trial: LayerTrial) -> tuple[bool, float, float]:
            suffers, gap, error = self.suffers(trial), self.gap(trial), trial.gradient_error
            beyond = gap if gap is not None and suffers is Suffers.WORSE else 0.0
            return suffers is Suffers.FAILED, beyond, math.inf if error is None or math.isnan(error) else error

        return tuple(sorted(self.probes, key=badness, reverse=True))

    def keeps(self, trial: LayerTrial) -> bool:
        gap, error, most = self.gap(trial), trial.gradient_error, self.gradient_tolerance
        exact = most is None or (error is not None and error <= most)
        return gap is not None and gap <= self.tolerance and exact

    @property
    def undecided(self) -> bool:
        """Whether every gap lies within the noise, so that no layer can be told from another, but by gradients."""
        if self.gradient_tolerance is not None:
            return False
        trials = (*self.probes, *self.candidates)
        return bool(trials) and all(self.suffers(trial) is Suffers.NOISE for trial in trials)

    def stated_map(self, trial: LayerTrial) -> PrecisionMap:
        """A candidate's map; where it needs none, because suites leave the same layers high, these all the same."""
        every = self.candidates[0].low
        return trial.precision_map or tuple((name, self.reference) for name in every if name not in trial.low)

    @property
    def suggested(self) -> LayerTrial | None:
        """The candidate that keeps the loss with as many layers low as any; None if none did or can be told."""
        return None if self.undecided else next(filter(self.keeps, self.candidates), None)

    def together(self, groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """The first gradients' errors of the probes of each group, put together as errors that know nothing of each
        other: the root of the sum of their squares. Groups without any are left out."""
        errors = {probe.name: probe.gradient_error for probe in self.probes if probe.gradient_error is not None}
        known = {group: [errors[name] for name in names if name in errors] for group, names in groups.items()}
        return {group: math.hypot(*group_errors) for group, group_errors in known.items() if group_errors}


def last_of(steps: int) -> int:
    return max(1, steps // _LAST)


PrecisionMap = tuple[tuple[str, str], ...]


def map_of(layers: Sequence[Layer], low: Collection[str], modes: tuple[str, str], high: str) -> PrecisionMap:
    """The map for a case in the first of the modes, the low one, that leaves just the layers named low in it.

    All others take the second one, the reference; `high` is what layers that stay high have without a map.
    """
    wanted = {layer.name: modes[0] if layer.name in low else modes[1] for layer in layers}
    usual = {layer.name: high if layer.high else modes[0] for layer in layers}
    return shortened(layers, wanted, usual)


def shortened(layers: Sequence[Layer], wanted: Mapping[str, str], usual: Mapping[str, str]) -> PrecisionMap:
    """A map by kinds and prefixes of names where they say the same as names; nothing for what is usual."""
    keys: dict[str, str] = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        _enter(keys, kind, [layer.name for layer in layers if layer.kind == kind], wanted, usual)
    # Front parts of names that several layers share, the shortest first.
    names = [layer.name.split(".") for layer in layers]
    counts = Counter(".".join(words[:length]) for words in names for length in range(1, len(words)))
    for front in sorted((front for front, count in counts.items() if count > 1), key=lambda front: front.count(".")):
        inside = [layer.name for layer in layers if layer.name == front or layer.name.startswith(f"{front}.")]
        if not all(_said(layers, keys, usual)[name] == wanted[name] for name in inside):
            _enter(keys, front, inside, wanted, usual)
    # A layer's name may be another one's kind: what it says there is mended by that one's name.
    while wrong := [name for name, mode in _said(layers, keys, usual).items() if mode != wanted[name]]:
        keys.update({name: wanted[name] for name in wrong})
    return tuple(keys.items())


def _enter(
    keys: dict[str, str], key: str, names: Sequence[str], wanted: Mapping[str, str], usual: Mapping[str, str]
) -> None:
    """Take a key where all its layers want the same, and something else than they have anyway."""
    modes = {wanted[name] for name in names}
    if len(modes) == 1 and any(wanted[name] != usual[name] for name in names):
        keys[key] = modes.pop()


def _said(layers: Sequence[Layer], found: Mapping[str, str], usual: Mapping[str, str]) -> dict[str, str]:
    keys = {layer.name: key_of(layer, found) for layer in layers}
    return {name: usual[name] if key is None else found[key] for name, key in keys.items()}


def as_words(precision_map: PrecisionMap) -> str:
    return ",".join(f"{key}={mode}" for key, mode in precision_map)


def value_of(study: Study) -> dict[str, Any]:
    document = {"schema": SCHEMA, **encode(study), "noise": encode(study.noise)}
    document["baseline"] = _told(study, study.baseline)
    for part in ("draws", "probes", "candidates"):
        document[part] = [_told(study, one) for one in getattr(study, part)]
    document["ranking"] = [trial.name for trial in study.ranking]
    suggested = study.suggested
    document["suggested"] = None if suggested is None else as_words(suggested.precision_map)
    return document


def _told(study: Study, trial: LayerTrial) -> dict[str, Any]:
    said = {"loss": trial.loss, "loss_gap": study.gap(trial), "says": study.suffers(trial).value}
    return {**encode(trial), **{name: encode(value) for name, value in said.items()}}
