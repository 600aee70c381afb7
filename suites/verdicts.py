"""How often a verdict on learning is wrong, and how often it finds what was planted: `python -m suites.verdicts`.

Seeded Monte Carlo: studies of several seeds are drawn, and judged by the code that judges trainings. Their noise is
taken from real trainings of arms that differ from their reference by rounding alone, or made with worse tails. Made
held-out losses always agree with training losses: the worst case for a false alarm. Figures are in percent of studies.

`--trained` makes the real trainings, of arms that differ by rounding alone and of arms at another rate: groups of five
seeds, each of which judges an arm whose initial weights lie one unit in the last place apart. Rates are high, so that
rounding grows until gaps are as large as the margin.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp8bench.analysis.compare.interval import quantile
from fp8bench.features.train import words
from fp8bench.features.train.beginnings import prepare_text
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import Arm, ArmRole, SeedTask, StepRow, StreamLine, Training, TrainingText
from fp8bench.features.train.verdicts.curves import (
    LEAST_PAIRS,
    SHOWN,
    Curve,
    JudgedArm,
    Key,
    Learned,
    Matters,
    Pair,
    Why,
    judge,
)
from fp8bench.features.train.verdicts.verdicts import adjusted_speed, verdicts_of, verdicts_on
from fp8bench.model import DeviceFacts, Environment
from fp8bench.model.raw import Settings
from suites.trials import ROOT, Table, conditions, options, say, scratch

MARGIN = 0.01
SEEDS = 5
PLANTED = (0.005, 0.01, 0.02, 0.04)
# In real trainings a step's gap moves from step to step by 2 to 7 times the distance between seeds.
_STEP_NOISE = 4
_ENDING_STEPS = 200
_LAST_ENDS = 10
SPREADS = (0.0005, 0.002, 0.004, 0.007, 0.01, 0.02, 0.05)
TRAINED = ROOT / "reports" / "verdicts_cpu_202611" / "null_gaps.json"
CALLED = (Learned.WORSE, Learned.BETTER)
_MOST_SEEDS = 60
# If a verdict asks for more additional seeds than this, nobody adds them.
_MOST_MORE = 20
_STEPS = 30
_SPEED_STEPS = 150
_PACES = (0.7, 0.9, 1.0, 1.2)

Draw = np.random.Generator
Floats = NDArray[np.float64]
# Gaps on training and on held-out text, (studies, seeds, 2), of deviation 1 about 0.
Noise = Callable[[Draw, int, int], Floats]


def gaussian(draw: Draw, studies: int, seeds: int) -> Floats:
    return _alike(draw.standard_normal((studies, seeds)))


def heavy(draw: Draw, studies: int, seeds: int) -> Floats:
    """Draws from Student's distribution with three degrees of freedom: one seed in a hundred lies beyond 3.4
    deviations."""
    return _alike(draw.standard_t(3, (studies, seeds)) / np.sqrt(3))


def curves(draw: Draw, studies: int, seeds: int) -> Floats:
    """Draws means of the last tenth of a curve whose neighbouring steps are alike (0.9), with tails as heavy."""
    shocks = draw.standard_t(3, (studies, seeds, 2 * _STEPS))
    value, total = np.zeros((studies, seeds)), np.zeros((studies, seeds))
    for step in range(2 * _STEPS):
        value = 0.9 * value + shocks[..., step]
        total += value * (step >= _STEPS)
    return _alike(total / total.std())


def spikes(draw: Draw, studies: int, seeds: int) -> Floats:
    """One seed in ten of either arm ends in a spike of its loss, five deviations high on average."""
    either = draw.exponential(5, (2, studies, seeds)) * (draw.random((2, studies, seeds)) < 0.1)
    gaps = draw.standard_normal((studies, seeds)) + either[0] - either[1]
    return _alike(gaps / np.sqrt(1 + 2 * (0.1 * 50 - 0.25)))


def trained(gaps: Sequence[Sequence[float]]) -> Noise:
    """Draws from real gaps, each with either sign: which of two arms is the reference is chance. They are smoothed
    by Silverman's rule: five of a hundred are often the same one twice, which real seeds are not."""
    known = np.array(gaps)
    known = known / np.sqrt((known**2).mean(axis=0))
    smooth = 1.06 * len(known) ** -0.2

    def drawn(draw: Draw, studies: int, seeds: int) -> Floats:
        signs = draw.choice([-1.0, 1.0], (studies, seeds, 1))
        chosen = known[draw.integers(len(known), size=(studies, seeds))] * signs
        return (chosen + smooth * draw.standard_normal(chosen.shape)) / np.hypot(1, smooth)

    return drawn


