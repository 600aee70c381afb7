"""Measures how often verdicts on learning are wrong, and how often they find a planted loss: `python -m
suites.verdicts`.

Monte Carlo with fixed seeds: studies of several seeds are drawn, and judged by the code that judges trainings. Their
noise comes from real trainings of arms that differ from the reference only by rounding, or is simulated with heavier
tails. Simulated held-out losses always agree with training losses, which is the worst case for false alarms. Figures
are percentages of studies.
"""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp8bench.features.train.values import Arm, ArmRole, StepRow
from fp8bench.features.train.verdicts.curves import (
    ArmAndSeed,
    LearningVerdict,
    LossCurve,
    SeedComparison,
    judge_seed_pairs,
)
from fp8bench.features.train.verdicts.verdicts import judge_arms, measure_speed
from suites.trials import ROOT, Table, options, write_document

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
    real = np.array(gaps)
    real = real / np.sqrt((real**2).mean(axis=0))
    smooth = 1.06 * len(real) ** -0.2

    def draw_gaps(draw: Draw, studies: int, seeds: int) -> Floats:
        signs = draw.choice([-1.0, 1.0], (studies, seeds, 1))
        chosen = real[draw.integers(len(real), size=(studies, seeds))] * signs
        return (chosen + smooth * draw.standard_normal(chosen.shape)) / np.hypot(1, smooth)

    return draw_gaps


def _alike(gaps: Floats) -> Floats:
    return np.stack([gaps, gaps], axis=-1)


def noises(only: str = "") -> dict[str, Noise]:
    """Returns the noises with this word in their names; those of real trainings only if their file exists."""
    noises_by_name: dict[str, Noise] = {"Gaussian": gaussian, "heavy tails": heavy, "curves": curves, "spikes": spikes}
    if TRAINED.exists():
        gaps = json.loads(TRAINED.read_text())["gaps"]
        noises_by_name |= {f"trained, rate {rate}": trained(pairs) for rate, pairs in gaps.items()}
    return {name: noise for name, noise in noises_by_name.items() if only in name}


def share(verdicts: Container[LearningVerdict], noise: Noise, studies: int, spread: float, shift: float = 0.0) -> float:
    """Returns the share of studies with one of these verdicts. Their arm is worse than its reference by `shift`.

    The studies are the same in every call.
    """
    gaps = shift + spread * noise(np.random.default_rng(SEEDS), studies, SEEDS)
    count = 0
    for study in gaps.tolist():
        pairs = [SeedComparison(seed, *both) for seed, both in enumerate(study)]
        count += judge_seed_pairs(pairs, MARGIN).learned in verdicts
    return count / studies


# The shares of studies with a verdict although nothing differs, and with a verdict on a planted loss.
false_alarms = partial(share, (LearningVerdict.WORSE, LearningVerdict.BETTER))
found = partial(share, (LearningVerdict.WORSE,))


def draw_curves(draw: Draw, noise: Noise) -> dict[ArmAndSeed, LossCurve]:
    """Draws the curves of a study. Its spread and planted loss are random, and held-out text is evaluated after every
    step.
    """
    reference = 1.8 + 3.7 * (1 + np.arange(_ENDING_STEPS) / 15) ** -0.7
    spread, shift = draw.choice(SPREADS), draw.choice((0.0, *PLANTED))
    gaps = shift + spread * noise(draw, 1, SEEDS)[0]
    moves = spread * draw.standard_normal((2, SEEDS, _ENDING_STEPS)) * [[[_STEP_NOISE]], [[1]]]
    curves: dict[ArmAndSeed, LossCurve] = {}
    for seed in range(SEEDS):
        base = reference * (1 + 0.01 * seed)
        training, held_out = (base * (1 + gaps[seed, kind] + moves[kind, seed]) for kind in (0, 1))
        curves[REFERENCE_ARM.name, seed] = _curve(base, base.tolist())
        curves[CANDIDATE_ARM.name, seed] = _curve(training, held_out.tolist())
    return curves


