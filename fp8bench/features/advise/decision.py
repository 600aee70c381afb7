"""The cost of a decision: time, energy and money to the same loss, of each precision of a model beside its reference.

A step's time and joules come from a run, the steps that a loss takes from a training. Both are drawn again together:
rounds of the run, its energy windows, and seeds of the training. Five seeds drawn again vary too little; what they
vary by is widened to what Student's t gives for so many.

What a precision would give to a step that was not timed in it, from the products that were: Amdahl's law by size.

The step's products and their share are its reference's; how fast a product is in the precision, casts included, comes
from products of the same device as large as these. Where precisions carry other values between products more would
change than products, and nothing is projected.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.break_even import LEAST_SIZES, SizedRatio
from fp8bench.analysis.compare.interval import quantile
from fp8bench.analysis.energy import LEAST_WINDOWS, energy_samples
from fp8bench.analysis.stats import Floats
from fp8bench.analysis.verdicts import BAND
from fp8bench.errors import UsageError
from fp8bench.features.advise.basis import Basis, Beside, Trained
from fp8bench.features.advise.cost_rules import arm_of
from fp8bench.features.advise.rule import amdahl, mapped, met_above, part, times
from fp8bench.features.advise.shape_rules import products_of, sized
from fp8bench.features.advise.values import Advice, AdviceKind, Cost, Ground, Met
from fp8bench.features.train.verdicts.curves import curves_of
from fp8bench.features.train.verdicts.judging import LEAST_PAIRS, SHOWN, Learned
from fp8bench.features.train.verdicts.speed import log_steps
from fp8bench.features.train.verdicts.verdicts import ArmVerdict
from fp8bench.model import EnergyUse, Interval, Label, Level, Phase
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.registry import precisions

_NORMAL = statistics.NormalDist().inv_cdf((1 + SHOWN) / 2)
_NO_LOSS = (Learned.DIVERGED, Learned.DID_NOT_LEARN)


def costs_of(basis: Basis) -> tuple[Cost, ...]:
    """Of every case whose step trains a model, beside its reference."""
    return tuple(_cost(one, basis) for one in basis.besides if one.trains)


def _cost(one: Beside, basis: Basis) -> Cost:
    case, arm = one.record.case, arm_of(one, basis)
    reference = one.lead.case.mode if one.lead is not None else ""
    times, joules = _log_times(one), _log_joules(one)
    steps, why = _log_steps(basis.training, arm)
    whys = [why, "" if times is not None else _why_no_time(one)]
    judged = arm.judged if arm is not None else None
    request = basis.training.kept.training.request if basis.training is not None else None
    hours = used = None
    if request is not None and one.lead_finding is not None and one.lead_finding.median_seconds and not one.emulated:
        hours = request.steps * one.lead_finding.median_seconds / 3600
        windows = energy_samples(one.lead.energy) if one.lead is not None else ()
        used = request.steps * statistics.median(windows) if windows else None
    return Cost(
        case.setting, case.mode, reference,
        speed=_interval(times, -1.0), gap=judged.gap.shown if judged is not None and judged.gap else None,
        learned=str(judged.learned) if judged is not None else "", joules=_interval(joules),
        time=_interval(_sum(times, steps)), energy=_interval(_sum(joules, steps)), hours=hours, energy_used=used,
        steps=request.steps if request is not None else 0,
        model=request.settings.model if request is not None else "", why="; ".join(filter(None, whys)),
    )  # fmt: skip


@dataclass(frozen=True)
class _Drawn:
    """The logarithm of a ratio, and what it came to in each of BOOTSTRAPS draws."""

    point: float
    drawn: Floats


def _sum(one: _Drawn | None, other: _Drawn | None) -> _Drawn | None:
    return _Drawn(one.point + other.point, one.drawn + other.drawn) if one is not None and other is not None else None


def _interval(one: _Drawn | None, sign: float = 1.0) -> Interval | None:
    if one is None:
        return None
    tail = (1 - SHOWN) / 2
    low, high = np.quantile(sign * one.drawn, [tail, 1 - tail])
    point = sign * one.point
    return Interval(math.exp(point), math.exp(min(low, point)), math.exp(max(high, point)), SHOWN)


def _why_no_time(one: Beside) -> str:
    return "emulated: its time is no speed" if one.emulated else "its step has no speed in this run"


def _log_times(one: Beside) -> _Drawn | None:
    """The step's time over the reference's, by the rounds that both were in."""
    if one.speed is None or one.record.timing is None or one.lead is None:
        return None
    own, base = one.record.timing, one.record.paired_with or one.lead.timing
    control = one.record.control if one.record.paired_with is not None else one.lead.control
    if base is None:
        return None
    timings = [own, base, *([control] if control is not None and control.slots else [])]
    rounds = verdicts.common_rounds(timings)
    if len(rounds) < LEAST_ROUNDS:
        return None
    calls = min(len(slot.calls_ns) for timing in timings for slot in timing.slots)
    uneven = one.finding is not None and Label.UNEVEN in one.finding.labels
    first, *others = (
        stats.mean_case(verdicts.means(timing, rounds)) if uneven
        else stats.best_case(verdicts.cells(timing, calls, rounds))
        for timing in timings
    )  # fmt: skip
    point = first.point - statistics.fmean(each.point for each in others)
    return _Drawn(point, first.resampled - np.mean([each.resampled for each in others], axis=0))


def _log_joules(one: Beside) -> _Drawn | None:
    """Joules of a step over the reference's, by windows of both."""
    lead = one.lead
    if one.emulated or lead is None or one.record.energy is None or lead.energy is None:
        return None
    if one.record.energy.source != lead.energy.source:
        return None
    drawn = [_drawn_joules(use, seed) for seed, use in enumerate((one.record.energy, lead.energy))]
    own, theirs = drawn
    return None if own is None or theirs is None else _Drawn(own.point - theirs.point, own.drawn - theirs.drawn)


