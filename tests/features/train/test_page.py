"""A training as text, as a page and for programs: what golden documents do not cover."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from fp8bench.features.train.data import list_csv_rows, list_scalars, training_to_json
from fp8bench.features.train.frame import FIGURES, Figure
from fp8bench.features.train.page import choose_point_steps, render_page
from fp8bench.features.train.values import (
    WIRE_BYTES,
    ArmCost,
    ArmRole,
    LayerReading,
    StepFigure,
    StepRow,
    StreamLine,
    Training,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.curves import make_curves
from fp8bench.features.train.verdicts.summary import JudgedTraining, list_figures
from fp8bench.features.train.view import render_all as text_of
from fp8bench.features.train.view import render_answer as short_page
from fp8bench.model import MemoryUse
from fp8bench.report.data.plain import csv_text
from fp8bench.report.elements import Chart, Lines, Page, Table
from fp8bench.report.page import html, markdown
from fp8bench.report.terminal.layout import render
from tests.counts import for_each
from tests.learning_curves import CANDIDATE, REPEAT, judged, lines, training

E = TypeVar("E")
GAPS = {"fp8": [0.02, 0.03, 0.025, 0.02, 0.03]}
NAN = math.nan


def page(*more: StreamLine, of: Training | None = None, change: Callable[[StepRow], StepRow] = lambda row: row) -> Page:
    """The page of a training with changed rows and more lines."""
    rows = (change(line) if isinstance(line, StepRow) else line for line in lines(GAPS))
    return render_page(judged((*rows, *more), of))


def element(made: Page, name: str, kind: type[E]) -> E:
    (named,) = (own for part in made.parts for own in part.elements if getattr(own, "name", "") == name)
    assert isinstance(named, kind)
    return named


def cells(made: Page, name: str) -> list[list[str]]:
    return [[field.text for field in row] for row in element(made, name, Table).rows]


def column(made: Page, title: str, name: str = "arms") -> list[str]:
    """A column of the compared arms."""
    arms = element(made, name, Table)
    place = [column.title for column in arms.columns].index(title)
    return [row[place].text for row in arms.rows if row[0].text in ("bf16", "fp8")]


def reading(step: int, amax: float, layer: str = "head", role: str = "input", **more: Any) -> LayerReading:
    return LayerReading("fp8", 0, step, layer, role, amax, 0.0, 0.0, 1.0, 0.0, **more)


def test_a_declared_figure_is_in_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared as a table row or as a figure of steps, it appears in CSV, boards, page and terminal."""
    figure = Figure("noise_scale", "noise scale", "noise scale")
    monkeypatch.setitem(FIGURES, figure.name, figure)
    more = [StepFigure("fp8", 0, step, figure.name, 3.0 + step) for step in (0, 10, 20)]
    of = judged((*lines(GAPS), *more))
    assert "noise_scale,23" in csv_text(*list_csv_rows(of))
    assert ("fp8 seed 0/training/noise_scale", 20, 23.0) in list_scalars(of.training, more)
    (series,) = element(render_page(of), "noise-scale-over-steps", Lines).series
    assert [mark and mark.value for mark in series[1]] == [3, 13, 23]
    assert column(text_of(of), "noise scale", "last-step") == ["-", "23"]


@for_each("steps", [1, 2, 9, 60, 300, 1000, 12345])
def test_windows_end_at_the_endpoint(steps: int) -> None:
    """The first has one step; few enough to draw."""
    ends = choose_point_steps(steps)
    assert (ends[0], ends[-1]) == (1, steps) and ends == tuple(sorted(set(ends))) and len(ends) <= 61


def test_the_last_gap_drawn_is_the_verdict_and_the_band_is_of_all_seeds() -> None:
    """The verdict's interval also spans those of earlier steps."""
    gap = judged(lines(GAPS)).verdicts.arms[0].judged.gap
    last = dict(element(page(), "gap", Lines).series)["fp8"][-1]
    assert gap is not None and gap.shown is not None and last is not None
    assert last.value == pytest.approx(100 * gap.shown.point) and last.low is not None and last.high is not None
    assert 100 * gap.shown.low <= last.low + 1e-9 < last.high <= 100 * gap.shown.high + 1e-9
    ends = [curve.endpoint for (arm, _), curve in make_curves(lines(GAPS), 100).items() if arm == "bf16"]
    series = dict(element(page(), "loss", Lines).series)
    assert series.keys() == {"bf16", "fp8"} and series["bf16"][-1] is not None
    assert (series["bf16"][-1].low, series["bf16"][-1].high) == pytest.approx((min(ends), max(ends)))


