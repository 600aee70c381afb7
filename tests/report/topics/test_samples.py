"""All rounds of all cases, relative to their medians."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import Finding, Label, Record, Segments, SlotSample, Status, Timing, Verdict
from fp8bench.report.elements import Lines, Strips, Text
from tests.materials import Made, built, many, of_kind, part
from tests.runs import EMULATED, NATIVE, case, measured, run_of
from tests.told_before import Told, as_before


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
    """The fastest call of a round counts: 90, 100 and 130 us are -10, 0 and 30 percent; 1 ms would be too far out."""
    for microseconds, distances in (((100, 90, 130), (0, -10, 30)), ((100, 100, 100, 1000), (0, 0, 0))):
        (strips,) = of_kind(part("samples", made(("fp32", microseconds, ()))), Strips)
        ((_, values, _),) = strips.rows
        assert values == pytest.approx(distances)


@as_before
def test_samples() -> Told:
    cases = made(
        ("fp32", (1, 1), ()), ("bf16", (1, 1), (Label.FEW_SAMPLES,)),
        ("fp16", (1, 2), (Label.BIMODAL, Label.NOISY)), ("fp8", (1, 1), ()),
    )  # fmt: skip
    yield "unsteady cases stand first and grey with their labels, emulations apart", part("samples", cases)
    yield "rounds far out are counted", part("samples", made(("fp32", (100, 100, 100, 1000), ())))
    yield "cases without samples are left out", part("samples", measured())
    yield "a clock that saw nothing has no median", built("samples", made(("fp32", (0, 0), ())))
    run, _ = measured()
    yield "a case that lost its finding is shown", part("samples", (replace(run, records=run.records[:1]), {}))
    rounds = (100,) * 6 + (120,) * 7
    drifts = made(("fp32", rounds, (Label.DRIFT,)), ("bf16", rounds, (Label.NOISY,)))
    yield "rounds are drawn in their order where that explains a label", of_kind(part("samples", drifts), Lines)
    short = made(("fp32", rounds[3:10], (Label.DRIFT,)))
    yield "and where they are many", of_kind(part("samples", short), Lines)


def test_of_very_many_cases_the_rest_is_counted() -> None:
    found = part("samples", many(100))
    assert sum(len(strips.rows) for strips in of_kind(found, Strips)) == 250
    assert of_kind(found, Text)[0].text.startswith("50 more")
