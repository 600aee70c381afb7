"""Verdicts on whole trainings, from their lines: what diverges, what does not learn, what does not count,
and how much sooner an arm comes to the same loss."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from fp8bench.features.train import words
from fp8bench.features.train.values import (
    FALLBACK,
    UNPAIRED,
    Arm,
    KeptTraining,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.curves import Curve, Learned, Void, Why, curves_of, last_of
from fp8bench.features.train.verdicts.verdicts import (
    AdjustedSpeed,
    ArmVerdict,
    TrainingVerdicts,
    adjusted_speed,
    least_fall,
    log_steps,
    verdicts_of,
)
from tests.counts import for_each
from tests.learning_curves import CANDIDATE, OTHER_SEED, REFERENCE, REPEAT, curve, held_out, lines, rows, training

WORSE = {"fp8": [0.030, 0.031, 0.029, 0.032, 0.030]}
SAME = {"fp8": [0.001, -0.001, 0.002, -0.002, 0.0]}


def judged(found: tuple[StreamLine, ...]) -> tuple[ArmVerdict, TrainingVerdicts]:
    """The verdict on the only candidate."""
    among = verdicts_of(training(), found)
    return among.arms[0], among


def changed(
    found: tuple[StreamLine, ...], change: Callable[[StepRow], StepRow | None], arm: str = "fp8"
) -> tuple[StreamLine, ...]:
    """The rows of one arm changed, or left out."""
    told = (change(line) if isinstance(line, StepRow) and line.arm == arm else line for line in found)
    return tuple(line for line in told if line is not None)


def stopped(arm: str, seed: int) -> tuple[TrainingEvent, ...]:
    return tuple(TrainingEvent(arm, seed, 40, kind, "") for kind in ("not-finite", "stopped"))


def test_the_endpoint_is_the_mean_of_the_last_tenth() -> None:
    """Nothing before it counts; of one step at least; a step told twice counts once, as it was told last."""
    assert [last_of(steps) for steps in (1, 9, 10, 19, 20, 300)] == [1, 1, 1, 1, 2, 30]
    losses = [9.0] * 18 + [2.0, 4.0]
    told = [*rows("a", 0, losses), *rows("a", 0, [8.0])]
    found = curves_of(told, 20)["a", 0]
    assert (found.endpoint, found.rows[0].loss, found.whole) == (3.0, 8.0, True)
    assert math.isnan(curves_of(told[:19], 20)["a", 0].endpoint)


def test_worse_within_noise_and_better() -> None:
    """Paired over seeds: the reference's own differences from seed to seed are larger than all of these."""
    assert judged(lines(WORSE))[0].judged.learned is Learned.WORSE
    assert judged(lines(SAME))[0].judged.learned is Learned.WITHIN_NOISE
    better = {"fp8": [-one for one in WORSE["fp8"]]}
    assert judged(lines(better))[0].judged.learned is Learned.BETTER


def test_the_sentences() -> None:
    """Whether all of it lies beyond the margin is said; the interval is the one that decides."""
    said = words.verdict(*judged(lines(WORSE)))
    assert said.startswith("worse by +3.0% [+2.8%, +3.3%] (99%), all of it beyond the margin of 1.0%")
    assert "all of it" not in words.verdict(*judged(lines({"fp8": [0.001, 0.02, 0.014, 0.014, 0.02]})))
    assert words.verdict(*judged(lines(SAME))).endswith("inside +-1.0%")
    few = words.verdict(*judged(lines({"fp8": [0.001] * 2})))
    assert few == "inconclusive: 2 seeds count, fewer than 5: not finished"
    wide = words.verdict(*judged(lines({"fp8": [0.0, 0.03, -0.03, 0.02, 0.0]})))
    assert wide.endswith("is too wide; 140 more would do in four of five cases")
    apart = words.verdict(*judged(lines(WORSE, held={"fp8": [-0.01] * 5})))
    assert apart == "inconclusive: +3.0% on training text, but -1.0% on held-out text"


