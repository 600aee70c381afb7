"""The curves of a training over its steps, as charts.

A point is the mean over the window that ends there. Windows are as long as the endpoint's, so that the last point is
the endpoint; the first ones have fewer steps. A point of the gap is what it would be, had the training
ended there.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from fp8bench import units
from fp8bench.features.train.values import ArmRole, KeptTraining, StepFigure, StepRow, TrainingEvent, Validation
from fp8bench.features.train.verdicts.curves import HELD_OUT, Curve, Key, gap_of, gaps_at, last_of
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.report.elements import ChartAxis, Element, Lines, Mark, Tone
from fp8bench.report.panels import together
from fp8bench.report.words.naming import many

# The means of each curve in the windows before the ends; and an arm's name with its marks.
Windows = dict[Key, list[float]]
Series = tuple[str, tuple[Mark | None, ...]]
# At most so many points of a curve are drawn; the CSV has every number.
_PLACES = 60
# Name, title, the value of the steps from one point to the next, and whether the chart is folded.
_FIGURES: tuple[tuple[str, str, Callable[[Sequence[StepRow]], float], bool], ...] = (
    ("gradient-norm", "norm of the gradients, before clipping", lambda rows: rows[-1].gradient_norm, False),
    ("update-ratio", "norm of the update over that of the weights", lambda rows: rows[-1].update_ratio, False),
    ("parameter-norm", "norm of the weights", lambda rows: rows[-1].parameter_norm, True),
    ("clipped", "share of the gradients' norm that clipping took", lambda rows: rows[-1].clipped, True),
    ("loss-scale", "loss scale", lambda rows: rows[-1].loss_scale, True),
    ("rate", "learning rate", lambda rows: rows[-1].rate, True),
)


def ends_of(steps: int) -> tuple[int, ...]:
    """How many steps are done at the end of each window, with the last step."""
    count = min(_PLACES, steps)
    return tuple(sorted({1 + round(number * (steps - 1) / max(1, count - 1)) for number in range(count)} | {steps}))


def losses(judged: JudgedTraining) -> Iterator[Element]:
    kept, ends = judged.kept, ends_of(judged.training.request.steps)
    means = windows_of(judged.curves, ends)
    yield from gap_curves(kept, judged.curves, ends, judged.verdicts.reference)
    yield from loss_curves(kept, means, ends)
    yield from held_out_curves(kept)


def loss_curves(kept: KeptTraining, means: Windows, ends: Sequence[int]) -> Iterator[Element]:
    steps, arms = kept.training.request.steps, kept.training.arms
    series = []
    for arm in arms:
        if not arm.is_band:
            own = [values for (name, _), values in means.items() if name == arm.name]
            banded = arm.role is ArmRole.REFERENCE
            series.append((arm.name, tuple(_loss(own, banded, place) for place in range(len(ends)))))
    words = (
        f"Means over seeds, each over the last {many(last_of(steps), 'step')}. The band is the range of the reference "
        "over its seeds. Alarms of any seed stand at their steps."
    )
    yield Lines(
        "loss",
        "Training loss over steps",
        words,
        _places(ends),
        ChartAxis(f"{_unit(kept)}, by steps done"),
        _drawn(_flagged(kept, series, ends)),
    )


def gap_curves(
    kept: KeptTraining, curves: Mapping[Key, Curve], ends: Sequence[int], reference: str
) -> Iterator[Element]:
    base = {seed: curve for (name, seed), curve in curves.items() if name == reference}
    series = []
    for arm in kept.training.arms:
        if arm.role is ArmRole.CANDIDATE:
            pairs = [(base[seed], own) for (name, seed), own in curves.items() if name == arm.name and seed in base]
            gaps = [gaps_at(*pair, ends) for pair in pairs]
            by_end = zip(*gaps, strict=True) if gaps else [()] * len(ends)
            series.append((arm.name, tuple(map(_gap, by_end))))
    margin = units.percent(kept.training.request.margin)
    words = (
        f"Relative to {reference} in the same seed, over the last third of the steps done by then: the last point is "
        f"the verdict's gap. The band is the 95% interval over seeds; the margin is {margin}. Alarms of any "
        "seed stand at their steps. The axis fits the last two thirds."
    )
    yield Lines(
        "gap",
        "Gap to the reference over steps",
        words,
        _places(ends),
        ChartAxis("gap of the loss, by steps done", "%"),
        _drawn(_flagged(kept, series, ends)),
        settled=len(ends) // 3,
        levels=tuple(
            (sign * 100 * kept.training.request.margin, f"margin {words}")
            for sign, words in ((1, f"+{margin}"), (-1, f"-{margin}"))
        ),
    )


def _flagged(kept: KeptTraining, series: Iterable[Series], ends: Sequence[int]) -> Iterator[Series]:
    """Alarms stand at the mark of their step, or the last one before it: a value that is not finite has no mark."""
    alarms = kept.alarms
    for name, marks in series:
        known = [place for place, mark in enumerate(marks) if mark is not None]
        own = ((bisect_right(known, bisect_left(ends, event.step + 1)), event) for event in alarms if event.arm == name)
        flags = {known[before - 1]: events for before, events in together(own).items() if before}
        yield name, tuple(mark and _with_flag(mark, flags.get(place, [])) for place, mark in enumerate(marks))


def _with_flag(mark: Mark, alarms: Sequence[TrainingEvent]) -> Mark:
    if not alarms:
        return mark
    return replace(mark, tone=Tone.BAD, flag=", ".join(dict.fromkeys(alarm.rule for alarm in alarms)))


def held_out_curves(kept: KeptTraining) -> Iterator[Element]:
    arms = [arm.name for arm in kept.training.arms if arm.role not in (ArmRole.REPEAT, ArmRole.CHAOS)]
    looks = (look for look in kept.of(Validation) if look.of == HELD_OUT and math.isfinite(look.loss))
    known = together(((look.arm, look.step), look.loss) for look in looks)
    steps = sorted({step for _, step in known})
    series = [
        (arm, tuple(Mark("", fmean(own)) if (own := known.get((arm, step))) else None for step in steps))
        for arm in arms
    ]
    yield Lines(
        "held-out",
        "Loss on held-out text",
        "Means over seeds, of text that was never trained on.",
        _places(steps),
        ChartAxis(f"{_unit(kept)}, by steps done"),
        _drawn(series),
    )


def figure_curves(judged: JudgedTraining) -> Iterator[Element]:
    """Further figures of every step in the first seed, one chart each, unless a figure never changes."""
    kept, request = judged.kept, judged.training.request
    arms = {
        arm.name: curve
        for arm in judged.training.arms
        if not arm.is_band and (curve := judged.curves.get((arm.name, request.seed))) is not None
    }
    ends = ends_of(request.steps)
    for name, title, value, folded in _FIGURES:
        series = [(arm, tuple(_figures(curve, ends, value))) for arm, curve in arms.items()]
        if len({mark.value for _, marks in series for mark in marks if mark}) > 1:
            yield Lines(
                name,
                title[0].upper() + title[1:],
                "First seed, the values of single steps.",
                _places(ends),
                ChartAxis(f"{title}, by steps done"),
                _drawn(series),
                folded=folded,
                settled=len(ends) // 3,
            )
    yield from _pace_and_memory(kept, arms, ends)


def _figures(curve: Curve, ends: Sequence[int], value: Callable[[Sequence[StepRow]], float]) -> Iterator[Mark | None]:
    for before, end in pairwise((0, *ends)):
        figure = value(curve.rows[before:end]) if end <= len(curve.rows) else math.nan
        yield Mark("", figure) if math.isfinite(figure) else None


def _pace(rows: Sequence[StepRow]) -> float:
    """NaN where all steps were watched, which takes extra time."""
    paces = [row.tokens / row.seconds for row in rows if row.seconds > 0]
    return median(paces) if paces else math.nan


def _pace_and_memory(kept: KeptTraining, arms: Mapping[str, Curve], ends: Sequence[int]) -> Iterator[Element]:
    native = {arm.name for arm in kept.training.arms if arm.native}
    series = [(arm, tuple(_figures(curve, ends, _pace))) for arm, curve in arms.items() if arm in native]
    yield Lines(
        "throughput",
        "Throughput over steps",
        "Native arms in the first seed: the median of the steps before each point, without watched ones.",
        _places(ends),
        ChartAxis("tokens/s, by steps done"),
        _drawn(series),
        folded=True,
    )
    yield _memory_over_steps(kept)


def _memory_over_steps(kept: KeptTraining) -> Lines:
    """Of all arms together; of several figures in a step the largest is drawn."""
    seed, most = kept.training.request.seed, dict[int, float]()
    for figure in kept.of(StepFigure):
        if figure.name == "memory" and figure.seed == seed:
            most[figure.step] = max(figure.value, most.get(figure.step, 0.0))
    steps = sorted(most)
    steps = steps[:: max(1, -(-len(steps) // _PLACES))]
    return Lines(
        "memory-over-steps",
        "Memory over steps",
        "All arms together, in watched steps of the first seed.",
        _places(step + 1 for step in steps),
        ChartAxis("bytes in use, by steps done", "B"),
        _drawn([("all arms", tuple(Mark("", most[step]) for step in steps))]),
        folded=True,
    )


def windows_of(curves: Mapping[Key, Curve], ends: Sequence[int]) -> Windows:
    """The mean of each curve before each end; NaN where the curve is shorter, or not finite."""
    means = {}
    for key, curve in curves.items():
        window, rows = last_of(curve.steps), curve.rows
        parts = (rows[max(0, end - window) : end] if end <= len(rows) else () for end in ends)
        losses = ([row.loss for row in part] for part in parts)
        means[key] = [math.fsum(own) / len(own) if own and all(map(math.isfinite, own)) else math.nan for own in losses]
    return means


def _loss(own: Sequence[Sequence[float]], banded: bool, place: int) -> Mark | None:
    here = [values[place] for values in own if math.isfinite(values[place])]
    if not here:
        return None
    return Mark("", fmean(here), *((min(here), max(here)) if banded and len(here) > 1 else ()))


def _gap(gaps: Sequence[float]) -> Mark | None:
    """In percent; with one seed there is no interval."""
    gap = gap_of([100 * gap for gap in gaps if math.isfinite(gap)])
    if gap is None:
        return None
    low, high = (gap.shown.low, gap.shown.high) if gap.shown is not None else (None, None)
    return Mark("", gap.point, low, high)


def _places(steps: Iterable[int]) -> tuple[str, ...]:
    return tuple(map(units.whole, steps))


def _drawn(series: Iterable[Series]) -> tuple[Series, ...]:
    return tuple((name, marks) for name, marks in series if any(marks))


def _unit(kept: KeptTraining) -> str:
    return "loss" if kept.training.request.settings.make else "loss in nats a token"
