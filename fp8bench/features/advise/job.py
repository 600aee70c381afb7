"""Advice on a stored run: what it rests on, runs that check what it predicts, and what a decision costs.

Checks are kept in `<store>/advice.jsonl`, append-only, a line each: {"version": 1, "checked": {...}}.

A cost is time, energy and money to the same loss, over the reference's. A step's time and joules come from a run, the
steps that a loss takes from a training; rounds, energy windows and seeds are resampled together. Five seeds resampled
vary too little, so their spread is widened to what Student's t gives for so many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.compare.interval import quantile
from fp8bench.analysis.energy import LEAST_WINDOWS, energy_samples
from fp8bench.analysis.findings import findings
from fp8bench.analysis.stats import Floats
from fp8bench.errors import StoreError, UsageError
from fp8bench.features.advise.basis import Basis, ComparedCase, speed_of
from fp8bench.features.advise.rules import arm_of
from fp8bench.features.advise.values import Advice, AdviceKind, Advised, Checked, Cost
from fp8bench.features.infer.values import kept_answers
from fp8bench.features.sensitivity.job import studies_of, write_map_file
from fp8bench.features.sensitivity.study import as_words
from fp8bench.features.train.kind import load_training, training_named
from fp8bench.features.train.verdicts.curves import LEAST_PAIRS, SHOWN, Learned
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.features.train.verdicts.verdicts import ArmVerdict, log_steps
from fp8bench.model import Case, EnergyUse, Interval, Label, Run
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.pipeline import execute, measure_again, now
from fp8bench.protocols import Observer
from fp8bench.store.kept_lines import Log
from fp8bench.store.runs.listing import load_named, store_of

# Facts of the environment that are kept with a check.
_UNDER = ("machine", "torch", "commit", "threads")


def basis_of(
    word: str, store: Path, training: str | None, least: float, beside: Sequence[str] = ()
) -> tuple[Basis, list[str]]:
    """Returns the named run with what else the store knows about it, and what of that could not be read."""
    run = load_named(word, store)
    other_runs = [load_named(name, store) for name in beside]
    for other in other_runs:
        _refuse_foreign(run, other)
    studies, troubles = studies_of(store_of(Path(run.path)) or store)
    trained = None
    if training is not None:
        kept = load_training(training_named(training, store))
        trained = JudgedTraining(kept)
        troubles += kept.troubles
    known = tuple((other, findings(other)) for other in other_runs)
    answers, wrong = kept_answers(store_of(Path(run.path)) or store).lines()
    ids = {run.id, *(other.id for other in other_runs)}
    served = tuple(dict.fromkeys(answer for answer in answers if ids & {*answer.runs}))
    return Basis(run, findings(run), studies, trained, least, known, served), troubles + wrong


def _refuse_foreign(run: Run, other: Run) -> None:
    """Raises UsageError if the other run is of another machine, torch or device."""
    names = {device.key: device.name for device in run.devices}
    for what, own, theirs in (
        *((name, run.environment.get(name), other.environment.get(name)) for name in ("machine", "torch")),
        *((f"device {device.key}", names.get(device.key, device.name), device.name) for device in other.devices),
    ):
        if own != theirs:
            raise UsageError(
                f"the run {other.id} says nothing of {run.id}: its {what} is {theirs}, and not {own}. Measure it here, "
                "or leave it out."
            )


def write_map(advised: Advised, run: Run, path: Path) -> None:
    routes = [advice for advice in advised.advice if advice.kind is AdviceKind.ROUTE and advice.precision_map]
    if not routes:
        raise UsageError(
            f"no layer of the run {run.id} is advised to stay high, so that there is no map to write. "
            "`fp8bench sensitivity` finds out which layers suffer."
        )
    first = routes[0]
    write_map_file(path, f"{first.mode} on run {run.id}: {first.sentence}", first.precision_map)


def checkable(advice: Sequence[Advice]) -> list[Advice]:
    """Returns the advice that predicts the speed of a step. Schedules are left out: they would take a training."""
    return [each for each in advice if each.gain is not None and each.kind is not AdviceKind.SCHEDULE]


def checked(basis: Basis, advised: Advised, most: int, store: Path, observer: Observer) -> tuple[Checked, ...]:
    wanted = checkable(advised.advice)[:most]
    if not wanted:
        raise UsageError(
            f"nothing that is advised on the run {basis.run.id} predicts the speed of a step, so that there is nothing "
            "to check. Emulated precisions have none."
        )
    done = []
    for advice in wanted:
        again = _measured(basis.run, advice, store, observer)
        speed, why = _speed(advice, again)
        under = tuple((name, value) for name in _UNDER if (value := again.environment.get(name)) is not None)
        done.append(Checked(advice, basis.run.id, again.id, now(), speed, why, under))
        keep_checks(store, done[-1:])
        if not again.finished:
            raise KeyboardInterrupt
    return tuple(done)


def _measured(run: Run, advice: Advice, store: Path, observer: Observer) -> Run:
    """Measures the group of the advice again in fresh processes; as a run of its own if its map or mode was not in the
    run."""
    command = f"fp8bench advise {run.id} --check"
    timed = any(record.case.id == advice.case for record in run.records)
    if timed and not advice.precision_map:
        return measure_again(run, {advice.case}, store, observer, command)
    case = next(record.case for record in run.records if record.case.setting == advice.settings[0])
    own = {name: str(value) for name, value in case.params}
    axes = tuple((name, (own[name],) if name in own else values) for name, values in run.request.axes)
    request = replace(
        run.request, suite=case.workload, dtypes=(advice.reference, advice.mode), reference=advice.reference,
        devices=(case.device,), axes=axes, precision_map=advice.precision_map, grid=False, trace=None,
    )  # fmt: skip
    return execute(request, store, observer, f"{command} ({as_words(advice.precision_map)})", origin="advice")


def _speed(advice: Advice, again: Run) -> tuple[Interval | None, str]:
    setting = advice.settings[0]
    beside = [record for record in again.records if record.case.setting == setting and not record.is_reference]
    layers, case = advice.precision_map, advice.case
    alike = [record.case.precision_map == layers if layers else record.case.id == case for record in beside]
    if not any(alike):
        return None, "its run has no such case"
    record = beside[alike.index(True)]
    finding = findings(again).get(record.case.id)
    if finding is None or finding.ratio is None:
        return None, record.reason or (finding.why if finding is not None else "") or "it has no speed there"
    if finding.hard:
        return None, finding.why
    return speed_of(finding), ""


_VERSION = 1


def checks_of(store: Path) -> Path:
    return store / "advice.jsonl"


def load_checks(store: Path) -> tuple[tuple[Checked, ...], list[str]]:
    """Returns checks, oldest first and each once, and what is wrong with lines that were left out."""
    try:
        checks, troubles = _log(store).lines()
    except OSError as error:
        raise StoreError(f"{checks_of(store)} cannot be read ({error.strerror}).") from None
    each_once = sorted(dict.fromkeys(checks), key=lambda check: check.when)
    return tuple(each_once), [f"{trouble}, and was left out" for trouble in troubles]


def keep_checks(store: Path, checked: Sequence[Checked]) -> None:
    _log(store).append(checked)


def _log(store: Path) -> Log[Checked]:
    return Log(checks_of(store), {"checked": Checked}, "check", _VERSION, "Choose another --store.")


_NORMAL = statistics.NormalDist().inv_cdf((1 + SHOWN) / 2)
_NO_LOSS = (Learned.DIVERGED, Learned.DID_NOT_LEARN)


def costs_of(basis: Basis) -> tuple[Cost, ...]:
    return tuple(_cost(compared, basis) for compared in basis.cases if compared.trains)


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
    """Returns the model that was trained, '' if it is the case's own."""
    return "" if model == dict(case.params).get("make") else model


