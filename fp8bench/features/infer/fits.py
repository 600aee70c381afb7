"""Times over contexts as a line, where two lines cross, and what resampling rounds makes of both.

A context's figure is the best case of its rounds, as everywhere in fp8bench. Rounds of one context are resampled
together for all arms, which were measured in the same ones, and of each context by themselves. So few rounds say less
than their resamples do: a resample's spread is widened as Student's t widens that of a mean.

And up to how many rows of a product arms of weights pay, what takes the gain away, and what ceilings say beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8bench.analysis.break_even import SizedRatio, break_even
from fp8bench.analysis.findings import findings
from fp8bench.analysis.stats import Floats, best_case
from fp8bench.features.infer.values import LEAST_CONTEXTS, BatchGain, BatchSweep, ContextCrossing, TimeLine, is_of
from fp8bench.model import Interval, Record, Run
from fp8bench.nn.served import CARRIERS, ServedArm, ServedShape, step_bytes

# What intervals are called, and the share of resamples that they hold: by simulated sweeps these hold the truth in 95
# of 100, from 10 rounds on. The fastest of few rounds are a little slower than those of many.
LEVEL, _DRAWN = 0.95, 0.99
_ENDS = ((1 - _DRAWN) / 2, (1 + _DRAWN) / 2)
# Contexts at which two lines are held against each other.
_PLACES = 256


@dataclass(frozen=True)
class LineDraws:
    """The fitted a and b, those of each resample (resamples, 2), and how far each context lies above: seconds."""

    point: Floats
    draws: Floats
    off: float
    above: Floats

    @property
    def line(self) -> TimeLine:
        low, high = np.quantile(self.draws, _ENDS, axis=0)
        a, b = (
            Interval(float(point), float(least), float(most), LEVEL)
            for point, least, most in zip(self.point, low, high, strict=True)
        )
        return TimeLine(a, b, self.off)

    def at(self, contexts: Floats) -> Floats:
        """Seconds of each resample at contexts: (resamples, contexts)."""
        seconds: Floats = self.draws[:, :1] + self.draws[:, 1:] * contexts
        return seconds


def fastest(samples: Sequence[float]) -> float:
    """The best case of rounds: what a context's line is fitted to, so that a figure is not beside its own line."""
    return math.exp(best_case(np.array(samples, dtype=np.float64)[:, None]).point)


def line_of(rounds: Mapping[int, Sequence[float]]) -> LineDraws | None:
    """The line through seconds by context, each context weighed by its own time; None of fewer than four."""
    if len(rounds) < LEAST_CONTEXTS:
        return None
    contexts, points, logs = sorted(rounds), [], []
    for place, context in enumerate(contexts):
        case = best_case(np.array(rounds[context], dtype=np.float64)[:, None])
        order = np.random.default_rng(place).permutation(len(case.resampled))
        widened = case.point + widening(len(rounds[context])) * (case.resampled[order] - case.point)
        points.append(case.point)
        logs.append(widened)
    seconds = np.exp(np.array(points))
    weights = np.stack((1 / seconds, np.array(contexts) / seconds), 1)
    solve = np.linalg.pinv(weights) / seconds
    point = solve @ seconds
    above = seconds - (point[0] + point[1] * np.array(contexts))
    off = float((np.abs(above) / seconds).max())
    return LineDraws(point, np.exp(np.array(logs)).T @ solve.T, off, above)


def widening(rounds: int) -> float:
    """How much wider Student's t of so many rounds, less one, is than the normal distribution; what the spread of their
    resamples lacks; and how much slower the fastest of few rounds are than those of many, by simulation."""
    freedom = max(1, rounds - 1)
    t = 1.96 + 2.37 / freedom + 2.8 / freedom**2 + 5.6 / freedom**3  # within 1% from 2 degrees on
    return t / 1.96 * math.sqrt(rounds / freedom) * (1 + 6 / rounds)


