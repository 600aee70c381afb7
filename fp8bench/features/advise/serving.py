"""Gives advice on serving from answers of `infer`: from which context on to use low precision, and for what."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fp8bench import units
from fp8bench.features.advise.values import Advice, AdviceGround, AdviceKind
from fp8bench.features.infer.values import ArmTimes, ServingAnswer, format_arm
from fp8bench.nn.served import ServedArm

# A faster arm is not recommended if it increases the model's perplexity by more than this share.
MAX_PERPLEXITY_INCREASE = 0.01


def advise_on_serving(answer: ServingAnswer) -> Iterator[Advice]:
    yield from (
        _advise_on_context_lengths(answer, arm_times)
        for arm_times in answer.times
        if arm_times.arm != answer.question.arms[0]
    )


def _make_advice(answer: ServingAnswer, kind: AdviceKind, mode: str, sentence: str, recipe: str = "") -> Advice:
    question = answer.question
    setting_text = f"{question.size} on {answer.device}, batch {question.batch}"
    advice_ground = AdviceGround(f"runs {', '.join(answer.runs)} of infer", sentence)
    return Advice(
        "context",
        kind,
        mode,
        _format_reference_arm(answer),
        sentence,
        (setting_text,),
        recipe,
        grounds=(advice_ground,),
    )


def _format_reference_arm(answer: ServingAnswer) -> str:
    return format_arm(answer.question.arms[0])


def _advise_by_arm_quality(answer: ServingAnswer, arm: ServedArm, contexts: str, speed_reason: str) -> Advice:
    """Returns advice on an arm that was faster at the `contexts`: to adopt it there, unless its predictions suffer.
    If `contexts` is '', the arm was faster nowhere, and the advice is to do nothing.
    """
    name = format_arm(arm)
    quality = answer.arm_quality(arm)
    action_text = f"quantise weights ({name})" if arm.weights and not arm.kv else f"take {name}"
    # 1. Describe how the arm changes predictions, and decide whether it spoils them.
    quality_change = "its effect on predictions is not known"
    spoils_predictions = False
    if quality is not None and answer.quality is not None:
        ratio = quality.log_perplexity
        low, high = (units.change(math.exp(end)) for end in (ratio.low, ratio.high))
        quality_source = ", ".join(filter(None, (answer.quality.model, answer.quality.caution)))
        quality_change = (
            f"perplexity {units.change(math.exp(ratio.point))} [{low}, {high}], mean KL {quality.kl:.1e} next to a "
        )
        quality_change += f"floor of {answer.quality.floor.kl:.0e} on {quality_source}"
        # With random weights or tokens (`caution`), the perplexity shows only the effect of arithmetic.
        is_perplexity_increase_proven = not answer.quality.caution and ratio.low > math.log1p(MAX_PERPLEXITY_INCREASE)
        spoils_predictions = is_perplexity_increase_proven or not math.isfinite(quality.kl)
    # 2. Recommend the arm where it is faster, unless it spoils predictions.
    if contexts and not spoils_predictions:
        return _make_advice(
            answer,
            AdviceKind.ADOPT_PRECISION,
            name,
            f"{action_text} {contexts}: {speed_reason}; {quality_change}",
            f"--arms {name}",
        )
    reason = f"predictions suffer ({quality_change}), though {speed_reason}" if contexts else speed_reason
    return _make_advice(answer, AdviceKind.CHANGE_NOTHING, name, f"do not adopt {name}: {reason}")


def _advise_on_context_lengths(answer: ServingAnswer, times: ArmTimes) -> Advice:
    reference = _format_reference_arm(answer)
    crossing = times.crossing
    low = answer.question.contexts[0]
    high = answer.question.contexts[-1]
    # 1. Recommend no change if the arm was not timed, or if labels of its runs question its times.
    if crossing is None:
        name = format_arm(times.arm)
        reason = f": {times.why}" if times.why else ""
        contexts_text = " at every context" if times.tpot else ""
        text = f"no advice on the speed of {name}, which was not timed{contexts_text}{reason}"
        return _make_advice(answer, AdviceKind.CHANGE_NOTHING, name, text)
    if times.doubts:
        return _advise_by_arm_quality(answer, times.arm, "", f"its times are labelled {', '.join(times.doubts)}")
    # 2. If the times of arm and reference cross, recommend the arm where it is faster.
    if crossing.at is not None:
        # Inside the interval of the crossing either arm may be faster, so recommend only the contexts outside it.
        lower_text = f"{crossing.low:.0f}"
        upper_context_text = f"{crossing.high:.0f}"
        contexts_text = (
            f"from a context of {upper_context_text} on" if crossing.faster[1] else f"up to {lower_text} tokens"
        )
        return _advise_by_arm_quality(
            answer,
            times.arm,
            contexts_text,
            f"its decode step crosses that of {reference} at {crossing.at:.0f} [{lower_text}, {upper_context_text}]",
        )
    # 3. Recommend the arm at all contexts if it is faster at all measured ones.
    if crossing.faster == (True, True):
        return _advise_by_arm_quality(
            answer, times.arm, f"at contexts of {low} to {high}", f"faster than {reference} throughout"
        )
    # 4. Otherwise recommend no change: the arm is not certainly faster at both the shortest and the longest context.
    lowest_context_speed, highest_context_speed = (
        {True: "faster", False: "slower", None: "not told apart"}[faster] for faster in crossing.faster
    )
    reason_text = (
        f"its decode step is {lowest_context_speed} at a context of {low} and {highest_context_speed} at {high}"
    )
    return _advise_by_arm_quality(answer, times.arm, "", f"{reason_text}, against {reference}")
