"""What is drawn over the steps of a training: losses with the seed band, gaps with their intervals, and the rest.

A value at a step is the mean over the window that ends there. A window is as long as the endpoint's, so that the last
one is the endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, median

from fp8bench import units
from fp8bench.features.train.values import ArmRole, KeptTraining, StepRow, Validation
from fp8bench.features.train.verdicts.curves import HELD_OUT, Curve, Key, last_of
from fp8bench.features.train.verdicts.curves import gap_of
from fp8bench.features.train.view import POSITION
from fp8bench.report.elements import Axis, Element, Lines, Mark, Point, Scatter
from fp8bench.report.words.run_facts import many

Curves = Mapping[Key, Curve]
# So many places of a curve are drawn; every number is in the training's CSV.
_PLACES = 60
_FIGURES: tuple[tuple[str, str, Callable[[StepRow], float]], ...] = (
    ("gradient-norm", "norm of the gradients, before clipping", lambda row: row.gradient_norm),
    ("clipped", "share of the gradients' norm that clipping took", lambda row: row.clipped),
    ("update-ratio", "norm of the update over that of the weights", lambda row: row.update_ratio),
    ("loss-scale", "loss scale", lambda row: row.loss_scale),
    ("rate", "learning rate", lambda row: row.rate),
)


def ends_of(steps: int) -> tuple[int, ...]:
    """How many steps are done where windows end: at most so many as are drawn, all steps the last of them."""
    window = last_of(steps)
    count = min(_PLACES, steps - window + 1)
    return tuple(sorted({window + round(one * (steps - window) / max(1, count - 1)) for one in range(count)} | {steps}))


def loss_curves(kept: KeptTraining, curves: Curves) -> Iterator[Element]:
    """The mean over seeds of each arm, and between which values the reference lies under all seeds it was given."""
    steps, arms = kept.training.request.steps, kept.training.arms
    ends = ends_of(steps)
    band = _windows(curves, [arm.name for arm in arms if arm.role in (ArmRole.REFERENCE, ArmRole.OTHER_SEED)], ends)
    series = []
    for arm in arms:
        if arm.role in (ArmRole.REFERENCE, ArmRole.CANDIDATE):
            own = _windows(curves, [arm.name], ends)
            beside = band if arm.role is ArmRole.REFERENCE else {}
            marks = [_loss(_finite(own, place), _finite(beside, place)) for place in range(len(ends))]
            series.append((arm.name, tuple(marks)))
    words = (
        f"Means over seeds, each of the {many(last_of(steps), 'step')} before its place. The band is from the least to "
        "the largest of the reference under all its seeds: its own and the other ones."
    )
    yield Lines(
        "loss", "Training loss over steps", words, _places(ends), Axis("loss in nats a token, by steps done"),
        _told(series),
    )  # fmt: skip


def gap_curves(kept: KeptTraining, curves: Curves) -> Iterator[Element]:
    """By what share each arm's loss lies above the reference's in the same seed, with the interval over seeds."""
    steps, arms = kept.training.request.steps, kept.training.arms
    ends = ends_of(steps)
    reference = next(arm.name for arm in arms if arm.role is ArmRole.REFERENCE)
    base = _windows(curves, [reference], ends)
    series = []
    for arm in arms:
        if arm.role is ArmRole.CANDIDATE:
            own = _windows(curves, [arm.name], ends)
            both = [(own[arm.name, seed], base[reference, seed]) for _, seed in own if (reference, seed) in base]
            series.append((arm.name, tuple(_gap(both, place) for place in range(len(ends)))))
    margin = units.percent(kept.training.request.margin)
    words = (
        f"Relative to {reference} in the same seed, of the {many(last_of(steps), 'step')} before each place: the last "
        f"one is the endpoint. The band is the 95% interval over seeds; the margin is {margin}."
    )
    yield Lines(
        "gap", "Gap to the reference over steps", words, _places(ends), Axis("gap of the loss, by steps done", "%"),
        _told(series),
    )  # fmt: skip


def held_out_curves(kept: KeptTraining) -> Iterator[Element]:
    """The loss on held-out text at each look, the mean over seeds."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in kept.of(Validation):
        if line.of == HELD_OUT and math.isfinite(line.loss):
            found.setdefault(line.arm, {}).setdefault(line.step, []).append(line.loss)
    steps = sorted({step for own in found.values() for step in own})
    series = [
        (arm.name, tuple(Mark("", fmean(own[step])) if step in own else None for step in steps))
        for arm in kept.training.arms if (own := found.get(arm.name)) and arm.role is not ArmRole.REPEAT
    ]  # fmt: skip
    yield Lines(
        "held-out", "Loss on held-out text", "Means over seeds, of text that was never trained on.", _places(steps),
        Axis("loss in nats a token, by steps done"), _told(series),
    )  # fmt: skip


