"""How often change points are found, and how often where there are none: `python -m suites.change_points`.

Seeded Monte Carlo over made series. The constants of fp8bench/analysis/steps/change_points.py were chosen by it, and
`--calibrate` shows the choice: the first row of its table that keeps both promises (of series of 60 values with 2%
noise, at most 1% of the flat ones alarm; a step of 5% is found within 3 commits of its place in 60% of the series when
3 commits lie after it, and in 90% when 5 do) with room on either side.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable

import numpy as np

from fp8bench.analysis.stats import Floats
from fp8bench.analysis.steps.change_points import DEVIATIONS, Step, steps_of_many

NOISE = 0.02
LENGTH = 60
NEAR = 3
STEP = 1.05
Random = np.random.Generator


def gaussian(random: Random, series: int, length: int) -> Floats:
    """Independent and Gaussian."""
    return random.normal(size=(series, length))


def heavy_tails(random: Random, series: int, length: int) -> Floats:
    """Student's t with 3 degrees of freedom, of the same variance."""
    return random.standard_t(3, size=(series, length)) / math.sqrt(3)


def bad_nights(random: Random, series: int, length: int) -> Floats:
    """Gaussian, and one night in twenty is slower by 8 deviations on average."""
    bad = random.random((series, length)) < 0.05
    found: Floats = gaussian(random, series, length) + bad * random.exponential(8, size=(series, length))
    return found


def one_sided(random: Random, series: int, length: int) -> Floats:
    """Exponential: what disturbs only adds."""
    return random.exponential(size=(series, length))


def remembering(share: float) -> Callable[[Random, int, int], Floats]:
    """Gaussian, and every night shares so much of its deviation with the night before."""

    def noise(random: Random, series: int, length: int) -> Floats:
        new = gaussian(random, series, length)
        for night in range(1, length):
            new[:, night] = share * new[:, night - 1] + math.sqrt(1 - share**2) * new[:, night]
        return new

    return noise


KINDS = {
    "Gaussian": gaussian, "heavy tails": heavy_tails, "bad nights": bad_nights, "one-sided": one_sided,
    "memory 0.3": remembering(0.3), "memory 0.5": remembering(0.5),
}  # fmt: skip


def flat(kind: str, random: Random, series: int, length: int = LENGTH) -> Floats:
    """Series of one level."""
    found: Floats = np.exp(NOISE * KINDS[kind](random, series, length))
    return found


def steps(series: Floats, deviations: float = DEVIATIONS) -> list[tuple[Step, ...]]:
    """The steps of each row."""
    return steps_of_many(list(series), deviations)


def alarms(series: Floats, deviations: float = DEVIATIONS) -> int:
    """How many of them have a step."""
    return sum(bool(found) for found in steps(series, deviations))


def hits(series: Floats, after: int, size: float, deviations: float = DEVIATIONS) -> int:
    """How many show a step of that size near its place, when it is put so many values before their ends."""
    place = series.shape[1] - after
    stepped = series.copy()
    stepped[:, place:] *= size
    found = steps(stepped, deviations)
    return sum(any(abs(one.at - place) <= NEAR and one.after > one.before for one in ones) for ones in found)


def ever(series: Floats, first: int) -> int:
    """How many alarm in any of the looks that are taken after each commit from the first on."""
    seen = np.zeros(len(series), dtype=bool)
    for length in range(first, series.shape[1] + 1):
        seen |= [bool(found) for found in steps(series[:, :length])]
    return int(seen.sum())


def coverage(series: Floats, after: int) -> tuple[int, float, int]:
    """Of those with one step: in how many its range holds the place, its mean width, and how many there are."""
    place = series.shape[1] - after
    stepped = series.copy()
    stepped[:, place:] *= STEP
    found = [ones[0] for ones in steps(stepped) if len(ones) == 1]
    inside = sum(one.low < place <= one.high for one in found)
    return inside, float(np.mean([one.high - one.low for one in found])), len(found)


