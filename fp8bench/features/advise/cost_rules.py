"""What a precision costs: rules about memory, energy and whether the model still learns, and the cost of a decision.

That is time, energy and money to the same loss, of each precision of a model beside its reference. A step's time and
joules come from a run, the steps that a loss takes from a training. Both are drawn again together: rounds of the run,
its energy windows, and seeds of the training. Five seeds drawn again vary too little; what they vary by is widened to
what Student's t gives for so many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.compare.interval import quantile
from fp8bench.analysis.energy import LEAST_WINDOWS, Demand, energy_ratio, energy_samples, why_no_energy
from fp8bench.analysis.stats import Floats
from fp8bench.features.advise.basis import AdviceRule, Basis, ComparedCase, Reply, Trained
from fp8bench.features.advise.values import Cost, Ground, Met
from fp8bench.features.sensitivity.study import LayerTrial, Study
from fp8bench.features.train.verdicts.curves import LEAST_PAIRS, SHOWN, Learned, curves_of
from fp8bench.features.train.verdicts.verdicts import ArmVerdict, log_steps
from fp8bench.model import Case, EnergyUse, Interval, Label, MemoryRole, Status
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.registry import precisions
from fp8bench.report.panels import error_name

# A saving of less is called none.
_LEAST_SAVING = 0.01
_COPIES = {
    MemoryRole.LOW_WEIGHTS: "low-precision copies of weights",
    MemoryRole.LOW_ACTIVATIONS: "low-precision copies of activations",
}
_KEPT = {MemoryRole.WEIGHTS: "weights", MemoryRole.OPTIMIZER: "optimizer state"}


def _memory(pair: ComparedCase, basis: Basis) -> Reply | str:
    if pair.emulated:
        return "emulated here: its memory is the cost of emulation"
    lead = pair.lead
    if pair.record.memory is None or lead is None or lead.memory is None or not lead.memory.peak:
        return "no memory was measured"
    share = pair.record.memory.peak / lead.memory.peak
    roles, before = dict(pair.record.memory.roles), dict(lead.memory.roles)
    kept = [
        f"{words} ({units.size(roles[role])})"
        for role, words in _KEPT.items() if roles.get(role) and roles[role] >= before.get(role, 0)
    ]  # fmt: skip
    copies = [f"{words} ({units.size(roles[role])})" for role, words in _COPIES.items() if roles.get(role)]
    staying = f"what stays: {', '.join(kept)}" if kept else ""
    more = "; ".join(filter(None, (staying, f"what comes on top: {', '.join(copies)}" if copies else "")))
    figure = f"{units.ratio(share)} of {lead.case.mode}'s peak" + (f"; {more}" if more else "")
    grounds = (Ground(pair.row, f"peak {units.size(pair.record.memory.peak)}"),
               Ground(lead.case.id, f"peak {units.size(lead.memory.peak)}"))  # fmt: skip
    return Reply(Met.YES if share <= 1 - _LEAST_SAVING else Met.NO, figure, grounds)


def _energy(pair: ComparedCase, basis: Basis) -> Reply | str:
    labels = [label for finding in (pair.finding, pair.lead_finding) if finding is not None for label in finding.labels]
    found = energy_ratio(pair.record, pair.lead, labels)
    if pair.emulated:
        return "emulated here: its joules are the cost of emulation"
    if found is None:
        return why_no_energy(pair.record) if pair.record.energy is not None else "no energy was measured"
    met = {Demand.LESS: Met.YES, Demand.MORE: Met.NO, Demand.UNCLEAR: Met.UNCLEAR}[found.demand]
    ends = f"[{units.significant(found.low)}, {units.significant(found.high)}]"
    figure = f"{units.ratio(found.point)} {ends} of the joules of a step" + (f": {found.why}" if found.why else "")
    return Reply(met, figure, (Ground(pair.row, figure),))


def _error(pair: ComparedCase, basis: Basis) -> Reply | str:
    """A relative error says what a precision costs in numbers, and no more: what it may be, the training says."""
    known = {error_name(each): max(each.samples) for each in pair.record.measurements
             if each.metric.endswith("_error") and each.samples}  # fmt: skip
    if pair.record.status is not Status.OK or not known:
        return "no error was measured"
    words = ", ".join(f"{name.replace('_', ' ')} {units.relative_error(value)}" for name, value in known.items())
    finite = all(value < float("inf") for value in known.values()) and not pair.record.not_finite
    return Reply(Met.YES if finite else Met.NO, words, (Ground(pair.row, words),))


def study_of(pair: ComparedCase, basis: Basis) -> Study | None:
    """The newest study of this workload, device and precision; the same model where that is one of its parameters."""
    case = pair.record.case
    params = dict(case.params)
    fitting = [
        study for study in basis.studies
        if (study.workload, study.low, study.device) == (case.workload, case.precision, case.device)
        and all(params.get(name, value) == value for name, value in study.params if name in ("size", "make"))
        and not study.baseline.failure
    ]  # fmt: skip
    return max(fitting, key=lambda study: study.started, default=None)


def tried_as(pair: ComparedCase, study: Study) -> LayerTrial:
    """The candidate that has the layers low which the case has, by its map; else the one with all of them."""
    return next((each for each in study.candidates if each.precision_map == pair.record.case.precision_map),
                study.candidates[0])  # fmt: skip


def _layers(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    study = study_of(pair, basis)
    if (study is None and not pair.trains) or precisions.unit_scaled(pair.record.case.precision):
        return None  # no layer of a unit-scaled model can stand in another
    if study is None or not study.candidates:
        return "no layer was tried alone"
    row = f"sensitivity study {study.path or study.started}"
    whole = tried_as(pair, study)
    gap = study.gap(whole)
    told = "none" if gap is None else units.change(1 + gap)
    noise = units.percent(study.noise or 0.0)
    figure = f"layers low: {len(whole.low)}, loss {told} beside a noise of {noise} in {study.steps} steps"
    grounds = (Ground(row, figure),)
    if study.undecided:
        return Reply(Met.UNCLEAR, f"{figure}: no layer can be told from another", grounds)
    return Reply(Met.YES if study.keeps(whole) else Met.NO, figure, grounds)


def arm_of(pair: ComparedCase, basis: Basis) -> ArmVerdict | None:
    """What the training says of an arm in this mode with no setting of its own; else of the first one in it."""
    if basis.training is None:
        return None
    arms = [arm for arm in basis.training.found.arms if arm.arm.precision == pair.mode]
    return min(arms, key=lambda arm: len(arm.arm.settings), default=None)


_LEARNS = {
    Learned.WITHIN_NOISE: Met.YES, Learned.BETTER: Met.YES, Learned.WORSE: Met.NO, Learned.DIVERGED: Met.NO,
}  # fmt: skip


def _learns(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    if not pair.trains:
        return None
    arm = arm_of(pair, basis)
    if arm is None or basis.training is None:
        return "no training had an arm in it"
    judged = arm.judged
    gap = judged.gap
    figure = str(judged.learned)
    if gap is not None and gap.decides is not None:
        low, high = units.change(1 + gap.decides.low), units.change(1 + gap.decides.high)
        figure += f": loss {units.change(1 + gap.point)} [{low}, {high}] over {gap.pairs} seeds"
    training = basis.training.kept.training
    model = training.request.settings.called
    ground = Ground(f"training {training.id}, arm {arm.arm.name}", f"{figure}, {model}, {training.request.steps} steps")
    return Reply(_LEARNS.get(judged.learned, Met.UNCLEAR), figure, (ground,))


RULES = (
    AdviceRule(
        "memory", "Does it save memory?", _memory, "{again}",
        "Training in FP8 keeps weights and optimizer state, and adds copies: published peaks are 1.00 of bf16's.",
    ),
    AdviceRule(
        "energy", "Does it save energy?", _energy,
        "{again}, where a device tells its energy",
        "A device at its power limit trades clocks for width.",
    ),
    AdviceRule(
        "errors", "Are all results finite?", _error, "{again}",
        "The error orders formats; whether it does harm, a training says.",
        of_speed=False,
    ),
    AdviceRule(
        "layers", "Do all layers bear it?", _layers, "{study}",
        "Heads, routers, first and last layers are those that published recipes leave high.",
        of_speed=False,
    ),
    AdviceRule(
        "learns", "Does it still learn?", _learns, "{train}",
        "A short training of one seed tells nothing: seeds differ by as much as formats.",
        of_speed=False,
    ),
)  # fmt: skip


_NORMAL = statistics.NormalDist().inv_cdf((1 + SHOWN) / 2)
_NO_LOSS = (Learned.DIVERGED, Learned.DID_NOT_LEARN)


def costs_of(basis: Basis) -> tuple[Cost, ...]:
    return tuple(_cost(compared, basis) for compared in basis.besides if compared.trains)


def _cost(pair: ComparedCase, basis: Basis) -> Cost:
    case, arm = pair.record.case, arm_of(pair, basis)
    reference = pair.lead.case.mode if pair.lead is not None else ""
    times, joules = _log_times(pair), _log_joules(pair)
    steps, why = _log_steps(basis.training, arm)
    no_time = "emulated: its time is no speed" if pair.emulated else "its step has no speed in this run"
    whys = [why, "" if times is not None else no_time]
    judged = arm.judged if arm is not None else None
    request = basis.training.kept.training.request if basis.training is not None else None
    hours = used = None
    if request is not None and pair.lead_finding is not None and pair.lead_finding.median_seconds and not pair.emulated:
        hours = request.steps * pair.lead_finding.median_seconds / 3600
        windows = energy_samples(pair.lead.energy) if pair.lead is not None else ()
        used = request.steps * statistics.median(windows) if windows else None
    return Cost(
        case.setting, case.mode, reference,
        speed=_interval(times, -1.0), gap=judged.gap.shown if judged is not None and judged.gap else None,
        learned=str(judged.learned) if judged is not None else "", joules=_interval(joules),
        time=_interval(_sum(times, steps)), energy=_interval(_sum(joules, steps)), hours=hours, energy_used=used,
        steps=request.steps if request is not None else 0,
        model=_trained(request.settings.called, case) if request is not None else "", why="; ".join(filter(None, whys)),
    )  # fmt: skip


def _trained(model: str, case: Case) -> str:
    """The model that was trained, where it is another one than the case's own."""
    return "" if model == dict(case.params).get("make") else model


