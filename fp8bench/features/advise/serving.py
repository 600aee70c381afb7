"""Advice on serving from answers of `infer`: from which context on to use low precision, and for what."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fp8bench import units
from fp8bench.features.advise.values import Advice, AdviceKind, Ground
from fp8bench.features.infer.values import ArmTimes, ServingAnswer, word_of
from fp8bench.nn.served import ServedArm

# A gain that raises perplexity by more than this share on the answer's model does not count.
SPOILED = 0.01


def serving_advice(answer: ServingAnswer) -> Iterator[Advice]:
    yield from (_advise_on_contexts(answer, times) for times in answer.times if times.arm != answer.question.arms[0])


def _make_advice(answer: ServingAnswer, kind: AdviceKind, mode: str, words: str, recipe: str = "") -> Advice:
    question = answer.question
    setting = f"{question.size} on {answer.device}, batch {question.batch}"
    ground = Ground(f"runs {', '.join(answer.runs)} of infer", words)
    return Advice("context", kind, mode, _reference_name(answer), words, (setting,), recipe, grounds=(ground,))


def _reference_name(answer: ServingAnswer) -> str:
    return word_of(answer.question.arms[0])


def _weigh_quality(answer: ServingAnswer, arm: ServedArm, where: str, because: str) -> Advice:
    """Advises to adopt the arm `where` it was faster, unless predictions suffer; to do nothing if `where` is ''."""
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
        return _make_advice(answer, AdviceKind.ADOPT, name, f"{doing} {where}: {because}; {harm}", f"--arms {name}")
    reason = f"predictions suffer ({harm}), though {because}" if where else because
    return _make_advice(answer, AdviceKind.NOTHING, name, f"do not adopt {name}: {reason}")


def _advise_on_contexts(answer: ServingAnswer, times: ArmTimes) -> Advice:
    reference, crossing = _reference_name(answer), times.crossing
    low, high = answer.question.contexts[0], answer.question.contexts[-1]
    # 1. Not timed, or timed with doubts.
    if crossing is None:
        name, reason = word_of(times.arm), times.why or "no line fits its times"
        return _make_advice(
            answer,
            AdviceKind.NOTHING,
            name,
            f"no advice on the speed of {name}: it was not timed: {reason}",
        )
    if times.doubts:
        return _weigh_quality(answer, times.arm, "", f"its times are labelled {', '.join(times.doubts)}")
    # 2. The times cross: the advice holds from there on, or up to there.
    if crossing.at is not None:
        begins, ends = f"{crossing.low:.0f}", f"{crossing.high:.0f}"
        where = f"from a context of {ends} on" if crossing.faster[1] else f"up to {begins} tokens"
        return _weigh_quality(
            answer,
            times.arm,
            where,
            f"its decode step crosses that of {reference} at {crossing.at:.0f} [{begins}, {ends}]",
        )
    # 3. Faster at all measured contexts.
    if crossing.faster == (True, True):
        return _weigh_quality(
            answer, times.arm, f"at contexts of {low} to {high}", f"faster than {reference} throughout"
        )
    # 4. Slower, or unclear at one end: no reason to change.
    first, last = ({True: "faster", False: "slower", None: "not told apart"}[faster] for faster in crossing.faster)
    because = f"its decode step is {first} at a context of {low} and {last} at {high}"
    return _weigh_quality(answer, times.arm, "", f"{because}, against {reference}")
