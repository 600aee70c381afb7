"""From the checklist's answers to advice: adopt, route, schedule, or do nothing, because.

What is predicted is what was measured, as wide as identical code differs there, and never above what Amdahl's law
leaves. Of an emulated case nothing is predicted at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.verdicts import BAND
from fp8bench.features.advise import cost_rules, shape_rules, speed_rules
from fp8bench.features.advise.basis import Basis, ComparedCase, Trained, doubts, mapped, met_above, times
from fp8bench.features.advise.cost_rules import arm_of, study_of, tried_as
from fp8bench.features.advise.serving_rules import serving_advice
from fp8bench.features.advise.shape_rules import pays_from, projections
from fp8bench.features.advise.speed_rules import bound_of, stage_of
from fp8bench.features.advise.values import Advice, AdviceKind, Advised, Answer, Ground, Met
from fp8bench.features.sensitivity.study import as_words
from fp8bench.features.train.verdicts.curves import Curve, Gap, curves_of, gap_of
from fp8bench.model import Interval, Level, Status, Verdict

Answers = Mapping[str, Answer]
# What stands against a precision, in the order in which it is told.
_AGAINST = ("learns", "amdahl", "casts", "shapes", "granularity", "stages", "coverage", "experts", "batch")
_ORDER = (AdviceKind.ADOPT, AdviceKind.ROUTE, AdviceKind.SCHEDULE, AdviceKind.NOTHING)
# A whole that is faster than its parts allow by so much was not what it is called.
_BEYOND = 1.02


def advice_of(basis: Basis, answers: Sequence[Answer]) -> tuple[Advice, ...]:
    by_case: dict[tuple[str, str], dict[str, Answer]] = {}
    for answer in answers:
        by_case.setdefault((answer.setting, answer.mode), {})[answer.rule] = answer
    found: list[Advice] = []
    for compared in basis.besides:
        here = by_case.get((compared.record.case.setting, compared.mode), {})
        found += [_of_speed(compared, basis, here), *_routed(compared, basis, here), *_scheduled(compared, basis, here)]
    return tuple(_merged(found))


def _merged(found: Sequence[Advice]) -> list[Advice]:
    """What is about no speed and says the same of several settings is said once."""
    merged: dict[tuple[object, ...], Advice] = {}
    for number, advice in enumerate(found):
        key = (advice.kind, advice.mode, advice.sentence, advice.precision_map) if advice.gain is None else (number,)
        before = merged.get(key, advice)
        merged[key] = replace(before, settings=tuple(dict.fromkeys((*before.settings, *advice.settings))))
    return list(merged.values())


def _advice(
    pair: ComparedCase, rule: str, kind: AdviceKind, words: str, answers: Sequence[Answer], gain: Interval | None = None
) -> Advice:
    case = pair.record.case
    reference = pair.lead.case.mode if pair.lead is not None else ""
    grounds = tuple(dict.fromkeys(ground for answer in answers for ground in answer.grounds))
    words += doubts(pair) if pair.speed is not None else ""
    recipe = f"--dtypes {reference},{case.mode}" if kind is not AdviceKind.NOTHING else ""
    return Advice(
        rule, kind, case.mode, reference, words, (case.setting,), recipe, gain=gain,
        case=case.id if gain is not None else "", grounds=grounds,
        doubtful=gain is not None and pair.finding is not None and pair.finding.doubtful,
    )  # fmt: skip


def predicted(pair: ComparedCase) -> Interval | None:
    """What this step will be seen to gain once more: between what its fastest and all its calls said, give and take
    what identical code differs by, and not above Amdahl's bound; None of what has no speed."""
    speed, bound = pair.speed, bound_of(pair)
    if speed is None or bound is None:
        return None
    floor = 1 + max(BAND, (pair.lead_finding.floor if pair.lead_finding is not None else None) or 0.0)
    typical = pair.finding.typical.inverse if pair.finding is not None and pair.finding.typical is not None else speed
    low, high = min(speed.low, typical.low), max(speed.high, typical.high)
    most = bound.point
    return Interval(min(speed.point, most), min(low / floor, most), min(high * floor, bound.high), speed.level)