def seconds_of(series: int, length: int) -> float:
    """CPU seconds for so many series, half of which step in their middle."""
    made = flat("Gaussian", np.random.default_rng(0), series, length)
    made[::2, length // 2 :] *= STEP
    begin = time.process_time()
    steps(made)
    return time.process_time() - begin


def asv_hits(series: Floats, after: int, threshold: float) -> int:
    """How many of the same steps `asv publish` calls a regression near their place."""
    from asv.step_detect import detect_regressions, detect_steps

    place = series.shape[1] - after
    stepped = series.copy()
    stepped[:, place:] *= STEP
    found = [detect_regressions(detect_steps(row.tolist()), threshold=threshold)[2] or () for row in stepped]
    return sum(any(abs(jump[1] - place) <= NEAR for jump in jumps) for jumps in found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.change_points", description="how often steps are found")
    parser.add_argument("--series", type=int, default=4000, metavar="N", help="series a figure; default 4000")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--calibrate", action="store_true", help="how the figures go with the price of a cut instead")
    parser.add_argument("--asv", action="store_true", help="what asv finds of a tenth of the same steps instead")
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    if arguments.calibrate:
        _print_calibration(random, arguments.series)
    elif arguments.asv:
        _print_asv(random, max(arguments.series // 10, 1))
    else:
        _print_figures(random, arguments.series)
    return 0


def _print_calibration(random: Random, series: int) -> None:
    made = flat("Gaussian", random, series)
    print("deviations  flat alarms  5%, 3 after  5%, 5 after   of", series)
    for deviations in np.arange(3.1, 3.71, 0.05):
        counts = alarms(made, deviations), hits(made, 3, STEP, deviations), hits(made, 5, STEP, deviations)
        print(f"{deviations:10.2f}" + "".join(f"{_percent(count, series):>13}" for count in counts), flush=True)


def _print_asv(random: Random, series: int) -> None:
    print(f"steps of 5% found within {NEAR} commits of their place in {LENGTH} values, one look, of {series}")
    print(" after     here  asv, threshold 5%  asv, threshold 1%")
    for after in (3, 5, 8, 30):
        made = flat("Gaussian", random, series)
        counts = hits(made, after, STEP), asv_hits(made, after, 0.05), asv_hits(made, after, 0.01)
        here, *theirs = (_percent(count, series) for count in counts)
        print(f"{after:>6}{here:>9}" + "".join(f"{one:>19}" for one in theirs), flush=True)


def _print_figures(random: Random, series: int) -> None:
    lengths = (11, 20, 40, 60, 100, 300)
    print(f"flat series that alarm, one look at the whole, of {series} by length")
    print(f"{'noise':<14}" + "".join(f"{length:>9}" for length in lengths))
    for kind in KINDS:
        counts = [alarms(flat(kind, random, series, length)) for length in lengths]
        print(f"{kind:<14}" + "".join(f"{_percent(count, series):>9}" for count in counts), flush=True)
    places = ((STEP, 3), (STEP, 4), (STEP, 5), (STEP, 8), (STEP, 30), (1.03, 5), (1.03, 8), (1.03, 30), (1.1, 3))
    print(f"\nsteps found within {NEAR} commits of their place in {LENGTH} values, one look, of {series}")
    print(f"{'size, after':<14}" + "".join(f"{f'{size - 1:.0%}, {after}':>9}" for size, after in places))
    for kind in KINDS:
        made = flat(kind, random, series)
        counts = [hits(made, after, size) for size, after in places]
        print(f"{kind:<14}" + "".join(f"{_percent(count, series):>9}" for count in counts), flush=True)
    few = max(series // 2, 1)
    print(f"\nflat series that alarm in any look, a look after each of the commits 60 to 100 or 11 to 100, of {few}")
    for kind in KINDS:
        made = flat(kind, random, few, 100)
        print(f"{kind:<14}{_percent(ever(made, 60), few):>9}{_percent(ever(made, 11), few):>9}", flush=True)
    print("\nranges of single steps of 5% that hold the place, and their mean width in commits")
    for after in (3, 5, 10, 30):
        inside, width, count = coverage(flat("Gaussian", random, series), after)
        print(f"{after:>3} after  {_percent(inside, count):>9} of {count}, {width:.1f}")
    print(f"\nflat series of which a step has at most this chance, of {10 * series}")
    chances = (0.01, 0.005, 0.002, 0.001, 0.0005)
    print(" " * 14 + "".join(f"{_percent(chance, 1):>9}" for chance in chances))
    for kind in ("Gaussian", "heavy tails", "memory 0.3"):
        found = [steps(flat(kind, random, series)) for _ in range(10)]
        least = np.array([min((one.p_value for one in ones), default=1.0) for some in found for ones in some])
        shares = [float((least <= chance).mean()) for chance in chances]
        print(f"{kind:<14}" + "".join(f"{_percent(share, 1):>9}" for share in shares), flush=True)
    print(f"\n1,000 series of 300 values: {seconds_of(1000, 300):.2f} s of CPU time")


def _percent(count: float, series: int) -> str:
    return f"{100 * count / series:.2f}%"


if __name__ == "__main__":
    sys.exit(main())
