"""Energy on the page: what a lower precision saves, bars, phases, windows, and why there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import EnergyUse
from fp8bench.report.elements import Axis, Bars, Items, Stacks, Table, Text, Tone
from fp8bench.report.page import html
from fp8bench.report.page.section import page_of
from tests.energies import (
    TOO_FEW,
    VIRTUAL,
    energetic,
    phase_of,
    squares,
    unmeasured,
    use,
    with_energy,
    without_energy,
)  # fmt: skip
from tests.materials import Made, material, of_kind, part


def said(made: Made) -> list[Text]:
    """The sentences and the notes."""
    return [text for items in of_kind(part("energy", made), Items) for text in items.items]


def test_a_sentence_for_each_precision() -> None:
    """With the joules, and what its speed alone would give; then what is missing."""
    found = said(energetic())
    bf16, fp8, nvfp4, fp16 = (one.text for one in found)
    assert bf16 == (
        "bf16 takes 0.613x [0.599, 0.625] of fp32's energy on transformer (1.90 J a step against 3.10 J; beyond "
        "idling 1.39 J against 2.28 J); at the same power its speed would give 0.617x."
    )
    assert fp8 == (
        "fp8 takes perhaps 0.974x [0.935, 1.011] of fp32's energy on transformer (3.02 J a step against 3.10 J; "
        "beyond idling 2.25 J against 2.28 J); at the same power its speed would give 0.939x. It is not clear: their "
        "windows lie too close together."
    )
    assert nvfp4 == "nvfp4 is emulated: the 31.0 J of its steps are the cost of emulation."
    assert fp16 == f"fp16: no energy: {TOO_FEW}."
    assert [one.tone for one in found] == [Tone.GOOD, Tone.DOUBT, Tone.DOUBT, Tone.DOUBT]


def test_the_source_is_named() -> None:
    assert part("energy", energetic()).lead.endswith("Read from the driver's energy counter.")
    lead = part("energy", with_energy(bf16=use((1.9,) * 3, source="average"))).lead
    assert lead.endswith("counter and the driver's mean power, summed up, whose figures do not compare.")


def test_bars_are_idling_and_what_comes_on_top() -> None:
    """Emulations in a chart of their own; without an idle power a bar is in one piece."""
    energy, cost = of_kind(part("energy", with_energy(fp8=replace(use((3.0,) * 3), idle_before=None))), Stacks)[:2]
    assert energy.axis == Axis("energy of a step", "J") and energy.parts == ("beyond idling", "idling", "not split")
    rows = dict(energy.rows)
    assert list(rows) == ["fp32", "bf16", "fp8"] and list(dict(cost.rows)) == ["nvfp4"]
    assert rows["bf16"] == pytest.approx((1.3916, 0.5084, 0.0)) and rows["fp8"] == pytest.approx((0.0, 0.0, 3.0))
    assert energy.description.startswith(
        "From 1.90 J (bf16) to 3.10 J (fp32) a step, at 300 W to 310 W; idling is 26% "
    )


def test_ratios_are_bars_from_the_reference() -> None:
    """Green and red where it is clear, grey where not; no bar for the reference, emulations and other sources."""
    (bars,) = of_kind(part("energy", with_energy(fp16=use((4.0,) * 3))), Bars)
    ((_, marks),) = bars.groups
    assert bars.start == 1.0 and bars.axis.unit == "x"
    assert [(one.label, one.tone) for one in marks] == [
        ("bf16", Tone.GOOD), ("fp8", Tone.DOUBT), ("fp16", Tone.BAD),
    ]  # fmt: skip
    assert marks[0].low is not None and marks[0].high is not None and marks[0].low < marks[0].value < marks[0].high
    assert "0.617x of its time" in marks[0].hint and "not clear" in marks[1].hint


def test_phases_are_estimates() -> None:
    """With the parts of the chart of times, so that colours agree; they sum to the step."""
    made = energetic()
    estimated = of_kind(part("energy", made), Stacks)[-1]
    times = of_kind(part("phases", made), Stacks)[0]
    assert "estimate" in estimated.title and estimated.description.startswith("An estimate")
    assert estimated.parts == times.parts
    assert {label: sum(values) for label, values in estimated.rows} == pytest.approx(
        {"fp32": 3.1, "bf16": 1.9, "fp8": 3.02}
    )


def test_windows_are_all_there_and_folded() -> None:
    (table,) = of_kind(part("energy", energetic()), Table)
    assert table.folded and len(table.rows) == 10
    titles = [column.title for column in table.columns]
    row = dict(zip(titles, (field.text for field in table.rows[3]), strict=True))
    assert row == {
        "precision": "bf16", "source": "counter", "steps": "100", "length": "620 ms", "energy": "190 J",
        "per step": "1.900 J", "valid": "certified",
        "power": "306 W", "idle before": "81.0 W", "idle after": "83.0 W", "intervals": "12",
        "uncertainty": "+-0.40%", "SM clock": "1.41 GHz", "temperature": "61",
    }  # fmt: skip
    page = html.render(page_of(material(energetic())))
    assert '<details class="sheet" id="energy-windows-transformer"' in page


def test_what_no_window_knows_has_no_column() -> None:
    plain = EnergyUse("rapl", tuple(replace(one, sm_clock=None, temperature=None) for one in use((1.0,) * 3).windows))
    (table,) = of_kind(
        part("energy", with_energy(**dict.fromkeys(("fp32", "bf16", "fp8", "nvfp4", "fp16"), plain))), Table
    )
    assert not {"SM clock", "temperature", "idle before", "idle after"} & {column.title for column in table.columns}


def test_many_shapes_have_one_sentence_and_shares() -> None:
    """Joules that differ by 256 would hide each other."""
    made = squares(0.5, 0.6, 1.0)
    assert said(made)[0].text == "bf16 takes 0.500x to 1.000x of fp32's energy in 3 cases: less in 2, not clear in 1."
    assert said(made)[1].text == "fp8 is emulated: the 4.00 mJ to 1.02 J of its steps are the cost of emulation."
    shares = of_kind(part("energy", made), Stacks)[0]
    assert shares.axis.unit == "%" and shares.rows[0][0] == "m=256 fp32, 1.00 mJ"
    assert all(sum(values) == pytest.approx(100) for _, values in shares.rows)
    (bars,) = of_kind(part("energy", made), Bars)
    ((heading, marks),) = bars.groups
    assert heading == "bf16 over fp32" and [one.label for one in marks] == ["m=256", "m=512", "m=1024"]


def test_the_reference_alone_has_nothing_beside_it() -> None:
    alone = with_energy(bf16=None, fp8=None, nvfp4=None, fp16=None)
    assert said(alone)[0].text == "fp32 takes 3.10 J a step: there is nothing to compare it with."


def test_where_nobody_can_tell_there_is_the_reason() -> None:
    found = part("energy", unmeasured())
    assert found.elements == (Text(f"Not measured on cpu: {VIRTUAL}.", Tone.DOUBT),) and found.lead == ""


def test_the_table_of_all_cases_has_joules() -> None:
    """Where there are some; of emulations with the word that they are a cost."""
    (table,) = of_kind(part("results", energetic()), Table)
    place = [column.title for column in table.columns].index("energy")
    assert [row[place].text for row in table.rows] == ["3.10 J", "1.90 J", "3.02 J", "31.0 J", "-"]
    assert [row[place].tone for row in table.rows[2:4]] == [Tone.PLAIN, Tone.DOUBT]
    (table,) = of_kind(part("results", without_energy()), Table)
    assert "energy" not in [column.title for column in table.columns]


def test_the_verdict_tells_of_energy_that_is_clear() -> None:
    """And of no other; of several cases how many are."""
    sentences = [text.text for items in of_kind(part("verdict", energetic()), Items) for text in items.items]
    assert [one.endswith("; it takes 0.613x of the energy") for one in sentences] == [True, False, False, False]
    (several,) = of_kind(part("verdict", squares(0.5, 0.6, 1.0)), Items)
    assert several.items[0].text.endswith("; it takes 0.500x to 0.600x of the energy in 2 of 3")


def test_phases_that_were_measured_have_a_chart_of_their_own_and_a_table() -> None:
    """What they leave over is unattributed; each row has its range, its power, and what it is worth."""
    shares = {"cast": 0.1, "gemm": 0.5, "attention": 0.1, "optimizer_step": 0.1, "elementwise": 0.15}
    joules = {"cast": 0.12, "gemm": 0.9, "attention": 0.2, "optimizer_step": 0.2, "elementwise": 0.4}
    asked = tuple(phase_of(name, joules[name], 0.0062 * share) for name, share in shares.items())
    whole = replace(use((1.9, 1.9, 1.9), 0.0062), phases=asked, power_limits=(650.0,))
    section = part("energy", with_energy(bf16=whole, fp32=None, fp8=None, fp16=None, nvfp4=None))
    (chart,) = (one for one in of_kind(section, Stacks) if one.name == "energy-phases-transformer")
    assert chart.title.endswith("energy by phase (each measured by itself)")
    (table,) = (one for one in of_kind(section, Table) if one.name == "energy-of-phases-transformer")
    titles = [column.title for column in table.columns]
    row = dict(zip(titles, (field.text for field in table.rows[1]), strict=True))
    assert {name: row[name] for name in ("phase", "per step", "from", "to", "per token", "power limit")} == {
        "phase": "gemm", "per step": "900 mJ", "from": "896.4 mJ", "to": "903.6 mJ", "per token": "879 uJ",
        "power limit": "650 W",
    }  # fmt: skip
    assert (row["provenance"], row["valid"], row["power"]) == ("measured", "certified", "290 W")