def _alike(gaps: Floats) -> Floats:
    return np.stack([gaps, gaps], axis=-1)


def noises(only: str = "") -> dict[str, Noise]:
    """Returns noises with that word in their names; trained ones only if their file exists."""
    known: dict[str, Noise] = {"Gaussian": gaussian, "heavy tails": heavy, "curves": curves, "spikes": spikes}
    if TRAINED.exists():
        gaps = json.loads(TRAINED.read_text())["gaps"]
        known |= {f"trained, rate {rate}": trained(pairs) for rate, pairs in gaps.items()}
    return {name: noise for name, noise in known.items() if only in name}


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
    """Returns the share of studies, always the same, whose arm lies above its reference by `shift` and counts."""
    gaps = shift + spread * noise(np.random.default_rng(seeds), studies, seeds)
    arms = (judge([Pair(seed, *both) for seed, both in enumerate(study)], MARGIN) for study in gaps.tolist())
    return sum(map(counts, arms)) / studies


# Without a difference, and with a planted loss.
false_alarms = partial(share, is_called)
decided = partial(share, lambda arm: arm.learned is Learned.WITHIN_NOISE)
not_tolerated = partial(share, lambda arm: is_called(arm) and arm.matters is not Matters.NO)
found = partial(share, lambda arm: arm.learned is Learned.WORSE)


def seeds_for(noise: Noise, studies: int, spread: float, shift: float, power: float = 0.8) -> int | None:
    """Returns the fewest seeds that find a planted loss with this probability; None if no number does."""
    counts = range(LEAST_PAIRS, _MOST_SEEDS + 1)
    return next((count for count in counts if found(noise, studies, spread, shift, count) >= power), None)


def after_advice(noise: Noise, studies: int, spread: float) -> float:
    """Returns the false alarms if everybody adds the suggested number of seeds and judges again."""
    every = spread * noise(np.random.default_rng(1), studies, SEEDS + _MOST_MORE)
    wrong = 0
    for study in every.tolist():
        pairs = [Pair(seed, *both) for seed, both in enumerate(study)]
        arm = judge(pairs[:SEEDS], MARGIN)
        if arm.why is Why.TOO_WIDE and (arm.more_seeds or _MOST_SEEDS) <= _MOST_MORE:
            arm = judge(pairs[: SEEDS + (arm.more_seeds or 0)], MARGIN)
        wrong += is_called(arm)
    return wrong / studies


def ending_studies(noise: Noise, studies: int, steps: int = _ENDING_STEPS) -> Iterator[list[JudgedArm]]:
    """Yields for each study its verdicts, had it ended at any of its last ten steps. Spreads and planted losses are by
    chance. Held-out text is looked at after every step."""
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
    verdicts = verdicts_on((REFERENCE, CANDIDATE), cut, tuple(range(SEEDS)), end, MARGIN, looks=True)
    return verdicts.arms[0].judged


def same_at_every_end(noise: Noise, studies: int) -> float:
    """Returns the share of studies whose verdict is the same at each of the last ten steps."""
    return sum(map(_is_same, ending_studies(noise, studies))) / studies


def _is_same(ends: Sequence[JudgedArm]) -> bool:
    return len({judged.learned for judged in ends}) == 1


