"""What gaps paired over seeds say: an interval by Student's t, a verdict, and how many more seeds one would take.

The interval of 99% decides, that of 95% is shown. It is each arm's own: of a hundred arms that differ from their
reference by nothing, one at most is called worse or better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8bench.features.train.values import FALLBACK, Arm, ArmRole, Line, Training
from fp8bench.features.train.verdicts.curves import Curve, Key, Pair, Void, curves_of, paired
from fp8bench.features.train.verdicts.judging import Judged, Learned, Why, judge, outlier_of
from fp8bench.features.train.verdicts.speed import AdjustedSpeed, adjusted_speed

# A verdict that an arm is no worse says something only if an arm that had lost this share of what the reference
# learned lay beyond the margin. A reference that fell by less than this in any case only met noise.
_LOST = 0.1
_LEAST_FALL = 0.1


@dataclass(frozen=True)
class ArmVerdict:
    """What is said of one arm: its pairs judged, and of seeds without a pair why.

    `diverged_in` are the seeds in which it diverged, `outlier` one that lies far from all others. `same_bits` says that
    every loss is the reference's. `speed` is None where it means nothing or is not known.
    """

    arm: Arm
    judged: Judged
    pairs: tuple[Pair, ...] = ()
    voids: tuple[tuple[int, Void], ...] = ()
    diverged_in: tuple[int, ...] = ()
    outlier: int | None = None
    speed: AdjustedSpeed | None = None

    @property
    def same_bits(self) -> bool:
        return bool(self.pairs) and all(pair.same_bits for pair in self.pairs)


@dataclass(frozen=True)
class SeedBand:
    """Gaps of the reference under other seeds: the largest either way, and the root of their mean square."""

    gaps: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(map(abs, self.gaps))

    @property
    def deviation(self) -> float:
        return math.sqrt(math.fsum(gap * gap for gap in self.gaps) / len(self.gaps))


@dataclass(frozen=True)
class RepeatBand:
    """The reference once more under the same seed: how many steps both have, the first that differs, and by how much.

    `largest` is the largest gap of any step, infinite where one is not finite. None differs where all have the same
    bits.
    """

    steps: int
    first: int | None
    largest: float


@dataclass(frozen=True)
class Verdicts:
    """All that is said of how a training's arms learned. `falls` are those of the reference by seed."""

    reference: str
    margin: float
    seeds: tuple[int, ...]
    least_fall: float
    falls: Mapping[int, float]
    arms: tuple[ArmVerdict, ...]
    seed_band: SeedBand | None
    repeat_band: RepeatBand | None

    def of(self, name: str) -> ArmVerdict | None:
        """None for the reference itself, and its bands."""
        return next((one for one in self.arms if one.arm.name == name), None)


def least_fall(margin: float) -> float:
    """By what share the reference's loss has to fall: losing a tenth of it must be a gap above the margin."""
    return max(_LEAST_FALL, margin / (margin + _LOST))


def verdicts_of(training: Training, lines: Iterable[Line]) -> Verdicts:
    """From what was kept of a training, finished or not."""
    request = training.request
    curves = curves_of(lines, request.steps)
    seeds = tuple(range(request.seed, request.seed + request.seeds))
    arms = {role: [arm for arm in training.arms if arm.role is role and not arm.skip] for role in ArmRole}
    reference = arms[ArmRole.REFERENCE][0]
    own = {seed: curves.get((reference.name, seed), Curve(request.steps)) for seed in seeds}
    least = least_fall(request.margin)
    learned = not any(curve.blew_up or curve.fall < least for curve in own.values())
    others = [pair.gap for arm in arms[ArmRole.OTHER_SEED] for pair in _pairs(own, arm, curves)[0]]
    repeats = [
        (own[seed], curves[arm.name, seed])
        for arm in arms[ArmRole.REPEAT] for seed in seeds if (arm.name, seed) in curves
    ]  # fmt: skip
    return Verdicts(
        reference.name, request.margin, seeds, least, {seed: curve.fall for seed, curve in own.items() if curve.rows},
        tuple(_of_arm(reference, arm, own, curves, request.margin, learned) for arm in arms[ArmRole.CANDIDATE]),
        SeedBand(tuple(others)) if others else None,
        _repeat_band(*repeats[0]) if repeats else None,
    )  # fmt: skip


def _of_arm(
    reference: Arm, arm: Arm, own: Mapping[int, Curve], curves: Mapping[Key, Curve], margin: float, learned: bool
) -> ArmVerdict:
    pairs, voids = _pairs(own, arm, curves)
    least = least_fall(margin)
    diverged = tuple(
        seed for seed, curve in own.items()
        if (arm.name, seed) in curves and _diverged(curve, curves[arm.name, seed], least)
    )  # fmt: skip
    judged = judge(pairs, margin)
    if diverged:
        judged = Judged(Learned.DIVERGED, judged.gap, judged.held_out)
    elif not learned:
        judged = Judged(Learned.DID_NOT_LEARN)
    elif why := _not_what_it_is_called(reference, arm, pairs, curves):
        judged = replace(judged, learned=Learned.INCONCLUSIVE, why=why, more_seeds=None)
        learned = False
    speed = None
    if learned and not diverged and arm.native and reference.native:
        speed = adjusted_speed([(own[pair.seed], curves[arm.name, pair.seed]) for pair in pairs])
    return ArmVerdict(arm, judged, pairs, voids, diverged, outlier_of(pairs), speed)


def _not_what_it_is_called(reference: Arm, arm: Arm, pairs: Sequence[Pair], curves: Mapping[Key, Curve]) -> Why | None:
    """Whether the arm was seen to train in another precision than it says."""
    if any(FALLBACK in curve.events for (name, _), curve in curves.items() if name == arm.name):
        return Why.FALLBACK
    same = bool(pairs) and all(pair.same_bits for pair in pairs)
    return Why.SAME_BITS if same and arm.precision != reference.precision else None


def _diverged(reference: Curve, arm: Curve, least: float) -> bool:
    """Whether it ended without a finite loss, or no lower than it began, where its reference learned."""
    return not reference.blew_up and (arm.blew_up or (arm.fall <= 0 and reference.fall >= least))


def _pairs(
    own: Mapping[int, Curve], arm: Arm, curves: Mapping[Key, Curve]
) -> tuple[tuple[Pair, ...], tuple[tuple[int, Void], ...]]:
    """The arm's pairs, and seeds without one. Seeds with the same losses of the reference are one seed."""
    pairs: list[Pair] = []
    voids: list[tuple[int, Void]] = []
    seen: set[tuple[float, ...]] = set()
    for seed, reference in own.items():
        found = paired(reference, curves.get((arm.name, seed), Curve(reference.steps)), seed)
        if reference.losses in seen:
            found = Void.COPY if isinstance(found, Pair) else found
        if isinstance(found, Pair):
            pairs.append(found)
            seen.add(reference.losses)
        else:
            voids.append((seed, found))
    return tuple(pairs), tuple(voids)


def _repeat_band(reference: Curve, repeat: Curve) -> RepeatBand:
    """Step by step, as far as both came."""
    both = list(zip(reference.rows, repeat.rows, strict=False))
    first = next((old.step for old, new in both if old.loss != new.loss), None)
    gaps = [abs(new.loss / old.loss - 1) if old.loss else math.inf for old, new in both if old.loss != new.loss]
    return RepeatBand(len(both), first, max((one if math.isfinite(one) else math.inf for one in gaps), default=0.0))
