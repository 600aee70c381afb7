"""Measures how often verdicts on learning are wrong, and how often they find a planted loss: `python -m
suites.verdicts`.

Monte Carlo with fixed seeds: studies of several seeds are drawn, and judged by the code that judges trainings. Their
noise comes from real trainings of arms that differ from the reference only by rounding, or is simulated with heavier
tails. Simulated held-out losses always agree with training losses, which is the worst case for false alarms. Figures
are percentages of studies.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp8bench.features.train.values import Arm, ArmRole, StepRow
from fp8bench.features.train.verdicts.curves import (
    Curve,
    JudgedArm,
    Key,
    Learned,
    Pair,
    judge_pairs,
)
from fp8bench.features.train.verdicts.verdicts import judge_arms, measure_speed
from suites.trials import ROOT, Table, options

MARGIN = 0.01
SEEDS = 5
PLANTED = (0.005, 0.01, 0.02, 0.04)
# In real trainings, the gap varies between steps by 2 to 7 times as much as between seeds.
_STEP_NOISE = 4
_ENDING_STEPS = 200
_LAST_ENDS = 10
SPREADS = (0.0005, 0.002, 0.004, 0.007, 0.01, 0.02, 0.05)
# Gaps of trainings that differ only by rounding. The program that trained them is in commit 2606bd4.
TRAINED = ROOT / "reports" / "verdicts_cpu_202611" / "null_gaps.json"
CALLED = (Learned.WORSE, Learned.BETTER)
_STEPS = 30
_SPEED_STEPS = 150
_PACES = (0.7, 0.9, 1.0, 1.2)

Draw = np.random.Generator
Floats = NDArray[np.float64]
# Draws gaps on training and on held-out text, (studies, seeds, 2), with mean 0 and deviation 1.
Noise = Callable[[Draw, int, int], Floats]


def gaussian(draw: Draw, studies: int, seeds: int) -> Floats:
    return _alike(draw.standard_normal((studies, seeds)))


def heavy(draw: Draw, studies: int, seeds: int) -> Floats:
    """Draws from Student's distribution with three degrees of freedom: 1 seed in 100 is beyond 3.4 deviations."""
    return _alike(draw.standard_t(3, (studies, seeds)) / np.sqrt(3))


def curves(draw: Draw, studies: int, seeds: int) -> Floats:
    """Draws means of the last tenth of a heavy-tailed curve whose neighbouring steps are correlated (0.9)."""
    shocks = draw.standard_t(3, (studies, seeds, 2 * _STEPS))
    value, total = np.zeros((studies, seeds)), np.zeros((studies, seeds))
    for step in range(2 * _STEPS):
        value = 0.9 * value + shocks[..., step]
        total += value * (step >= _STEPS)
    return _alike(total / total.std())


def spikes(draw: Draw, studies: int, seeds: int) -> Floats:
    """Draws gaps in which 1 seed in 10 of either arm ends in a spike of the loss, five deviations high on average."""
    either = draw.exponential(5, (2, studies, seeds)) * (draw.random((2, studies, seeds)) < 0.1)
    gaps = draw.standard_normal((studies, seeds)) + either[0] - either[1]
    return _alike(gaps / np.sqrt(1 + 2 * (0.1 * 50 - 0.25)))


def trained(gaps: Sequence[Sequence[float]]) -> Noise:
    """Draws from real gaps with a random sign, because it is chance which of two equal arms is the reference.

    The gaps are smoothed by Silverman's rule: five draws out of a hundred often repeat a value, which real seeds do
    not.
    """
    known_gaps = np.array(gaps)
    known_gaps = known_gaps / np.sqrt((known_gaps**2).mean(axis=0))
    smooth = 1.06 * len(known_gaps) ** -0.2

    def drawn(draw: Draw, studies: int, seeds: int) -> Floats:
        signs = draw.choice([-1.0, 1.0], (studies, seeds, 1))
        chosen = known_gaps[draw.integers(len(known_gaps), size=(studies, seeds))] * signs
        return (chosen + smooth * draw.standard_normal(chosen.shape)) / np.hypot(1, smooth)

    return drawn


def _alike(gaps: Floats) -> Floats:
    return np.stack([gaps, gaps], axis=-1)


def noises(only: str = "") -> dict[str, Noise]:
    """Returns the noises with this word in their names; those of real trainings only if their file exists."""
    noises_by_name: dict[str, Noise] = {"Gaussian": gaussian, "heavy tails": heavy, "curves": curves, "spikes": spikes}
    if TRAINED.exists():
        gaps = json.loads(TRAINED.read_text())["gaps"]
        noises_by_name |= {f"trained, rate {rate}": trained(pairs) for rate, pairs in gaps.items()}
    return {name: noise for name, noise in noises_by_name.items() if only in name}


def is_called(arm: JudgedArm) -> bool:
    return arm.learned in CALLED


def share(
    counts: Callable[[JudgedArm], bool],
    noise: Noise,
    studies: int,
    spread: float,
    shift: float = 0.0,
    seeds: int = SEEDS,
) -> float:
    """Returns the share of studies whose arm is worse than its reference by `shift` and for which `counts` is true.

    The studies are the same in every call.
    """
    gaps = shift + spread * noise(np.random.default_rng(seeds), studies, seeds)
    arms = (judge_pairs([Pair(seed, *both) for seed, both in enumerate(study)], MARGIN) for study in gaps.tolist())
    return sum(map(counts, arms)) / studies


# The shares of studies with a verdict although nothing differs, and with a verdict on a planted loss.
false_alarms = partial(share, is_called)
found = partial(share, lambda arm: arm.learned is Learned.WORSE)


