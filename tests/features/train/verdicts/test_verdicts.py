"""Verdicts on whole trainings from their lines: what diverges, did not learn or does not count, and speed to the same
loss."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from fp8bench.features.train import words
from fp8bench.features.train.data import training_to_json
from fp8bench.features.train.values import FALLBACK_EVENT, Arm, StepRow, StreamLine, TrainingEvent, Validation
from fp8bench.features.train.verdicts.curves import (
    LASTING_VOID_REASONS,
    InconclusiveReason,
    LearningVerdict,
    LossCurve,
    VoidReason,
    average_gaps,
    count_endpoint_steps,
    make_curves,
)
from fp8bench.features.train.verdicts.verdicts import (
    AdjustedSpeed,
    ArmVerdict,
    TrainingVerdicts,
    compute_required_loss_fall,
    judge_training,
    measure_log_step_ratio,
    measure_speed,
)
from fp8bench.features.train.view import find_arm_answers, render_answer
from fp8bench.report.elements import Table, Tone
from tests.counts import for_each
from tests.learning_curves import CANDIDATE, REFERENCE, REPEAT, curve, held_out, lines, rows
from tests.learning_curves import judged as judged_training
from tests.learning_curves import training as of_arms

Lines = Iterable[StreamLine]
WORSE = [0.030, 0.031, 0.029, 0.032, 0.030]
BETTER = [-gap for gap in WORSE]
SAME = [0.001, -0.001, 0.002, -0.002, 0.0]
# A gap of 0.84% in every seed: not noise, inside the margin of 1%, or possibly beyond.
TOLERATED = [0.0077, 0.0081, 0.0084, 0.0087, 0.0091]
PERHAPS = [gap - 0.022 for gap in WORSE]


def judged(told: Lines | Sequence[float]) -> tuple[ArmVerdict, TrainingVerdicts]:
    """The verdict on fp8, from lines or from gaps to the reference."""
    told = tuple(told)
    if all(isinstance(gap, float) for gap in told):
        told = lines({"fp8": told}) if told else ()  # type: ignore[arg-type,dict-item]
    among = judge_training(of_arms(), told)  # type: ignore[arg-type]
    return among.arms[0], among


def changed(told: Lines, change: Callable[[StepRow], StepRow | None], arm: str = "fp8") -> list[StreamLine]:
    lines = (change(line) if isinstance(line, StepRow) and line.arm == arm else line for line in told)
    return [line for line in lines if line is not None]


def with_loss(told: Lines, loss: float, seed: int, *steps: int, arm: str = "fp8") -> list[StreamLine]:
    """Without steps, all steps of the seed get this loss."""

    def change(row: StepRow) -> StepRow:
        return replace(row, loss=loss) if row.seed == seed and row.step in (steps or (row.step,)) else row

    return changed(told, change, arm)


def in_every_seed(losses: Sequence[float], factor: float) -> list[StreamLine]:
    """The reference has these losses in every seed, and fp8 has them multiplied by a factor."""
    told: list[StreamLine] = []
    for seed in range(5):
        told += rows("bf16", seed, losses)
        told += rows("fp8", seed, [factor * loss for loss in losses])
    return told


def test_the_endpoint_is_the_mean_of_the_last_tenth() -> None:
    """For a repeated step the last value counts."""
    assert [count_endpoint_steps(steps) for steps in (1, 9, 10, 19, 20, 300)] == [1, 1, 1, 1, 2, 30]
    told = [*rows("a", 0, [9.0] * 18 + [2.0, 4.0]), *rows("a", 0, [8.0])]
    whole = make_curves(told, 20)["a", 0]
    assert (whole.endpoint, whole.rows[0].loss, whole.is_complete) == (3.0, 8.0, True)
    assert math.isnan(make_curves(told[:19], 20)["a", 0].endpoint)


@for_each(
    ("gaps", "learned", "verdict"),
    [
        # Paired over seeds: the reference varies between seeds by more than all of these. Bounds are Student's t by
        # hand: for 0.1% and 0.2% at 95%, 0.15% + 12.706 * 0.05%.
        (
            WORSE,
            LearningVerdict.WORSE,
            "worse by +3.04% [+2.80%, +3.28%] (99%): real, all of it beyond the 1% you tolerate",
        ),
        (
            BETTER,
            LearningVerdict.BETTER,
            "better by -3.04% [-3.28%, -2.80%] (99%): real, all of it beyond the margin of 1%",
        ),
        (TOLERATED, LearningVerdict.WORSE, "worse by +0.84% [+0.72%, +0.96%] (99%): real, inside the 1% you tolerate"),
        (
            PERHAPS,
            LearningVerdict.WORSE,
            "worse by +0.84% [+0.60%, +1.08%] (99%): real, perhaps beyond the 1% you tolerate",
        ),
        (
            [-gap for gap in TOLERATED],
            LearningVerdict.BETTER,
            "better by -0.84% [-0.96%, -0.72%] (99%): real, inside the margin",
        ),
        (SAME, LearningVerdict.WITHIN_NOISE, "within noise: +0.00% [-0.33%, +0.33%] (99%), inside +-1%"),
        ([0.001], LearningVerdict.INCONCLUSIVE, "cannot tell: 1 seed counts, fewer than 5: not finished"),
        (
            [0.001, 0.002],
            LearningVerdict.INCONCLUSIVE,
            "cannot tell: at most 0.79% worse (95%); 2 seeds count, fewer than 5: not",
        ),
        (
            [-0.030, -0.031],
            LearningVerdict.INCONCLUSIVE,
            "cannot tell: at most 0% worse (95%); 2 seeds count, fewer than 5: not",
        ),
        (
            [0.0, 0.03, -0.03, 0.02, 0.0],
            LearningVerdict.INCONCLUSIVE,
            "cannot tell: at most 5.2% worse, as +0.4% [-4.4%, +5.2%] (99%) is too wide to tell",
        ),
        ([], LearningVerdict.INCONCLUSIVE, "cannot tell: 0 seeds count, fewer than 5: not finished"),
    ],
)
def test_what_gaps_say(gaps: list[float], learned: LearningVerdict, verdict: str) -> None:
    own, among = judged(gaps)
    assert own.judged.learned is learned and words.describe_verdict(own, among).startswith(verdict)


def test_a_difference_that_is_tolerated_has_one_word_and_one_colour_everywhere() -> None:
    """It is worse in every output, yellow, and does not fail; a loss that is not surely tolerated is red and fails."""
    for gaps, matters, tone, failed in ((TOLERATED, "no", Tone.DOUBT, 0), (PERHAPS, "open", Tone.BAD, 1)):
        of = judged_training(lines({"fp8": gaps}))
        row = training_to_json(of)["arms"]["fp8"]
        assert (row["verdict"], row["matters"]) == ("worse", matters) and row["words"].startswith("worse by +")
        (answer,) = find_arm_answers(of.summaries, of.verdicts)
        assert (answer.verdict, answer.tone) == ("learns worse", tone)
        (told, _) = (each for each in render_answer(of).parts[0].elements if isinstance(each, Table))
        assert [cell.tone for cell in told.rows[0] if cell.text == "learns worse"] == [tone]
        assert len(list(words.list_failures(of, ("worse", "inconclusive")))) == failed


def test_an_interval_spans_those_of_the_last_steps() -> None:
    """Just before the end the arm is worse: the interval includes that."""
    told = changed(lines({"fp8": TOLERATED}), lambda row: replace(row, loss=row.loss * (1.1 if row.step == 94 else 1)))
    judged_arm = judged(told)[0]
    gap = judged_arm.judged.gap
    ends = [average_gaps([pair.earlier[place] for pair in judged_arm.pairs]) for place in range(-9, 0)]
    highest = max(end.decides.high for end in ends if end and end.decides)
    assert gap is not None and gap.decides is not None and len(judged_arm.pairs[0].earlier) == 9
    assert gap.point == pytest.approx(0.0084 + 0.1 / 33, rel=0.02) and gap.decides.high >= highest
    assert gap.decides.low < 0.0084 < gap.point


def test_what_a_command_may_fail_on() -> None:
    alarm = TrainingEvent("fp8", 2, 40, "alarm", "the gradient's norm is 9.1 times its median")
    of = judged_training((*lines({"fp8": WORSE}), alarm, TrainingEvent("fp8", 2, 41, "stopped", "")))
    own, among = judged(of.stored.lines)
    assert list(words.list_failures(of, ("worse", "diverged"))) == [f"fp8: {words.describe_verdict(own, among)}"]
    assert list(words.list_failures(of, ("alarm",))) == [f"fp8, seed 2, step 40: {alarm.words}"]
    assert not list(words.list_failures(of, ("diverged", "inconclusive", "did-not-learn")))


def test_several_arms_say_what_their_level_means() -> None:
    other = replace(CANDIDATE, name="mxfp8")
    among = judge_training(of_arms(CANDIDATE, other), lines({"fp8": WORSE, "mxfp8": SAME}))
    assert [own.judged.learned for own in among.arms] == [LearningVerdict.WORSE, LearningVerdict.WITHIN_NOISE]
    assert "2 arms" in "".join(words.describe_chance(among))
    assert not any("each verdict" in sentence for sentence in words.describe_chance(judged(WORSE)[1]))
    skipped = judge_training(of_arms(CANDIDATE, replace(other, skip="no hardware")), lines({"fp8": WORSE}))
    assert [own.arm.name for own in skipped.arms] == ["fp8"]


GOOD = lines({"fp8": SAME})
BAD = lines({"fp8": WORSE})
CUT_OFF = changed(GOOD, lambda row: row if (row.seed, row.step < 40) != (3, False) else None)
NO_NUMBER, STOPPED = (TrainingEvent("fp8", 3, 40, kind, "") for kind in ("not-finite", "stopped"))
FLAT = with_loss(BAD, 5.2, 2, arm=REFERENCE.name)
BY_HEART = [*curve(90, 0.001), *[0.001] * 10]
UNFINISHED = ((4, VoidReason.NOT_FINISHED),)


@for_each(
    ("told", "own", "diverged", "voids"),
    [
        # A stopped arm has diverged; if it was interrupted or lost, the reason is unknown.
        ([*CUT_OFF, NO_NUMBER, STOPPED], LearningVerdict.DIVERGED, (3,), ((3, VoidReason.NOT_FINISHED),)),
        (CUT_OFF, InconclusiveReason.FEW_PAIRS, (), ((3, VoidReason.NOT_FINISHED),)),
        ([*CUT_OFF, STOPPED], InconclusiveReason.FEW_PAIRS, (), ((3, VoidReason.NOT_FINISHED),)),
        # So has one that ends where it began, or with NaN; not one that recovered.
        (with_loss(GOOD, 5.6, 1, *range(50, 100)), LearningVerdict.DIVERGED, (1,), ()),
        *(
            (with_loss(GOOD, loss, 1, *range(50, 100)), LearningVerdict.DIVERGED, (1,), ((1, VoidReason.NOT_FINITE),))
            for loss in (math.nan, math.inf)
        ),
        (with_loss(GOOD, math.nan, 1, 50), LearningVerdict.WITHIN_NOISE, (), ()),
        (with_loss(GOOD, math.nan, 1, 95), InconclusiveReason.FEW_PAIRS, (), ((1, VoidReason.NOT_FINITE),)),
        # If the reference did not learn in some seed there is no verdict, except that an arm diverged.
        (FLAT, LearningVerdict.DID_NOT_LEARN, (), ()),
        (with_loss(FLAT, 5.2, 2), LearningVerdict.DID_NOT_LEARN, (), ()),
        (with_loss(FLAT, math.nan, 0), LearningVerdict.DIVERGED, (0,), ((0, VoidReason.NOT_FINITE),)),
        (
            with_loss(BAD, math.nan, 2, arm=REFERENCE.name),
            LearningVerdict.DID_NOT_LEARN,
            (),
            ((2, VoidReason.NOT_FINITE),),
        ),
        # VoidReason seeds: unfinished, copies, a reference near zero, other tokens.
        *(
            (
                changed(GOOD, lambda row: None if row.seed == 4 and row.step > 97 else row, arm),
                InconclusiveReason.FEW_PAIRS,
                (),
                UNFINISHED,
            )
            for arm in ("fp8", REFERENCE.name)
        ),
        (
            [replace(line, seed=seed) for seed in range(5) for line in lines({"fp8": [0.03]})],
            InconclusiveReason.FEW_PAIRS,
            (),
            tuple((seed, VoidReason.COPY) for seed in range(1, 5)),
        ),
        (
            in_every_seed(BY_HEART, 2),
            InconclusiveReason.FEW_PAIRS,
            (),
            tuple((seed, VoidReason.NEARLY_ZERO) for seed in range(5)),
        ),
        # With a negative loss, even one that rises towards zero, a share would have the wrong sign.
        (
            in_every_seed([-5.0, *[-0.001] * 99], 0.9),
            InconclusiveReason.FEW_PAIRS,
            (),
            tuple((seed, VoidReason.NEARLY_ZERO) for seed in range(5)),
        ),
        (
            changed(GOOD, lambda row: replace(row, tokens=7)),
            InconclusiveReason.FEW_PAIRS,
            (),
            tuple((seed, VoidReason.OTHER_TOKENS) for seed in range(5)),
        ),
        # Arms that did not compute in their precision: losses equal to the bit, or another precision's products.
        (
            lines({"fp8": [0.0]}),
            InconclusiveReason.SAME_BITS,
            (),
            tuple((seed, VoidReason.NOT_FINISHED) for seed in range(1, 5)),
        ),
        (lines({"fp8": [0.0] * 5}), InconclusiveReason.SAME_BITS, (), ()),
        (
            [*GOOD, TrainingEvent("fp8", 0, 0, FALLBACK_EVENT, "of bfloat16, not of fp8")],
            InconclusiveReason.FALLBACK,
            (),
            (),
        ),
    ],
    ids=lambda value: str(value)[:99],
)
def test_what_does_not_compare(
    told: list[StreamLine],
    own: LearningVerdict | InconclusiveReason,
    diverged: tuple[int, ...],
    voids: tuple[tuple[int, VoidReason], ...],
) -> None:
    arm, among = judged(told)
    assert (arm.judged.why or arm.judged.learned, arm.diverged_in, arm.voids) == (own, diverged, voids)
    if own is LearningVerdict.DIVERGED:
        assert words.describe_verdict(arm, among).startswith("diverged in 1 of 5 seeds")
        assert not any("not count" in note for note in words.list_void_seeds(arm))
    elif isinstance(own, InconclusiveReason):
        assert arm.judged.learned is LearningVerdict.INCONCLUSIVE and len(list(words.list_void_seeds(arm))) == bool(
            voids
        )
    if own is InconclusiveReason.FEW_PAIRS:  # no more seeds are requested if they would not count either
        told_why = words.describe_inconclusive(arm.judged)
        void = voids[0][1]
        assert ("more would do" in told_why) == (void not in LASTING_VOID_REASONS)
        assert ("train fewer --steps" in told_why) == (void is VoidReason.NEARLY_ZERO)
    assert arm.speed is None


@for_each(
    ("told", "fell"),
    [
        (FLAT, "fell by 0.0%; every seed needs at least 10.0%"),
        (with_loss(BAD, math.nan, 2, arm=REFERENCE.name), "was not a number"),
    ],
    ids=lambda value: str(value)[:99],
)
def test_a_reference_that_did_not_learn_says_by_how_much(told: list[StreamLine], fell: str) -> None:
    assert fell in words.describe_verdict(*judged(told))


def test_an_arm_with_the_references_bits_may_take_no_effect() -> None:
    other = of_arms(Arm("bf16 clip=2.0", "bf16", settings=(("clip", 2.0),)))
    same = judge_training(other, lines({"bf16 clip=2.0": [0.0] * 5}))
    assert "does this arm take effect?" in words.describe_verdict(same.arms[0], same)


def test_after_an_easy_first_batch_held_out_text_shows_what_was_learned() -> None:
    easy = tuple(rows("bf16", 0, [2.6, *[2.42] * 99]))
    assert LossCurve(100, easy).loss_fall == pytest.approx(0.069, abs=1e-3)
    assert LossCurve(100, easy, {0: 2.66, 50: 1.0, 100: 2.22}).loss_fall == pytest.approx(0.165, abs=1e-3)
    assert (
        LossCurve(100, easy, {0: 2.0, 100: 2.2}).loss_fall
        == LossCurve(100, easy, {50: 1.0}).loss_fall
        == LossCurve(100, easy).loss_fall
    )
    assert math.isnan(LossCurve(100, easy[:50], {0: 2.66, 100: 2.22}).loss_fall)


def test_how_far_a_reference_has_to_fall() -> None:
    """A tenth of the fall must exceed the margin: 5.5 to 4.95, and back by 0.055, is 1.1%."""
    wide = compute_required_loss_fall(0.05)
    assert compute_required_loss_fall(0.01) == 0.1 and (0.1 * wide) / (1 - wide) == pytest.approx(0.05)


def test_held_out_losses_are_compared_at_the_same_step() -> None:
    """The steps of the last third that both have, if the last one is finite; other texts do not count."""
    told = [line for line in lines({"fp8": SAME}) if not isinstance(line, Validation)]
    for seed in range(5):
        told += [held_out("bf16", seed, 90, 3.0), held_out("fp8", seed, 90, 3.3), held_out("bf16", seed, 99, 2.0)]
        told.append(replace(held_out("fp8", seed, 99, 9.0), of="other-text"))
    assert [pair.held_out for pair in judged(told)[0].pairs] == [pytest.approx(0.1)] * 5
    broken = [replace(line, loss=math.nan) if isinstance(line, Validation) else line for line in told]
    early = [replace(line, step=67) if isinstance(line, Validation) and line.step == 90 else line for line in told]
    for other in (broken, early):
        assert judged(other)[0].judged.why is InconclusiveReason.NO_HELD_OUT
    twice = [held_out(arm, seed, 70, loss) for seed in range(5) for arm, loss in (("bf16", 5.0), ("fp8", 4.9))]
    assert [pair.held_out for pair in judged([*told, *twice])[0].pairs] == [pytest.approx(8.2 / 8 - 1)] * 5


def test_the_band_of_a_repeat() -> None:
    repeated = lines({REPEAT.name: [0.0]})
    same = judged(repeated)[1].repeat_band
    assert same is not None and (same.steps, same.first, same.largest) == (100, None, 0.0)
    assert "nondeterminism is zero" in words.describe_nondeterminism(same)
    told = changed(
        repeated,
        lambda row: None if row.step >= 60 else replace(row, loss=row.loss * (1 + 0.001 * (row.step >= 20))),
        REPEAT.name,
    )
    other = judged(told)[1].repeat_band
    assert other is not None and (other.steps, other.first) == (60, 20)
    assert words.describe_nondeterminism(other).startswith("the repeat differs from step 20 on, by at most 0.100%")


def test_speed_to_the_same_loss() -> None:
    native = of_arms(replace(CANDIDATE, native=True))
    speed = judge_training(native, lines({"fp8": [1e-9] * 5}, seconds={"fp8": 0.005})).arms[0].speed
    assert speed is not None and speed.adjusted is not None
    assert (speed.raw.point, speed.adjusted.point) == (pytest.approx(2), pytest.approx(2))
    assert words.format_adjusted_speed(speed) == "2.000x [2.000x, 2.000x] (2.000x by steps)"
    assert judged(SAME)[0].speed is None


STEPS = 200
SEEDS = 5


def falling(pace: float = 1.0) -> list[float]:
    return [1.8 + 3.7 * (1 + pace * step / 15) ** -0.7 for step in range(1, STEPS + 1)]


def of(losses: Sequence[float], seconds: float = 0.01, tokens: int = 100) -> LossCurve:
    return LossCurve(STEPS, tuple(rows("a", 0, losses, seconds, tokens)))


def speed(*arms: LossCurve, reference: LossCurve | None = None) -> AdjustedSpeed:
    speed = measure_speed([(reference or of(falling()), arms[seed % len(arms)]) for seed in range(SEEDS)])
    assert speed is not None
    return speed


@for_each("pace", [0.5, 0.7, 0.95, 1.0, 1.05, 1.4])
def test_steps_to_the_same_loss(pace: float) -> None:
    steps = measure_log_step_ratio([(of(falling()), of(falling(pace)))])
    assert steps is not None and math.exp(steps) == pytest.approx(pace, rel=0.02)
    arm = speed(of(falling(pace), seconds=0.005))
    assert arm.adjusted is not None and not arm.bounded
    assert (arm.raw.point, arm.adjusted.point) == (pytest.approx(2), pytest.approx(2 * pace, rel=0.02))


def test_noise_of_common_batches_cancels() -> None:
    draw = random.Random(0)
    losses = [loss * draw.gauss(1, 0.06) for loss in falling()]
    assert measure_log_step_ratio([(of(losses), of(losses))]) == 0
    steps = measure_log_step_ratio([(of(losses), of([loss * (1 + draw.gauss(0, 1e-4)) for loss in losses]))])
    assert steps is not None and abs(steps) < 0.005


def test_fewer_than_five_seeds_have_no_speed() -> None:
    assert measure_speed([(of(falling()), of(falling()))] * 4) is None and words.format_adjusted_speed(None) is None


def test_far_worse_learning_gives_a_bound() -> None:
    stuck = speed(of([max(3.5, loss) for loss in falling()], 0.005))
    assert stuck.bounded and stuck.adjusted is not None and stuck.adjusted.point == pytest.approx(2 / 3)
    assert words.format_adjusted_speed(stuck) == "at most 0.667x (2.000x by steps)"


def test_a_loss_that_no_longer_falls_gives_no_steps() -> None:
    flat = [5.0] * 20 + [2.0] * (STEPS - 20)
    worse = speed(of([loss * 1.01 for loss in flat], 0.005), reference=of(flat))
    assert worse.adjusted is None and (words.format_adjusted_speed(worse) or "").startswith("unknown")


def test_speed_is_in_tokens_and_by_steps_that_were_timed() -> None:
    assert speed(of(falling(), 0.02, tokens=300)).raw.point == pytest.approx(1.5)
    some = tuple(
        row if row.step % 10 else replace(row, seconds=0.0 if row.step % 20 else 9.0) for row in of(falling()).rows
    )
    assert speed(LossCurve(STEPS, some)).raw.point == pytest.approx(1.0)
    assert measure_speed([(of(falling()), of(falling(), 0.0))] * SEEDS) is None


def test_the_interval_is_over_seeds() -> None:
    apart = speed(of(falling(), 0.005), of(falling(), 0.01))
    assert apart.raw.point == pytest.approx(2**0.6) and apart.raw.low < 1 and apart.raw.high > 2
    other = speed(of(falling(0.8)), of(falling(0.9)))
    assert other.adjusted is not None and other.adjusted.low < 0.8 and other.adjusted.high > 0.88