@dataclass(frozen=True)
class _Drawn:
    """The logarithm of a ratio, and what it came to in each of BOOTSTRAPS draws."""

    point: float
    drawn: Floats


def _sum(drawn: _Drawn | None, other: _Drawn | None) -> _Drawn | None:
    return (
        _Drawn(drawn.point + other.point, drawn.drawn + other.drawn)
        if drawn is not None and other is not None
        else None
    )


def _interval(drawn: _Drawn | None, sign: float = 1.0) -> Interval | None:
    if drawn is None:
        return None
    tail = (1 - SHOWN) / 2
    low, high = np.quantile(sign * drawn.drawn, [tail, 1 - tail])
    point = sign * drawn.point
    return Interval(math.exp(point), math.exp(min(low, point)), math.exp(max(high, point)), SHOWN)


def _log_times(pair: ComparedCase) -> _Drawn | None:
    if pair.speed is None or pair.record.timing is None or pair.lead is None:
        return None
    own, base = pair.record.timing, pair.record.paired_with or pair.lead.timing
    control = pair.record.control if pair.record.paired_with is not None else pair.lead.control
    if base is None:
        return None
    timings = [own, base, *([control] if control is not None and control.slots else [])]
    rounds = verdicts.common_rounds(timings)
    if len(rounds) < LEAST_ROUNDS:
        return None
    labels = pair.finding.labels if pair.finding is not None else ()
    if Label.UNEVEN in labels:
        first, *others = (stats.mean_case(verdicts.means(timing, rounds)) for timing in timings)
    else:
        first, *others = map(stats.best_case, verdicts.comparable(timings, rounds, Label.WHOLE_STEPS in labels))
    point = first.point - statistics.fmean(each.point for each in others)
    return _Drawn(point, first.resampled - np.mean([each.resampled for each in others], axis=0))


def _log_joules(pair: ComparedCase) -> _Drawn | None:
    lead = pair.lead
    if pair.emulated or lead is None or pair.record.energy is None or lead.energy is None:
        return None
    if pair.record.energy.source != lead.energy.source:
        return None
    drawn = [_drawn_joules(use, seed) for seed, use in enumerate((pair.record.energy, lead.energy))]
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
    pairs = [(curves[trained.found.reference, pair.seed], curves[arm.arm.name, pair.seed]) for pair in arm.pairs]

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
