"""Turns answers of the checklist into advice: adopt a precision, adopt it for some layers, or do nothing. Each piece
of advice has a reason.

Advice on emulated cases makes no statement about speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fp8bench import units
from fp8bench.features.advise.basis import (
    AdviceBasis,
    ComparedCase,
    compare_with_minimum,
    describe_time_doubts,
    dtype_option,
    show_gain,
)
from fp8bench.features.advise.rules import ADVICE_RULES, compute_amdahl_bound, find_layer_trial, find_study
from fp8bench.features.advise.serving import advise_on_serving
from fp8bench.features.advise.values import Advice, AdviceKind, AdviceResult, AdviceRuleOutcome, RuleAnswer
from fp8bench.features.sensitivity.study import format_map
from fp8bench.model import Interval, Verdict
from fp8bench.report.panels import together

AnswersByRule = Mapping[str, RuleAnswer]
# Rules whose "no" is an objection to a precision, in the order in which objections are listed.
_OBJECTION_RULE_NAMES = ("learns", "errors", "amdahl", "casts", "coverage")
# A "no" to one of these rules excludes a precision, however fast it is. The texts describe this "no".
_OBJECTION_TEXT_BY_RULE = {"learns": "it does not learn as well", "errors": "its errors are too large"}
_ADVICE_KIND_ORDER = list(AdviceKind)
# If a step is faster by this factor than Amdahl's law allows, the step and its reference did different work.
_SPEED_UP_BOUND_TOLERANCE = 1.02


def advise(basis: AdviceBasis) -> AdviceResult:
    # 1. Apply every rule to every case. A rule returns None if its question does not apply.
    answers = []
    for pair in basis.cases:
        advice_rule_answers = [rule.answer(pair, basis) for rule in ADVICE_RULES]
        answers += [reply for reply in advice_rule_answers if reply is not None]
    # 2. List advice on serving first, then advice on steps with the largest gain first.
    advice: list[Advice] = []
    for serving_answer in basis.serving_answers:
        advice += advise_on_serving(serving_answer)
    advice.sort(key=lambda piece: _ADVICE_KIND_ORDER.index(piece.kind))
    advice += sorted(_advise_on_steps(basis, answers), key=_advice_sort_key)
    return AdviceResult(basis.run.id, tuple(advice), tuple(answers), basis.min_gain)


def _advice_sort_key(advice: Advice) -> tuple[int, float]:
    # Advice without a gain comes last among advice of the same kind.
    return _ADVICE_KIND_ORDER.index(advice.kind), -advice.gain.point if advice.gain is not None else math.inf


def _advise_on_steps(basis: AdviceBasis, answers: Sequence[RuleAnswer]) -> tuple[Advice, ...]:
    """Returns the advice on all cases. Advice without a gain appears once if it is the same for several settings."""
    answers_by_setting_and_mode = together(((answer.setting, answer.mode), answer) for answer in answers)
    advice_by_key: dict[tuple[object, ...], Advice] = {}
    for pair in basis.cases:
        answer_by_rule = {
            answer.rule: answer for answer in answers_by_setting_and_mode.get((pair.record.case.setting, pair.mode), ())
        }
        for advice in (_advise_on_speed(pair, basis, answer_by_rule), *_advise_on_layers(pair, basis, answer_by_rule)):
            # A gain belongs to one setting, so advice with a gain is not merged with that for other settings.
            advice_merge_key = (advice.kind, advice.mode, advice.sentence, advice.settings if advice.gain else ())
            merged_advice = advice_by_key.get(advice_merge_key, advice)
            settings = dict.fromkeys((*merged_advice.settings, *advice.settings))
            advice_by_key[advice_merge_key] = replace(merged_advice, settings=tuple(settings))
    return tuple(advice_by_key.values())


def _make_advice(
    pair: ComparedCase,
    rule: str,
    kind: AdviceKind,
    sentence: str,
    answers: Sequence[RuleAnswer],
    gain: Interval | None = None,
) -> Advice:
    case = pair.record.case
    reference = pair.reference.case.mode if pair.reference is not None else ""
    advice_grounds = dict.fromkeys(advice_ground for answer in answers for advice_ground in answer.grounds)
    sentence += describe_time_doubts(pair) if pair.speed is not None else ""
    recipe = f"--dtypes {reference},{dtype_option(case)}" if kind is not AdviceKind.CHANGE_NOTHING else ""
    is_gain_doubtful = gain is not None and pair.finding is not None and pair.finding.doubtful
    return Advice(
        rule,
        kind,
        case.mode,
        reference,
        sentence,
        (case.setting,),
        recipe,
        gain,
        tuple(advice_grounds),
        is_gain_doubtful,
    )


def _advise_on_speed(pair: ComparedCase, basis: AdviceBasis, answers: AnswersByRule) -> Advice:
    mode = pair.mode
    support = pair.record.support
    step = answers["step"]
    native_rule_answers = [answers["native"]]
    # 1. Give no advice on speed if the case is emulated or was not timed.
    if not support.is_native:
        reason = f" ({support.reason})" if support.reason else ""
        sentence = f"no advice on the speed of {mode}: it is {support.level} here{reason}, so its time shows no speed"
        return _make_advice(pair, "native", AdviceKind.CHANGE_NOTHING, sentence, native_rule_answers)
    if pair.speed is None or pair.finding is None:
        sentence = f"no advice on {mode}, whose speed is unknown here: {step.figure}"
        return _make_advice(pair, "step", AdviceKind.CHANGE_NOTHING, sentence, native_rule_answers)
    # 2. Give no advice if the speed-up is larger than possible: then case and reference do different work.
    objecting_answers = [
        answers[rule] for rule in _OBJECTION_RULE_NAMES if rule in answers and answers[rule].met is AdviceRuleOutcome.NO
    ]
    speed_up_bound = compute_amdahl_bound(pair)
    if speed_up_bound is not None and pair.speed.low > _SPEED_UP_BOUND_TOLERANCE * speed_up_bound.high:
        sentence = (
            f"no advice on {mode}: its step is {show_gain(pair.speed)} as fast, but its precision allows at most "
            f"{show_gain(speed_up_bound)}, so the two steps differ in something else"
        )
        return _make_advice(pair, "amdahl", AdviceKind.CHANGE_NOTHING, sentence, [step, *objecting_answers])
    # 3. Adopt the precision: its step is certainly faster by a worthwhile gain, and no rule objects.
    is_faster = pair.finding.verdict is Verdict.FASTER
    decisive_objections_text = " and ".join(
        _OBJECTION_TEXT_BY_RULE[answer.rule] for answer in objecting_answers if answer.rule in _OBJECTION_TEXT_BY_RULE
    )
    if (
        is_faster
        and not decisive_objections_text
        and compare_with_minimum(pair.speed, 1 + basis.min_gain) is AdviceRuleOutcome.YES
    ):
        sentence = _describe_speed_gain(pair, answers)
        supporting_rule_answers = [answers[rule] for rule in ("amdahl", "casts", "memory", "learns") if rule in answers]
        return _make_advice(
            pair, "step", AdviceKind.ADOPT_PRECISION, sentence, [step, *supporting_rule_answers], pair.speed
        )
    # 4. Otherwise do nothing, with the reason: the step is slower, gains too little, or its gain is unclear.
    if pair.finding.verdict is Verdict.SLOWER and pair.reference is not None:
        sentence = f"keep {pair.reference.case.mode}: {mode} {_describe_slowness(pair)}"
    elif is_faster and not decisive_objections_text:
        min_gain_text = units.percent(basis.min_gain, 0)
        sentence = (
            f"do not adopt {mode} yet: {show_gain(pair.speed)} may be below the {min_gain_text} that make it worthwhile"
        )
    else:
        reason = f", and {decisive_objections_text}" if is_faster else f": {pair.finding.verdict_words}"
        advice = "no advice on" if pair.finding.verdict is Verdict.UNSURE else "do not adopt"
        sentence = f"{advice} {mode}: its step is {show_gain(pair.speed)} as fast{reason}"
    for answer in objecting_answers:
        # Make the question a clause: a small first letter, and no question mark.
        sentence += f"; {answer.question[0].lower()}{answer.question[1:-1]}: no, {answer.figure}"
    rule = objecting_answers[0].rule if objecting_answers else "step"
    return _make_advice(pair, rule, AdviceKind.CHANGE_NOTHING, sentence, [step, *objecting_answers], pair.speed)


def _describe_slowness(pair: ComparedCase) -> str:
    """Returns a text such as 'takes 1.57 times as long (0.639x)'."""
    assert pair.speed is not None and pair.finding is not None
    ratio = 1 / pair.speed.point
    slow_down_text = (
        f"{units.format_significant_digits(ratio)} times as long"
        if ratio >= 1.5
        else f"{units.percent(ratio - 1, 0)} longer"
    )
    return f"{'perhaps ' * pair.finding.doubtful}takes {slow_down_text} ({show_gain(pair.speed)})"


def _describe_speed_gain(pair: ComparedCase, answers: AnswersByRule) -> str:
    assert pair.speed is not None and pair.finding is not None and pair.reference is not None
    sentence = f"adopt {pair.mode}: the step is {show_gain(pair.speed)} as fast as in {pair.reference.case.mode}"
    sentence = "perhaps " * pair.finding.doubtful + sentence
    sentence += f"; {answers['errors'].figure}"
    memory_answer = answers["memory"]
    training_quality_answer = answers.get("learns")
    if memory_answer.met is AdviceRuleOutcome.NO:
        sentence += f"; it saves no memory ({memory_answer.figure})"
    if training_quality_answer is None:
        return sentence
    if training_quality_answer.met is AdviceRuleOutcome.YES:
        return f"{sentence}; it learns as well ({training_quality_answer.figure})"
    if training_quality_answer.met is AdviceRuleOutcome.TOLERATED:
        return f"{sentence}; its loss is {training_quality_answer.figure}"
    command = f": {training_quality_answer.measure}" if training_quality_answer.measure else ""
    return f"{sentence}; whether it learns as well is {training_quality_answer.met}{command}"


def _advise_on_layers(pair: ComparedCase, basis: AdviceBasis, answers: AnswersByRule) -> Iterator[Advice]:
    """Yields advice to keep some layers in high precision. It comes from a sensitivity study in which the loss is too
    high with this case's layers in low precision.
    """
    layer_rule_answer = answers.get("layers")
    study = find_study(pair, basis)
    suggested_map_trial = study.suggestion if study is not None else None
    if (
        layer_rule_answer is None
        or layer_rule_answer.met is not AdviceRuleOutcome.NO
        or study is None
        or suggested_map_trial is None
    ):
        return
    # Name the layers that the measured map has in low precision, but the suggested map has not.
    measured_trial = find_layer_trial(pair, study)
    high_layers_text = ", ".join(sorted({*measured_trial.low} - {*suggested_map_trial.low})) or "what the map names"
    loss_gaps = (study.gap(suggested_map_trial), study.gap(measured_trial))
    suggested_loss_text, measured_loss_text = ("unknown" if gap is None else units.change(1 + gap) for gap in loss_gaps)
    precision_map_option = f"--precision-map {format_map(study.explicit_map(suggested_map_trial))}"
    sentence = f"route: use {pair.mode}, but leave {high_layers_text} in {study.reference}; "
    sentence += f"the loss is then {suggested_loss_text} instead of {measured_loss_text}: {precision_map_option}"
    advice = _make_advice(pair, "layers", AdviceKind.ROUTE_LAYERS, sentence, [layer_rule_answer])
    yield replace(advice, recipe=f"--dtypes {advice.reference},{pair.record.case.precision} {precision_map_option}")