def alarm(step: int, rule: str, arm: str = "fp8", seed: int = 0) -> TrainingEvent:
    return TrainingEvent(arm, seed, step, "alarm", f"{rule} it is", values=(("rule", rule),))


def test_alarms_stand_on_the_curves_by_their_rules() -> None:
    """At their steps, for any seed; on the gap only candidates' alarms. If a curve has ended, at its last mark."""
    alarms = (alarm(0, "plateau"), alarm(49, "loss-gap", seed=1), alarm(49, "plateau"), alarm(99, "plateau", "bf16"))
    made = page(*alarms, alarm(30, "plateau", "bf16 again"))
    loss = element(made, "loss", Lines)
    gap = element(made, "gap", Lines)
    for chart in (loss, gap):
        flagged = {
            place: mark.flag
            for place, mark in zip(chart.places, dict(chart.series)["fp8"], strict=True)
            if mark is not None and mark.flag
        }
        assert list(flagged.values()) == ["plateau", "loss-gap, plateau"] and "1" in flagged
        assert 50 <= int(list(flagged)[1]) <= 52
    last = dict(loss.series)["bf16"][-1]
    assert last is not None and last.flag == "plateau"
    assert {name for name, _ in gap.series} == {"fp8"}


def test_pace_and_memory_over_steps() -> None:
    memory = [StepFigure("fp8", 0, step, "memory", 1e6 + step) for step in (0, 10, 20)]
    made = page(*memory, change=lambda row: replace(row, seconds=0.01 + row.step * 1e-4))
    ((name, marks),) = element(made, "tokens-per-second-over-steps", Lines).series
    assert name == "bf16" and marks[0] is not None and marks[0].value == pytest.approx(19200)
    assert element(made, "memory-over-steps", Lines).places == ("1", "11", "21")


def test_memory_of_arms_is_compared_at_one_moment() -> None:
    """After the forward pass; each arm has its own peak."""
    forward = (("weights", 1 << 20), ("activations", 1 << 20))
    use = MemoryUse(3 << 20, (("weights", 1 << 20), ("activations", 2 << 20)), forward=forward)
    other = replace(use, forward=(("weights", 1 << 20), ("activations", 1 << 19)))
    assert cells(page(ArmCost("bf16", 0, memory=use), ArmCost("fp8", 0, memory=other)), "memory") == [
        ["bf16", "3.00 MiB", "1.00 MiB", "1.00 MiB"],
        ["fp8", "3.00 MiB", "1.00 MiB", "512 KiB"],
    ]
    lost = page(ArmCost("bf16", 0, memory=use), ArmCost("fp8", 0, why="it could not be measured"))
    assert column(lost, "memory") == ["3.00 MiB", "-"]
    assert "fp8: it could not be measured" in markdown.render(lost)


def test_lines_show_scaled_magnitudes_by_layer() -> None:
    """One chart per role, with the most variable layers first; a missing reading leaves a gap."""
    head = [reading(step, amax, scale=2.0) for step, amax in ((0, 1.0), (10, 2.0), (20, 8.0))]
    first = [reading(step, amax, "first", scale=4.0 / amax) for step, amax in ((0, 4.0), (20, 1.0))]
    made = page(*first, *head, reading(10, 0.5, "first", "weight", scale=4.0))
    chart = element(made, "tensors-1-inputs", Lines)
    octaves = {layer: [mark and mark.value for mark in marks] for layer, marks in chart.series}
    assert chart.places == ("0", "10", "20") and octaves == {"head": [-1, 0, 2], "first": [0, None, 0]}
    assert [*octaves] == ["head", "first"]
    assert [layer for layer, _ in element(made, "tensors-1-weights", Lines).series] == ["first"]


def test_a_training_without_steps_has_a_page() -> None:
    made = render_page(judged((), training(CANDIDATE), finished=False))
    assert not [own for part in made.parts for own in part.elements if isinstance(own, Chart)]
    assert "cut off" in html.render(made)


ROW = StepRow("bf16", 0, 0, 2.0, 1e-3, 1.0, 0.0, 8.0, 1e-3, 1.0, 32, 0.01)