@for_each(
    ("gaps", "sentence"),
    [
        (SAME["fp8"], "fp8 learns as bf16 does: a loss more than 0.33% worse is excluded (5 seeds)"),
        (WORSE["fp8"], "fp8 learns worse than bf16: its loss is 3.04% higher, at least 2.81% (5 seeds)"),
        ([-one for one in WORSE["fp8"]], "fp8 learns better than bf16: its loss is 3.04% lower, at least 2.81%"),
        ([0.001], "whether fp8 learns as bf16 does is open: 1 seed counts, fewer than 5: not finished"),
        ([0.001, 0.002], "whether fp8 learns as bf16 does is open: a loss more than 0.79% worse is excluded (95%)"),
    ],
)
def test_the_answer_is_one_sentence_with_the_digits_that_its_interval_leaves(gaps: list[float], sentence: str) -> None:
    """Bounds are those of Student's t by hand: of 0.1% and 0.2% at 95% 0.15% + 12.706 * 0.05%."""
    assert words.answer(*judged(lines({"fp8": gaps}))).startswith(sentence)


NEARLY_ZERO = (
    "the reference's loss is nearly zero, and more seeds would be no other; train fewer --steps, or on more --data"
)


@for_each(
    ("void", "ending"),
    [
        (lambda row: replace(row, loss=0.001 * row.loss if row.step else row.loss), NEARLY_ZERO),
        (
            lambda row: replace(row, tokens=7) if row.arm == "fp8" else row,
            "another number of tokens a step, and more seeds",
        ),
        (lambda row: replace(row, loss=math.nan) if row.step == 95 and row.arm == "fp8" else row, ""),
    ],
)
def test_more_seeds_are_not_asked_for_where_they_would_not_count(
    void: Callable[[StepRow], StepRow], ending: str
) -> None:
    """Nor is it said that they would do; where a seed was lost by chance they would."""
    told = tuple(void(line) if isinstance(line, StepRow) else line for line in lines(SAME))
    found, _ = judged(told)
    said = words.inconclusive(found.judged)
    assert not found.pairs and said.startswith("0 seeds count, fewer than 5")
    assert f"5: {ending}" in said and "would do" not in said if ending else said.endswith("5 more would do")


def test_a_finer_bound_names_the_seeds_that_it_would_take() -> None:
    """Of three seeds or more; where everything is settled nothing is added."""
    three = judged(lines({"fp8": [0.001, -0.001, 0.002]}))
    few = replace(three[0], judged=replace(three[0].judged, more_seeds=2, void=None))
    assert words.answer(few, three[1]).endswith("2 more would do; 17 more seeds would probably settle 0.2%")
    assert words.answer(*judged(lines(SAME))).endswith("(5 seeds); 35 more seeds would probably settle 0.1%")
    assert "settle" not in words.answer(*judged(lines(WORSE)))


def test_what_a_command_may_fail_on() -> None:
    """A verdict with its arm, an alarm with its place; what was not asked for fails nothing. All bad ends can be."""
    alarm = TrainingEvent("fp8", 2, 40, "alarm", "the gradient's norm is 9.1 times its median")
    told = (*lines(WORSE), alarm, TrainingEvent("fp8", 2, 41, "tried-fix", ""))
    kept, among = KeptTraining(training(), told, True, ""), judged(told)[1]
    (worse,) = words.failures(kept, among, ("worse", "diverged"))
    assert worse == f"fp8: {words.verdict(among.arms[0], among)}"
    assert list(words.failures(kept, among, ("alarm",))) == [f"fp8, seed 2, step 40: {alarm.words}"]
    assert not list(words.failures(kept, among, ("diverged", "inconclusive", "did-not-learn")))
    assert words.FAILURES == ("diverged", "did-not-learn", "worse", "inconclusive", "alarm")


