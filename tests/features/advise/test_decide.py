"""From answers to advice: planted truths, and what no advice may ever do."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.features.advise.basis import Trained
from fp8bench.features.advise.cost_rules import costs_of
from fp8bench.features.advise.decide import advised, harm_of, predicted
from fp8bench.features.advise.speed_rules import bound_of
from fp8bench.features.advise.values import AdviceKind, Cost, Met
from fp8bench.features.advise.view import advice_elements
from fp8bench.features.train.values import KeptTraining, StreamLine
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.model import Interval, Label, Level, Phase, Share, ShareKind, Shares, Verdict
from fp8bench.model.step import Coverage
from fp8bench.report.elements import Items
from tests.advised import BF16, FP8, NANO, answer, basis, group, only, record, said
from tests.counts import for_each
from tests.energies import use
from tests.features.advise.test_rules import holder, model, squares, study
from tests.learning_curves import curve, held_out, lines, rows, training

ADOPT, ROUTE, SCHEDULE, NOTHING = AdviceKind


def test_a_step_that_gains_is_adopted() -> None:
    """7.6 ms instead of 10: it predicts what was measured, with its rows, and says what it does not know."""
    one = only(said(group(fp8=FP8)), ADOPT)
    assert one.gain is not None and one.gain.point == pytest.approx(10 / 7.6, rel=1e-3)
    assert one.gain.low < one.gain.point < one.gain.high and one.recipe == "--dtypes bf16,fp8"
    assert one.sentence.startswith("adopt fp8: the step is 1.32x as fast as in bf16")
    assert "whether it still learns is not measured here: fp8bench train --dtypes bf16,fp8" in one.sentence
    assert {ground.row for ground in one.grounds} == {f"{one.settings[0]}/bf16", one.case}


def test_what_all_calls_say_is_within_what_is_predicted() -> None:
    """A step whose fastest calls are 1.32x as fast, and all calls 1.1x to 1.2x: either may be seen once more.

    Where they contradict each other beyond the noise, all calls count.
    """
    made = basis(group(fp8=FP8))
    (case,) = (key for key in made.findings if key.endswith("/fp8"))
    uneven = replace(made.findings[case], typical=Interval(1 / 1.15, 1 / 1.2, 1 / 1.1, 0.99))
    (one,) = replace(made, findings={**made.findings, case: uneven}).besides
    labelled = replace(uneven, labels=(Label.UNEVEN,))
    (other,) = replace(made, findings={**made.findings, case: labelled}).besides
    assert other.speed is not None and other.speed.point == pytest.approx(1.15)
    gain = predicted(one)
    assert gain is not None and gain.low < 1.1 < gain.point < gain.high
    assert gain.point == pytest.approx(1.316, rel=0.01)


def test_products_that_are_a_tenth_of_the_step_are_left() -> None:
    small = {"gemm": 1000, "optimizer_step": 5000, "elementwise": 4000}
    one = only(said(group(bf16=small, fp8={**small, "cast": 50, "gemm": 500})), NOTHING)
    assert one.rule == "amdahl" and one.gain is not None and 1.04 < one.gain.point < 1.05
    assert "is not surely the 10% that are worth it; do its products take enough of the step: no, 10%" in one.sentence


def test_casts_that_eat_the_gain_are_named() -> None:
    one = only(said(group(fp8={**FP8, "cast": 4000})), NOTHING)
    assert one.rule == "casts" and "keep bf16: fp8 takes 10% longer (0.909x); do casts leave what" in one.sentence


def test_what_is_worth_it_is_a_persons_own_choice() -> None:
    """A gain of 32%."""
    only(said(group(fp8=FP8), least=0.3), ADOPT)
    only(said(group(fp8=FP8), least=0.4), NOTHING)


def test_an_emulated_precision_has_no_advice_on_speed() -> None:
    """However fast it seems, in several settings once."""
    quick = {**BF16, "gemm": 1}
    groups = [group({**NANO, "batch": batch}, level=Level.EMULATED, fp8=quick) for batch in (1, 2)]
    found = said(*groups)
    (one,) = found.advice
    assert (one.kind, one.rule, one.gain, one.recipe, one.case) == (NOTHING, "native", None, "", "")
    assert len(one.settings) == 2
    assert one.sentence.startswith("do nothing about the speed of fp8, because it is emulated")


def test_a_label_casts_doubt_and_a_hard_one_forbids() -> None:
    """What is not judged is not known."""
    made = basis(group(fp8=FP8))
    (case,) = (key for key in made.findings if key.endswith("/fp8"))
    unsure = replace(made.findings[case], verdict=Verdict.UNSURE, ratio=None, why="it was throttled")
    one = only(advised(replace(made, findings={**made.findings, case: unsure})), NOTHING)
    assert one.gain is None and "its speed is not known here" in one.sentence


def test_faster_than_its_parts_allow_is_not_believed() -> None:
    """The optimizer, which no product is, took three quarters of the time less: by the tape it is not fp8's doing."""
    one = only(said(group(fp8={**FP8, "optimizer_step": 100, "elementwise": 100, "gemm": 2000, "cast": 1})), NOTHING)
    assert one.rule == "amdahl" and "something else is not alike" in one.sentence and one.gain is None


