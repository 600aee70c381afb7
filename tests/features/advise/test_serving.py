"""Advice from answers of `infer`: planted lines, and how they come from a store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.features.advise.basis import AdviceBasis
from fp8bench.features.advise.decide import advise
from fp8bench.features.advise.job import collect_advice_basis
from fp8bench.features.advise.serving import advise_on_serving
from fp8bench.features.advise.values import Advice, AdviceKind
from fp8bench.features.infer.values import (
    ArmQuality,
    ArmTimes,
    ContextCrossing,
    ServingAnswer,
    ServingQuality,
    ServingQuestion,
    open_serving_answer_log,
)
from fp8bench.model import Interval
from fp8bench.nn.served import ServedArm as Arm
from tests.advised import FP8, group, run
from tests.commands import Say
from tests.counts import for_each

ADOPT, _, NOTHING = AdviceKind
LEAD, INT8, FP8_KV = Arm("fp32"), Arm("bf16", "", "int8"), Arm("bf16", "fp8")


def quality(kl: float, harm: float = 0.0) -> ArmQuality:
    ratio = Interval(harm, harm - 1e-3, harm + 1e-3, 0.95)
    return ArmQuality(kl, 10 * kl, 0.99, ratio, 16.0)


def answer(**more: object) -> ServingAnswer:
    question = ServingQuestion("nano", (LEAD, INT8, FP8_KV), (128, 512, 1024, 2048), 1, True, 1024)
    known = ServingQuality("nano-python", 1024, 6.0, quality(0), quality(4e-13), (quality(2e-4), quality(2e-3)))
    return replace(ServingAnswer(question, "cpu", (), 128, known, runs=("12345678", "9abcdef0")), **more)  # type: ignore[arg-type]


def only(given: ServingAnswer) -> Advice:
    (advice,) = advise_on_serving(given)
    return advice


def test_a_speed_up_that_spoils_predictions_is_not_advised() -> None:
    known = answer().quality
    assert known is not None
    spoiled = replace(known, arms=(quality(2e-2, 0.03), known.arms[1]))
    times = ArmTimes(LEAD), ArmTimes(INT8, crossing=ContextCrossing(None, 128, 2048, (True, True)))
    advice = only(answer(times=times, quality=spoiled))
    assert advice.kind is NOTHING and "predictions suffer (perplexity +3.0%" in advice.sentence
    caution = replace(spoiled, caution="random weights: arithmetic only")
    assert only(answer(times=times, quality=caution)).kind is ADOPT


@for_each(
    ("times", "kind", "words"),
    [
        (ArmTimes(FP8_KV, why="restored"), NOTHING, "no advice on the speed of kv=fp8, which was not timed: restored"),
        (
            ArmTimes(FP8_KV, ((128, 1e-3),), why="at a context of 512: lost"),
            NOTHING,
            "no advice on the speed of kv=fp8, which was not timed at every context: at a context of 512: lost",
        ),
        (
            ArmTimes(FP8_KV, crossing=ContextCrossing(7000.0, 6500.0, 7600.0, (False, True))),
            ADOPT,
            "take kv=fp8 from a context of 7600 on: its decode step crosses that of fp32 at 7000 [6500, 7600]",
        ),
        (
            ArmTimes(FP8_KV, crossing=ContextCrossing(700.0, 650.0, 760.0, (True, False))),
            ADOPT,
            "take kv=fp8 up to 650 tokens",
        ),
        (
            ArmTimes(INT8, crossing=ContextCrossing(None, 128, 2048, (True, True))),
            ADOPT,
            "quantise weights (weights=int8) at contexts of 128 to 2048",
        ),
        (
            ArmTimes(FP8_KV, crossing=ContextCrossing(None, 128, 2048, (None, False))),
            NOTHING,
            "not adopt kv=fp8: its decode step is not told apart at a context of 128 and slower at 2048, against fp32",
        ),
        (
            ArmTimes(FP8_KV, crossing=ContextCrossing(700.0, 650.0, 760.0, (True, False)), doubts=("contended",)),
            NOTHING,
            "do not adopt kv=fp8: its times are labelled contended",
        ),
    ],
)
def test_advice_names_the_contexts_that_gain(times: ArmTimes, kind: AdviceKind, words: str) -> None:
    advice = only(answer(times=(ArmTimes(LEAD), times)))
    assert advice.kind is kind and words in advice.sentence, advice.sentence


def test_advice_on_serving_comes_first_and_is_read_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossing = ContextCrossing(700.0, 650.0, 760.0, (True, False))
    times = (ArmTimes(LEAD), ArmTimes(FP8_KV, crossing=crossing))
    whole = answer(times=times, experts=2.5)
    made = replace(run(group(fp8=FP8)), id="9abcdef0")
    log = open_serving_answer_log(tmp_path)
    log.append([whole, replace(whole, runs=("00000000",)), whole])
    assert log.lines() == ([whole, replace(whole, runs=("00000000",)), whole], [])
    with log.path.open("a") as file:
        file.write("{}\n")
    monkeypatch.setattr("fp8bench.features.advise.job.load_stored_run", lambda word, store: made)
    basis, troubles = collect_advice_basis("9abcdef0", tmp_path, None, 0.1)
    assert basis.serving_answers == (whole,) and len(troubles) == 1
    first, *rest = advise(basis).advice
    assert first.rule == "context" and rest == [*advise(replace(basis, serving_answers=())).advice]
    assert not AdviceBasis(made, {}).serving_answers


@pytest.mark.slow
def test_a_stored_infer_run_gives_advice(fp8bench: Say, store: Path) -> None:
    few = ("infer", "--quick", "--size", "nano-python", "--tokens", "256", "--arms", "kv=fp8,weights=int8")
    code, _, err = fp8bench(*few)
    assert code == 0, err
    code, out, err = fp8bench("advise", "last")
    assert code == 0 and "weights=int8" in out, err
    assert len(open_serving_answer_log(store).lines()[0]) == 1