def crossing_of(arm: LineDraws, reference: LineDraws, contexts: Sequence[int]) -> ContextCrossing:
    """Where the arm's line crosses, within what was measured and nowhere else.

    The interval has every context at which resamples do not agree which of the two is faster, or do by less than some
    measured context lies off what the lines say of it: no resample shows that times are no line.
    """
    first, last = min(contexts), max(contexts)
    places = np.geomspace(first, last, _PLACES)
    known = reference.point[0] + reference.point[1] * np.array(sorted(contexts))
    miss = float((np.abs(arm.above - reference.above) / known).max())
    beside = miss * (reference.point[0] + reference.point[1] * places)
    ends_of = np.quantile(arm.at(places) - reference.at(places), _ENDS, axis=0)
    low, high = ends_of[0] - beside, ends_of[1] + beside
    signs = np.where(high < 0, 1, np.where(low > 0, -1, 0))
    ends = tuple(bool(sign > 0) if sign else None for sign in (signs[0], signs[-1]))
    faster = ends[0], ends[1]
    if None in faster or faster[0] == faster[1]:
        return ContextCrossing(None, first, last, faster)
    a, b = arm.point - reference.point
    at = float(min(max(-a / b, first), last))
    # From the last place of the one's to the first of the other's: lines cross once.
    own, others = np.flatnonzero(signs == signs[0])[-1], np.flatnonzero(signs == signs[-1])[0]
    return ContextCrossing(at, min(float(places[own]), at), max(float(places[others]), at), faster)


Phases = Mapping[str, float]


def swept(run: Run, arms: Sequence[ServedArm], layer: tuple[int, int], rows: tuple[int, ...]) -> BatchSweep:
    return BatchSweep(layer, rows, tuple(gains_of(run, arms)), computed_batch(run, arms[0]))


def gains_of(run: Run, arms: Sequence[ServedArm]) -> Iterator[BatchGain]:
    """By the ratios of the suite's own verdicts; beside what is measured what ceilings say."""
    verdicts = findings(run)
    leads = {int(record.case.param("m")): record for record in run.records if record.is_reference}
    for arm in arms[1:]:
        own = {int(record.case.param("m")): record for record in run.records if is_of(record, arm)}
        known = ((rows, verdicts[record.case.id].ratio) for rows, record in own.items())
        ratios = [SizedRatio(rows, ratio) for rows, ratio in known if ratio is not None]
        even = break_even(ratios)
        if even is None:
            continue
        crossings = tuple((crossing.size, crossing.low, crossing.high, crossing.begins) for crossing in even.crossings)
        pays = even.stretches[0].pays if len(even.stretches) == 1 else None
        worst = max(ratios, key=lambda ratio: ratio.ratio.point)
        cases = own[min(own)], own[worst.size], leads[worst.size]
        first, last, lead = (dict(verdicts[record.case.id].phases) for record in cases)
        cause = cause_of(first, last, lead, arm) if worst.ratio.low > 1 else ""
        yield BatchGain(arm, crossings, pays, worst.size, cause, computed_rows(own[min(own)], arm))


# A product that takes less than so many times what it takes of one row has a time that is fixed.
_FIXED = 1.5


def cause_of(first: Phases, last: Phases, reference: Phases, arm: ServedArm) -> str:
    """What an arm loses by: its seconds by phase at the fewest rows and where it loses most, and the reference's there.

    A time that hardly depends on the rows is what a launch and reading the weight take; one that grows is what is
    computed, of which dequantising is the part that the reference has not.
    """
    lost = {phase: seconds - reference.get(phase, 0.0) for phase, seconds in last.items()}
    if max(lost, key=lambda phase: lost[phase]) == "cast":
        return "casts of inputs" if arm.low_inputs else "dequantising ahead of its product"
    if sum(last.values()) < _FIXED * sum(first.values()):
        return "launches: its time is fixed"
    return "dequantising inside its product" if arm.weights else f"its product: that of {arm.carrier} is slower here"


def computed_rows(record: Record, arm: ServedArm) -> float | None:
    """Below how many rows a product of the arm is bound by the bytes of its weight, by the ceilings of its device."""
    ceiling = record.ceiling
    if ceiling is None or not ceiling.flops or not ceiling.bytes:
        return None
    outputs, inputs = int(record.case.param("n")), int(record.case.param("k"))
    shape = ServedShape(0, 0, 1, 1, 1, 1, (("blocks.0.weight", (outputs, inputs)),))
    each = step_bytes(shape, replace(arm, kv=""), 1, 0).weights / (outputs * inputs)
    return each * ceiling.flops / (2 * ceiling.bytes)


def computed_batch(run: Run, reference: ServedArm) -> float | None:
    """The batch from which the reference's own products are bound by arithmetic, so that fewer bytes gain nothing."""
    ceiling = next(
        (record.ceiling for record in run.records if record.is_reference and record.ceiling is not None), None
    )
    if ceiling is None or not ceiling.flops or not ceiling.bytes:
        return None
    return CARRIERS[reference.carrier] * ceiling.flops / (2 * ceiling.bytes)
