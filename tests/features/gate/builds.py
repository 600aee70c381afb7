"""Random builds in which one case may be slower, judged by the gate; suspects are drawn again.

`share_failing` plants the slow-down that an unchanged build claims to detect.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fp8bench.analysis.compare.compare import compare_matched_figures
from fp8bench.analysis.compare.interval import Estimate
from fp8bench.analysis.compare.sides import MatchedFigures
from fp8bench.analysis.steps.change_points import MIN_LEVEL_LENGTH, find_level_steps, find_newest_levels
from fp8bench.cli.progress import SILENT
from fp8bench.features.duel.values import CaseSession, Duel
from fp8bench.features.duel.verdicts import comparisons
from fp8bench.features.gate.judging import (
    DetectionLimit,
    GateOutcome,
    GateVerdict,
    JudgedFigure,
    SecondMeasurement,
    apply_second_look,
    case_and_metric,
    judge_first_look,
)
from fp8bench.features.gate.power import RemeasurementMethod, SeriesState, detection_limits, history_detection_limits
from fp8bench.features.gate.stored_runs import GateSource, SuspectRemeasurer, judge_comparisons
from fp8bench.features.gate.thresholds import ThresholdRule
from fp8bench.model import Comparison, Direction, Evidence, Interval
from fp8bench.model.specs import TIME
from tests.duels import header, result
from tests.fakes import steady

CASES = 100
WITHIN = 0.003
# Fails on any difference beyond chance.
NO_THRESHOLD = (ThresholdRule("*", "*", 0.0, 0.0),)
Run = list[float]


@dataclass(frozen=True)
class Setting:
    """Runs on each side, how far the same case lies apart in two of them, and how far a whole run moves together."""

    before: int
    after: int
    between: float
    together: float = 0.0
    one_sided: bool = False

    def noise(self, draw: random.Random) -> float:
        return draw.expovariate(1) if self.one_sided else draw.gauss(0, 1)

    def run(self, draw: random.Random, planted: float) -> Run:
        """Log times of all cases; the first is `planted` times as slow."""
        shared = self.together * self.noise(draw)
        logs = [shared + math.hypot(self.between, WITHIN) * self.noise(draw) for _ in range(CASES)]
        return [logs[0] + math.log(planted), *logs[1:]]


def build(
    setting: Setting, draw: random.Random, planted: float = 1.0, rules: tuple[ThresholdRule, ...] = ()
) -> tuple[JudgedFigure, ...]:
    before = [setting.run(draw, 1.0) for _ in range(setting.before)]
    after = [setting.run(draw, planted) for _ in range(setting.after)]
    judged = judge_first_look(list(_comparisons(before, after)), rules)
    if not any(figure.outcome is GateOutcome.SUSPECTED for figure in judged):
        return judged
    again = _comparisons(before, [setting.run(draw, planted)], after)
    return apply_second_look(judged, SecondMeasurement({case_and_metric(case): case for case in again}, "again"), rules)


def stored_verdict(setting: Setting, draw: random.Random, planted: float) -> GateVerdict:
    """Judges such builds with the gate's default thresholds; suspects are drawn again."""
    before = [setting.run(draw, 1.0) for _ in range(setting.before)]
    after = [setting.run(draw, planted) for _ in range(setting.after)]

    def confirm(suspects: Sequence[Comparison]) -> SecondMeasurement:
        again = _comparisons(before, [setting.run(draw, planted)], after)
        return SecondMeasurement({case_and_metric(case): case for case in again}, "again")

    return judge_comparisons(GateSource("stored", tuple(_comparisons(before, after)), confirm), (), True, SILENT)


def duel_verdict(draw: random.Random, planted: float, spread: float) -> GateVerdict:
    """Judges a duel of one case whose processes vary by `spread`; sessions of repeated duels are added."""
    remeasurer = SuspectRemeasurer(Path(), SILENT)

    def duel() -> Duel:
        sessions = []
        for _ in range(4):
            log = [math.log(1e6) + draw.gauss(0, spread) for _ in range(4)]
            times = [
                steady(round(math.exp(one) * (planted if place > 1 else 1.0)), 12) for place, one in enumerate(log)
            ]
            sessions.append(CaseSession(tuple(times[:2]), tuple(times[2:])))
        return header(results=(result("bf16", *sessions),), finished=True, sessions=4)

    def confirm(suspects: Sequence[Comparison]) -> SecondMeasurement:
        again = duel()
        again = replace(again, results=tuple(remeasurer.add_earlier_sessions(one, "a") for one in again.results))
        return SecondMeasurement(
            {case_and_metric(figure): figure for figure in comparisons(again)}, "in duel x", pools_samples=True
        )

    return judge_comparisons(
        GateSource("duel", comparisons(duel()), confirm, remeasurement=RemeasurementMethod.DUEL), (), True, SILENT
    )