def loss_by_place(kept: KeptTraining) -> Iterator[Element]:
    """The loss of held-out text after the last step, by where in the context a token stands."""
    steps, found = kept.training.request.steps, dict[str, dict[str, list[float]]]()
    for line in kept.of(Validation):
        if line.of.startswith(POSITION) and line.step == steps and math.isfinite(line.loss):
            found.setdefault(line.arm, {}).setdefault(line.of.removeprefix(POSITION), []).append(line.loss)
    places = list(dict.fromkeys(place for own in found.values() for place in own))
    shown = [arm.name for arm in kept.training.arms if arm.role in (ArmRole.REFERENCE, ArmRole.CANDIDATE)]
    series = [
        (name, tuple(Mark("", fmean(own[place])) if place in own else None for place in places))
        for name in shown if (own := found.get(name))
    ]  # fmt: skip
    yield Lines(
        "places", "Loss by place in the context", "Means over seeds, of held-out text after the last step.",
        tuple(places), Axis("loss in nats a token, by tokens from the beginning"), _told(series),
    )  # fmt: skip


def loss_by_time(kept: KeptTraining, curves: Curves) -> Iterator[Element]:
    """Native arms alone: the time of an emulation means nothing. Watched steps count as the median one."""
    steps = kept.training.request.steps
    ends = ends_of(steps)
    points, joined = [], []
    for arm in kept.training.arms:
        curve = curves.get((arm.name, kept.training.request.seed))
        timed = [row.seconds for row in curve.rows if row.seconds > 0] if curve is not None else []
        if curve is None or not timed or not arm.native or arm.role not in (ArmRole.REFERENCE, ArmRole.CANDIDATE):
            continue
        usual = median(timed)
        elapsed = list(accumulate(row.seconds or usual for row in curve.rows))
        means = _windows(curves, [arm.name], ends)[arm.name, kept.training.request.seed]
        points += [
            Point(arm.name, f"{many(end, 'step')}", elapsed[end - 1], loss)
            for end, loss in zip(ends, means, strict=True) if math.isfinite(loss)
        ]  # fmt: skip
        joined.append(arm.name)
    if len(joined) > 1:
        yield Scatter(
            "loss-by-time", "Training loss over time", "Native arms of the first seed, by the time of their steps.",
            Axis("time of the steps", "s"), Axis("loss in nats a token"), tuple(points), joined=tuple(joined),
        )  # fmt: skip


def figure_curves(kept: KeptTraining, curves: Curves) -> Iterator[Element]:
    """What else every step says, of the first seed, one chart a figure; a figure that never changes has none."""
    seed, steps = kept.training.request.seed, kept.training.request.steps
    ends = ends_of(steps)
    for name, title, value in _FIGURES:
        series = []
        for arm in kept.training.arms:
            curve = curves.get((arm.name, seed))
            if curve is not None and arm.role in (ArmRole.REFERENCE, ArmRole.CANDIDATE):
                own = [value(row) for row in curve.rows]
                marks = [
                    Mark("", own[end - 1]) if end <= len(own) and math.isfinite(own[end - 1]) else None for end in ends
                ]
                series.append((arm.name, tuple(marks)))
        if len({mark.value for _, marks in series for mark in marks if mark}) > 1:
            yield Lines(
                name, title.capitalize(), "Of the first seed, at each place the last step's.", _places(ends),
                Axis(f"{title}, by steps done"), _told(series), folded=True,
            )  # fmt: skip


def _windows(curves: Curves, arms: Iterable[str], ends: Sequence[int]) -> dict[Key, list[float]]:
    """Of each curve of these arms the mean before each end; NaN where it has not come so far, or is not finite."""
    wanted, found = set(arms), {}
    for key, curve in curves.items():
        if key[0] in wanted:
            window, values = last_of(curve.steps), curve.losses
            found[key] = [_mean(values[max(0, end - window) : end]) if end <= len(values) else math.nan for end in ends]
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _finite(windows: Mapping[Key, Sequence[float]], place: int) -> list[float]:
    return [values[place] for values in windows.values() if math.isfinite(values[place])]


def _loss(own: Sequence[float], band: Sequence[float]) -> Mark | None:
    if not own:
        return None
    return Mark("", fmean(own), *((min(band), max(band)) if len(band) > 1 else ()))


def _gap(both: Sequence[tuple[Sequence[float], Sequence[float]]], place: int) -> Mark | None:
    """In percent; without an interval of one seed."""
    pairs = ((new[place], old[place]) for new, old in both)
    found = gap_of([100 * (new / old - 1) for new, old in pairs if math.isfinite(new) and 0 < old < math.inf])
    if found is None:
        return None
    low, high = (found.shown.low, found.shown.high) if found.shown is not None else (None, None)
    return Mark("", found.point, low, high, hint=f"of {many(found.pairs, 'seed')}")


def _places(steps: Iterable[int]) -> tuple[str, ...]:
    return tuple(map(units.whole, steps))


def _told(series: Iterable[tuple[str, tuple[Mark | None, ...]]]) -> tuple[tuple[str, tuple[Mark | None, ...]], ...]:
    return tuple((name, marks) for name, marks in series if any(marks))
