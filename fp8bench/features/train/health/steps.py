"""The base class of health rules, and the rules over figures of whole steps: losses, norms, updates.

A rule reads the lines of one arm and seed in order, and may raise an alarm at each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from statistics import correlation, fmean, median
from types import UnionType
from typing import Any, ClassVar, Generic, TypeVar, dataclass_transform

from fp8bench.features.train.values import LayerReading, StepFigure, StepRow

# Below this share of the first loss there is nothing left to learn.
LEARNED = 1e-4
L = TypeVar("L", StepRow, LayerReading, StepFigure)


@dataclass(frozen=True)
class WatchedArm:
    """The arm that a rule watches, the one that it is compared with, and the smallest rate factor of its parameters."""

    name: str
    reference: str = ""
    slowest: float = 1.0


# All rules, in the order in which their classes are defined.
RULES: list[type[HealthRule[Any]]] = []


def newest(length: int) -> Any:
    """Returns a dataclass field that keeps the newest `length` values."""
    return field(init=False, default_factory=lambda: deque(maxlen=length))


@dataclass_transform(eq_default=False, field_specifiers=(field,))
@dataclass(eq=False)
class HealthRule(ABC, Generic[L]):
    """One kind of problem in a training: a subclass with a `name` is applied to every training, and documented.

    It reads the lines of the types in `reads`, and only figures with a name in `figures`, or all if that is empty.
    `alarms_at` describes when it alarms, the docstring of a rule justifies the limit. With `compares` it also reads the
    rows of the arms that its arm is compared with. While the rule named by `until` alarms, this one is silent.
    """

    name: ClassVar[str]
    reads: ClassVar[type[StepRow] | type[LayerReading] | type[StepFigure] | UnionType] = StepRow
    figures: ClassVar[tuple[str, ...]] = ()
    alarms_at: ClassVar[str]
    remedies: ClassVar[tuple[Remedy, ...]]
    compares: ClassVar[bool] = False
    until: ClassVar[str] = ""
    arm: WatchedArm

    def __init_subclass__(cls) -> None:
        dataclass(eq=False)(cls)
        if "name" in vars(cls):
            RULES.append(cls)

    def reads_line(self, line: Any) -> bool:
        is_other = isinstance(line, StepFigure) and self.figures and line.name not in self.figures
        return isinstance(line, self.reads) and not is_other

    @property
    def current_remedies(self) -> tuple[Remedy, ...]:
        """The remedies for the last alarm."""
        return self.remedies

    @classmethod
    def because(cls) -> str:
        return " ".join((cls.__doc__ or "").split())

    @abstractmethod
    def see(self, line: L) -> str:
        """Reads the next line; returns the sentence of an alarm while something is wrong, else ''."""


class Remedy(StrEnum):
    """A recommended change of a single setting."""

    RAISE_MARGIN = "raise the margin of delayed scales by an octave"
    SHORTER_HISTORY = "shorter history or interval of delayed scales"
    E5M2_GRADIENTS = "E5M2 for gradients"
    LAYER_IN_BF16 = "this layer in bf16"
    DYNAMIC_LOSS_SCALE = "a dynamic loss scale"
    CLIP_HARDER = "clip gradients harder"
    LOWER_RATE = "a lower learning rate"
    HIGHER_MASTER = "master weights, gradients and optimizer states in fp32"
    SAME_SETTINGS = "compare at the reference's rate, clipping, loss scale, tokens per step and batches"
    LOOK_AT_DATA = "look at the batches of these steps"
    LOOK_AT_LOOP = "look at the loop: zero_grad, loss scale and sums, schedule, what the optimizer was given"
    LOOK_AT_LAYER = "look at how this layer is made: its gain, its momentum, whether anything reaches it"


class GradientSpike(HealthRule[StepRow]):
    """Few tokens a batch move a norm by 5 to 15 times, again and again; rare text does not move the loss. A model that
    has memorised its data loses nearly nothing by a spike."""

    name = "gradient-norm-spike"
    keep = 50
    longer = 500
    fewest = 20
    times = 16.0
    times_with_loss = 8.0
    far = 2.5
    lost = 0.1
    alarms_at = (
        f"{times:g} times the median of {fewest} to {keep} steps, and the square of the largest multiple of {longer};"
        f" or {times_with_loss:g} times it at a loss {far:g} times as far above its median as any of theirs, and by "
        f"{lost:.0%} of what was learned"
    )
    remedies = (Remedy.CLIP_HARDER, Remedy.LOWER_RATE, Remedy.LOOK_AT_DATA)
    _norms: deque[float] = newest(keep)
    _losses: deque[float] = newest(keep)
    _multiples: deque[float] = newest(longer)
    _first: float = math.nan

    def see(self, line: StepRow) -> str:
        norm, loss, norms, losses = line.gradient_norm, line.loss, self._norms, self._losses
        if not math.isfinite(norm + loss):
            return ""
        alarm = self._judge(norm, loss) if len(norms) >= self.fewest else ""
        self._first = loss if math.isnan(self._first) else self._first
        norms.append(norm)
        losses.append(loss)
        return alarm

    def _judge(self, norm: float, loss: float) -> str:
        # Medians, because a spike must not raise the level for the next one.
        usual = median(self._norms)
        multiple = norm / max(usual, 1e-300)
        if multiple > self.times_with_loss:
            # The largest multiple until now is normal for this training.
            most = max(max(self._norms) / max(usual, 1e-300), *self._multiples, math.sqrt(self.times))
            middle = median(self._losses)
            is_far = loss - middle > max(self.far * (max(self._losses) - middle), self.lost * (self._first - middle))
            if math.sqrt(multiple) > most or is_far:
                return f"the gradient norm is {norm:.3g}, {multiple:.1f} times its median, at a loss of {loss:.4g}"
        self._multiples.append(multiple)
        return ""


class UpdateBurst(HealthRule[StepRow]):
    """A rate that warms up in a line is at most twice its median ahead, and Adam bounds the effect of a batch. A model
    that has learned by heart moves so little that bursts stay below the first updates."""

    name = "update-norm-burst"
    until = "loss-back-up"
    keep = 20
    fewest = 10
    times = 4.0
    alarms_at = (
        f"{times:g} times the median of the last {keep} steps, and above that of the first {fewest}, from then on"
    )
    remedies = (Remedy.LOWER_RATE, Remedy.CLIP_HARDER)
    _ratios: deque[float] = newest(keep)
    _first: float = 0.0

    def see(self, line: StepRow) -> str:
        ratio, ratios = line.update_ratio, self._ratios
        if line.skipped or not math.isfinite(ratio):
            return ""
        # The newest ratio is added afterwards, so that it is not compared with itself.
        usual = median(ratios) if len(ratios) >= self.fewest else math.inf
        ratios.append(ratio)
        if len(ratios) == self.fewest:
            self._first = median(ratios)
        if ratio <= max(self.times * usual, self._first):
            return ""
        return f"the update is {ratio:.3g} of the weights, their median is {usual:.3g}: the loss may jump next"


class LossPlateau(HealthRule[Any]):
    """Losses fall by equal parts in equal multiples of time: the last half of a training is never flat."""

    name = "plateau"
    reads = StepRow | StepFigure
    figures = ("entropy",)
    entropy = 0.03
    least = 100
    often = 10
    parts = 4
    flat = 0.01
    noise = 0.0075
    gradients = 0.9
    alarms_at = (
        f"{parts} means over the last half of all steps ({least} at least) within {flat:.1%}, each known to {noise:.2%}"
        f"; gradients {gradients:g} of those before, the rate half of its peak; the entropy of predictions, if known, "
        f"{entropy:.0%} away. Looked at every {often} steps"
    )
    remedies = (Remedy.HIGHER_MASTER, Remedy.DYNAMIC_LOSS_SCALE, Remedy.LOOK_AT_LAYER)
    _losses: list[float] = field(default_factory=list)
    _norms: list[float] = field(default_factory=list)
    _rates: list[float] = field(default_factory=list)
    _entropies: deque[float] = newest(10)

    def see(self, line: StepRow | StepFigure) -> str:
        if isinstance(line, StepFigure):
            self._entropies.append(line.value)
            return ""
        if not (math.isfinite(line.loss) and math.isfinite(line.gradient_norm)):
            return ""
        self._losses.append(line.loss)
        self._norms.append(line.gradient_norm)
        self._rates.append(line.rate)
        length = len(self._losses) // 2 // self.parts * self.parts
        if length < self.least or len(self._losses) % self.often:
            return ""
        # A rate that has decayed changes little, and a flat loss is then normal.
        if min(self._rates[-length], line.rate) < max(self._rates) / 2:
            return ""
        # Four consecutive means distinguish a flat course from a slow fall within noise.
        part = length // self.parts
        losses = self._losses[-length:]
        means = [fmean(losses[start : start + part]) for start in range(0, length, part)]
        size = abs(fmean(means) or 1.0)
        spread, error = (max(means) - min(means)) / size, noise_of_values(losses) / math.sqrt(part) / size
        norm, norm_before = median(self._norms[-length:]), median(self._norms[-2 * length : -length])
        if abs(means[-1]) < LEARNED * abs(self._losses[0]):
            return ""
        if spread > self.flat or error > self.noise or norm < self.gradients * norm_before:
            return ""
        # If predictions are as uncertain as the loss, nothing more can be learned from this text.
        if self._entropies and abs(fmean(self._entropies) - means[-1]) < self.entropy * size:
            return ""
        return f"the loss has stood at {fmean(means):.4g} for {length} steps, the gradient norm at {norm:.3g}"


class NotFiniteStep(HealthRule[StepRow]):
    """A dynamic loss scale comes down from 2^32 by skipping steps, and tries a larger one at times."""

    name = "not-finite"
    allowed = 20
    alarms_at = f"a loss, weight or gradient that is not finite; of steps skipped under a loss scale {allowed} in a row"
    remedies = (Remedy.DYNAMIC_LOSS_SCALE, Remedy.LOWER_RATE, Remedy.LAYER_IN_BF16)
    _skipped: int = 0

    def see(self, line: StepRow) -> str:
        self._skipped = self._skipped + 1 if line.skipped else 0
        figures = {name: getattr(line, name) for name in ("loss", "gradient_norm", "parameter_norm")}
        wrong = [name for name, value in figures.items() if not math.isfinite(value)]
        # A dynamic loss scale occasionally overflows to find its level.
        scaled = line.skipped and line.loss_scale > 1 and wrong == ["gradient_norm"]
        if not wrong or (scaled and self._skipped < self.allowed):
            return ""
        first = wrong[0]
        words = f"the {first.replace('_', ' ')} is {figures[first]}"
        if scaled:
            words += f" in {self._skipped} steps in a row, at a loss scale of {line.loss_scale:g}"
        return words


class GradientScale(HealthRule[StepRow]):
    """A steeper loss changes the loss as well; a factor alone comes from a loss scale, a sum, or micro-batches."""

    name = "gradient-scale"
    last = 3
    keep = 20
    octaves = 1.9
    beyond = 1.0
    noise = 5.0
    alarms_at = (
        f"medians of the last {last} steps and of {keep} before them {octaves:g} octaves and {noise:g} times the noise "
        "apart, the last 1 beyond all before; the loss as it was, or moved by as much, within half an octave"
    )
    remedies = (Remedy.LOOK_AT_LOOP, Remedy.DYNAMIC_LOSS_SCALE)
    _rows: deque[tuple[float, float]] = newest(keep + last)

    def see(self, line: StepRow) -> str:
        if not (0 < line.gradient_norm < math.inf and 0 < line.loss < math.inf):
            return ""
        self._rows.append((math.log2(line.gradient_norm), math.log2(line.loss)))
        norms, losses = zip(*self._rows, strict=True)
        earlier, last = norms[: -self.last], norms[-self.last :]
        if len(earlier) < self.keep:
            return ""
        moved, loss = (median(logs[-self.last :]) - median(logs[: -self.last]) for logs in (norms, losses))
        # Beyond all earlier values: a slow drift has no such step.
        gap = min(last) - max(earlier) if moved > 0 else min(earlier) - max(last)
        if abs(moved) < max(self.octaves, self.noise * noise_of_values(earlier)) or gap < self.beyond:
            return ""
        # If the loss changed by another factor, the model changed, not the scale.
        if min(abs(loss), abs(loss - moved)) > 0.5:
            return ""
        direction, with_loss = "larger" if moved > 0 else "smaller", ", and so is the loss" if abs(loss) > 0.5 else ""
        return (
            f"gradients are {2 ** abs(moved):.3g} times {direction}{with_loss}: a loss scale, a sum, or micro-batches?"
        )


class LossGap(HealthRule[StepRow]):
    """Batches and dropout should be the same in both arms, and chaos does little. Other differences than
    that of the arithmetic explain a gap first: batches are the same where losses rise and fall together."""

    name = "loss-gap"
    compares = True
    keep = 50
    margin = 0.02
    differs = 0.01
    clipping = 0.1
    together = 0.5
    alarms_at = (
        f"{margin:.0%} behind the reference over {keep} steps. Its rate, loss scale and tokens are compared within "
        f"{differs:.0%}, what clipping takes within {clipping:.0%}; its batches are others at a correlation of losses "
        f"below {together:g}"
    )
    remedies = (Remedy.LAYER_IN_BF16, Remedy.RAISE_MARGIN, Remedy.LOWER_RATE)
    _rows: dict[int, dict[str, StepRow]] = field(default_factory=dict)
    _pairs: deque[tuple[StepRow, StepRow]] = newest(keep)
    _difference: str = ""

    @property
    def current_remedies(self) -> tuple[Remedy, ...]:
        return (Remedy.SAME_SETTINGS,) if self._difference else self.remedies

    def see(self, line: StepRow) -> str:
        arm, reference = self.arm.name, self.arm.reference
        if not reference:
            return ""
        # Arms run in turns, so the rows of a step do not arrive together.
        rows = self._rows.setdefault(line.step, {})
        rows[line.arm] = line
        if len(rows) < 2:
            return ""
        del self._rows[line.step]
        base = rows[reference]
        if not (base.loss and all(math.isfinite(row.loss) for row in rows.values())):
            return ""
        self._pairs.append((base, rows[arm]))
        if len(self._pairs) < self.keep:
            return ""
        gap = fmean((row.loss - base.loss) / abs(base.loss) for base, row in self._pairs)
        if gap <= self.margin:
            return ""
        self._difference = self.find_difference(self._pairs)
        alike = (
            "rate, loss scale, tokens, clipping and batches are the reference's, so that its arithmetic is suspected"
        )
        cause = self._difference or alike
        return f"the loss is {gap:.1%} behind that of {reference} over {self.keep} steps: {cause}"

    @classmethod
    def find_difference(cls, pairs: Sequence[tuple[StepRow, StepRow]]) -> str:
        """Returns what differs between two arms besides their arithmetic, from rows of the same steps; or ''."""
        for name, words in (("rate", "rate"), ("loss_scale", "loss scale"), ("tokens", "number of tokens per step")):
            ratios = [getattr(row, name) / getattr(base, name) for base, row in pairs if getattr(base, name)]
            if ratios and abs(median(ratios) - 1) > cls.differs:
                return f"its {words} is {median(ratios):.3g} times as large"
        clipped = fmean(row.clipped - base.clipped for base, row in pairs)
        if abs(clipped) > cls.clipping:
            return f"clipping takes {abs(clipped):.0%} {'more' if clipped > 0 else 'less'} of its gradients"
        losses, base_losses = ([pair[place].loss for pair in pairs] for place in (1, 0))
        # Differences of neighbours leave out the course that both have in common.
        moves, base_moves = ([after - before for before, after in pairwise(values)] for values in (losses, base_losses))
        if len(set(moves)) < 2 or len(set(base_moves)) < 2 or correlation(moves, base_moves) >= cls.together:
            return ""
        return "its batches are others, or in another order: the losses do not rise and fall together"


def noise_of_values(values: Sequence[float]) -> float:
    """Returns the standard deviation of values around a smooth course, from the differences of neighbours."""
    return 1.4826 * median(abs(following - value) for value, following in pairwise(values)) / math.sqrt(2)
