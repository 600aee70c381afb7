"""Where a lower precision gains, phase against phase: every number by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import Finding, Level, Record, Status, Verdict
from fp8bench.report.elements import Table, Text, Tone
from fp8bench.report.section import sections
from tests.materials import Made, built, many, material, of_kind, part
from tests.runs import EMULATED, NATIVE, case, gemm, run_of, transformer

BEFORE = (("data_load", 1e-6), ("gemm", 8e-3), ("attention", 1e-3), ("elementwise", 1e-3), ("unattributed", 1e-5))
AFTER = (("data_load", 2e-6), ("cast", 1e-3), ("gemm", 2e-3), ("attention", 1.5e-3), ("elementwise", 5e-4))


def step(reference: Level = Level.NATIVE, low: Level = Level.NATIVE, **changes: object) -> Made:
    """10 ms in fp32 and 5 ms in bf16: gemm is four times as fast, attention is slower, casts come on top."""
    fp32, bf16 = (case("model", name, {"size": 1}) for name in ("fp32", "bf16"))
    records = [
        Record(fp32, NATIVE if reference is Level.NATIVE else EMULATED, Status.OK, is_reference=True),
        Record(bf16, NATIVE if low is Level.NATIVE else EMULATED, Status.OK),
    ]
    findings = {
        fp32.id: Finding(fp32, Verdict.REFERENCE, 1e-2, phases=BEFORE, below_floor=("data_load",)),
        bf16.id: replace(Finding(bf16, Verdict.FASTER, 5e-3, phases=AFTER), **changes),  # type: ignore[arg-type]
    }
    return run_of(records), findings


def test_each_phase_beside_its_own_in_the_reference() -> None:
    """Times, ratio, share of the step, and Amdahl's law: 5 ms without 2 ms of gemm are 3 ms, 1.667 times as fast."""
    (table,) = of_kind(part("gains", step()), Table)
    assert [column.title for column in table.columns] == [
        "phase", "fp32", "bf16", "ratio", "share of step", "if it cost nothing",
    ]  # fmt: skip
    assert [[field.text for field in row] for row in table.rows] == [
        ["data load", "1.00 us", "2.00 us", "-", "0.04%", "-"],
        ["cast", "-", "1.00 ms", "-", "20.0%", "1.250x"],
        ["gemm", "8.00 ms", "2.00 ms", "0.250x", "40.0%", "1.667x"],
        ["attention", "1.00 ms", "1.50 ms", "1.500x", "30.0%", "1.429x"],
        ["elementwise", "1.00 ms", "500 us", "0.500x", "10.0%", "1.111x"],
        ["unattributed", "10.0 us", "-", "-", "-", "1.000x"],
        ["step", "10.0 ms", "5.00 ms", "0.500x", "100.0%", "-"],
    ]
    assert [field.value for field in table.rows[2]] == [None, 8e-3, 2e-3, 0.25, 0.4, pytest.approx(5 / 3)]
    assert table.rows[0][0].tone is Tone.DOUBT and "20 times the cost" in table.rows[0][0].hint


def test_the_lead_says_where_it_gains_and_where_not() -> None:
    (text,) = of_kind(part("gains", step()), Text)
    assert text == Text(
        "model bf16 against fp32: the step takes 5.00 ms instead of 10.0 ms. It saves most in gemm (6.00 ms) and adds "
        "most in cast (1.00 ms). 50% of the step is no shorter than before (cast and attention)."
    )


def test_a_step_that_only_got_longer() -> None:
    slower = tuple((name, 2 * seconds) for name, seconds in BEFORE)
    (text,) = of_kind(part("gains", step(best_seconds=2e-2, phases=slower)), Text)
    assert text.text.endswith("instead of 10.0 ms. It saves in no phase and adds most in gemm (8.00 ms).")


def test_a_doubted_case_is_grey_with_its_labels() -> None:
    text = of_kind(part("gains", transformer()), Text)[0]
    assert text.tone is Tone.DOUBT and text.text.endswith("Labelled contended, few-samples.")


def test_no_verdict_on_phases_is_promised() -> None:
    found = part("gains", transformer())
    assert "plain ratios" in found.lead and "no verdict" in found.lead


@pytest.mark.parametrize("levels", [(Level.EMULATED, Level.NATIVE), (Level.NATIVE, Level.EMULATED)])
def test_emulations_have_no_speed(levels: tuple[Level, Level]) -> None:
    """Neither as a case nor as a reference."""
    assert built("gains", step(*levels)) is None


def test_an_operation_and_its_cast_are_told_by_their_step() -> None:
    assert built("gains", gemm()) is None


def test_of_many_cases_some_have_tables_and_the_others_are_counted() -> None:
    found = part("gains", many(20))
    assert len(of_kind(found, Table)) == 12
    assert of_kind(found, Text)[-1].text.startswith("8 more cases have no table here")


def test_the_plain_ratio_of_a_step_names_the_paired_one() -> None:
    (table,) = of_kind(sections.get("gains").build(material(transformer())) or part("gains"), Table)
    assert table.rows[-1][3].text == "1.025x" and table.rows[-1][3].hint.endswith("it is 1.025x")