def coverage(noise: Noise, studies: int, seeds: int = SEEDS) -> dict[str, float]:
    """Returns how often an interval of 95% over seeds holds the true logarithm of a speed-up, by how it is made."""
    draw = np.random.default_rng(2)
    logs = noise(draw, studies, seeds)[..., 0]
    mean, error = logs.mean(axis=1), logs.std(axis=1, ddof=1) / np.sqrt(seeds)
    again = logs[:, draw.integers(seeds, size=(1000, seeds))].mean(axis=2)
    low, high = np.quantile(again, [(1 - SHOWN) / 2, (1 + SHOWN) / 2], axis=1)
    return {
        "Student's t": float((np.abs(mean) <= quantile(SHOWN, seeds - 1) * error).mean()),
        "bootstrap": float(((low <= 0) & (high >= 0)).mean()),
    }


def speeds(studies: int, pace: float, spread: float) -> tuple[float, float]:
    """Returns, for arms that learn at this pace, how often the adjusted speed's interval holds it, and its mean
    point. Batches, which both arms share, move the loss of a step by 6%; each arm's own noise is `spread`."""
    draw, steps = np.random.default_rng(3), np.arange(1, _SPEED_STEPS + 1)
    held, points = 0, []
    for _ in range(studies):
        pairs = []
        for _ in range(SEEDS):
            batches = 1 + 0.06 * draw.standard_normal(_SPEED_STEPS) + 0.02 * draw.standard_normal()
            own = 1 + spread * draw.standard_normal() * steps / _SPEED_STEPS
            losses = [(1.8 + 3.7 * (1 + share * steps / 15) ** -0.7) * batches for share in (1.0, pace)]
            pairs.append((_curve(losses[0]), _curve(losses[1] * own)))
        speed = adjusted_speed(pairs)
        assert speed is not None and speed.adjusted is not None
        held += speed.adjusted.low <= pace <= speed.adjusted.high
        points.append(speed.adjusted.point)
    return held / studies, float(np.mean(points))


def _curve(losses: Floats, held_out: Sequence[float] = ()) -> Curve:
    rows = (StepRow("", 0, step, loss, 0, 0, 0, 0, 0, 1, 64, 0.01) for step, loss in enumerate(losses.tolist()))
    return Curve(len(losses), tuple(rows), dict(enumerate(held_out, 1)))


TRAINED_STEPS = 100
SETTINGS = TrainerSettings(batch=2, sequence=32)
REFERENCE = Arm("bf16", "bf16", ArmRole.REFERENCE)
CANDIDATE = Arm("fp8", "fp8", native=False)
ULP = (Arm("ulp", "bf16"),)
SLOWER = tuple(Arm(f"rate x {share}", "bf16", settings=(("rate", 0.001 * share),)) for share in (0.8, 0.6, 0.4))
# Arms, their rate, and how many groups of seeds: 20 studies of one ulp.
STUDIES = ((ULP, 0.003, 10), (ULP, 0.01, 10), (SLOWER, 0.001, 4))


def study(
    lab: Lab, facts: DeviceFacts, text: TrainingText, arms: tuple[Arm, ...], rate: float, seed: int
) -> tuple[Training, list[StreamLine]]:
    """Trains the reference and the arms together, in five seeds."""
    settings, lines = replace(SETTINGS, rate=rate), []
    request = TrainingRequest(("bf16",), settings=settings, steps=TRAINED_STEPS, seeds=SEEDS, seed=seed)
    every = (REFERENCE, *arms)
    for number in range(seed, seed + SEEDS):
        started = (REFERENCE, *(replace(arm, role=ArmRole.CHAOS) for arm in arms)) if arms is ULP else every
        lab.begin(SeedTask(number, started, settings, TRAINED_STEPS, TRAINED_STEPS, text, facts))
        for arm in every:
            lines += [*lab.advance(arm.name, TRAINED_STEPS), *lab.validate(arm.name)]
    return Training(f"rate {rate}", "", "", request, every, facts, Environment({}), text, 0), lines


