"""Energy on a terminal: a table where there are windows, a line where nobody could tell, nothing where nobody asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import EnergyUse, Label, PhaseEnergy
from fp8bench.report.elements import Items, Text, Tone
from fp8bench.report.panels import panels_of
from fp8bench.report.terminal.figures import energy, energy_of_phases
from fp8bench.report.terminal.run import render
from tests.energies import TOO_FEW, VIRTUAL, energetic, phase_of, unmeasured, use, with_energy, without_energy
from tests.materials import Made, of_kind, part, told

# Of the best case of each.
SHARES = {"cast": 0.1, "gemm": 0.5, "attention": 0.1, "optimizer_step": 0.1, "elementwise": 0.15}


def lines(made: Made, width: int = 120) -> list[str]:
    """The tables of all panels."""
    return told([element for panel in panels_of(*made) for element in energy(panel)], width)


def test_the_table() -> None:
    """The source in its title, gross, against the reference, net, by tokens, watts, windows and clock."""
    assert lines(energetic()) == [
        "energy of a step, by the driver's energy counter",
        "  case   per step  vs fp32                           net/step  per token  power    idle  windows        clock",
        "  fp32     3.10 J  reference                           2.28 J    3.03 mJ  310 W  82.0 W  3 (+-0.4%)  1.41 GHz",
        "  bf16     1.90 J  less       0.613x [0.599, 0.625]    1.39 J    1.86 mJ  306 W  82.0 W  3 (+-0.4%)  1.41 GHz",
        "  fp8      3.02 J  unclear    0.974x [0.935, 1.011]    2.25 J    2.95 mJ  321 W  82.0 W  3 (+-0.4%)  1.41 GHz",
        "  nvfp4    31.0 J  emulated                            21.2 J    30.3 mJ  258 W  82.0 W  1 (+-0.4%)  1.41 GHz",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert all(len(line) <= width for line in lines(energetic(), width))


def test_what_is_missing_is_a_note_and_the_words_are_explained() -> None:
    text = render(*energetic(), width=200)
    assert f"- fp16: no energy: {TOO_FEW}" in text
    assert "- fp8: energy unclear: their windows lie too close together" in text
    assert "energy vs fp32: of a step / that of fp32, below 1x is less" in text
    assert "energy of an emulated case is the cost of emulation" in text


def test_the_same_doubt_of_several_cases_is_one_note() -> None:
    once = with_energy(bf16=use((1.9,)), fp8=use((3.0,)), nvfp4=None, fp16=None)
    assert "- bf16, fp8: energy unclear: one window is too few to compare" in render(*once, width=200)
    gone = with_energy(**dict.fromkeys(("fp32", "bf16", "fp8", "nvfp4", "fp16"), EnergyUse("counter", why=TOO_FEW)))
    text = render(*gone, width=200)
    assert f"- fp32, bf16, fp8, nvfp4, fp16: no energy: {TOO_FEW}" in text and "energy of a step" not in text


def test_what_the_label_says_is_said_once_for_all_cases() -> None:
    """Not beside each of them; the label itself stands there."""
    run, findings = with_energy(fp16=None, bf16=EnergyUse("counter", why="the GPU is lost"))
    label = Label.ENERGY_UNRESOLVED
    for mode, reason in (("bf16", "the GPU is lost"), ("fp8", "its windows are 9% apart"), ("fp32", "so they are")):
        (case,) = (one for one in findings if one.endswith(f"/{mode}"))
        findings[case] = replace(findings[case], labels=(label,), label_reasons=((label, reason),))
    text = render(run, findings, width=200)
    assert text.count("      labels: energy-unresolved\n") == 3
    assert "- bf16: no energy: the GPU is lost\n" in text
    assert "- fp8: energy-unresolved: its windows are 9% apart\n" in text
    assert text.count("the GPU is lost") == text.count("its windows are 9% apart") == 1
    assert "- fp8: energy unclear: energy-unresolved\n" in text


def test_windows_whose_steps_take_another_time_say_so() -> None:
    """A clock that slots keep and windows do not. Of an emulated case no time is a speed."""
    slow = with_energy(bf16=use((1.9, 1.9, 1.9), 0.0075), nvfp4=use((31.0,), 0.5))
    text = render(*slow, width=200)
    words = "a step took 7.50 ms (+20.5%) in the seconds of its energy windows, and 6.22 ms in slots"
    assert f"- bf16: {words}\n" in text and text.count("in the seconds of its energy windows") == 1
    assert "in the seconds of its energy windows" not in render(*energetic(), width=200)
    doubts = [one for items in of_kind(part("energy", slow), Items) for one in items.items]
    assert Text(f"bf16: {words}.", Tone.DOUBT) in doubts


def test_no_net_without_idle_power() -> None:
    text = render(*with_energy(bf16=replace(use((1.9, 1.9, 1.9)), idle_after=None, why="idle power: too few ticks")))
    assert "- bf16: no net energy: idle power: too few ticks" in text
    assert text.count("idle power: too few ticks") == 1


def test_windows_that_are_missing_are_told() -> None:
    text = render(*with_energy(bf16=use((1.9, 1.91), why="the counter went back")), width=200)
    assert "- bf16: energy of 2 windows only: the counter went back" in text


def test_sources_that_differ_are_named() -> None:
    """Then there is no ratio."""
    found = lines(with_energy(bf16=use((1.9, 1.9, 1.9), source="average"), nvfp4=None))
    assert found[0] == "energy of a step; sources differ, and their figures do not compare (counter, average)"
    (row,) = [line for line in found if line.startswith("  bf16")]
    assert row.split()[:4] == ["bf16", "1.90", "J", "-"] and row.endswith("average") and " 3  " in row


def test_where_nobody_can_tell_there_is_one_line() -> None:
    text = render(*unmeasured(), width=200)
    assert f"energy: not measured on cpu: {VIRTUAL}\n" in text and text.count("energy") == 1
    assert not lines(unmeasured())


def test_a_run_that_was_not_asked_looks_as_before() -> None:
    assert "energy" not in render(*without_energy())


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
    text = render(*made, width=250)
    assert "306 W" not in text and "371 W of 650 W, 500 W" in text
    assert "- bf16: energy of phases: they leave over 40.0 mJ [" in text and "and 310 us of its time" in text
    assert "fp8: energy of phases is void: by themselves they take 3.10 ms" in text
    assert "bf16, fp8: its energy is not certified: power-limit-changed" in text


def test_nobody_asked_for_phases() -> None:
    assert not [element for panel in panels_of(*energetic()) for element in energy_of_phases(panel)]