def ending_studies(noise: Noise, studies: int, steps: int = _ENDING_STEPS) -> Iterator[list[JudgedArm]]:
    """Yields for each study the verdicts that it would have if it ended at each of its last ten steps.

    Spreads and planted losses are random. Held-out text is evaluated after every step.
    """
    draw, places = np.random.default_rng(4), np.arange(steps)
    reference = 1.8 + 3.7 * (1 + places / 15) ** -0.7
    for _ in range(studies):
        spread, shift = draw.choice(SPREADS), draw.choice((0.0, *PLANTED))
        gaps = shift + spread * noise(draw, 1, SEEDS)[0]
        moves = spread * draw.standard_normal((2, SEEDS, steps)) * [[[_STEP_NOISE]], [[1]]]
        curves: dict[Key, Curve] = {}
        for seed in range(SEEDS):
            base = reference * (1 + 0.01 * seed)
            trained, held_out = (base * (1 + gaps[seed, kind] + moves[kind, seed]) for kind in (0, 1))
            curves[REFERENCE.name, seed] = _curve(base, base.tolist())
            curves[CANDIDATE.name, seed] = _curve(trained, held_out.tolist())
        ends = range(steps - _LAST_ENDS + 1, steps + 1)
        yield [_verdict_at(curves, end) for end in ends]


def _verdict_at(curves: Mapping[Key, Curve], end: int) -> JudgedArm:
    cut: dict[Key, Curve] = {}
    for key, curve in curves.items():
        held_out = {step: loss for step, loss in curve.held_out.items() if step <= end}
        cut[key] = replace(curve, steps=end, rows=curve.rows[:end], held_out=held_out)
    verdicts = judge_arms((REFERENCE, CANDIDATE), cut, tuple(range(SEEDS)), end, MARGIN, has_held_out=True)
    return verdicts.arms[0].judged


def same_at_every_end(noise: Noise, studies: int) -> float:
    """Returns the share of studies with the same verdict at each of their last ten steps."""
    return sum(map(_is_same, ending_studies(noise, studies))) / studies


def _is_same(ends: Sequence[JudgedArm]) -> bool:
    return len({judged.learned for judged in ends}) == 1


def speeds(studies: int, pace: float, spread: float) -> tuple[float, float]:
    """Returns how often the interval of the adjusted speed contains the true pace, and the mean of its points.

    Arms learn at this `pace`. Batches, which both arms share, change the loss of a step by 6%. The noise of each arm
    is `spread`.
    """
    draw, steps = np.random.default_rng(3), np.arange(1, _SPEED_STEPS + 1)
    held, points = 0, []
    for _ in range(studies):
        pairs = []
        for _ in range(SEEDS):
            batches = 1 + 0.06 * draw.standard_normal(_SPEED_STEPS) + 0.02 * draw.standard_normal()
            own_noise = 1 + spread * draw.standard_normal() * steps / _SPEED_STEPS
            losses = [(1.8 + 3.7 * (1 + share * steps / 15) ** -0.7) * batches for share in (1.0, pace)]
            pairs.append((_curve(losses[0]), _curve(losses[1] * own_noise)))
        speed = measure_speed(pairs)
        assert speed is not None and speed.adjusted is not None
        held += speed.adjusted.low <= pace <= speed.adjusted.high
        points.append(speed.adjusted.point)
    return held / studies, float(np.mean(points))


def _curve(losses: Floats, held_out: Sequence[float] = ()) -> Curve:
    rows = (StepRow("", 0, step, loss, 0, 0, 0, 0, 0, 1, 64, 0.01) for step, loss in enumerate(losses.tolist()))
    return Curve(len(losses), tuple(rows), dict(enumerate(held_out, 1)))


REFERENCE = Arm("bf16", "bf16", ArmRole.REFERENCE)
CANDIDATE = Arm("fp8", "fp8", native=False)


def lines(studies: int, only: str) -> Iterator[tuple[str, list[float]]]:
    """Yields the name of each figure, with a share for each of SPREADS."""
    few = max(1, studies // 10)
    for name, noise in noises(only).items():
        yield f"{name}: called worse or better", [false_alarms(noise, studies, spread) for spread in SPREADS]
        for shift in PLANTED:
            yield f"{name}: {100 * shift:g}% found", [found(noise, few, spread, shift) for spread in SPREADS]


def print_figures(studies: int, only: str) -> dict[str, list[float]]:
    """Returns all figures, and prints each as soon as it is computed."""
    title = f"margin {100 * MARGIN:g}%, {SEEDS} seeds, {studies} studies; by the deviation of the gap from seed to seed"
    table, figures = Table(title, *(f"{100 * spread:g}%" for spread in SPREADS), name=52), {}
    for name, values in lines(studies, only):
        figures[name] = values
        table.row(name, *values)
    table = Table("\nthe same verdict at each of the last ten steps", "of studies", name=52)
    for name, noise in noises(only).items():
        stable = same_at_every_end(noise, max(1, studies // 50))
        figures[f"{name}: the same at each of the last ten steps"] = [stable]
        table.row(name, stable)
    table = Table("\nspeed to the same loss, by the pace that was planted", "held in", "told", name=52)
    for pace in _PACES:
        held, point = speeds(max(1, studies // 50), pace, 0.002)
        figures[f"speed at a pace of {pace:g}: coverage, point"] = [held, point]
        table.row(f"{pace:g}", held, f"{point:.3f}")
    return figures


def main() -> int:
    asked = options(
        __doc__,
        studies=(10_000, "of each kind"),
        only=("", "noises with this word in their names"),
        json=(Path, "write what is printed into a file, too"),
    )
    figures = print_figures(asked.studies, asked.only)
    if asked.json:
        document = {
            "margin": MARGIN,
            "seeds": SEEDS,
            "studies": asked.studies,
            "deviations": SPREADS,
            "shares": figures,
        }
        asked.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
