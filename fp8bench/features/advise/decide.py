"""Turns the checklist's answers into advice: adopt, route, schedule, or do nothing, because.

The predicted gain is what was measured, as wide as identical code differs here, and never above what Amdahl's law
leaves. Nothing is predicted of an emulated case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.verdicts import BAND
from fp8bench.features.advise import shape_rules
from fp8bench.features.advise.basis import Basis, ComparedCase, doubts, gain_text, mapped, met_above, typed
from fp8bench.features.advise.rules import COST_RULES, SPEED_RULES, arm_of, bound_of, stage_of, study_of, tried_as
from fp8bench.features.advise.shape_rules import pays_from, projections
from fp8bench.features.advise.values import Advice, AdviceKind, Advised, Ground, Met, RuleAnswer
from fp8bench.features.infer.values import ArmTimes, BatchGain, BatchSweep, ServingAnswer, word_of
from fp8bench.features.sensitivity.study import as_words
from fp8bench.features.train.verdicts.curves import Curve, Gap, gap_of
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.model import Interval, Level, Status, Verdict
from fp8bench.nn.served import ServedArm
from fp8bench.report.panels import together

Answers = Mapping[str, RuleAnswer]
# Rules whose "no" speaks against a precision, in the order in which they are given as reasons.
_AGAINST = ("learns", "amdahl", "casts", "shapes", "granularity", "stages", "coverage", "experts", "batch")
_ORDER = (AdviceKind.ADOPT, AdviceKind.ROUTE, AdviceKind.SCHEDULE, AdviceKind.NOTHING)
# A step that is so many times faster than Amdahl's law allows was not the same step.
_BEYOND = 1.02


def advice_of(basis: Basis, answers: Sequence[RuleAnswer]) -> tuple[Advice, ...]:
    """Advice without a gain that says the same of several settings is given once."""
    by_case = together(((answer.setting, answer.mode), answer) for answer in answers)
    advised: list[Advice] = []
    for pair in basis.cases:
        here = {answer.rule: answer for answer in by_case.get((pair.record.case.setting, pair.mode), ())}
        advised += [_of_speed(pair, basis, here), *_routed(pair, basis, here), *_scheduled(pair, basis, here)]
    merged: dict[tuple[object, ...], Advice] = {}
    for number, advice in enumerate(advised):
        key = (advice.kind, advice.mode, advice.sentence, advice.precision_map) if advice.gain is None else (number,)
        before = merged.get(key, advice)
        merged[key] = replace(before, settings=tuple(dict.fromkeys((*before.settings, *advice.settings))))
    return tuple(merged.values())


def _advice(
    pair: ComparedCase,
    rule: str,
    kind: AdviceKind,
    words: str,
    answers: Sequence[RuleAnswer],
    gain: Interval | None = None,
) -> Advice:
    case = pair.record.case
    reference = pair.lead.case.mode if pair.lead is not None else ""
    grounds = tuple(dict.fromkeys(ground for answer in answers for ground in answer.grounds))
    words += doubts(pair) if pair.speed is not None else ""
    recipe = f"--dtypes {reference},{typed(case)}" if kind is not AdviceKind.NOTHING else ""
    return Advice(
        rule, kind, case.mode, reference, words, (case.setting,), recipe, gain=gain,
        case=case.id if gain is not None else "", grounds=grounds,
        doubtful=gain is not None and pair.finding is not None and pair.finding.doubtful,
    )  # fmt: skip


def predicted(pair: ComparedCase) -> Interval | None:
    """Returns the gain that the step will show once more; None if it has no speed here. It lies between what its
    fastest and all its calls gave, widened by what identical code differs by, and not above Amdahl's bound."""
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
            f"do nothing about {case.mode}, because its step is {gain_text(pair.speed)} as fast, and what the "
            f"precision may change allows {gain_text(bound)} at most: something else is not alike"
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
        because = f"{gain_text(pair.speed)} is not surely the {units.percent(basis.least, 0)} that are worth it"
    elif faster:
        because = f"its step is {gain_text(pair.speed)} as fast, and it does not learn as well"
    else:
        because = f"its step is {gain_text(pair.speed)} as fast: {pair.finding.verdict_words if pair.finding else ''}"
    words = f"do nothing about {case.mode}, because {because}"
    if pair.finding is not None and pair.finding.verdict is Verdict.SLOWER and pair.lead is not None:
        perhaps, ratio = "perhaps " * pair.finding.doubtful, 1 / pair.speed.point
        longer = (
            f"{units.significant(ratio)} times as long" if ratio >= 1.5 else f"{units.percent(ratio - 1, 0)} longer"
        )
        words = f"keep {pair.lead.case.mode}: {case.mode} {perhaps}takes {longer} ({gain_text(pair.speed)})"
    words = "; ".join([words, *reasons])
    rule = against[0].rule if against else "step"
    return _advice(pair, rule, AdviceKind.NOTHING, words, [step, *against], gain)


