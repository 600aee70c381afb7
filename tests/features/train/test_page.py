"""The report of a training: what stands on its page, of trainings made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.features.train.curve_charts import ends_of
from fp8bench.features.train.page import page_of
from fp8bench.features.train.values import (
    ArmCost,
    KeptTraining,
    LayerReading,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.curves import curves_of
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.features.train.words import without_histories
from fp8bench.model import Capacity, MemoryUse, PhaseMemory
from fp8bench.report.elements import Chart, Lines, Page, Scatter, Sparks, Stacks, Table
from fp8bench.report.page import html, markdown
from fp8bench.report.page.drawing.draw import draw
from tests.counts import for_each
from tests.learning_curves import CANDIDATE, lines, training

GAPS = {"fp8": [0.02, 0.03, 0.025, 0.02, 0.03], "bf16 other seed": [0.01, -0.02, 0.03, 0.0, 0.01]}


def page(
    *more: StreamLine, steps: int = 100, seeds: int = 5, finished: bool = True, said: tuple[StreamLine, ...] = ()
) -> Page:
    held = said or lines(GAPS, steps)
    kept = KeptTraining(training(steps=steps, seeds=seeds), (*held, *more), finished, "x/steps.jsonl")
    return page_of(kept, verdicts_of(kept.training, kept.lines))


def element(made: Page, name: str) -> object:
    return next(one for part in made.parts for one in part.elements if getattr(one, "name", "") == name)


def reading(step: int, amax: float, layer: str = "head", **more: float) -> LayerReading:
    return LayerReading("fp8", 0, step, layer, "input", amax, 0.0, 0.0, 1.0, 0.0, **more)  # type: ignore[arg-type]


@for_each("steps", [1, 2, 9, 60, 300, 1000, 12345])
def test_windows_end_at_the_endpoint(steps: int) -> None:
    """The first is of one step, the last of all; there are few enough to draw."""
    ends = ends_of(steps)
    assert (ends[0], ends[-1]) == (1, steps) and ends == tuple(sorted(set(ends))) and len(ends) <= 61


def test_the_last_gap_drawn_is_the_verdict() -> None:
    """Point and 95% interval of the chart's end are those of the endpoint, which decides."""
    found = verdicts_of(training(), lines(GAPS)).of("fp8")
    assert found is not None and found.judged.gap is not None and found.judged.gap.shown is not None
    chart = element(page(), "gap")
    assert isinstance(chart, Lines)
    last = dict(chart.series)["fp8"][-1]
    assert last is not None and last.low is not None and last.high is not None
    shown = found.judged.gap.shown
    assert [last.value, last.low, last.high] == pytest.approx([100 * shown.point, 100 * shown.low, 100 * shown.high])


def test_the_band_is_the_reference_under_all_its_seeds() -> None:
    """From the least to the largest, its own seeds and the others."""
    chart = element(page(), "loss")
    assert isinstance(chart, Lines)
    own = curves_of(lines(GAPS), 100)
    ends = [curve.endpoint for (arm, _), curve in own.items() if arm.startswith("bf16")]
    last = dict(chart.series)["bf16"][-1]
    assert last is not None and (last.low, last.high) == pytest.approx((min(ends), max(ends)))
    assert dict(chart.series).keys() == {"bf16", "fp8"}


def test_what_is_not_finite_is_not_drawn() -> None:
    """A window with a loss that is no number has no mark, and those before it stay."""
    said = tuple(
        replace(one, loss=float("nan")) if getattr(one, "step", 0) == 70 and one.arm == "fp8" and hasattr(one, "loss")
        else one for one in lines(GAPS)
    )  # fmt: skip
    chart = element(page(said=said), "loss")
    assert isinstance(chart, Lines)
    marks = dict(zip(chart.places, dict(chart.series)["fp8"], strict=True))
    assert marks["1"] is not None and marks["100"] is not None
    assert any(mark is None for mark in marks.values())


def alarm(step: int, rule: str, arm: str = "fp8", seed: int = 0) -> TrainingEvent:
    return TrainingEvent(arm, seed, step, "alarm", f"{rule} it is", values=(("rule", rule),))