def _verdict_at(curves: Mapping[ArmAndSeed, LossCurve], end: int) -> LearningVerdict:
    cut: dict[ArmAndSeed, LossCurve] = {}
    for key, curve in curves.items():
        held_out = {step: loss for step, loss in curve.held_out.items() if step <= end}
        cut[key] = replace(curve, steps=end, rows=curve.rows[:end], held_out=held_out)
    verdicts = judge_arms((REFERENCE_ARM, CANDIDATE_ARM), cut, tuple(range(SEEDS)), end, MARGIN, has_held_out=True)
    return verdicts.arms[0].judged.learned


def same_at_every_end(noise: Noise, studies: int) -> float:
    """Returns the share of studies that would have the same verdict if they ended at any of their last ten steps."""
    draw, count = np.random.default_rng(4), 0
    for _ in range(studies):
        curves = draw_curves(draw, noise)
        ends = range(_ENDING_STEPS - _LAST_ENDS + 1, _ENDING_STEPS + 1)
        count += len({_verdict_at(curves, end) for end in ends}) == 1
    return count / studies


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
            arm_noise = 1 + spread * draw.standard_normal() * steps / _SPEED_STEPS
            losses = [(1.8 + 3.7 * (1 + share * steps / 15) ** -0.7) * batches for share in (1.0, pace)]
            pairs.append((_curve(losses[0]), _curve(losses[1] * arm_noise)))
        speed = measure_speed(pairs)
        assert speed is not None and speed.adjusted is not None
        held += speed.adjusted.low <= pace <= speed.adjusted.high
        points.append(speed.adjusted.point)
    return held / studies, float(np.mean(points))


def _curve(losses: Floats, held_out: Sequence[float] = ()) -> LossCurve:
    rows = (StepRow("", 0, step, loss, 0, 0, 0, 0, 0, 1, 64, 0.01) for step, loss in enumerate(losses.tolist()))
    return LossCurve(len(losses), tuple(rows), dict(enumerate(held_out, 1)))


REFERENCE_ARM = Arm("bf16", "bf16", ArmRole.REFERENCE)
CANDIDATE_ARM = Arm("fp8", "fp8", native=False)


def print_figures(studies: int, only: str) -> dict[str, list[float]]:
    """Returns all figures, and prints each as soon as it is computed."""
    figures: dict[str, list[float]] = {}

    def add(table: Table, name: str, values: list[float]) -> None:
        figures[name] = values
        table.row(name, *values)

    title = f"margin {100 * MARGIN:g}%, {SEEDS} seeds, {studies} studies; by the deviation of the gap from seed to seed"
    table = Table(title, *(f"{100 * spread:g}%" for spread in SPREADS), name=52)
    few = max(1, studies // 10)
    for name, noise in noises(only).items():
        add(table, f"{name}: called worse or better", [false_alarms(noise, studies, spread) for spread in SPREADS])
        for shift in PLANTED:
            shares = [found(noise, few, spread, shift) for spread in SPREADS]
            add(table, f"{name}: {100 * shift:g}% found", shares)

    few = max(1, studies // 50)
    table = Table("\nthe same verdict at each of the last ten steps", "of studies", name=52)
    for name, noise in noises(only).items():
        stable = same_at_every_end(noise, few)
        figures[f"{name}: the same at each of the last ten steps"] = [stable]
        table.row(name, stable)

    table = Table("\nspeed to the same loss, by the pace that was planted", "held in", "told", name=52)
    for pace in _PACES:
        held, point = speeds(few, pace, 0.002)
        figures[f"speed at a pace of {pace:g}: coverage, point"] = [held, point]
        table.row(f"{pace:g}", held, f"{point:.3f}")
    return figures


def main() -> None:
    asked = options(
        __doc__,
        studies=(10_000, "studies of each kind"),
        only=("", "noises with this word in their names"),
        json=(Path, "also write the figures into this file"),
    )
    figures = print_figures(asked.studies, asked.only)
    if asked.json:
        facts = {"margin": MARGIN, "seeds": SEEDS, "studies": asked.studies, "deviations": SPREADS}
        write_document({**facts, "shares": figures}, asked.json, prints=False)


if __name__ == "__main__":
    main()