def _of_speed(pair: ComparedCase, basis: Basis, answers: Answers) -> Advice:
    case, record = pair.record.case, pair.record
    gain = predicted(pair)
    native = [answers["native"]] if "native" in answers else []
    if record.support.level is not Level.NATIVE:
        words = f"do nothing about the speed of {case.mode}, because it is {record.support.level} here"
        reason = f" ({record.support.reason})" if record.support.reason else ""
        return _advice(pair, "native", AdviceKind.NOTHING, f"{words}{reason}: a step says nothing of its speed", native)
    if gain is None or pair.speed is None:
        why = answers["step"].figure if "step" in answers else "it was not measured"
        words = f"do nothing about {case.mode}, because its speed is not known here: {why}"
        return _advice(pair, "step", AdviceKind.NOTHING, words, native)
    against = [answers[rule] for rule in _AGAINST if rule in answers and answers[rule].met is Met.NO]
    step, bound = answers["step"], bound_of(pair)
    if bound is not None and pair.speed.low > _BEYOND * bound.high:
        words = (
            f"do nothing about {case.mode}, because its step is {times(pair.speed)} as fast, and what it may change "
            f"allows {times(bound)} at most: something else is not alike"
        )
        return _advice(pair, "amdahl", AdviceKind.NOTHING, words, [step, *against])
    worth = met_above(pair.speed, 1 + basis.least)
    faster = pair.finding is not None and pair.finding.verdict is Verdict.FASTER
    learns = answers.get("learns")
    spoiled = learns is not None and learns.met is Met.NO
    if faster and worth is Met.YES and not spoiled:
        supporting = [answers[rule] for rule in ("amdahl", "casts", "memory", "learns") if rule in answers]
        return _advice(pair, "step", AdviceKind.ADOPT, _adopted(pair, answers), [step, *supporting], gain)
    reasons = [f"{answer.question[0].lower()}{answer.question[1:-1]}: no, {answer.figure}" for answer in against]
    if faster and not spoiled:
        said = f"{times(pair.speed)} is not surely the {units.percent(basis.least, 0)} that are worth it"
    elif faster:
        said = f"its step is {times(pair.speed)} as fast, and it does not learn as well"
    else:
        said = f"its step is {times(pair.speed)} as fast: {pair.finding.verdict_words if pair.finding else ''}"
    words = f"do nothing about {case.mode}, because {said}"
    if pair.finding is not None and pair.finding.verdict is Verdict.SLOWER and pair.lead is not None:
        perhaps = "perhaps " if pair.finding.doubtful else ""
        ratio = 1 / pair.speed.point
        longer = (
            f"{units.significant(ratio)} times as long" if ratio >= 1.5 else f"{units.percent(ratio - 1, 0)} longer"
        )
        words = f"keep {pair.lead.case.mode}: {case.mode} {perhaps}takes {longer} ({times(pair.speed)})"
    words = "; ".join([words, *reasons])
    rule = against[0].rule if against else "step"
    return _advice(pair, rule, AdviceKind.NOTHING, words, [step, *against], gain)


def _adopted(pair: ComparedCase, answers: Answers) -> str:
    reference = pair.lead.case.mode if pair.lead is not None else ""
    words = f"adopt {pair.mode}: the step is {times(pair.speed)} as fast as in {reference}" if pair.speed else ""
    if pair.finding is not None and pair.finding.doubtful:
        words = f"perhaps {words}"
    memory, learns = answers.get("memory"), answers.get("learns")
    if memory is not None and memory.met is Met.NO:
        words += f"; it saves no memory ({memory.figure})"
    if learns is not None and learns.met is Met.YES:
        words += f"; it learns as well ({learns.figure})"
    elif learns is not None:
        words += f"; whether it still learns is {learns.met}" + (f": {learns.measure}" if learns.measure else "")
    return words


def _routed(pair: ComparedCase, basis: Basis, answers: Answers) -> Iterator[Advice]:
    layers, study = answers.get("layers"), study_of(pair, basis)
    chosen = study.suggested if study is not None else None
    if layers is not None and layers.met is Met.NO and study is not None and chosen is not None:
        now = tried_as(pair, study)
        kept = set(now.low) - set(chosen.low)
        gaps = (study.gap(chosen), study.gap(now))
        then, before = ("unknown" if gap is None else units.change(1 + gap) for gap in gaps)
        words = (
            f"route: leave {', '.join(sorted(kept)) or 'what the map names'} in {study.reference} with {pair.mode}; "
            f"the loss is then {then} instead of {before}"
        )
        gain = predicted(pair)
        if gain is not None:  # with some layers high a step gains between nothing and what it gains with all low
            gain = Interval(math.sqrt(gain.point), min(1.0, gain.low), max(1.0, gain.high), gain.level)
        found = _advice(pair, "layers", AdviceKind.ROUTE, words, [layers], gain)
        yield replace(
            found, precision_map=chosen.precision_map,
            recipe=f"{found.recipe} --precision-map {as_words(chosen.precision_map)}",
        )  # fmt: skip
    yield from _small(pair, basis)


def _small(pair: ComparedCase, basis: Basis) -> Iterator[Advice]:
    coverage = pair.record.coverage
    if coverage is None or not pair.timed or pair.lead is None:
        return
    known = pays_from(pair.mode, pair.record.case.device, basis)
    if isinstance(known, str) or not math.isfinite(known[0]):
        return
    begins, _, grounds = known
    held = {
        holder.name: max((each.m * each.n * each.k) ** (1 / 3) for each in holder.products)
        for holder in coverage.holders if holder.converted and holder.products
    }  # fmt: skip
    small = [name for name, size in held.items() if size < begins]
    if not small or len(small) == len(held):
        return
    share = sum(h.flops for h in coverage.holders if h.name in small) / coverage.flops
    case, reference = pair.record.case, pair.lead.case.mode
    gain, bound = predicted(pair), bound_of(pair)
    bounded = bound is not None and math.isfinite(bound.high)
    wider = replace(gain, high=max(gain.high, bound.high)) if gain is not None and bound and bounded else None
    words = (
        f"route: leave {len(small)} layers ({units.percent(share, 0)} of product FLOPs) in {reference}, whose products "
        f"are below the size that pays here ({units.whole(round(begins))}){doubts(pair)}"
    )
    kept = tuple((name, reference) for name in small)
    yield Advice(
        "shapes", AdviceKind.ROUTE, pair.mode, reference, words, (case.setting,),
        f"--dtypes {reference},{pair.mode} --precision-map {as_words(kept)}", kept, wider,
        case.id if wider is not None else "", (Ground(pair.row, words), *grounds), bool(doubts(pair)),
    )  # fmt: skip