def test_what_a_rank_sends_in_a_step_is_told() -> None:
    """All operations of the first watched step."""
    asked = training(steps=30, seeds=1)
    told = list[StreamLine]()
    wires = {"bf16": {"reduce bfloat16": 3000.0, "all_reduce float32": 96.0}, "fp8": {"all_to_all uint8": 1548.0}}
    for arm, wire in wires.items():
        told.append(replace(ROW, arm=arm, seconds=0.0))
        told += [StepFigure(arm, 0, step, WIRE_BYTES, size, of) for step in (0, 10) for of, size in wire.items()]
    sent = judged(told, asked)
    assert cells(text_of(sent), "wire") == [
        ["bf16", "3.02 KiB", "reduce bfloat16 2.93 KiB, all_reduce float32 96 B"],
        ["fp8", "1.51 KiB", "all_to_all uint8 1.51 KiB"],
    ]
    figures = [list_figures(summary, sent.verdicts)["wire_bytes"] for summary in sent.summaries]
    assert [size for size in figures if size] == [3096.0, 1548.0]


STEPS = 40
LOOKS = tuple(
    Validation(arm, seed, STEPS, "held-out", loss, 1000)
    for arm, loss in (("bf16", 2.1), ("fp8", 2.15))
    for seed in range(5)
)
LINES = (*lines({**GAPS, REPEAT.name: [0.0]}, STEPS), *LOOKS)


def test_an_own_optimizer_keeps_as_much_in_bands_as_in_the_reference_and_an_own_loss_has_no_perplexity() -> None:
    """Its moments do not exist before the first step, when bytes of all arms are counted."""
    asked = training(steps=STEPS)
    own = replace(asked, request=replace(asked.request, settings=replace(asked.request.settings, make="net.py:make")))
    cost = ArmCost("bf16", 0, 0, kept=(("weights", 4.0 * own.parameters), ("momentum buffer", 4.0 * own.parameters)))
    of_own = judged((*LINES, cost), own)
    sizes = {summary.arm.name: summary.bytes_per_parameter for summary in of_own.summaries}
    assert sizes[REPEAT.name] == sizes["bf16"] == 8.0
    tables = element(text_of(judged(LINES, asked)), "looks", Table), element(text_of(of_own), "looks", Table)
    assert [table.columns[-1].title for table in tables] == ["perplexity", "held-out"]


def test_the_loss_of_a_single_seed_is_marked() -> None:
    """The arm with weights one ulp apart is trained in the first seed only, so its loss is not a mean over seeds."""
    chaos = replace(REPEAT, name="bf16 one ulp", role=ArmRole.CHAOS)
    shown = element(text_of(judged(lines({"bf16 one ulp": [0.1]}), training(chaos))), "arms", Table)
    assert [row[0].text for row in shown.rows] == ["bf16", "bf16 again", "bf16 one ulp (first seed)"]


def test_a_lag_is_shown_only_beyond_the_range() -> None:
    """Otherwise it is the unused part of the range, such as -125 octaves of a tensor of tiny values."""
    readings = [LayerReading("fp8", 0, 1, "head", role, 1.0, 0.0, 0.0, 1.0, 0.0) for role in ("input", "gradient")]
    inside, beyond = (replace(reading, lag=lag) for reading, lag in zip(readings, (-125.69, 0.7), strict=True))
    shown = element(render_page(judged((*LINES, inside, beyond), training(steps=STEPS))), "worst", Table)
    octaves = [(row[1].text, row[3].text) for row in shown.rows if "octaves" in row[2].text]
    assert octaves == [("gradient", "0.70")]


def told(of: JudgedTraining) -> list[str]:
    return render(short_page(of), 100, explain=False).splitlines()


def test_a_training_answers_in_few_lines_and_names_the_command_that_would_settle_it() -> None:
    other = replace(CANDIDATE, name="mxfp8", precision="mxfp8")
    few = judged(lines({"fp8": [0.002, 0.003], "mxfp8": [0.03, 0.001]}), training(CANDIDATE, other, seeds=2))
    said = told(few)
    assert len(said) <= 14 and all(said) and said[1] == "Does it learn as well as bf16?"
    assert re.match(r"  fp8 +cannot tell +", said[2]) and said[3].startswith("      at most 0.89% worse (95%); 2 seeds")
    (action,) = (line for line in said if line.startswith("Do this: "))
    assert re.fullmatch(
        r"Do this: train 5 seeds in about \d+ s, probably enough for a verdict: fp8bench train --seeds 5", action
    )
    settled = told(judged(lines(GAPS)))
    assert re.match("  fp8  learns worse ", settled[2]) and not [line for line in settled if "Do this" in line]


def test_an_arm_that_was_not_trained_has_its_reason() -> None:
    skipped = judged((), training(replace(CANDIDATE, skip="no units")))
    assert [line for line in told(skipped) if line.startswith("  fp8  not trained")] and "      no units" in told(
        skipped
    )
    assert "no units" in csv_text(*list_csv_rows(skipped))
    assert training_to_json(skipped)["arms"]["fp8"]["verdict"] is None