@for_each("micros", [9000, 5000])
def test_a_model_as_it_came_gains_no_more_than_what_multiplies_allows(micros: int) -> None:
    """Products are 7% of it, by the pass that looked: at most 1.075x, and a step in half the time is not believed."""
    lead, case = group(bf16={"unattributed": 10_000}, fp8={"unattributed": micros})
    looked = replace(lead, shares=Shares((Share(ShareKind.GEMM, "", False, 0.07, 1),), 1.0))
    (one,) = basis([looked, case]).besides
    bound, gain = bound_of(one), predicted(one)
    assert bound is not None and bound.point == pytest.approx(1 / 0.93) and gain is not None
    assert gain.low <= gain.point <= gain.high <= bound.high
    found = only(said([looked, case]), NOTHING)
    assert (
        found.gain is None and "what it may change allows 1.08x at most: something else is not alike" in found.sentence
    )
    (unlooked,) = basis([lead, case]).besides
    unbound = predicted(unlooked)
    assert unbound is not None and unbound.point == pytest.approx(10_000 / micros, rel=1e-3)


def test_a_gain_beside_the_bound_is_predicted_as_the_bound() -> None:
    """A step 1.085 times as fast where 7% multiply: within what a look may err by, and no more is predicted."""
    lead, case = group(bf16={"unattributed": 10_000}, fp8={"unattributed": 9217})
    looked = replace(lead, shares=Shares((Share(ShareKind.GEMM, "", False, 0.07, 1),), 1.0))
    found = only(said([looked, case], least=0.05), ADOPT)
    assert found.gain is not None and found.gain.point == found.gain.high == pytest.approx(1 / 0.93)


def test_layers_left_high_predict_nothing_where_nobody_knows_a_bound() -> None:
    """No phase is marked, and nobody looked: what is left out could gain anything."""
    whole = {"unattributed": 10_000}
    coverage = Coverage((holder("big", "linear", 90), holder("small", "linear", 10, side=600)), flops=100)
    records = [record("bf16", whole, reference=True), record("nvfp4", {"unattributed": 7600}, coverage=coverage)]
    one = only(said(records, *squares(0.5, 0.8, 1.4, 1.9, 2.0)), ROUTE, "nvfp4")
    assert one.gain is None and one.case == ""