def _scheduled(pair: ComparedCase, basis: Basis, answers: Answers) -> Iterator[Advice]:
    stages = answers.get("stages")
    reference = pair.lead.case.mode if pair.lead is not None else ""
    gains = {
        stage_of(each): each.speed for axis in ("pass", "stage") for each in (pair, *basis.differing(pair, axis))
        if each.speed is not None and stage_of(each)
    }  # fmt: skip
    paying = {name: speed for name, speed in gains.items() if met_above(speed, 1 + BAND) is Met.YES}
    if stages is not None and stages.met is Met.NO and paying and stage_of(pair) == next(iter(sorted(gains))):
        told = ", ".join(f"{name} ({times(speed)})" for name, speed in paying.items())
        words = f"schedule: take {pair.mode} for {told}, and {reference} for the rest ({stages.figure})"
        yield _advice(pair, "stages", AdviceKind.SCHEDULE, words, [stages])
    learns, arm = answers.get("learns"), arm_of(pair, basis)
    if learns is None or learns.met is not Met.NO or arm is None or basis.training is None:
        return
    harm = harm_of(basis.training, arm.arm.name)
    if harm is None:
        return
    first = round(harm.begins * harm.steps)
    words = (
        f"schedule: take {pair.mode} for the first {units.percent(harm.begins, 0)} of the steps ({first} of "
        f"{harm.steps}) and {reference} for the rest: up to there its loss is not surely above "
        f"{reference}'s, at the end it is ({units.change(1 + harm.gap.point)}); that it then recovers was not tried"
    )
    speed = predicted(pair) if pair.record.status is Status.OK else None
    # A step's mean speed-up where so many of them have it.
    gain = speed and mapped(speed, lambda value: 1 / (harm.begins / value + 1 - harm.begins))
    yield _advice(pair, "learns", AdviceKind.SCHEDULE, words, [learns], gain)


# A training is looked at in so many parts, each long enough to have a mean loss.
PARTS = 10
_LEAST_STEPS = 5 * PARTS


class Harm(NamedTuple):
    """An arm's loss lies surely above its reference's from this share of the steps on; the gap of the last part."""

    begins: float
    gap: Gap
    steps: int


def harm_of(trained: Trained, arm: str) -> Harm | None:
    """None where it does not, or no part before it is without: then no other time to begin is known."""
    training = trained.kept.training
    steps = training.request.steps
    if steps < _LEAST_STEPS:
        return None
    curves = curves_of(trained.kept.lines, steps)
    gaps = []
    for part in range(PARTS):  # of each seed that has both, the mean loss of that part over the reference's
        losses = [
            (_mean(own, part), _mean(curves[arm, seed], part))
            for (name, seed), own in curves.items() if name == trained.found.reference and (arm, seed) in curves
        ]  # fmt: skip
        above = [after / before - 1 for before, after in losses if math.isfinite(after) and before > 0]
        gaps += [gap_of(above)] if above else []
    sure = [gap is not None and gap.decides is not None and gap.decides.low > 0 for gap in gaps]
    if len(gaps) < PARTS or not sure[-1]:
        return None
    first = PARTS - 1
    while first and sure[first - 1]:
        first -= 1
    last = gaps[-1]
    return Harm(first / PARTS, last, steps) if first and last is not None else None


def _mean(curve: Curve, part: int) -> float:
    losses: Sequence[float] = curve.losses[curve.steps * part // PARTS : curve.steps * (part + 1) // PARTS]
    return math.fsum(losses) / len(losses) if losses and curve.whole else math.nan


# In the order of the checklist.
RULES = (*speed_rules.RULES, *shape_rules.RULES, *cost_rules.RULES)


def advised(basis: Basis) -> Advised:
    asked = (rule.answer(compared, basis) for compared in basis.besides for rule in RULES)
    answers = tuple(answer for answer in asked if answer is not None)
    # By kind, and what gives most first.
    ordered = sorted(
        (*advice_of(basis, answers), *projections(basis)),
        key=lambda projection: (
            _ORDER.index(projection.kind),
            -projection.gain.point if projection.gain is not None else math.inf,
        ),
    )
    of_serving = (advice for answer in basis.served for advice in serving_advice(answer))
    first = sorted(of_serving, key=lambda advice: _ORDER.index(advice.kind))
    return Advised(basis.run.id, (*first, *ordered), answers, basis.least)