def test_several_arms_say_what_their_level_means() -> None:
    other = replace(CANDIDATE, name="mxfp8")
    among = verdicts_of(training(CANDIDATE, other), lines({**WORSE, "mxfp8": SAME["fp8"]}))
    assert [one.judged.learned for one in among.arms] == [Learned.WORSE, Learned.WITHIN_NOISE]
    assert "of 2 arms that differ by nothing" in words.chance_of_all(among)
    assert words.chance_of_all(judged(lines(WORSE))[1]) == ""
    skipped = verdicts_of(training(CANDIDATE, replace(other, skip="no hardware")), lines(WORSE))
    assert [one.arm.name for one in skipped.arms] == ["fp8"]


def test_an_arm_that_is_stopped_has_diverged() -> None:
    """In one of five seeds is enough, and one seed is enough to say it."""
    told = changed(lines(SAME), lambda row: row if (row.seed, row.step < 40) != (3, False) else None)
    assert judged(told)[0].judged.why is Why.FEW_PAIRS  # cut off, nobody knows why
    found, among = judged((*told, *stopped("fp8", 3)))
    assert (found.judged.learned, found.diverged_in) == (Learned.DIVERGED, (3,))
    assert words.verdict(found, among) == "diverged in 1 of 5 seeds (seed 3)"
    assert not list(words.notes(found))
    lost = (*told, replace(stopped("fp8", 3)[1], words="its worker was lost"))
    assert judged(lost)[0].voids == ((3, Void.NOT_FINISHED),)


@for_each("loss", [math.nan, math.inf, 5.6])
def test_an_arm_that_ends_where_it_began_has_diverged(loss: float) -> None:
    """Or with no number at all; that some steps before were not finite is another matter."""
    told = changed(lines(SAME), lambda row: replace(row, loss=loss) if row.seed == 1 and row.step >= 50 else row)
    assert judged(told)[0].diverged_in == (1,)


def test_a_step_that_is_not_finite_voids_its_seed_alone() -> None:
    """In the last tenth; an arm that recovered from one before is judged."""
    late = changed(lines(SAME), lambda row: replace(row, loss=math.nan) if (row.seed, row.step) == (1, 95) else row)
    found, _ = judged(late)
    assert (found.judged.why, found.voids) == (Why.FEW_PAIRS, ((1, Void.NOT_FINITE),))
    assert list(words.notes(found)) == ["seed 1 does not count: not finite"]
    early = changed(lines(SAME), lambda row: replace(row, loss=math.nan) if (row.seed, row.step) == (1, 50) else row)
    assert judged(early)[0].judged.learned is Learned.WITHIN_NOISE


def test_a_reference_that_did_not_learn_takes_every_verdict_away() -> None:
    """In any seed; an arm that diverged beside a reference that learned is told first."""
    flat = changed(lines(WORSE), lambda row: replace(row, loss=5.2) if row.seed == 2 else row, REFERENCE.name)
    found, among = judged(flat)
    assert (found.judged.learned, found.speed) == (Learned.DID_NOT_LEARN, None)
    assert words.verdict(found, among) == (
        "no verdict: the reference did not learn (in one seed its loss fell by 0.0%; at least 10.0% is asked of every "
        "seed)"
    )  # fmt: skip
    both = changed(flat, lambda row: replace(row, loss=math.nan) if row.seed == 0 else row)
    assert judged(both)[0].judged.learned is Learned.DIVERGED
    alike = changed(flat, lambda row: replace(row, loss=5.2) if row.seed == 2 else row)
    assert judged(alike)[0].judged.learned is Learned.DID_NOT_LEARN
    gone = changed(lines(WORSE), lambda row: replace(row, loss=math.nan) if row.seed == 2 else row, REFERENCE.name)
    assert judged(gone)[0].judged.learned is Learned.DID_NOT_LEARN
    assert "its loss was no number" in words.verdict(*judged(gone))