def train(path: Path) -> int:
    """Writes gaps of the arms one ulp apart by rate, how often each verdict was given, and its sentences. Returns 1 if
    one of these was called worse or better, or had the reference's bits."""
    began, failed, lab = time.time(), False, Lab(Settings())
    gaps: dict[str, list[tuple[float, float]]] = defaultdict(list)
    verdicts: dict[str, Counter[str]] = defaultdict(Counter)
    sentences, facts = [], lab.probe()[0]
    with scratch() as folder:
        text = prepare_text(None, folder, SETTINGS.sequence)
        for arms, rate, group in ((arms, rate, group) for arms, rate, count in STUDIES for group in range(count)):
            among = verdicts_of(*study(lab, facts, text, arms, rate, SEEDS * group))
            for verdict in among.arms:
                name = f"{verdict.arm.name}, rate {rate}"
                sentences.append(f"{name}: {words.verdict(verdict, among)}")
                verdicts[name][verdict.judged.learned.value] += 1
                deviation = statistics.stdev(pair.gap for pair in verdict.pairs) if len(verdict.pairs) > 1 else 0.0
                say(f"{sentences[-1]}; deviation {100 * deviation:.2f}%")
                if arms is ULP:
                    gaps[str(rate)] += [(round(pair.gap, 6), round(pair.held_out or 0.0, 6)) for pair in verdict.pairs]
                    failed |= verdict.same_bits or verdict.judged.learned in CALLED
    setting = {
        "command": "python -m suites.verdicts --trained",
        "model": SETTINGS.model,
        "batch": SETTINGS.batch,
        "sequence": SETTINGS.sequence,
        "steps": TRAINED_STEPS,
        "seeds": SEEDS,
        "text": text.identity,
        "torch": facts.torch,
        "device": facts.name,
        "seconds": round(time.time() - began),
        **conditions(),
    }
    kept = {"gaps": gaps, "verdicts": verdicts, "sentences": sentences, "setting": setting}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    for name, counts in verdicts.items():
        say(f"{name}: {dict(counts)}")
    return int(failed)


def lines(studies: int, only: str) -> Iterator[tuple[str, list[float | int | None]]]:
    """Yields each figure's name, with a value for each of SPREADS: a share, or a number of seeds."""
    few = max(1, studies // 10)
    for name, noise in noises(only).items():
        yield f"{name}: called worse or better", [false_alarms(noise, studies, spread) for spread in SPREADS]
        yield (
            f"{name}: so called, not surely inside the margin",
            [not_tolerated(noise, studies, spread) for spread in SPREADS],
        )
        yield f"{name}: within noise", [decided(noise, few, spread) for spread in SPREADS]
        yield f"{name}: worse or better, seeds added", [after_advice(noise, few, spread) for spread in SPREADS]
        for shift in PLANTED:
            yield f"{name}: {100 * shift:g}% found", [found(noise, few, spread, shift) for spread in SPREADS]
        yield f"{name}: seeds for 2%", [seeds_for(noise, max(1, few // 2), spread, 0.02) for spread in SPREADS]


def print_figures(studies: int, only: str) -> dict[str, list[float | int | None]]:
    """Returns every figure, and prints each as soon as it is computed."""
    title = f"margin {100 * MARGIN:g}%, {SEEDS} seeds, {studies} studies; by the deviation of the gap from seed to seed"
    table, figures = Table(title, *(f"{100 * spread:g}%" for spread in SPREADS), name=52), {}
    for name, values in lines(studies, only):
        figures[name] = values
        table.row(name, *(f"over {_MOST_SEEDS}" if value is None else value for value in values))
    table = Table("\nan interval of 95% holds the truth", "Student's t", "bootstrap", name=52)
    for name, noise in noises(only).items():
        shares = coverage(noise, min(studies, 2000))
        figures[f"{name}: coverage of {', '.join(shares)}"] = [*shares.values()]
        table.row(name, *shares.values())
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
        trained=(False, "real trainings that differ as rounding does, first"),
        json=(Path, "write what is printed into a file, too"),
    )
    if asked.trained:
        return train(TRAINED)
    figures = print_figures(asked.studies, asked.only)
    if asked.json:
        kept = {"margin": MARGIN, "seeds": SEEDS, "studies": asked.studies, "deviations": SPREADS, "shares": figures}
        asked.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