def _drawn_joules(use: EnergyUse, seed: int) -> _Drawn | None:
    """Any of its windows, off by as much as any can be; None of too few, or where nobody knows that."""
    samples = np.log(energy_samples(use))
    known = [window.uncertainty for window in use.windows if window.uncertainty is not None]
    if len(samples) < LEAST_WINDOWS or len(known) < len(use.windows):
        return None
    random = np.random.default_rng(seed)
    drawn = random.choice(samples, stats.BOOTSTRAPS) + max(known) * random.uniform(-1, 1, stats.BOOTSTRAPS)
    return _Drawn(float(np.median(samples)), drawn)


def _log_steps(trained: Trained | None, arm: ArmVerdict | None) -> tuple[_Drawn | None, str]:
    """How many times as many steps the arm takes to the same loss, by seeds drawn again; or why nobody knows."""
    if trained is None or arm is None:
        return None, "no training had an arm in it" if trained is not None else "no training was named (--training)"
    if arm.judged.learned in _NO_LOSS:
        return None, f"it never comes to that loss: {arm.judged.learned}"
    if len(arm.pairs) < LEAST_PAIRS:
        return None, f"{LEAST_PAIRS} seeds are needed, and there are {len(arm.pairs)}"
    curves = curves_of(trained.kept.lines, trained.kept.training.request.steps)
    pairs = [(curves[trained.found.reference, one.seed], curves[arm.arm.name, one.seed]) for one in arm.pairs]

    @cache
    def of(chosen: tuple[int, ...]) -> float | None:
        return log_steps([pairs[place] for place in chosen])

    found = _drawn_seeds(of, len(pairs))
    return (
        found,
        "" if found is not None else "it is not known how many steps its loss takes: too far from its reference's",
    )


def _drawn_seeds(of: Callable[[tuple[int, ...]], float | None], count: int) -> _Drawn | None:
    """A figure of seeds, and of seeds drawn again, widened to what so few of them say; None if it is ever unknown.

    Above 0 is fewer steps: what is returned are more.
    """
    point = of(tuple(range(count)))
    draws = np.sort(np.random.default_rng(2).integers(0, count, (stats.BOOTSTRAPS, count)), axis=1)
    values = [of(tuple(row)) for row in draws.tolist()]
    known = np.array([value for value in values if value is not None and math.isfinite(value)])
    if point is None or not math.isfinite(point) or len(known) < len(values):
        return None
    wider = quantile(SHOWN, count - 1) / _NORMAL * math.sqrt(count / (count - 1))
    return _Drawn(-point, -point - wider * (known - point))


# Of the products' FLOPs so many have to be in sizes that were timed.
_LEAST_TIMED = 0.9
_OWN_MODEL = "model"
# What a layer multiplies in a training step, each as much; a library may do them at very different speeds.
_KINDS = ("forward", "input-gradient", "weight-gradient")