def test_an_easy_first_batch_of_trained_weights_is_no_sign_that_nothing_was_learned() -> None:
    """Where the loss on held-out text, the same before and after, has fallen; where it has not, batches alone tell."""
    easy = tuple(rows("bf16", 0, [2.6, *[2.42] * 99]))
    assert Curve(100, easy).fall == pytest.approx(0.069, abs=1e-3)
    assert Curve(100, easy, {0: 2.66, 50: 1.0, 100: 2.22}).fall == pytest.approx(0.165, abs=1e-3)
    assert Curve(100, easy, {0: 2.0, 100: 2.2}).fall == Curve(100, easy, {50: 1.0}).fall == Curve(100, easy).fall
    assert math.isnan(Curve(100, easy[:50], {0: 2.66, 100: 2.22}).fall)


def test_how_far_a_reference_has_to_fall() -> None:
    """So far that losing a tenth of it lies beyond the margin: 5.5 to 4.95, and back by 0.055, is 1.1%."""
    assert least_fall(0.01) == 0.1
    wide = least_fall(0.05)
    assert (0.1 * wide) / (1 - wide) == pytest.approx(0.05)


def test_seeds_that_were_not_finished_do_not_count() -> None:
    """Neither an arm's nor the reference's; seeds that never began either."""
    for arm in ("fp8", REFERENCE.name):
        told = changed(lines(SAME), lambda row: None if row.seed == 4 and row.step > 97 else row, arm)
        assert judged(told)[0].voids == ((4, Void.NOT_FINISHED),)
    assert len(judged(())[0].voids) == 5
    assert words.verdict(*judged(())) == "inconclusive: 0 seeds count, fewer than 5: not finished"


def test_copies_of_a_seed_are_one_seed() -> None:
    """Five pairs from the same weights and batches are one pair, five times."""
    alike = tuple(line for seed in range(5) for line in (replace(one, seed=seed) for one in lines({"fp8": [0.03]})))
    found, _ = judged(alike)
    assert (found.judged.why, len(found.pairs)) == (Why.FEW_PAIRS, 1)
    assert {why for _, why in found.voids} == {Void.COPY}


def test_losses_near_zero_and_other_numbers_of_tokens_do_not_compare() -> None:
    """A share of next to nothing says nothing, nor does an arm that saw more text."""
    learned_by_heart = [*curve(90, 0.001), *[0.001] * 10]
    told: list[StreamLine] = []
    for seed in range(5):
        told += [*rows("bf16", seed, learned_by_heart), *rows("fp8", seed, [2 * one for one in learned_by_heart])]
    assert judged(tuple(told))[0].voids[0] == (0, Void.NEARLY_ZERO)
    more = changed(lines(SAME), lambda row: replace(row, tokens=2 * row.tokens))
    assert judged(more)[0].voids[0] == (0, Void.OTHER_TOKENS)


def test_held_out_losses_are_compared_at_the_same_step() -> None:
    """The last that both have; other texts do not count, nor what is not finite, nor what was seen long before."""
    told = [line for line in lines(SAME) if not isinstance(line, Validation)]
    for seed in range(5):
        told += [held_out("bf16", seed, 90, 3.0), held_out("fp8", seed, 90, 3.3), held_out("bf16", seed, 99, 2.0)]
        told.append(replace(held_out("fp8", seed, 99, 9.0), of="other-text"))
    assert [pair.held_out for pair in judged(tuple(told))[0].pairs] == [pytest.approx(0.1)] * 5
    broken = [replace(line, loss=math.nan) if isinstance(line, Validation) else line for line in told]
    early = [replace(line, step=89) if isinstance(line, Validation) and line.step == 90 else line for line in told]
    for other in (broken, early):
        assert judged(tuple(other))[0].judged.why is Why.NO_HELD_OUT


def test_the_band_of_seeds() -> None:
    _, among = judged(lines({OTHER_SEED.name: [0.03, -0.04]}))
    assert among.seed_band is not None
    assert (among.seed_band.largest, among.seed_band.deviation) == (
        pytest.approx(0.04),
        pytest.approx(0.035355, rel=1e-4),
    )
    assert words.seed_band(among.seed_band).endswith("by 3.54% (root mean square of 2), at most 4.00%")