def test_alarms_stand_on_the_curves_by_their_rules() -> None:
    """At the place of their step, in whichever seed; those of a band's arm and of the reference not on the gap."""
    alarms = (alarm(0, "plateau"), alarm(49, "loss-gap", seed=1), alarm(49, "plateau"), alarm(99, "plateau", "bf16"))
    made = page(*alarms, alarm(30, "plateau", "bf16 again"))
    loss, gap = element(made, "loss"), element(made, "gap")
    assert isinstance(loss, Lines) and isinstance(gap, Lines)
    for chart in (loss, gap):
        flagged = {place: mark.flag for place, mark in zip(chart.places, dict(chart.series)["fp8"], strict=True)
                   if mark is not None and mark.flag}  # fmt: skip
        assert list(flagged.values()) == ["plateau", "loss-gap, plateau"] and "1" in flagged
        assert 50 <= int(list(flagged)[1]) <= 52
    last = dict(loss.series)["bf16"][-1]
    assert last is not None and last.flag == "plateau" and "plateau in step 99 of seed 0: plateau it is" in last.hint
    assert {name for name, _ in gap.series} == {"fp8"}
    text = html.render(made)
    assert text.count(">loss-gap</text>") == 4 and text.count(">plateau</text>") == 10


def test_an_alarm_of_what_is_not_finite_stands_at_the_last_mark() -> None:
    """Where the curve has ended there is no mark to bear it."""
    nan = float("nan")
    said = tuple(replace(one, loss=nan) if isinstance(one, StepRow) and one.arm == "fp8" and one.step >= 40 else one
                 for one in lines(GAPS))  # fmt: skip
    chart = element(page(alarm(40, "not-finite"), said=said), "loss")
    assert isinstance(chart, Lines)
    known = [(place, mark) for place, mark in zip(chart.places, dict(chart.series)["fp8"], strict=True) if mark]
    assert int(known[-1][0]) <= 40 and known[-1][1].flag == "not-finite"


def test_the_gap_is_drawn_by_its_last_two_thirds() -> None:
    """First steps that are far off have an axis of their own, and are not drawn on the other."""
    said = tuple(replace(one, loss=3 * one.loss) if isinstance(one, StepRow) and one.arm == "fp8" and one.step < 8
                 else one for one in lines(GAPS))  # fmt: skip
    chart = element(page(said=said), "gap")
    assert isinstance(chart, Lines) and chart.settled == len(chart.places) // 3
    assert "on an axis of their own" in html.render(page(said=said))
    assert "on an axis of their own" not in draw(replace(chart, settled=0))


def test_times_have_a_line_a_seed() -> None:
    held = training(replace(CANDIDATE, native=True))
    kept = KeptTraining(held, lines(GAPS), True, "x/steps.jsonl")
    chart = element(page_of(kept, verdicts_of(kept.training, kept.lines)), "loss-by-time")
    assert isinstance(chart, Scatter) and chart.joined == ("bf16", "fp8")
    assert {point.strand for point in chart.points} == {f"seed {seed}" for seed in range(5)}
    assert len(chart.points) <= 400 and max(point.x or 0 for point in chart.points) == pytest.approx(1.0)
    assert draw(chart).count('class="line s1" d="M') == 2


def test_pace_memory_and_norms_over_steps() -> None:
    """Throughput of native arms alone, memory of all arms; gradients and updates are open."""
    memory = [StepFigure("fp8", 0, step, "memory", 1e6 + step) for step in (0, 10, 20)]
    said = tuple(replace(one, gradient_norm=one.loss, update_ratio=one.loss, parameter_norm=one.loss,
                         seconds=0.01 + one.step * 1e-4) if isinstance(one, StepRow) else one
                 for one in lines(GAPS))  # fmt: skip
    made = page(*memory, said=said)
    pace, bytes_used = element(made, "throughput"), element(made, "memory-over-steps")
    assert isinstance(pace, Lines) and isinstance(bytes_used, Lines)
    assert [name for name, _ in pace.series] == ["bf16"]
    first = pace.series[0][1][0]
    assert first is not None and first.value == pytest.approx(19200)
    assert bytes_used.places == ("1", "11", "21")
    charts = [element(made, name) for name in ("gradient-norm", "update-ratio", "parameter-norm")]
    assert [chart.folded for chart in charts if isinstance(chart, Lines)] == [False, False, True]