def test_labels_are_told_with_all_that_rests_on_these_times() -> None:
    """Of the case, of its reference, and of the products of a projection; remarks cast no doubt."""
    made = basis(group(fp8={**BF16, "cast": 100}))
    reference, case = made.findings
    labels = {case: (Label.NOISY, Label.POWER_CAPPED), reference: (Label.CONTENDED, Label.NOISY)}
    findings = {name: replace(made.findings[name], labels=several, floor=0.5) for name, several in labels.items()}
    one = only(advised(replace(made, findings=findings)), NOTHING)
    assert one.doubtful and "keep bf16: fp8 perhaps takes 1% longer" in one.sentence
    assert one.sentence.endswith("; labelled noisy; its reference labelled contended")
    lead, other = model(2048)  # type: ignore[misc]
    step = [lead, replace(other, case=replace(other.case, precision="mxfp8"))]  # type: ignore[attr-defined]
    made = basis(step, *squares(0.5, 0.8, 1.4, 1.9))  # type: ignore[arg-type]
    noisy = {
        name: replace(found, labels=(Label.NOISY,)) if found.case.workload == "gemm" else found
        for name, found in made.findings.items()
    }
    (projected,) = (each for each in advised(replace(made, findings=noisy)).advice if each.rule == "projection")
    assert projected.sentence.endswith("; its reference labelled work-mismatch; products labelled noisy")
    assert projected.doubtful


def test_layers_that_a_study_found_stay_high() -> None:
    """With the map that kept the loss; between nothing and what it gains with all layers."""
    found = said(group(fp8=FP8), studies=(study(0.1, 0.005),))
    one = only(found, ROUTE)
    assert one.precision_map == (("head", "bf16"),) and "--precision-map head=bf16" in one.recipe
    assert "leave head in bf16 with fp8; the loss is then +0.5% instead of +10.0%" in one.sentence
    assert one.gain is not None and one.gain.low == 1 and one.gain.high > 1.3
    assert not [each for each in said(group(fp8=FP8), studies=(study(0.001),)).advice if each.kind is ROUTE]


def test_layers_below_break_even_stay_high() -> None:
    coverage = Coverage((holder("big", "linear", 90), holder("small", "linear", 10, side=600)), flops=100)
    records = [record("bf16", BF16, reference=True), record("nvfp4", FP8, coverage=coverage)]
    one = only(said(records, *squares(0.5, 0.8, 1.4, 1.9, 2.0)), ROUTE, "nvfp4")
    assert one.precision_map == (("small", "bf16"),) and one.rule == "shapes" and "10% of product FLOPs" in one.sentence


def test_a_stage_that_gains_nothing_stays_high() -> None:
    training, forward = (group({"pass": word}, fp8=phases)
                         for word, phases in (("training", FP8), ("forward", {**FP8, "cast": 4000})))  # fmt: skip
    one = only(said(training, forward), SCHEDULE)
    assert one.rule == "stages" and one.sentence.startswith("schedule: take fp8 for training (1.32x), and bf16 for")


def test_a_step_that_was_not_timed_is_projected_from_its_products() -> None:
    """60% of it are products of 2048, 1.4 times as fast in nvfp4: 1.21x, which the step itself would have to show."""
    products = squares(0.5, 0.8, 1.4, 1.9)
    lead, case = model(2048)  # type: ignore[misc]
    step = [lead, replace(case, case=replace(case.case, precision="mxfp8"))]  # type: ignore[attr-defined]
    (one,) = (each for each in said(step, *products).advice if each.rule == "projection")  # type: ignore[arg-type]
    assert one.kind is ADOPT and one.gain is not None and one.gain.point == pytest.approx(1.207, rel=0.01)
    assert one.gain.low < one.gain.point < one.gain.high and "--check does" in one.sentence
    assert one.case == f"{one.settings[0]}/nvfp4"
    assert {ground.row.partition("[")[0] for ground in one.grounds} == {"transformer", "gemm"}
    least = said(step, *products, least=0.3)  # type: ignore[arg-type]
    assert [each.kind for each in least.advice if each.rule == "projection"] == [NOTHING]


