"""Energy: on the page, in a terminal, as tidy and as wide rows; why there is none, and nothing where nobody asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import EnergyUse, Label, PhaseEnergy
from fp8bench.model.specs import STEP
from fp8bench.report.data.run import TidyRow, rows, widened
from fp8bench.report.elements import Bars, Items, Stacks, Table, Text, Tone
from fp8bench.report.panels import panels_of
from fp8bench.report.topics.energy import energy, energy_of_phases
from tests.energies import TOO_FEW, VIRTUAL, energetic, phase_of, squares, unmeasured, use, with_energy, without_energy
from tests.materials import Made, of_kind, part, told
from tests.runs import render_whole

# Of the best case of each.
SHARES = {"cast": 0.1, "gemm": 0.5, "attention": 0.1, "optimizer_step": 0.1, "elementwise": 0.15}


def said(made: Made) -> list[Text]:
    """The sentences and the notes."""
    return [text for items in of_kind(part("energy", made), Items) for text in items.items]


def test_the_source_is_named() -> None:
    assert part("energy", energetic()).lead.endswith("Read from the driver's energy counter.")
    lead = part("energy", with_energy(bf16=use((1.9,) * 3, source="average"))).lead
    assert lead.endswith("counter and the driver's mean power, summed up, whose figures do not compare.")


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


def lines(made: Made, width: int = 120) -> list[str]:
    """The tables of all panels."""
    return told([element for panel in panels_of(*made) for element in energy(panel)], width)


def test_the_same_doubt_of_several_cases_is_one_note() -> None:
    once = with_energy(bf16=use((1.9,)), fp8=use((3.0,)), nvfp4=None, fp16=None)
    assert "- bf16, fp8: energy unclear: one window is too few to compare" in render_whole(*once, width=200)
    gone = with_energy(**dict.fromkeys(("fp32", "bf16", "fp8", "nvfp4", "fp16"), EnergyUse("counter", why=TOO_FEW)))
    text = render_whole(*gone, width=200)
    assert f"- fp32, bf16, fp8, nvfp4, fp16: no energy: {TOO_FEW}" in text and "energy of a step" not in text


def test_what_the_label_says_is_said_once_for_all_cases() -> None:
    """Not beside each of them; the label itself stands there."""
    run, findings = with_energy(fp16=None, bf16=EnergyUse("counter", why="the GPU is lost"))
    label = Label.ENERGY_UNRESOLVED
    for mode, reason in (("bf16", "the GPU is lost"), ("fp8", "its windows are 9% apart"), ("fp32", "so they are")):
        (case,) = (one for one in findings if one.endswith(f"/{mode}"))
        findings[case] = replace(findings[case], labels=(label,), label_reasons=((label, reason),))
    text = render_whole(run, findings, width=200)
    assert text.count("      labels: energy-unresolved\n") == 3
    assert "- bf16: no energy: the GPU is lost\n" in text
    assert "- fp8: energy-unresolved: its windows are 9% apart\n" in text
    assert text.count("the GPU is lost") == text.count("its windows are 9% apart") == 1
    assert "- fp8: energy unclear: energy-unresolved\n" in text


def test_windows_whose_steps_take_another_time_say_so() -> None:
    """A clock that slots keep and windows do not. Of an emulated case no time is a speed."""
    slow = with_energy(bf16=use((1.9, 1.9, 1.9), 0.0075), nvfp4=use((31.0,), 0.5))
    text = render_whole(*slow, width=200)
    words = "a step took 7.50 ms (+20.5%) in the seconds of its energy windows, and 6.22 ms in slots"
    assert f"- bf16: {words}\n" in text and text.count("in the seconds of its energy windows") == 1
    assert "in the seconds of its energy windows" not in render_whole(*energetic(), width=200)
    doubts = [one for items in of_kind(part("energy", slow), Items) for one in items.items]
    assert Text(f"bf16: {words}.", Tone.DOUBT) in doubts


def test_no_net_without_idle_power() -> None:
    text = render_whole(
        *with_energy(bf16=replace(use((1.9, 1.9, 1.9)), idle_after=None, why="idle power: too few ticks"))
    )
    assert "- bf16: no net energy: idle power: too few ticks" in text
    assert text.count("idle power: too few ticks") == 1


def test_windows_that_are_missing_are_told() -> None:
    text = render_whole(*with_energy(bf16=use((1.9, 1.91), why="the counter went back")), width=200)
    assert "- bf16: energy of 2 windows only: the counter went back" in text


def test_sources_that_differ_are_named() -> None:
    """Then there is no ratio."""
    found = lines(with_energy(bf16=use((1.9, 1.9, 1.9), source="average"), nvfp4=None))
    assert found[0] == "energy of a step; sources differ, and their figures do not compare (counter, average)"
    (row,) = [line for line in found if line.startswith("  bf16")]
    assert row.split()[:4] == ["bf16", "1.90", "J", "-"] and row.endswith("average") and " 3  " in row


def test_a_run_that_was_not_asked_looks_as_before() -> None:
    assert "energy" not in render_whole(*without_energy())


def test_phases_that_were_asked_for_have_a_table_and_what_is_left_over_a_note() -> None:
    """Measured ones with half their range, estimates in brackets; the limit beside the power, and a code where it was
    changed within the run."""
    parts = {"gemm": 1.5, "cast": 0.12, "attention": 0.2, "optimizer_step": 0.2, "elementwise": 0.24}
    seconds = {name: 0.0062 * share for name, share in SHARES.items()}
    asked = tuple(phase_of(name, joules, seconds[name]) for name, joules in parts.items())
    whole = replace(use((2.3, 2.3, 2.3), 0.0062), phases=asked, power_limits=(650.0, 500.0))
    why = PhaseEnergy("cast", why="it is given a sparse tensor")
    void = replace(whole, phases=(why, phase_of("gemm", 4.0, seconds["gemm"])))
    made = with_energy(bf16=whole, fp8=replace(void, windows=use((3.0, 3.0, 3.0), 0.0094).windows))
    tables = told([element for panel in panels_of(*made) for element in energy_of_phases(panel)], 120)
    assert tables[0] == "joules per step of each phase by itself; (estimated) by share of time"
    bf16, fp8 = (line.split() for line in tables[2:])
    assert bf16[:6] == ["bf16", "120", "mJ", "+-0.4%", "1.50", "J"] and "(" not in " ".join(bf16[:-2])
    assert fp8[:3] == ["fp8", "(300", "mJ)"] and "+-" not in " ".join(fp8)
    text = render_whole(*made, width=250)
    assert "306 W" not in text and "371 W of 650 W, 500 W" in text
    assert "- bf16: energy of phases: they leave over 40.0 mJ [" in text and "and 310 us of its time" in text
    assert "fp8: energy of phases is void: by themselves they take 3.10 ms" in text
    assert "bf16, fp8: its energy is not certified: power-limit-changed" in text


def test_nobody_asked_for_phases() -> None:
    assert not [element for panel in panels_of(*energetic()) for element in energy_of_phases(panel)]


def of(mode: str, **wanted: object) -> list[TidyRow]:
    """The rows of one case of energetic() that have these values."""
    found = [row for row in rows(*energetic()) if row["mode"] == mode]
    return [row for row in found if all(row[name] == value for name, value in wanted.items())]


def only(mode: str, **wanted: object) -> TidyRow:
    (row,) = of(mode, **wanted)
    return row


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