def test_the_first_table_has_the_verdict_of_every_arm() -> None:
    """Arms and reference, not its bands; the words of the terminal."""
    table = element(page(), "arms")
    assert isinstance(table, Table)
    said = {row[0].text: row[5].text for row in table.rows}
    assert said.keys() == {"bf16", "fp8"} and said["bf16"] == "the reference"
    assert said["fp8"].startswith("worse by +2.5% [")


def test_memory_is_told_by_arm_and_by_what_it_is_for() -> None:
    """Each alone; an arm that nobody could measure has none, with the reason below."""
    use = MemoryUse(3 << 20, (("weights", 1 << 20), ("activations", 2 << 20)))
    made = page(ArmCost("bf16", 0, memory=use), ArmCost("fp8", 0, why="its memory could not be measured: lost"))
    arms, roles = element(made, "arms"), element(made, "memory")
    assert isinstance(arms, Table) and isinstance(roles, Table)
    assert [(row[0].text, row[12].text) for row in arms.rows] == [("bf16", "3.00 MiB"), ("fp8", "-")]
    assert [[field.text for field in row] for row in roles.rows] == [["bf16", "1.00 MiB", "2.00 MiB"]]
    assert "fp8: its memory could not be measured: lost" in markdown.render(made)
    assert "Memory by what" not in markdown.render(page())


def test_memory_of_arms_is_told_at_one_moment() -> None:
    """Where the forward pass has ended; the highest point has a moment of its own in each arm."""
    forward = (("weights", 1 << 20), ("activations", 1 << 20))
    phases = (PhaseMemory("backward", 3 << 20), PhaseMemory("optimizer_step", 1 << 20))
    use = MemoryUse(3 << 20, (("weights", 3 << 20),), phases, forward=forward)
    other = replace(use, forward=(("weights", 1 << 20), ("activations", 1 << 19)), phases=phases[::-1])
    made = page(ArmCost("bf16", 0, memory=use), ArmCost("fp8", 0, memory=other))
    told = element(made, "memory")
    assert isinstance(told, Table)
    assert [column.title for column in told.columns][1:4] == ["all of it", "highest point", "in"]
    assert [[field.text for field in row[1:]] for row in told.rows] == [
        ["2.00 MiB", "3.00 MiB", "backward", "1.00 MiB", "1.00 MiB"],
        ["1.50 MiB", "3.00 MiB", "backward", "1.00 MiB", "512 KiB"],
    ]
    bars = element(made, "memory-bars")
    assert isinstance(bars, Stacks) and [sum(parts) for _, parts in bars.rows] == [2 << 20, 3 << 19]


def test_largest_batches_stand_in_the_table_or_how_to_have_them() -> None:
    said = "No largest batch was looked for: "
    assert said in markdown.render(page())
    known = Capacity("batch", 1 << 30, 812, tokens=51968, beyond=813, why="tensors need 2 B more")
    costs = ArmCost("bf16", 0, capacity=known), ArmCost("fp8", 0, capacity=Capacity("batch", 9, why="lost"))
    held = replace(training(), request=replace(training().request, max_batch=True, memory_limit=1 << 30))
    kept = KeptTraining(held, (*lines(GAPS), *costs), True, "x/steps.jsonl")
    made = page_of(kept, verdicts_of(kept.training, kept.lines))
    arms, text = element(made, "arms"), markdown.render(made)
    assert isinstance(arms, Table) and [row[11].text for row in arms.rows] == ["812", "-"] and said not in text
    assert "bf16: largest batch that fits into 1.00 GiB: 812 (52.0 k tokens); not 813: tensors need 2 B more" in text


def test_events_are_told_in_their_order_and_drawn() -> None:
    """Each with its place, its words and what may help."""
    events = [TrainingEvent("fp8", seed, 20 + seed, "alarm", "scales fall", "head", "input", (), "raise margin")
              for seed in range(3)]  # fmt: skip
    made = page(*events)
    table, chart = element(made, "events"), element(made, "timeline")
    assert isinstance(table, Table) and isinstance(chart, Scatter)
    assert [row[2].text for row in table.rows] == ["20", "21", "22"] and table.rows[0][6].text == "raise margin"
    assert [(point.x, point.y) for point in chart.points] == [(20, 0), (21, 1), (22, 2)]
    assert "Nothing: no alarm" in html.render(page()) and "cut off" in html.render(page(finished=False))


