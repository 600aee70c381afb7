"""How often a gate fails a build for nothing, and how often it finds what was planted: `python -m suites.gate`.

Seeded Monte Carlo: runs of 100 cases are drawn, judged by the gate's own code, and suspects drawn once more, as a
second look would. Figures in percent of such runs.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fp8bench.analysis.compare.compare import of_times
from fp8bench.analysis.compare.interval import Estimate
from fp8bench.analysis.compare.matched_figures import Figures
from fp8bench.features.gate.judging import GateOutcome, JudgedFigure, SecondLook, first_look, key_of, second_look
from fp8bench.features.gate.thresholds import ThresholdRule
from fp8bench.model import Comparison
from fp8bench.model.specs import TIME

CASES = 100
WITHIN = 0.003
Noise = Callable[[random.Random], float]


def gaussian(draw: random.Random) -> float:
    """Of variance 1."""
    return draw.gauss(0, 1)


def one_sided(draw: random.Random) -> float:
    """Exponential, of variance 1: what disturbs only adds."""
    return draw.expovariate(1)


def bad_runs(draw: random.Random) -> float:
    """Gaussian, and one figure in twenty is slower by 4 deviations on average."""
    return draw.gauss(0, 1) + (draw.expovariate(0.25) if draw.random() < 0.05 else 0)


NOISES: dict[str, Noise] = {"Gaussian": gaussian, "one-sided": one_sided, "bad runs": bad_runs}


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
        yield of_times(Figures(TIME, "s", old, new, beside=others), f"made[case={case}]@cpu/bf16", "made", ())


def false_alarms(setting: Setting, builds: int, seed: int = 0) -> float:
    """The share of builds that fail although nothing has changed."""
    draw = random.Random(seed)
    return sum(any(map(_fails, build(setting, draw))) for _ in range(builds)) / builds


def found(setting: Setting, planted: float, builds: int, seed: int = 0) -> float:
    """The share of builds in which the one case that became slower fails."""
    draw = random.Random(seed)
    return sum(_fails(build(setting, draw, planted)[0]) for _ in range(builds)) / builds


def _fails(one: JudgedFigure) -> bool:
    return one.outcome is GateOutcome.REGRESSION


def main() -> int:
    """A line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--builds", type=int, default=2000, help="of each setting; default 2000")
    builds = parser.parse_args().builds
    sys.stdout.write(f"{CASES} cases a build, {builds} builds a line; percent of builds\n")
    sys.stdout.write(f"{'':66}  false alarms  +8% found  +15%   +30%\n")
    for setting in SETTINGS:
        few = max(1, builds // 10)
        shares = [false_alarms(setting, builds), *(found(setting, times, few) for times in (1.08, 1.15, 1.3))]
        cells = [f"{100 * shares[0]:12.2f}", *(f"{100 * share:8.1f}" for share in shares[1:])]
        sys.stdout.write(f"{setting.words:66}  {'  '.join(cells)}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