def test_the_band_of_a_repeat() -> None:
    """Zero is said; else from which step on, as far as both came."""
    same = judged(lines({REPEAT.name: [0.0]}))[1].repeat_band
    assert same is not None and (same.steps, same.first, same.largest) == (100, None, 0.0)
    assert words.repeat_band(same).startswith("nondeterminism is zero: the repeat has the same loss in each of 100")
    told = changed(
        lines({REPEAT.name: [0.0]}),
        lambda row: None if row.step >= 60 else replace(row, loss=row.loss * (1 + 0.001 * (row.step >= 20))),
        REPEAT.name,
    )
    other = judged(told)[1].repeat_band
    assert other is not None and (other.steps, other.first) == (60, 20)
    assert words.repeat_band(other) == "the repeat differs from step 20 on, by at most 0.100% of a step's loss"


def test_speed_to_the_same_loss() -> None:
    """A native arm that is twice as fast, and learns as the reference does, is twice as fast; emulated ones say so."""
    native = replace(CANDIDATE, native=True)
    found = verdicts_of(training(native), lines({"fp8": [1e-9] * 5}, seconds={"fp8": 0.005})).arms[0].speed
    assert found is not None and found.adjusted is not None
    assert (found.raw.point, found.adjusted.point) == (pytest.approx(2), pytest.approx(2))
    assert words.speed(found, True) == "2.000x [2.000x, 2.000x] to the same loss (2.000x by steps)"
    assert judged(lines(SAME))[0].speed is None
    assert words.speed(None, False) == "emulated: numerics and no speed"


def test_an_arm_that_is_not_in_its_precision_has_no_verdict() -> None:
    """Its losses are the reference's bit for bit, in one seed or in five; or a product was of another precision."""
    for seeds in (1, 5):
        found, among = judged(lines({"fp8": [0.0] * seeds}))
        assert (found.judged.learned, found.judged.why) == (Learned.INCONCLUSIVE, Why.SAME_BITS)
        assert words.verdict(found, among) == f"inconclusive: {Why.SAME_BITS}"
    told = TrainingEvent("fp8", 0, 0, FALLBACK, "the numbers of a product are those of bfloat16, not of fp8")
    found, _ = judged((*lines(SAME), told))
    assert (found.judged.learned, found.judged.why, found.speed) == (Learned.INCONCLUSIVE, Why.FALLBACK, None)
    other = training(Arm("bf16 clip=2.0", "bf16", settings=(("clip", 2.0),)))
    same = verdicts_of(other, lines({"bf16 clip=2.0": [0.0] * 5}))
    assert "does this arm take effect?" in words.verdict(same.arms[0], same)


STEPS = 200
SEEDS = 5


def falling(pace: float = 1.0, steps: int = STEPS) -> list[float]:
    """A loss that falls ever more slowly, at so many times the usual pace."""
    return [1.8 + 3.7 * (1 + pace * step / 15) ** -0.7 for step in range(1, steps + 1)]


def of(losses: Sequence[float], seconds: float = 0.01, tokens: int = 100) -> Curve:
    return Curve(STEPS, tuple(rows("a", 0, losses, seconds, tokens)))


def speed(*arms: Curve, reference: Curve | None = None) -> AdjustedSpeed:
    """Of five seeds, each with the next of these arms."""
    found = adjusted_speed([(reference or of(falling()), arms[seed % len(arms)]) for seed in range(SEEDS)])
    assert found is not None
    return found


@for_each("pace", [0.5, 0.7, 0.95, 1.0, 1.05, 1.4])
def test_steps_to_the_same_loss(pace: float) -> None:
    """An arm that learns at nine tenths of the pace takes nine tenths as many times fewer steps, better ones too."""
    steps = log_steps([(of(falling()), of(falling(pace)))])
    assert steps is not None and math.exp(steps) == pytest.approx(pace, rel=0.02)
    found = speed(of(falling(pace), seconds=0.005))
    assert found.adjusted is not None and not found.bounded
    assert (found.raw.point, found.adjusted.point) == (pytest.approx(2), pytest.approx(2 * pace, rel=0.02))


