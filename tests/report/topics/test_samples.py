"""All rounds of all cases, relative to their medians."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import Finding, Label, Record, Segments, SlotSample, Status, Timing, Verdict
from fp8bench.report.elements import ChartAxis, Items, Lines, Strips, Text, Tone
from tests.materials import Made, built, many, of_kind, part
from tests.runs import EMULATED, NATIVE, case, measured, run_of


def timing(*microseconds: int) -> Timing:
    """A round for each, with a first call that is slower."""
    slots = tuple(
        SlotSample(number, ((9 * 1000 * one,), (1000 * one,)), 1e-3, 1e-3) for number, one in enumerate(microseconds)
    )
    return Timing(Segments(("gemm",), (0,)), slots)


def made(*rounds: tuple[str, tuple[int, ...], tuple[Label, ...]]) -> Made:
    records, findings = [], {}
    for mode, microseconds, labels in rounds:
        named = case("gemm", mode, {"m": 1})
        support = EMULATED if mode == "fp8" else NATIVE
        records.append(Record(named, support, Status.OK, is_reference=mode == "fp32", timing=timing(*microseconds)))
        findings[named.id] = Finding(named, Verdict.UNSURE, 1e-3, labels=labels)
    return run_of(records), findings


def test_each_round_is_a_distance_from_the_median() -> None:
    """The fastest call of a round counts: 90, 100 and 130 us are -10, 0 and 30 percent."""
    (strips,) = of_kind(part("samples", made(("fp32", (100, 90, 130), ()))), Strips)
    assert strips.axis == ChartAxis("distance from the case's median", "%")
    ((label, values, tone),) = strips.rows
    assert (label, tone) == ("gemm fp32", Tone.PLAIN) and values == pytest.approx((0, -10, 30))


def test_unsteady_cases_stand_first_and_grey_with_their_labels() -> None:
    """The others as in the table; a label that the samples do not show is grey, and not first."""
    found = part(
        "samples",
        made(
            ("fp32", (1, 1), ()), ("bf16", (1, 1), (Label.FEW_SAMPLES,)),
            ("fp16", (1, 2), (Label.BIMODAL, Label.NOISY)), ("fp8", (1, 1), ()),
        ),
    )  # fmt: skip
    native, cost = of_kind(found, Strips)
    assert [(label, tone) for label, _, tone in native.rows] == [
        ("gemm fp16 (bimodal, noisy)", Tone.DOUBT), ("gemm fp32", Tone.PLAIN), ("gemm bf16", Tone.DOUBT),
    ]  # fmt: skip
    assert [label for label, _, _ in cost.rows] == ["gemm fp8 (emulated)"] and cost.folded and not native.folded
    assert not of_kind(found, Items)  # what labels mean stands once, in the last section


def test_rounds_far_out_are_counted_and_not_drawn() -> None:
    """1 ms beside 100 us would press all others into a line."""
    (strips,) = of_kind(part("samples", made(("fp32", (100, 100, 100, 1000), ()))), Strips)
    assert strips.rows[0][1] == pytest.approx((0, 0, 0))
    assert strips.description == (
        "1 case. The middle half of the rounds spans most in gemm fp32: 225% of the median. 1 round took more than "
        "twice the median, which is not drawn; the longest took 10.00x of it, in gemm fp32."
    )


def test_cases_without_samples_are_left_out() -> None:
    """Skipped and failed ones."""
    assert sum(len(strips.rows) for strips in of_kind(part("samples", measured()), Strips)) == 5


def test_a_clock_that_saw_nothing_has_no_median() -> None:
    assert built("samples", made(("fp32", (0, 0), ()))) is None


def test_of_very_many_cases_the_rest_is_counted() -> None:
    found = part("samples", many(100))
    assert sum(len(strips.rows) for strips in of_kind(found, Strips)) == 250
    assert of_kind(found, Text)[0].text == "50 more cases are not shown here; their samples are in the run."


def test_a_case_that_lost_its_finding_is_shown() -> None:
    run, findings = measured()
    (strips,) = of_kind(part("samples", (replace(run, records=run.records[:1]), {})), Strips)
    assert strips.rows[0][2] is Tone.PLAIN and findings


def test_rounds_are_drawn_in_their_order_where_that_explains_a_label() -> None:
    rounds = (100,) * 6 + (120,) * 7
    (lines,) = of_kind(part("samples", made(("fp32", rounds, (Label.DRIFT,)), ("bf16", rounds, (Label.NOISY,)))), Lines)
    ((name, marks),) = lines.series
    assert name == "gemm fp32" and len(lines.places) == 13
    assert [mark.value if mark else None for mark in marks] == pytest.approx([100 / 120] * 6 + [1.0] * 7)
    assert not of_kind(part("samples", made(("fp32", rounds[3:10], (Label.DRIFT,)))), Lines)