def projections(basis: Basis) -> Iterator[Advice]:
    """Of every training step with a native reference, for modes that products alone were timed in."""
    leads = {one.lead.case.id: one for one in basis.besides if one.lead is not None and one.trains}
    timed = {(one.mode, one.record.case.device) for one in basis.known if one.speed is not None}
    for one in leads.values():
        assert one.lead is not None
        here = {record.case.mode for record, _ in one.group}
        for mode, device in sorted(timed):
            if device == one.lead.case.device and mode not in here and (found := _projected(one, mode, basis)):
                yield found


def _projected(one: Beside, mode: str, basis: Basis) -> Advice | None:
    lead = one.lead
    if lead is None or lead.support.level is not Level.NATIVE or lead.tape is None or not _products_alone(one, mode):
        return None
    paths = set(lead.tape.by_path)
    share = one.share({Phase.GEMM})
    kinds = ("forward",) if dict(lead.case.params).get("pass") == "forward" else _KINDS
    timed = [sized(mode, lead.case.device, basis, paths, kind) for kind in kinds]
    found = [_of_products(one, [known for known, _ in ratios.values()]) for ratios in timed]
    each = [ratio for ratio in found if ratio is not None]
    if share is None or len(each) < len(kinds):
        return None
    means = (statistics.fmean(ends) for ends in zip(*((r.point, r.low, r.high) for r in each), strict=True))
    ratio = Interval(*means, min(one.level for one in each))  # type: ignore[call-arg]
    floor = 1 + max(BAND, (one.lead_finding.floor if one.lead_finding is not None else None) or 0.0)
    wide = (1.0, share.point, ratio.point), (1 / floor, share.low, ratio.high), (floor, share.high, ratio.low)
    ends = [far * amdahl(own, taken) for far, own, taken in wide]
    most = amdahl(share.high, 0.0)
    gain = mapped(Interval(ends[0], min(ends), max(ends), ratio.level), lambda value: min(value, most))
    case, worth = lead.case, met_above(gain, 1 + basis.least)
    known = f"products are {part(share)} of the step, and {times(ratio.inverse)} as fast at its sizes, with casts"
    words = f"adopt {mode}, by projection: a step {times(gain)} as fast as in {case.mode}"
    if worth is not Met.YES:
        words = (
            f"do nothing about {mode}, because by projection its step is {times(gain)} as fast, not surely the "
            f"{units.percent(basis.least, 0)} that are worth it"
        )
    rows = dict.fromkeys(
        Ground(row, f"{units.speed_up(1 / known.ratio.point)} at size {size}")
        for ratios in timed for size, (known, row) in sorted(ratios.items())
    )  # fmt: skip
    return Advice(
        "projection", AdviceKind.ADOPT if worth is Met.YES else AdviceKind.NOTHING, mode, case.mode,
        f"{words}: {known}; the step itself was not timed in it, --check does", (case.setting,),
        f"--dtypes {case.mode},{mode}" if worth is Met.YES else "", gain=gain, case=f"{case.setting}/{mode}",
        grounds=(Ground(case.id, f"products are {part(share)} of the step"), *rows),
    )  # fmt: skip


def _products_alone(one: Beside, mode: str) -> bool:
    """Whether this precision changes products and nothing else of the step: in copies of a person's own model, and
    where it is carried in what the reference is."""
    assert one.lead is not None
    if one.lead.case.workload == _OWN_MODEL:
        return True
    try:
        return precisions.get(mode).carried_by == one.lead.case.precision
    except UsageError:
        return False


def _of_products(one: Beside, ratios: list[SizedRatio]) -> Interval | None:
    """The time of the step's products in the precision over their time now, each by its size; None where too few of
    them lie between sizes that were timed."""
    products = [(math.prod(sides) ** (1 / 3), flops) for *sides, flops in products_of(one)]
    total = sum(flops for _, flops in products)
    if len(ratios) < LEAST_SIZES or not total:
        return None
    ordered = sorted(ratios)
    at = np.log([ratio.size for ratio in ordered])
    inside = [(math.log(size), flops) for size, flops in products if at[0] <= math.log(size) <= at[-1] + 1e-3]
    whole = sum(flops for _, flops in inside)
    if whole < _LEAST_TIMED * total:
        return None
    places, weights = (np.array(each) for each in zip(*inside, strict=True))
    ends = (
        float(np.exp(np.interp(places, at, np.log(values))) @ weights / whole)
        for values in zip(*((one.ratio.point, one.ratio.low, one.ratio.high) for one in ordered), strict=True)
    )
    return Interval(*ends, min(one.ratio.level for one in ordered))  # type: ignore[call-arg]