def test_a_projection_wants_all_three_products_of_a_layer() -> None:
    """Forward alone would say 1.4; of 1.4, 2.8 and 2.8 the mean of times counts. A forward pass has but the first."""
    kinds = {"forward": 1.4, "input-gradient": 2.8, "weight-gradient": 2.8}
    products = [
        group({"m": side, "n": side, "k": side, "product": kind}, workload="gemm", bf16={"gemm": 8000},
              nvfp4={"gemm": round(8000 / speed)})
        for kind, speed in kinds.items() for side in (1024, 2048, 4096)
    ]  # fmt: skip
    lead, case = model(2048)  # type: ignore[misc]
    step = [lead, replace(case, case=replace(case.case, precision="mxfp8"))]  # type: ignore[attr-defined]
    (one,) = (each for each in said(step, *products).advice if each.rule == "projection")  # type: ignore[arg-type]
    ratio = (1 / 1.4 + 2 / 2.8) / 3
    assert one.gain is not None and one.gain.point == pytest.approx(1 / (0.4 + 0.6 * ratio), rel=0.01)
    found = said(step, *products[:6])  # type: ignore[arg-type]
    assert not [each for each in found.advice if each.rule == "projection"]


@for_each("side", [256, 16384])
def test_nothing_is_projected_beyond_what_was_timed(side: int) -> None:
    """Nor of a mode that the step was timed in, nor from products of which too few sizes are known."""
    lead, case = model(side)  # type: ignore[misc]
    step = [lead, replace(case, case=replace(case.case, precision="mxfp8"))]  # type: ignore[attr-defined]
    for products in (squares(0.5, 0.8, 1.4, 1.9), squares(1.5, 1.6)):
        found = said(step, *products)  # type: ignore[arg-type]
        assert not [one for one in found.advice if one.rule == "projection"]
    found = said(model(2048), *squares(0.5, 0.8, 1.4, 1.9))  # type: ignore[arg-type]
    assert not [one for one in found.advice if one.rule == "projection"]


times = st.integers(500, 50_000)
steps = st.fixed_dictionaries({"gemm": times, "optimizer_step": times, "elementwise": times})


@settings(max_examples=30, deadline=None)
@given(bf16=steps, fp8=steps, cast=times, emulated=st.booleans(), least=st.floats(0, 0.9))
def test_no_advice_is_above_amdahls_bound(
    bf16: dict[str, int], fp8: dict[str, int], cast: int, emulated: bool, least: float
) -> None:
    """Nor is there any on the speed of an emulation; every adoption names rows and a recipe."""
    level = Level.EMULATED if emulated else Level.NATIVE
    made = basis(group(bf16=bf16, level=level, fp8={**fp8, "cast": cast}), least=least)
    found = advised(made)
    (one,) = made.besides
    bound, gain = bound_of(one), predicted(one)
    whole = sum(bf16.values())
    assert bound is not None and bound.point == pytest.approx(whole / (whole - bf16["gemm"]), rel=0.01)
    assert found.advice and all(each.kind in (ADOPT, NOTHING) for each in found.advice)
    for each in found.advice:
        if each.gain is not None:
            assert not emulated and each.gain.low <= each.gain.point <= each.gain.high <= bound.high
            assert each.gain.point <= bound.point
        if each.kind is ADOPT:
            assert not emulated and each.grounds and each.recipe and each.gain is not None
            assert one.speed is not None and one.speed.low >= 1 + least
    assert (gain is None) == emulated
    assert {Phase.GEMM} < one.touched


STEPS = 200


def falling(pace: float) -> list[float]:
    """A loss that falls at so many times the usual pace."""
    return [1.8 + 3.7 * (1 + pace * step / 15) ** -0.7 for step in range(1, STEPS + 1)]


