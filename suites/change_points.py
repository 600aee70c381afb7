"""How often change points are found, and how often where there are none: `python -m suites.change_points`.

Seeded Monte Carlo over made series. The constants of fp8bench/analysis/steps/change_points.py were chosen by it, and
`--calibrate` shows the choice: the first row of its table that keeps both promises (of series of 60 values with 2%
noise, at most 1% of the flat ones alarm; a step of 5% is found within 3 commits of its place in 60% of the series when
3 commits lie after it, and in 90% when 5 do) with room on either side.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fp8bench.analysis.stats import Floats
from fp8bench.analysis.steps.change_points import DEVIATIONS, Step, steps_of_many
from suites.trials import Table, options

NOISE = 0.02
LENGTH = 60
NEAR = 3
STEP = 1.05
LENGTHS = (11, 20, 40, 60, 100, 300)
# Steps by their size, and how many values lie after them.
PLACES = ((STEP, 3), (STEP, 4), (STEP, 5), (STEP, 8), (STEP, 30), (1.03, 5), (1.03, 8), (1.03, 30), (1.1, 3))
Random = np.random.Generator
Noise = Callable[[Random, int, int], Floats]


def gaussian(random: Random, series: int, length: int) -> Floats:
    return random.normal(size=(series, length))


def heavy_tails(random: Random, series: int, length: int) -> Floats:
    """Student's t with 3 degrees of freedom, and the same variance."""
    return random.standard_t(3, size=(series, length)) / math.sqrt(3)


def bad_nights(random: Random, series: int, length: int) -> Floats:
    """Gaussian, and one night in twenty is slower by 8 deviations on average."""
    bad = random.random((series, length)) < 0.05
    return gaussian(random, series, length) + bad * random.exponential(8, size=(series, length))


def one_sided(random: Random, series: int, length: int) -> Floats:
    """Exponential: what disturbs only adds."""
    return random.exponential(size=(series, length))


def remembering(share: float) -> Noise:
    """Gaussian; every night shares so much of its deviation with the night before."""

    def noise(random: Random, series: int, length: int) -> Floats:
        new = gaussian(random, series, length)
        for night in range(1, length):
            new[:, night] = share * new[:, night - 1] + math.sqrt(1 - share**2) * new[:, night]
        return new

    return noise


KINDS: dict[str, Noise] = {
    "Gaussian": gaussian, "heavy tails": heavy_tails, "bad nights": bad_nights, "one-sided": one_sided,
    "memory 0.3": remembering(0.3), "memory 0.5": remembering(0.5),
}  # fmt: skip


def flat(kind: str, random: Random, series: int, length: int = LENGTH) -> Floats:
    """Returns series of one level."""
    return np.exp(NOISE * KINDS[kind](random, series, length))


def steps(series: Floats, deviations: float = DEVIATIONS) -> list[tuple[Step, ...]]:
    return steps_of_many(list(series), deviations)


def alarms(series: Floats, deviations: float = DEVIATIONS) -> float:
    """Returns the share of the series that have a step."""
    return float(np.mean([bool(each) for each in steps(series, deviations)]))


def hits(series: Floats, after: int, size: float = STEP, deviations: float = DEVIATIONS) -> float:
    """Returns the share that shows a step of that size near its place, if it is so many values before the end."""
    place = series.shape[1] - after
    made = np.concatenate((series[:, :place], size * series[:, place:]), axis=1)
    near = [
        any(abs(step.at - place) <= NEAR and step.after > step.before for step in each)
        for each in steps(made, deviations)
    ]
    return float(np.mean(near))


def ever(series: Floats, first: int) -> float:
    """Returns the share that alarms after any commit from the first on."""
    seen = np.zeros(len(series), dtype=bool)
    for length in range(first, series.shape[1] + 1):
        seen |= [bool(each) for each in steps(series[:, :length])]
    return float(seen.mean())


def calibrate(random: Random, series: int) -> None:
    made = flat("Gaussian", random, series)
    table = Table(f"percent of {series}", "flat alarms", "5%, 3 after", "5%, 5 after")
    for deviations in np.arange(3.1, 3.71, 0.05):
        shares = (hits(made, after, STEP, deviations) for after in (3, 5))
        table.row(f"{deviations:.2f}", alarms(made, deviations), *shares)


def figures(random: Random, series: int) -> None:
    table = Table(f"flat series that alarm, one look at the whole, percent of {series} by length", *map(str, LENGTHS))
    for kind in KINDS:
        table.row(kind, *(alarms(flat(kind, random, series, length)) for length in LENGTHS))
    title = f"\nsteps found within {NEAR} commits of their place in {LENGTH} values, one look, percent of {series}"
    table = Table(title, *(f"{size - 1:.0%}, {after}" for size, after in PLACES))
    for kind in KINDS:
        made = flat(kind, random, series)
        table.row(kind, *(hits(made, after, size) for size, after in PLACES))
    few = max(series // 2, 1)
    table = Table(f"\nflat series that alarm in any look, one after each commit, percent of {few}", "60-100", "11-100")
    for kind in KINDS:
        made = flat(kind, random, few, 100)
        table.row(kind, ever(made, 60), ever(made, 11))


def main() -> None:
    asked = options(
        __doc__, series=(4000, "series a figure"), seed=(0, "of the noise"),
        calibrate=(False, "how the figures go with the price of a cut instead"),
    )  # fmt: skip
    (calibrate if asked.calibrate else figures)(np.random.default_rng(asked.seed), asked.series)


if __name__ == "__main__":
    main()
