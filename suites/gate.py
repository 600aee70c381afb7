"""How often a gate fails a build for nothing, and how often it finds what was planted: `python -m suites.gate`.

Seeded Monte Carlo: runs of 100 cases are drawn, judged by the gate's own code, and suspects drawn once more, as a
second look would. MatchedFigures in percent of such runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fp8bench.analysis.compare.compare import MatchedFigures, of_times
from fp8bench.analysis.compare.interval import Estimate
from fp8bench.features.gate.judging import GateOutcome, JudgedFigure, SecondLook, first_look, key_of, second_look
from fp8bench.features.gate.thresholds import ThresholdRule
from fp8bench.model import Comparison
from fp8bench.model.specs import TIME
from suites.trials import Table, options

CASES = 100
WITHIN = 0.003
# Of variance 1 where nothing is bad: what disturbs only adds, or makes one figure in twenty slower by 4 deviations.
NOISES: dict[str, Callable[[random.Random], float]] = {
    "Gaussian": lambda draw: draw.gauss(0, 1),
    "one-sided": lambda draw: draw.expovariate(1),
    "bad runs": lambda draw: draw.gauss(0, 1) + (draw.expovariate(0.25) if draw.random() < 0.05 else 0),
}


@dataclass(frozen=True)
class Setting:
    """Runs on each side, how far the same case lies apart in two of them, and how far all of a run do together."""

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
    """What the gate makes of the cases of one build; the first is so many times as slow as it was."""
    before = [_run(setting, draw) for _ in range(setting.before)]
    after = [_run(setting, draw, planted) for _ in range(setting.after)]
    judged = first_look(list(_comparisons(before, after)), rules)
    suspects = {key_of(one.comparison) for one in judged if one.outcome is GateOutcome.TO_CONFIRM}
    if suspects:
        again = _comparisons(before, [_run(setting, draw, planted)], after)
        look = SecondLook({key_of(one): one for one in again if key_of(one) in suspects}, "again")
        judged = second_look(judged, look, rules)
    return judged


def _run(setting: Setting, draw: random.Random, planted: float = 1.0) -> list[float]:
    """The logarithms of the times of all cases in one run."""
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


def main() -> None:
    builds = options(__doc__, builds=(2000, "of each setting")).builds
    title = f"{CASES} cases a build, {builds} builds a line; percent of builds"
    table, few = Table(title, "false alarms", "+8% found", "+15%", "+30%", name=66), max(1, builds // 10)
    for setting in SETTINGS:
        table.row(
            setting.words, false_alarms(setting, builds), *(found(setting, times, few) for times in (1.08, 1.15, 1.3))
        )


if __name__ == "__main__":
    main()