def trained(*paces: float, spread: float = 0.0, steps: int = STEPS) -> Trained:
    """fp8 at these paces, a seed each; losses of a seed differ by the spread."""
    draw = random.Random(0)
    found: list[StreamLine] = []
    for seed, pace in enumerate(paces):
        shift = 1 + draw.gauss(0, spread)
        own = 1 + 1e-4 * seed  # seeds whose references have the same losses are one
        found += rows("bf16", seed, [loss * own for loss in falling(1.0)])
        found += rows("fp8", seed, [loss * own * shift for loss in falling(pace)])
    made = training(steps=steps, seeds=len(paces))
    kept = KeptTraining(made, tuple(found), True, "x/steps.jsonl")
    return Trained(kept, verdicts_of(made, kept.lines))


def cost(learned: Trained | None = None, level: Level = Level.NATIVE, joules: float = 1.0) -> Cost:
    lead, case = group(fp8=FP8, level=level)
    records = [replace(lead, energy=use([2.0, 2.02, 1.98])), replace(case, energy=use([joules] * 3))]
    (found,) = costs_of(basis(records, training=learned))
    return found


def test_losses_are_those_of_the_model_that_was_trained() -> None:
    """Named by its own make; of the model that was measured there is nothing to doubt."""
    learned = trained(*[1.0] * 5)
    was = learned.kept.training
    request = replace(was.request, settings=replace(was.request.settings, make="net.py:make"))
    own = replace(learned, kept=replace(learned.kept, training=replace(was, request=request)))
    measured = group({"make": "net.py:make", "pass": "training"}, workload="model", fp8=FP8)
    models = [costs_of(basis(records, training=own))[0].model for records in (group(fp8=FP8), measured)]
    assert models == ["net.py:make", ""] and cost(learned).model == was.request.settings.model


@for_each(("settings_", "items"), [(3, 3), (5, 1)])
def test_the_same_advice_about_many_settings_is_one_piece(settings_: int, items: int) -> None:
    """With how many are alike, and the least speed of them; a few are told each by itself."""
    slow = {**FP8, "gemm": 9000}
    groups = [
        group({**NANO, "batch": number}, fp8={**slow, "cast": 600 * number}) for number in range(1, settings_ + 1)
    ]
    (told, *_) = advice_elements(said(*groups))
    assert isinstance(told, Items) and len(told.items) == items
    assert ("the like in 4 more settings, down to 0." in str(told.items[0])) == (items == 1)


def test_time_to_the_same_loss_is_that_of_a_step_times_steps() -> None:
    """A step of 7.6 ms instead of 10, and nine tenths of the pace: 0.76 / 0.9; half the joules, over 0.9."""
    found = cost(trained(*[0.9] * 5))
    assert found.speed is not None and found.speed.point == pytest.approx(10 / 7.6, rel=0.01)
    assert found.time is not None and found.time.point == pytest.approx(0.76 / 0.9, rel=0.02)
    assert found.joules is not None and found.joules.point == pytest.approx(0.5)
    assert found.energy is not None and found.energy.point == pytest.approx(0.5 / 0.9, rel=0.02)
    assert found.energy.low < found.energy.point < found.energy.high
    assert found.hours is not None and found.hours == pytest.approx(STEPS * 0.01 / 3600, rel=0.05)
    assert found.energy_used == pytest.approx(400) and found.why == ""
    money = found.money(2.5)
    assert money is not None and money.point == pytest.approx(2.5 * found.hours * found.time.point)


def test_the_interval_holds_seeds_and_rounds() -> None:
    """Seeds that differ make it wider, on both sides of what they are in the mean."""
    alike, differing = cost(trained(*[0.9] * 5)), cost(trained(*[0.9] * 5, spread=0.004))
    assert alike.time is not None and differing.time is not None
    assert differing.time.half_width > 3 * alike.time.half_width > 0
    assert differing.time.low < 0.76 / 0.9 < differing.time.high and differing.time.level == 0.95