def test_lines_show_magnitudes_and_scales_by_layer() -> None:
    """A row a layer, a cell a role, two lines in it; a reading that is no number leaves its place empty."""
    told = [reading(step, amax, scale=2.0) for step, amax in ((0, 1.0), (10, 2.0), (20, 8.0))]
    other = [
        reading(0, 4.0, "first", scale=1.0),
        reading(20, 1.0, "first", scale=4.0),
        replace(reading(10, 0.5, "first", scale=4.0), role="weight"),
    ]
    chart = element(page(*told, *other), "tensors-1")
    assert isinstance(chart, Sparks) and not chart.folded
    assert chart.places == ("0", "10", "20") and chart.columns == ("inputs", "weights")
    none = (None, None, None)
    assert dict(chart.rows) == {
        "head": (((1.0, 2.0, 8.0), (2.0, 2.0, 2.0)), (none, none)),
        "first": (((4.0, None, 1.0), (1.0, None, 4.0)), ((None, 0.5, None), (None, 4.0, None))),
    }
    assert "largest magnitude from 1.00 to 8.00, last 8.00; scale from 2.00" in draw(chart)
    plain = element(page(*(replace(one, scale=1.0) for one in told)), "tensors-1")
    assert isinstance(plain, Sparks) and plain.series == ("largest magnitude",)


def test_the_worst_reading_names_layer_and_step() -> None:
    """The least signal to noise, the most of the others; nothing is pointed at where nothing was clipped."""
    table = element(
        page(reading(0, 1.0, signal_to_noise=30.0, underflow=0.01), reading(10, 1.0, "mlp", signal_to_noise=12.0)),
        "worst",
    )
    assert isinstance(table, Table)
    (row,) = table.rows
    assert [field.text for field in row] == [
        "fp8", "input", "12.0 dB", "mlp, step 10", "1.0%", "head, step 0", "0.0%", "", "-", "",
    ]  # fmt: skip


def test_histories_that_cannot_be_replayed_are_told_before() -> None:
    """Of arms with delayed scaling alone, where some amaxes are not kept."""
    made = training()
    delayed = replace(CANDIDATE, name="d", precision="fp8-delayed")
    for stride, batches, lacks in ((10, 1, "--stride 1"), (1, 2, "--micro-batches 1"), (10, 2, "--stride 1 and --m")):
        settings = replace(made.request.settings, micro_batches=batches)
        request = replace(made.request, stride=stride, settings=settings)
        told = replace(made, request=request, arms=(*made.arms, delayed))
        assert without_histories(told).startswith(f"`show --histories` of d needs every amax, which {lacks}")
        assert without_histories(replace(told, arms=(*made.arms, replace(delayed, skip="no")))) == ""
    whole = replace(made.request, stride=1)
    assert without_histories(replace(made, request=whole, arms=(delayed,))) == ""


def test_looks_and_places_in_the_context() -> None:
    """Kinds of text in a table, positions over the context."""
    seen = {"other-text": 3.0, "position:0-7": 2.5, "position:8-15": 2.0, "position:16-23": 1.9}
    told = [Validation(arm, 0, 100, of, loss, 10, 10) for arm in ("bf16", "fp8") for of, loss in seen.items()]
    chart = element(page(*told), "places")
    assert isinstance(chart, Lines) and chart.places == ("0-7", "8-15", "16-23")
    assert "other-text" in html.render(page(*told))


@for_each("seeds", [1, 5])
def test_the_same_training_gives_the_same_bytes(seeds: int) -> None:
    first, again = page(seeds=seeds), page(seeds=seeds)
    assert html.render(first) == html.render(again) and markdown.render(first) == markdown.render(again)
    assert markdown.render(first).startswith("# training of nano")


def test_a_training_without_steps_has_a_page() -> None:
    kept = KeptTraining(training(CANDIDATE), (), False, "x/steps.jsonl")
    made = page_of(kept, verdicts_of(kept.training, ()))
    assert not [one for part in made.parts for one in part.elements if isinstance(one, Chart)]
    assert "cut off" in html.render(made)
