"""How often a gate fails a build for nothing, and how often it finds what was planted: `python -m suites.gate`.

Seeded Monte Carlo: runs of 100 cases are drawn and judged by the gate's own code; suspects are drawn once more, as by a
second look. Figures are in percent of such runs.

`trial` checks what the gate says about its sight. For builds in which nothing changed, it says from which slow-down on
they would have failed, with its thresholds and without. A slow-down of that size is planted in another build of the
same kind, which should fail as often as was asked for (80 of 100).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fp8bench.analysis.compare.compare import of_times
from fp8bench.analysis.compare.interval import Estimate
from fp8bench.analysis.compare.sides import MatchedFigures
from fp8bench.analysis.steps.change_points import LEAST, newest_levels, steps_of_many
from fp8bench.features.gate.judging import (
    USUAL_POWER,
    GateOutcome,
    JudgedFigure,
    SecondLook,
    Sight,
    first_look,
    key_of,
    second_look,
)
from fp8bench.features.gate.power import Newest, Second, chance_among, sight_of, sights_of_history
from fp8bench.features.gate.thresholds import ThresholdRule
from fp8bench.model import Comparison, Direction, Evidence, Interval
from fp8bench.model.specs import TIME
from suites.trials import Table, options

CASES = 100
WITHIN = 0.003
# Of variance 1, but for bad runs: there one figure in twenty is slower, by 4 deviations in the mean.
NOISES: dict[str, Callable[[random.Random], float]] = {
    "Gaussian": lambda draw: draw.gauss(0, 1),
    "one-sided": lambda draw: draw.expovariate(1),
    "bad runs": lambda draw: draw.gauss(0, 1) + (draw.expovariate(0.25) if draw.random() < 0.05 else 0),
}


@dataclass(frozen=True)
class Setting:
    """Runs on each side, how far the same case lies apart in two of them, and how far a whole run moves together."""

    before: int
    after: int
    between: float
    together: float = 0.0
    noise: str = "Gaussian"

    @property
    def words(self) -> str:
        shared = f", {100 * self.together:g}% shared by a run" if self.together else ""
        return f"{self.before} + {self.after} runs, {100 * self.between:g}% between runs ({self.noise}{shared})"


SETTINGS = (
    Setting(1, 1, 0.005), Setting(1, 1, 0.01), Setting(1, 1, 0.02), Setting(1, 1, 0.03), Setting(1, 1, 0.05),
    Setting(1, 1, 0.02, noise="one-sided"), Setting(1, 1, 0.02, noise="bad runs"), Setting(1, 1, 0.02, 0.02),
    Setting(3, 1, 0.02), Setting(5, 1, 0.02), Setting(5, 5, 0.01), Setting(5, 5, 0.02), Setting(5, 5, 0.05),
    Setting(5, 5, 0.02, noise="one-sided"), Setting(5, 5, 0.02, noise="bad runs"), Setting(5, 5, 0.01, 0.02),
)  # fmt: skip


def build(
    setting: Setting, draw: random.Random, planted: float = 1.0, rules: tuple[ThresholdRule, ...] = ()
) -> tuple[JudgedFigure, ...]:
    """Returns the gate's judgement of the cases of one build, the first of which is `planted` times as slow as
    before."""
    before = [_run(setting, draw) for _ in range(setting.before)]
    after = [_run(setting, draw, planted) for _ in range(setting.after)]
    judged = first_look(list(_comparisons(before, after)), rules)
    suspects = {key_of(figure.comparison) for figure in judged if figure.outcome is GateOutcome.TO_CONFIRM}
    if suspects:
        again = _comparisons(before, [_run(setting, draw, planted)], after)
        look = SecondLook({key_of(case): case for case in again if key_of(case) in suspects}, "again")
        judged = second_look(judged, look, rules)
    return judged


def _run(setting: Setting, draw: random.Random, planted: float = 1.0) -> list[float]:
    """Returns the logarithms of the times of all cases in one run."""
    noise = NOISES[setting.noise]
    shared = setting.together * noise(draw)
    logs = [shared + math.hypot(setting.between, WITHIN) * noise(draw) for _ in range(CASES)]
    return [logs[0] + math.log(planted), *logs[1:]]


def _comparisons(
    before: list[list[float]], after: list[list[float]], beside: Sequence[list[float]] = ()
) -> Iterator[Comparison]:
    for case in range(CASES):
        old, new, others = (
            tuple(Estimate(run[case] + math.log(1e-3), WITHIN) for run in side) for side in (before, after, beside)
        )
        yield of_times(MatchedFigures(TIME, "s", old, new, beside=others), f"made[case={case}]@cpu/bf16", "made", ())


def false_alarms(setting: Setting, builds: int, seed: int = 0) -> float:
    """The share of builds that fail although nothing has changed."""
    draw = random.Random(seed)
    return sum(any(map(_fails, build(setting, draw))) for _ in range(builds)) / builds


def found(setting: Setting, planted: float, builds: int, seed: int = 0) -> float:
    """The share of builds in which the one case that became slower fails."""
    draw = random.Random(seed)
    return sum(_fails(build(setting, draw, planted)[0]) for _ in range(builds)) / builds


def _fails(judged: JudgedFigure) -> bool:
    return judged.outcome is GateOutcome.REGRESSION


# Whatever differs by more than chance fails.
NO_THRESHOLD = (ThresholdRule("*", "*", 0.0, 0.0),)
Build = Callable[[random.Random, float, tuple[ThresholdRule, ...]], tuple[bool, Sight]]


class Seen(NamedTuple):
    """Over many builds: the median of what could have been seen, and the share of builds with just that which fail;
    the same beyond the threshold."""

    seen: float
    told: float
    fails: float
    failed: float


def trial(of: Build, builds: int, seed: int = 0) -> Seen:
    """Asks builds in which nothing changed what they would see, and plants that in two others of the same kind."""
    draw = random.Random(seed)
    sights = [of(draw, 0.0, ())[1] for _ in range(builds)]
    known = [sight for sight in sights if math.isfinite(sight.fails)]
    told = sum(of(draw, sight.seen, NO_THRESHOLD)[0] for sight in known)
    failed = sum(of(draw, sight.fails, ())[0] for sight in known)
    seen, fails = (statistics.median_low(getattr(sight, name) for sight in sights) for name in ("seen", "fails"))
    return Seen(seen, told / max(1, len(known)), fails, failed / max(1, len(known)))


def stored(setting: Setting) -> Build:
    """Builds that compare runs of 100 cases; suspects are measured again."""

    def of(draw: random.Random, planted: float, rules: tuple[ThresholdRule, ...]) -> tuple[bool, Sight]:
        judged = build(setting, draw, 1 + planted, rules)
        return _fails(judged[0]), sight_of(judged[0], chance_among(judged), Second.AGAIN, USUAL_POWER)

    return of


def nights(count: int, between: float, noise: str = "Gaussian") -> Build:
    """A history of so many nights; what is planted comes with the last nights in which a step can be found."""

    def of(draw: random.Random, planted: float, rules: tuple[ThresholdRule, ...]) -> tuple[bool, Sight]:
        logs = np.array([between * NOISES[noise](draw) for _ in range(count)])
        (level,) = newest_levels([np.exp(logs)])
        flat = Comparison(
            "made[case=0]@box/bf16", "made", "relative_time", "x", Direction.SAME, Evidence.HISTORY, 1.0, 1.0
        )
        sights = sights_of_history([Newest(flat, level, count)], rules, 0, Second.AGAIN, USUAL_POWER, required=False)
        logs[-LEAST:] += math.log1p(planted)
        steps = steps_of_many([np.exp(logs)])[0]
        slower = [step for step in steps if step.after > 1.01 * step.before]
        if not slower:
            return False, sights.figures[0]
        last = slower[-1]
        was = {"before": last.before, "after": last.after, "ratio": last.ratio, "p_value": last.p_value}
        step = replace(flat, direction=Direction.WORSE, **was)  # type: ignore[arg-type]
        judged = first_look([step], rules)
        value = math.exp(between * NOISES[noise](draw)) * (1 + planted)
        where = Direction.WORSE if value > math.sqrt(last.before * last.after) else Direction.SAME
        ratio = value / last.before
        again = replace(
            flat, direction=where, before=last.before, after=value, ratio=Interval(ratio, ratio, ratio, 0.0)
        )
        settled = second_look(judged, SecondLook({key_of(again): again}, "again"), rules)
        return _fails(settled[0]), sights.figures[0]

    return of


def main() -> None:
    builds = options(__doc__, builds=(2000, "of each setting")).builds
    title = f"{CASES} cases a build, {builds} builds a line; percent of builds"
    table, few = Table(title, "false alarms", "+8% found", "+15%", "+30%", name=66), max(1, builds // 10)
    for setting in SETTINGS:
        rest = (found(setting, times, few) for times in (1.08, 1.15, 1.3))
        table.row(setting.words, false_alarms(setting, builds), *rest)


if __name__ == "__main__":
    main()
