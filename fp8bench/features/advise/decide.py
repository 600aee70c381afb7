"""Turns the checklist's answers into advice: adopt, route, or do nothing, with the reason. Emulated cases get no
statement about speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fp8bench import units
from fp8bench.features.advise.basis import Basis, ComparedCase, doubts, dtype_words, gain_text, met_above
from fp8bench.features.advise.rules import RULES, bound_of, study_of, tried_as
from fp8bench.features.advise.serving import serving_advice
from fp8bench.features.advise.values import Advice, AdviceKind, Advised, Met, RuleAnswer
from fp8bench.features.sensitivity.study import as_words
from fp8bench.model import Interval, Verdict
from fp8bench.report.panels import together

Answers = Mapping[str, RuleAnswer]
# Rules whose "no" counts against a precision, in the order in which reasons are listed.
_AGAINST = ("learns", "errors", "amdahl", "casts", "coverage")
# Questions whose "no" no speed compensates for, with its meaning.
_SPOILING = {"learns": "it does not learn as well", "errors": "its errors are too large"}
_ORDER = list(AdviceKind)
# A step this many times faster than Amdahl's law allows was a different step.
_BEYOND = 1.02


def advise(basis: Basis) -> Advised:
    # 1. Apply every rule to every case; a rule returns None if its question does not apply.
    answers: list[RuleAnswer] = []
    for pair in basis.cases:
        replies = [rule.answer(pair, basis) for rule in RULES]
        answers += [reply for reply in replies if reply is not None]
    # 2. List advice on serving first, then that on steps, the largest gain first.
    advice: list[Advice] = []
    for served in basis.served:
        advice += serving_advice(served)
    advice.sort(key=lambda piece: _ORDER.index(piece.kind))
    advice += sorted(_advice_of(basis, answers), key=_importance)
    return Advised(basis.run.id, tuple(advice), tuple(answers), basis.least)


def _importance(advice: Advice) -> tuple[int, float]:
    return _ORDER.index(advice.kind), -advice.gain.point if advice.gain is not None else math.inf


def _advice_of(basis: Basis, answers: Sequence[RuleAnswer]) -> tuple[Advice, ...]:
    """Returns the advice; advice without a gain that is equal for several settings appears once."""
    by_case = together(((answer.setting, answer.mode), answer) for answer in answers)
    merged: dict[tuple[object, ...], Advice] = {}
    for pair in basis.cases:
        by_rule = {answer.rule: answer for answer in by_case.get((pair.record.case.setting, pair.mode), ())}
        for advice in (_advise_on_speed(pair, basis, by_rule), *_route(pair, basis, by_rule)):
            settings = advice.settings if advice.gain is not None else ()
            key = (advice.kind, advice.mode, advice.sentence, settings)
            previous = merged.get(key, advice)
            merged[key] = replace(previous, settings=tuple(dict.fromkeys((*previous.settings, *advice.settings))))
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
    reference = pair.reference.case.mode if pair.reference is not None else ""
    grounds = dict.fromkeys(ground for answer in answers for ground in answer.grounds)
    words += doubts(pair) if pair.speed is not None else ""
    recipe = f"--dtypes {reference},{dtype_words(case)}" if kind is not AdviceKind.NOTHING else ""
    doubtful = gain is not None and pair.finding is not None and pair.finding.doubtful
    return Advice(rule, kind, case.mode, reference, words, (case.setting,), recipe, gain, tuple(grounds), doubtful)


def _advise_on_speed(pair: ComparedCase, basis: Basis, answers: Answers) -> Advice:
    mode, support, step, native = pair.mode, pair.record.support, answers["step"], [answers["native"]]
    # 1. Emulated or not timed: the step shows no speed.
    if not support.is_native:
        reason = f" ({support.reason})" if support.reason else ""
        words = f"no advice on the speed of {mode}: it is {support.level} here{reason}, so its time is not its speed"
        return _advice(pair, "native", AdviceKind.NOTHING, words, native)
    if pair.speed is None or pair.finding is None:
        return _advice(
            pair,
            "step",
            AdviceKind.NOTHING,
            f"no advice on {mode}: its speed is unknown here: {step.figure}",
            native,
        )
    # 2. Faster than possible: the two steps differ, so no advice can be based on them.
    against = [answers[rule] for rule in _AGAINST if rule in answers and answers[rule].met is Met.NO]
    bound = bound_of(pair)
    if bound is not None and pair.speed.low > _BEYOND * bound.high:
        words = (
            f"no advice on {mode}: its step is {gain_text(pair.speed)} as fast, but its precision allows at most "
            f"{gain_text(bound)}, so the two steps differ in something else"
        )
        return _advice(pair, "amdahl", AdviceKind.NOTHING, words, [step, *against])
    # 3. Certainly faster by a worthwhile gain, and without an objection: adopt.
    faster = pair.finding.verdict is Verdict.FASTER
    spoiled = " and ".join(_SPOILING[answer.rule] for answer in against if answer.rule in _SPOILING)
    if faster and not spoiled and met_above(pair.speed, 1 + basis.least) is Met.YES:
        supporting = [answers[rule] for rule in ("amdahl", "casts", "memory", "learns") if rule in answers]
        return _advice(pair, "step", AdviceKind.ADOPT, _describe_gain(pair, answers), [step, *supporting], pair.speed)
    # 4. Slower, too little gain, or unclear: do nothing, with the reason.
    if pair.finding.verdict is Verdict.SLOWER and pair.reference is not None:
        words = f"keep {pair.reference.case.mode}: {mode} {_describe_slowness(pair)}"
    elif faster and not spoiled:
        least = units.percent(basis.least, 0)
        words = f"do not adopt {mode} yet: {gain_text(pair.speed)} may be less than the {least} that make it worthwhile"
    else:
        why = f"and {spoiled}" if faster else pair.finding.verdict_words
        join = ", " if faster else ": "
        advice = "no advice on" if pair.finding.verdict is Verdict.UNSURE else "do not adopt"
        words = f"{advice} {mode}: its step is {gain_text(pair.speed)} as fast{join}{why}"
    reasons = [f"{answer.question[0].lower()}{answer.question[1:-1]}: no, {answer.figure}" for answer in against]
    rule = against[0].rule if against else "step"
    return _advice(pair, rule, AdviceKind.NOTHING, "; ".join([words, *reasons]), [step, *against], pair.speed)


def _describe_slowness(pair: ComparedCase) -> str:
    """Returns for example 'perhaps takes 1.57 times as long (0.639x)'."""
    assert pair.speed is not None and pair.finding is not None
    ratio = 1 / pair.speed.point
    longer = f"{units.significant(ratio)} times as long" if ratio >= 1.5 else f"{units.percent(ratio - 1, 0)} longer"
    return f"{'perhaps ' * pair.finding.doubtful}takes {longer} ({gain_text(pair.speed)})"


def _describe_gain(pair: ComparedCase, answers: Answers) -> str:
    assert pair.speed is not None and pair.finding is not None and pair.reference is not None
    words = f"adopt {pair.mode}: the step is {gain_text(pair.speed)} as fast as in {pair.reference.case.mode}"
    words = "perhaps " * pair.finding.doubtful + words
    words += f"; {answers['errors'].figure}"
    memory, learns = answers["memory"], answers.get("learns")
    if memory.met is Met.NO:
        words += f"; it saves no memory ({memory.figure})"
    if learns is not None and learns.met is Met.YES:
        words += f"; it learns as well ({learns.figure})"
    elif learns is not None and learns.met is Met.TOLERATED:
        words += f"; its loss is {learns.figure}"
    elif learns is not None:
        words += f"; whether it still learns is {learns.met}" + (f": {learns.measure}" if learns.measure else "")
    return words


def _route(pair: ComparedCase, basis: Basis, answers: Answers) -> Iterator[Advice]:
    """Yields which layers to keep in high precision according to a study, if the loss is too high with all layers
    low."""
    layers, study = answers.get("layers"), study_of(pair, basis)
    chosen = study.suggestion if study is not None else None
    if layers is None or layers.met is not Met.NO or study is None or chosen is None:
        return
    # The layers between the measured map and the one that the study suggests stay high.
    now = tried_as(pair, study)
    high_layers = ", ".join(sorted({*now.low} - {*chosen.low})) or "what the map names"
    gaps = (study.gap(chosen), study.gap(now))
    loss_after, loss_before = ("unknown" if gap is None else units.change(1 + gap) for gap in gaps)
    stated = as_words(study.stated_map(chosen))
    words = f"route: leave {high_layers} in {study.reference} with {pair.mode}; "
    words += f"the loss is then {loss_after} instead of {loss_before}: --precision-map {stated}"
    routed = _advice(pair, "layers", AdviceKind.ROUTE, words, [layers])
    recipe = f"--dtypes {routed.reference},{pair.record.case.precision} --precision-map {stated}"
    yield replace(routed, recipe=recipe)