@dataclass(frozen=True)
class _Drawn:
    """The logarithm of a ratio, and its value in each of BOOTSTRAPS resamples."""

    point: float
    drawn: Floats


def _sum(drawn: _Drawn | None, other: _Drawn | None) -> _Drawn | None:
    return _Drawn(drawn.point + other.point, drawn.drawn + other.drawn) if drawn and other else None


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
    own, theirs = (_drawn_joules(use, seed) for seed, use in enumerate((pair.record.energy, lead.energy)))
    return None if own is None or theirs is None else _Drawn(own.point - theirs.point, own.drawn - theirs.drawn)


def _drawn_joules(use: EnergyUse, seed: int) -> _Drawn | None:
    """Resamples windows, each off by up to the largest uncertainty; None if windows are too few or an uncertainty is
    unknown."""
    samples = np.log(energy_samples(use))
    known = [window.uncertainty for window in use.windows if window.uncertainty is not None]
    if len(samples) < LEAST_WINDOWS or len(known) < len(use.windows):
        return None
    random = np.random.default_rng(seed)
    drawn = random.choice(samples, stats.BOOTSTRAPS) + max(known) * random.uniform(-1, 1, stats.BOOTSTRAPS)
    return _Drawn(float(np.median(samples)), drawn)


def _log_steps(trained: JudgedTraining | None, arm: ArmVerdict | None) -> tuple[_Drawn | None, str]:
    """Returns how many times as many steps the arm takes to the same loss, over resampled seeds; or None and why."""
    if trained is None or arm is None:
        return None, "no training had an arm in it" if trained is not None else "no training was named (--training)"
    if arm.judged.learned in _NO_LOSS:
        return None, f"it never comes to that loss: {arm.judged.learned}"
    if len(arm.pairs) < LEAST_PAIRS:
        return None, f"{LEAST_PAIRS} seeds are needed, and there are {len(arm.pairs)}"
    curves = trained.curves
    pairs = [(curves[trained.verdicts.reference, pair.seed], curves[arm.arm.name, pair.seed]) for pair in arm.pairs]

    @cache
    def of(chosen: tuple[int, ...]) -> float | None:
        return log_steps([pairs[place] for place in chosen])

    drawn = _drawn_seeds(of, len(pairs))
    return drawn, "" if drawn else "it is not known how many steps its loss takes: too far from its reference's"


def _drawn_seeds(of: Callable[[tuple[int, ...]], float | None], count: int) -> _Drawn | None:
    """Resamples a figure over seeds, widened to what so few seeds say; None if it is unknown for any of them. `of`
    is above 0 for fewer steps; what is returned is above 0 for more."""
    point = of(tuple(range(count)))
    draws = np.sort(np.random.default_rng(2).integers(0, count, (stats.BOOTSTRAPS, count)), axis=1)
    values = [of(tuple(row)) for row in draws.tolist()]
    known = np.array([value for value in values if value is not None and math.isfinite(value)])
    if point is None or not math.isfinite(point) or len(known) < len(values):
        return None
    wider = quantile(SHOWN, count - 1) / _NORMAL * math.sqrt(count / (count - 1))
    return _Drawn(-point, -point - wider * (known - point))