@for_each(
    ("learned", "why"),
    [
        (None, "no training was named (--training)"),
        (trained(*[0.9] * 4), "5 seeds are needed, and there are 4"),
        (trained(*[0.1] * 5), "too far from its reference's"),
    ],
)
def test_without_a_training_nothing_is_said_of_a_loss(learned: Trained | None, why: str) -> None:
    found = cost(learned)
    assert found.time is None and found.energy is None and why in found.why and found.money(1.0) is None


def test_an_emulated_precision_has_a_loss_and_no_time() -> None:
    found = cost(trained(*[0.9] * 5), Level.EMULATED)
    assert (found.speed, found.time, found.joules, found.hours) == (None, None, None, None)
    assert found.gap is not None and "emulated: its time is no speed" in found.why


@pytest.mark.slow
def test_intervals_hold_the_truth() -> None:
    """Of 40 trainings whose seeds differ by 0.4% of the loss: 95% of the intervals of five seeds, within its noise."""
    held = 0
    for trial in range(40):
        draw, found = random.Random(trial), list[StreamLine]()
        for seed in range(5):
            own, shift = 1 + 1e-4 * seed, 1 + draw.gauss(0, 0.004)
            found += rows("bf16", seed, [loss * own for loss in falling(1.0)])
            found += rows("fp8", seed, [loss * own * shift for loss in falling(1.0)])
        made = training(steps=STEPS, seeds=5)
        one = cost(Trained(KeptTraining(made, tuple(found), True, "x"), verdicts_of(made, found)))
        held += one.time is not None and one.time.low <= 0.76 <= one.time.high
    assert held >= 34


def late(gap: float, begins: int, steps: int = 200) -> Trained:
    """fp8 whose loss lies above bf16's from that step on, in five seeds; before it by noise of either sign."""
    found: list[StreamLine] = []
    for seed in range(5):
        base = curve(steps, 2.0 + 0.01 * seed)
        noise = 1 + 0.001 * (-1) ** seed
        found += rows("bf16", seed, base)
        found += rows("fp8", seed, [one * ((1 + gap) if step >= begins else noise) for step, one in enumerate(base)])
        found += [held_out("bf16", seed, steps, 2.1), held_out("fp8", seed, steps, 2.1 * (1 + gap + 1e-4 * seed))]
    made = training(steps=steps)
    kept = KeptTraining(made, tuple(found), True, "x")
    return Trained(kept, verdicts_of(made, kept.lines))


def test_a_precision_that_does_harm_late_is_left_before() -> None:
    """From 60% of the steps on: so many steps of its speed are predicted, and no adoption."""
    harmful = late(0.05, 120)
    found = said(group(fp8=FP8), training=harmful)
    one = only(found, AdviceKind.SCHEDULE)
    assert "take fp8 for the first 60% of the steps (120 of 200) and bf16 for the rest" in one.sentence
    assert one.gain is not None and one.gain.point == pytest.approx(1 / (0.6 * 0.76 + 0.4), rel=0.01)
    assert answer(found, "learns").met is Met.NO
    assert "it does not learn as well" in only(found, AdviceKind.NOTHING).sentence


def test_one_that_does_none_needs_no_schedule() -> None:
    """Nor is there one where it does harm from the first step on, or too few steps were trained to tell."""
    assert harm_of(late(0.0, 100), "fp8") is None
    assert harm_of(late(0.05, 0), "fp8") is None
    assert harm_of(late(0.05, 20, steps=40), "fp8") is None
    kept = KeptTraining(training(), lines({"fp8": [0.0001, -0.0001, 0.0002, -0.0002, 0.0]}), True, "x")
    adopted = said(group(fp8=FP8), training=Trained(kept, verdicts_of(kept.training, kept.lines)))
    assert "it learns as well (within noise" in only(adopted, AdviceKind.ADOPT).sentence
    assert not math.isnan(cost(Trained(kept, verdicts_of(kept.training, kept.lines))).hours or 0.0)