def _estimates(runs: Sequence[Run], case: int) -> tuple[Estimate, ...]:
    return tuple(Estimate(run[case] + math.log(1e-3), WITHIN) for run in runs)


def _comparisons(before: list[Run], after: list[Run], beside: Sequence[Run] = ()) -> Iterator[Comparison]:
    for case in range(CASES):
        old, new, others = (_estimates(runs, case) for runs in (before, after, beside))
        yield compare_matched_figures(
            MatchedFigures(TIME, "s", old, new, extra=others), f"made[case={case}]@cpu/bf16", "made", ()
        )


def false_alarms(setting: Setting, builds: int) -> float:
    """The share of unchanged builds that fail."""
    draw = random.Random(0)
    return sum(any(map(_fails, build(setting, draw))) for _ in range(builds)) / builds


def found(setting: Setting, planted: float, builds: int) -> float:
    """The share of builds in which the one slower case fails."""
    draw = random.Random(0)
    return sum(_fails(build(setting, draw, planted)[0]) for _ in range(builds)) / builds


def _fails(judged: JudgedFigure) -> bool:
    return judged.outcome is GateOutcome.REGRESSION


# Draws a build with one case slower by a share; returns whether it fails, and the slow-down it claims to detect.
Build = Callable[[random.Random, float], tuple[bool, DetectionLimit]]


def share_failing(of: Build, builds: int) -> float:
    draw = random.Random(0)
    known = [sight for _ in range(builds) if math.isfinite((sight := of(draw, 0.0)[1]).smallest)]
    return sum(of(draw, sight.smallest)[0] for sight in known) / len(known)


def stored(setting: Setting) -> Build:
    """Builds that compare stored runs; suspects are measured again."""

    def of(draw: random.Random, planted: float) -> tuple[bool, DetectionLimit]:
        judged = build(setting, draw, 1 + planted, NO_THRESHOLD)
        sights = detection_limits(judged, RemeasurementMethod.MEASURED_AGAIN)
        return _fails(judged[0]), next(sight for sight in sights if sight.case == judged[0].comparison.case)

    return of


def nights(count: int, between: float) -> Build:
    """A history of `count` nights; the planted step is in the last place where it can be found."""

    def of(draw: random.Random, planted: float) -> tuple[bool, DetectionLimit]:
        logs = np.array([draw.gauss(0, between) for _ in range(count)])
        flat = Comparison(
            "made[case=0]@box/bf16", "made", "relative_time", "x", Direction.SAME, Evidence.HISTORY, 1.0, 1.0
        )
        newest = SeriesState(flat, find_newest_levels([np.exp(logs)])[0])
        (sight,) = history_detection_limits([newest], (), 0, RemeasurementMethod.MEASURED_AGAIN)
        logs[-MIN_LEVEL_LENGTH:] += math.log1p(planted)
        slower = [step for step in find_level_steps([np.exp(logs)])[0] if step.after > 1.01 * step.before]
        if not slower:
            return False, sight
        last = slower[-1]
        step = replace(
            flat,
            direction=Direction.WORSE,
            before=last.before,
            after=last.after,
            ratio=last.ratio,
            p_value=last.p_value,
        )
        value = math.exp(draw.gauss(0, between)) * (1 + planted)
        where = Direction.WORSE if value > math.sqrt(last.before * last.after) else Direction.SAME
        ratio = Interval(value / last.before, value / last.before, value / last.before, 0.0)
        again = replace(flat, direction=where, before=last.before, after=value, ratio=ratio)
        judged = judge_first_look([step], NO_THRESHOLD)
        return _fails(
            apply_second_look(judged, SecondMeasurement({case_and_metric(again): again}), NO_THRESHOLD)[0]
        ), sight

    return of