def test_the_noise_of_batches_that_both_have_in_common_is_none() -> None:
    """Arms that differ by nothing are as fast, whatever single steps do."""
    draw = random.Random(0)
    noise = [draw.gauss(1, 0.06) for _ in range(STEPS)]
    losses = [loss * one for loss, one in zip(falling(), noise, strict=True)]
    assert log_steps([(of(losses), of(losses))]) == 0
    nudged = [loss * (1 + draw.gauss(0, 1e-4)) for loss in losses]
    steps = log_steps([(of(losses), of(nudged))])
    assert steps is not None and abs(steps) < 0.005


def test_times_are_those_of_the_reference_beside_it() -> None:
    """Where it was trained once more beside the arm, by these; without one beside it there is no speed."""
    arm = of(falling(), seconds=0.005)
    slow = replace(arm, beside=dict.fromkeys(range(STEPS), 0.02))
    assert speed(arm).raw.point == pytest.approx(2) and speed(slow).raw.point == pytest.approx(4)
    alone = replace(arm, events=frozenset({UNPAIRED}))
    assert adjusted_speed([(of(falling()), alone)] * SEEDS) is None


def test_fewer_steps_are_told_beside_the_speed() -> None:
    """As many times as the arm's pace, whatever its seconds; a bound where it is one."""
    found = speed(of(falling(1.4), seconds=0.005)).fewer_steps
    assert found is not None and found.point == pytest.approx(1.4, rel=0.02) and found.low <= found.point <= found.high
    stuck = speed(of([max(3.5, loss) for loss in falling()], 0.005))
    assert stuck.bounded and stuck.fewer_steps is not None and stuck.fewer_steps.point == pytest.approx(1 / 3)


def test_one_that_learns_far_less_is_a_bound() -> None:
    """It ends where the reference was before a third of its steps: at most so fast, and the words say so."""
    stuck = speed(of([max(3.5, loss) for loss in falling()], 0.005))
    assert stuck.bounded and stuck.adjusted is not None
    assert stuck.adjusted.point == pytest.approx(2 / 3)
    assert words.speed(stuck, True) == "at most 0.667x to the same loss (2.000x by steps)"


def test_a_loss_that_falls_no_more_says_nothing_of_steps() -> None:
    flat = [5.0] * 20 + [2.0] * (STEPS - 20)
    worse = of([loss * 1.01 for loss in flat], 0.005)
    found = speed(worse, reference=of(flat))
    assert found.adjusted is None
    assert words.speed(found, True) == (
        "not known to the same loss, which does not surely fall any more (2.000x by steps)"
    )


def test_speed_is_in_tokens_and_by_steps_that_were_timed() -> None:
    """A watched step has no time; a slow step now and then is no arm's."""
    assert speed(of(falling(), 0.02, tokens=300)).raw.point == pytest.approx(1.5)
    some = tuple(
        row if row.step % 10 else replace(row, seconds=0.0 if row.step % 20 else 9.0) for row in of(falling()).rows
    )
    assert speed(Curve(STEPS, some)).raw.point == pytest.approx(1.0)
    assert adjusted_speed([(of(falling()), of(falling(), 0.0))] * SEEDS) is None


def test_fewer_than_five_seeds_say_nothing() -> None:
    assert adjusted_speed([(of(falling()), of(falling()))] * 4) is None
    assert words.speed(None, True) == "-"


def test_the_interval_is_over_seeds() -> None:
    """Seeds of different speeds are a wide interval about their geometric mean, and those that learn otherwise, too."""
    found = speed(of(falling(), 0.005), of(falling(), 0.01))
    assert found.raw.point == pytest.approx(2**0.6)
    assert found.raw.low < 1 and found.raw.high > 2
    other = speed(of(falling(0.8)), of(falling(0.9)))
    assert other.adjusted is not None and other.adjusted.low < 0.8 and other.adjusted.high > 0.88
