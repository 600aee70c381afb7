"""Energy on the page, in a terminal, in tidy and wide rows.

The reason if there is none, and nothing if it was not requested.
"""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import EnergyUse, Label, PhaseEnergy
from fp8bench.report.data.run import tidy_rows
from fp8bench.report.panels import group_into_panels
from fp8bench.report.topics.energy import energy_table, phase_energy_table
from tests.energies import TOO_FEW, energetic, phase_of, unmeasured, use, with_energy, without_energy
from tests.materials import Made, part, told
from tests.runs import render_whole
from tests.told_before import Told, as_before, on_terminal

MODES = ("fp32", "bf16", "fp8", "nvfp4", "fp16")
# The best case of each.
SHARES = {"cast": 0.1, "gemm": 0.5, "attention": 0.1, "optimizer_step": 0.1, "elementwise": 0.15}


def alone(bf16: EnergyUse) -> Made:
    return with_energy(bf16=bf16, fp32=None, fp8=None, fp16=None, nvfp4=None)


def phased(joules: dict[str, float]) -> tuple[PhaseEnergy, ...]:
    return tuple(phase_of(name, joules[name], 0.0062 * share) for name, share in SHARES.items())


def lines(made: Made) -> list[str]:
    return told([element for panel in group_into_panels(*made) for element in energy_table(panel)], 120)


@as_before
def test_energy() -> Told:
    yield "where nobody can tell there is the reason", part("energy", unmeasured())
    yield "a verdict tells of energy that is clear, and of no other", part("verdict", energetic())
    joules = {"cast": 0.12, "gemm": 0.9, "attention": 0.2, "optimizer_step": 0.2, "elementwise": 0.4}
    whole = replace(use((1.9, 1.9, 1.9), 0.0062), phases=phased(joules), power_limits=(650.0,))
    yield ("phases by themselves have a chart and a table", part("energy", alone(whole)))


@as_before
def test_energy_in_a_terminal() -> Told:
    once = with_energy(bf16=use((1.9,)), fp8=use((3.0,)), nvfp4=None, fp16=None)
    yield "the same doubt of several cases is one note", on_terminal(once, "energy")
    gone = with_energy(**dict.fromkeys(MODES, EnergyUse("counter", why=TOO_FEW)))
    yield "where no case has energy there is no table of it", on_terminal(gone, "energy")
    run, findings = with_energy(fp16=None, bf16=EnergyUse("counter", why="the GPU is lost"))
    label = Label.ENERGY_UNRESOLVED
    for mode, reason in (("bf16", "the GPU is lost"), ("fp8", "its windows are 9% apart"), ("fp32", "so they are")):
        (case,) = (finding for finding in findings if finding.endswith(f"/{mode}"))
        findings[case] = replace(findings[case], labels=(label,), label_reasons=((label, reason),))
    yield "what the label says is said once for all cases", on_terminal((run, findings), "energy")
    slow = with_energy(bf16=use((1.9, 1.9, 1.9), 0.0075), nvfp4=use((31.0,), 0.5))
    yield "a clock that slots keep and windows do not is told", on_terminal(slow, "energy")
    idle = replace(use((1.9, 1.9, 1.9)), idle_after=None, why="idle power: too few ticks")
    yield "no net energy without idle power", on_terminal(with_energy(bf16=idle), "energy")
    fewer = use((1.9, 1.91), why="the counter went back")
    yield "windows that are missing are told", on_terminal(with_energy(bf16=fewer), "energy")
    differ = with_energy(bf16=use((1.9, 1.9, 1.9), source="average"), nvfp4=None)
    yield "where sources differ there is no ratio", lines(differ)
    joules = {"gemm": 1.5, "cast": 0.12, "attention": 0.2, "optimizer_step": 0.2, "elementwise": 0.24}
    whole = replace(use((2.3, 2.3, 2.3), 0.0062), phases=phased(joules), power_limits=(650.0, 500.0))
    lost = PhaseEnergy("cast", why="it is given a sparse tensor"), phase_of("gemm", 4.0, 0.0062 * SHARES["gemm"])
    void = replace(whole, phases=lost, windows=use((3.0, 3.0, 3.0), 0.0094).windows)
    both = with_energy(bf16=whole, fp8=void)
    yield (
        "phases that were asked for have a table; measured ones half their range, estimates brackets",
        told([element for panel in group_into_panels(*both) for element in phase_energy_table(panel)], 120),
    )
    yield ("what phases leave over, and a limit that was changed, are notes", on_terminal(both, "energy", width=250))


def test_who_did_not_ask_sees_nothing() -> None:
    assert "energy" not in render_whole(*without_energy()).partition("how to read")[0]
    assert not [element for panel in group_into_panels(*energetic()) for element in phase_energy_table(panel)]
    tidy = tidy_rows(*without_energy())
    assert not [row for row in tidy if "energy" in str(row["metric"]) or "power" in str(row["metric"])]
