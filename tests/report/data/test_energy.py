"""Energy as tidy and as wide rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import EnergyUse
from fp8bench.model.specs import STEP
from fp8bench.report.data.tidy import TidyRow, rows, widened
from tests.energies import TOO_FEW, VIRTUAL, energetic, unmeasured, without_energy


def of(mode: str, **wanted: object) -> list[TidyRow]:
    """The rows of one case of energetic() that have these values."""
    found = [row for row in rows(*energetic()) if row["mode"] == mode]
    return [row for row in found if all(row[name] == value for name, value in wanted.items())]


def only(mode: str, **wanted: object) -> TidyRow:
    (row,) = of(mode, **wanted)
    return row


def test_the_row_of_the_step() -> None:
    """Gross, with how it compares; its range is of no confidence."""
    row = only("bf16", metric="energy", phase=STEP)
    assert (row["median_in_unit"], row["unit"], row["n_samples"]) == (pytest.approx(1.9), "J", 3)
    assert (row["verdict"], row["provenance"], row["energy_source"]) == ("less", "measured", "counter")
    assert row["ratio_to_reference"] == pytest.approx(1.9 / 3.1) and row["ratio_confidence"] is None
    assert float(str(row["ratio_low"])) < 1.89 / 3.13 and float(str(row["ratio_high"])) > 1.91 / 3.08
    assert only("fp8", metric="energy", phase=STEP)["why"] == "their windows lie too close together"


@pytest.mark.parametrize(
    ("metric", "value", "unit", "provenance"),
    [
        ("energy_net", 1.9 - 82 * 0.0062, "J", "derived"),
        ("energy_uncertainty", 0.004, "ratio", "derived"),
        ("energy_per_token", 1.9 / 1024, "J", "derived"),
        ("energy_per_tflop", 1.9 / 3.1, "J", "derived"),
        ("power", 1.9 / 0.0062, "W", "measured"),
        ("idle_power", 82.0, "W", "measured"),
    ],
)
def test_figures_beside_it(metric: str, value: float, unit: str, provenance: str) -> None:
    row = only("bf16", metric=metric)
    assert row["median_in_unit"] == pytest.approx(value)
    assert (row["unit"], row["provenance"], row["phase"], row["energy_source"]) == (unit, provenance, STEP, "counter")


def test_phases_are_estimates_that_sum_to_the_step() -> None:
    found = [row for row in of("bf16", metric="energy") if row["phase"] != STEP]
    assert {row["provenance"] for row in found} == {"estimated"}
    assert sum(float(str(row["median_in_unit"])) for row in found) == pytest.approx(1.9)


def test_an_emulation_has_a_cost_and_no_ratio() -> None:
    row = only("nvfp4", metric="energy", phase=STEP)
    assert row["level"] == "emulated" and row["median_in_unit"] and row["ratio_to_reference"] is None
    assert row["verdict"] is None


def test_what_is_missing_has_a_row_with_the_reason() -> None:
    """Empty, and never 0."""
    row = only("fp16", metric="energy")
    assert row["median_in_unit"] is None and row["why"] == TOO_FEW and row["n_samples"] is None
    run, findings = energetic()
    records = [replace(one, energy=replace(one.energy or EnergyUse("counter"), idle_after=None)) for one in run.records]
    nets = [row for row in rows(replace(run, records=tuple(records)), findings) if row["metric"] == "energy_net"]
    assert len(nets) == 4 and {row["median_in_unit"] for row in nets} == {None}
    assert {row["why"] for row in nets} == {"the idle power after its windows was not measured"}
    none = [row for row in rows(*unmeasured()) if row["metric"] == "energy"]
    assert len(none) == 5 and {(row["why"], row["energy_source"]) for row in none} == {(VIRTUAL, "none")}


def test_a_run_that_was_not_asked_has_no_rows() -> None:
    found = rows(*without_energy())
    assert not [row for row in found if "energy" in str(row["metric"]) or "power" in str(row["metric"])]
    columns, _ = widened(found)
    assert not [name for name in columns if "energy" in name]


def test_wide_rows_have_a_column_a_figure() -> None:
    """With the source and the reason once; the verdict stays that of the time."""
    columns, wide = widened(rows(*energetic()))
    by_mode = {row["mode"]: row for row in wide}
    assert {"energy_J", "energy_net_J", "energy_per_token_J", "power_W", "gemm_energy_J"} <= set(columns)
    assert by_mode["bf16"]["verdict"] == "faster" and by_mode["bf16"]["energy_source"] == "counter"
    assert by_mode["fp16"]["energy_J"] is None and by_mode["fp16"]["energy_why"] == TOO_FEW