def _adopted(pair: ComparedCase, answers: Answers) -> str:
    reference = pair.lead.case.mode if pair.lead is not None else ""
    words = f"adopt {pair.mode}: the step is {gain_text(pair.speed)} as fast as in {reference}" if pair.speed else ""
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
        routed = _advice(pair, "layers", AdviceKind.ROUTE, words, [layers], gain)
        stated = study.stated_map(chosen)
        recipe = f"--dtypes {routed.reference},{pair.record.case.precision} --precision-map {as_words(stated)}"
        yield replace(routed, precision_map=stated, recipe=recipe)
    yield from _small(pair, basis)


def _small(pair: ComparedCase, basis: Basis) -> Iterator[Advice]:
    coverage = pair.record.coverage
    if coverage is None or not pair.timed or pair.lead is None:
        return
    known = pays_from(pair.mode, pair.record.case.device, basis)
    if isinstance(known, str) or not math.isfinite(known[0]):
        return
    begins, _, grounds = known
    sizes = {
        holder.name: max((each.m * each.n * each.k) ** (1 / 3) for each in holder.products)
        for holder in coverage.holders if holder.converted and holder.products
    }  # fmt: skip
    small = [name for name, size in sizes.items() if size < begins]
    if not small or len(small) == len(sizes):
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
    kept = tuple({**dict(case.precision_map), **dict.fromkeys(small, reference)}.items())
    yield Advice(
        "shapes", AdviceKind.ROUTE, pair.mode, reference, words, (case.setting,),
        f"--dtypes {reference},{case.precision} --precision-map {as_words(kept)}", kept, wider,
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
        told = ", ".join(f"{name} ({gain_text(speed)})" for name, speed in paying.items())
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


# A training is divided into so many parts, each long enough for a mean loss.
PARTS = 10
_LEAST_STEPS = 5 * PARTS


class Harm(NamedTuple):
    """An arm's loss lies surely above its reference's from the share `begins` of the steps on; `gap` is that of the
    last part."""

    begins: float
    gap: Gap
    steps: int


def harm_of(trained: JudgedTraining, arm: str) -> Harm | None:
    """Returns None where an arm does no harm, or does it from the first part on: no other time to begin is known."""
    training = trained.kept.training
    steps = training.request.steps
    if steps < _LEAST_STEPS:
        return None
    curves = trained.curves
    gaps = []
    for part in range(PARTS):  # of each seed that has both, the mean loss of that part over the reference's
        losses = [
            (_mean(own, part), _mean(curves[arm, seed], part))
            for (name, seed), own in curves.items() if name == trained.verdicts.reference and (arm, seed) in curves
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


# Advice on serving follows: by answers of `infer`, from which context and below which batch to keep what low.
# A gain that costs more than this share of perplexity on the answer's model is none.
SPOILED = 0.01


def serving_advice(answer: ServingAnswer) -> Iterator[Advice]:
    if answer.sweep is not None:
        yield from (_of_batches(answer, answer.sweep, gain) for gain in answer.sweep.gains)
    yield from (_of_contexts(answer, times) for times in answer.times if times.arm != answer.question.arms[0])


def _serving(answer: ServingAnswer, rule: str, kind: AdviceKind, mode: str, words: str, recipe: str = "") -> Advice:
    question = answer.question
    setting = f"{question.size} on {answer.device}" + ("" if rule == "batch" else f", batch {question.batch}")
    ground = Ground(f"runs {', '.join(answer.runs)} of infer", words)
    return Advice(rule, kind, mode, _lead(answer), words, (setting,), recipe, grounds=(ground,))


def _lead(answer: ServingAnswer) -> str:
    return word_of(answer.question.arms[0])


def _judged(answer: ServingAnswer, rule: str, arm: ServedArm, where: str, because: str) -> Advice:
    """Advises to take the arm `where` it was timed to be faster, unless predictions suffer; to do nothing if that is
    ''."""
    name, quality = word_of(arm), answer.quality_of(arm)
    doing = f"quantise weights ({name})" if arm.weights and not arm.kv else f"take {name}"
    harm, spoils = "what it does to predictions is not known", False
    if quality is not None and answer.quality is not None:
        ratio = quality.log_perplexity
        low, high = (units.change(math.exp(end)) for end in (ratio.low, ratio.high))
        whose = ", ".join(filter(None, (answer.quality.model, answer.quality.caution)))
        harm = f"perplexity {units.change(math.exp(ratio.point))} [{low}, {high}], mean KL {quality.kl:.1e} beside a "
        harm += f"floor of {answer.quality.floor.kl:.0e} on {whose}"
        proven = not answer.quality.caution and ratio.low > math.log1p(SPOILED)
        spoils = proven or not math.isfinite(quality.kl)
    if where and not spoils:
        return _serving(answer, rule, AdviceKind.ADOPT, name, f"{doing} {where}: {because}; {harm}", f"--arms {name}")
    reason = f"predictions suffer ({harm}), though {because}" if where else because
    return _serving(answer, rule, AdviceKind.NOTHING, name, f"do nothing about {name}, because {reason}")


def _of_batches(answer: ServingAnswer, sweep: BatchSweep, gain: BatchGain) -> Advice:
    product, faster = "its product of {} x {}".format(*sweep.layer), f"faster than in {_lead(answer)}"
    span = f"{sweep.rows[0]} to {sweep.rows[-1]} rows"
    if gain.crossings:
        (rows, low, high, begins), last = gain.crossings[0], gain.crossings[-1]
        place = f"{rows:.0f} [{low:.0f}, {high:.0f}]"
        if not begins:
            where, because = f"below a batch of {low:.0f} rows", f"{product} is {faster} up to {place}"
        else:
            where, because = f"from a batch of {high:.0f} rows on", f"{product} is {faster} from {place}"
            where += "" if last[3] else f", up to {last[1]:.0f}"
        return _judged(answer, "batch", gain.arm, where, because)
    if gain.pays:
        return _judged(answer, "batch", gain.arm, f"at every batch of {span}", f"{product} is {faster}")
    sure = "surely " if gain.pays is None else ""
    return _judged(answer, "batch", gain.arm, "", f"at no batch of {span} is {product} {sure}{faster}")


def _of_contexts(answer: ServingAnswer, times: ArmTimes) -> Advice:
    lead, crossing = _lead(answer), times.crossing
    low, high = answer.question.contexts[0], answer.question.contexts[-1]
    if crossing is None:
        name, why = word_of(times.arm), times.why or "no line fits its times"
        words = f"do nothing about the speed of {name}, because it was not timed: {why}"
        return _serving(answer, "context", AdviceKind.NOTHING, name, words)
    if times.doubts:
        return _judged(answer, "context", times.arm, "", f"its times are labelled {', '.join(times.doubts)}")
    if crossing.at is not None:
        begins, ends = f"{crossing.low:.0f}", f"{crossing.high:.0f}"
        where = f"from a context of {ends} on" if crossing.faster[1] else f"up to {begins} tokens"
        because = f"its decode step crosses that of {lead} at {crossing.at:.0f} [{begins}, {ends}]"
        return _judged(answer, "context", times.arm, where, because)
    if crossing.faster == (True, True):
        where = f"at contexts of {low} to {high}"
        return _judged(answer, "context", times.arm, where, f"faster than {lead} throughout")
    first, last = ({True: "faster", False: "slower", None: "not told apart"}[faster] for faster in crossing.faster)
    because = f"its decode step is {first} at a context of {low} and {last} at {high}"
    return _judged(answer, "context", times.arm, "", f"{because}, against {lead}")


# The checklist, in order.
RULES = (*SPEED_RULES, *shape_rules.RULES, *COST_RULES)


def advised(basis: Basis) -> Advised:
    replies = (rule.answer(compared, basis) for compared in basis.cases for rule in RULES)
    answers = tuple(answer for answer in replies if answer is not None)
    # By kind, and the largest gain first.
    ordered = sorted(
        (*advice_of(basis, answers), *projections(basis)),
        key=lambda advice: (_ORDER.index(advice.kind), -advice.gain.point if advice.gain is not None else math.inf),
    )
    of_serving = (advice for answer in basis.served for advice in serving_advice(answer))
    first = sorted(of_serving, key=lambda advice: _ORDER.index(advice.kind))
    return Advised(basis.run.id, (*first, *ordered), answers, basis.least)
