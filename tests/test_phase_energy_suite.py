"""Phases of known power through a whole suite: real worker, real pynvml, and a simulated driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from fp8bench.analysis.energy import PhaseEnergies, phase_energies
from fp8bench.analysis.findings import findings
from fp8bench.analysis.metrics import EnergyValidity, classify_energy_validity
from fp8bench.api import load
from fp8bench.model import EnergyUse, Provenance, Record
from tests.commands import ROOT
from tests.measure.sensors.nvml.library import TOLD, Simulation, build, uuid_of, why_not
from tests.runs import render_whole

SUITE = ROOT / "tests" / "phase_power_suite.py"
# The seconds and watts of phase_power_suite.py.
TRUTH = {"gemm": (9.8e-3, 600.0), "cast": (2e-4, 80.0), "elementwise": (6e-3, 250.0), "optimizer_step": (4e-3, 410.0)}
STEP = sum(seconds * watts for seconds, watts in TRUTH.values())


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    if why_not():
        pytest.skip(why_not())
    return Simulation(build(tmp_path_factory.mktemp("nvml")))


class Measured(NamedTuple):
    """The record of one case, and what its phases take."""

    record: Record
    phases: PhaseEnergies


def measured(simulation: Simulation, folder: Path, hows: str, *words: str) -> tuple[dict[str, Measured], str]:
    """A case per label, and its terminal output."""
    device = simulation.reset()
    device.curve = TOLD
    device.low = 0.5
    device.period_ns = 10_000_000
    told = {**simulation.environment(), "FP8BENCH_NVML_DEVICE": uuid_of(1), "COLUMNS": "150", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fp8bench", "suite", str(SUITE), "--set", f"how={hows}", "--energy", "phases"]
    command += ["--rounds", "8", "--no-report", "--store", "store", *words]
    done = subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    kept = load("last", folder / "store")
    found = {}
    for record in kept.records:
        phases = phase_energies(record, findings(kept)[record.case.id])
        assert phases is not None
        found[str(record.case.param("how"))] = Measured(record, phases)
    assert "energy of phases" in done.stdout or "joules of each phase, measured alone" in done.stdout
    return found, render_whole(kept, findings(kept), 150)


@pytest.fixture(scope="module")
def quick(simulation: Simulation, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Measured], str]:
    """One command for all tests with few windows; the last case lowers the limit for good."""
    return measured(simulation, tmp_path_factory.mktemp("quick"), "pretend,hidden,sparse,lower", "--quick")


def joules(use: EnergyUse | None) -> Mapping[str, float]:
    """The median joules of each phase with windows."""
    assert use is not None
    by_phase = {}
    for phase in use.phases:
        if phase.windows:
            by_phase[phase.phase] = median(window.joules / window.steps for window in phase.windows)
    return by_phase


@pytest.mark.slow
def test_phases_of_80_to_600_watts_are_recovered(simulation: Simulation, tmp_path: Path) -> None:
    cases, text = measured(simulation, tmp_path, "burn")
    record, found = cases["burn"]
    told = joules(record.energy)
    assert record.energy is not None
    whys = {one.phase: one.why for one in record.energy.phases if one.phase not in told}
    assert set(whys) <= {"unattributed", "cast"}, whys
    assert all("not measurable" in why for phase, why in whys.items() if phase == "cast")
    for phase in told:
        seconds, watts = TRUTH[phase]
        assert told[phase] == pytest.approx(seconds * watts, rel=0.1 if phase == "cast" else 0.03)
    assert len(record.energy.windows) == 3
    for window in record.energy.windows:
        assert window.joules / window.steps == pytest.approx(STEP, rel=0.03)
    assert record.energy.power_limits == (650.0,) and " W of 650 W" in text
    assert "joules of each phase, measured alone" in " ".join(text.split())
    if found.void_reason:
        assert found.void_reason.startswith("run separately, the phases take ")
        return
    assert found.residual is not None and abs(found.residual.middle) < 0.03 * STEP
    for one in found.phases:
        if one.phase in TRUTH and one.provenance is Provenance.MEASURED:
            assert one.range is not None and one.range.low <= one.joules <= one.range.high


@pytest.mark.nightly
def test_a_phase_that_is_another_by_itself_makes_all_void(quick: tuple[dict[str, Measured], str]) -> None:
    cases, text = quick
    for how in ("pretend", "hidden"):
        found = cases[how].phases
        assert found.void_reason and {one.provenance for one in found.phases} == {Provenance.ESTIMATED}
    assert text.count("energy of phases is void") == sum(bool(one.phases.void_reason) for one in cases.values())


@pytest.mark.nightly
def test_what_cannot_be_done_by_itself_stays_an_estimate(quick: tuple[dict[str, Measured], str]) -> None:
    cases, text = quick
    record, found = cases["sparse"]
    (product,) = (one for one in found.phases if one.phase == "gemm")
    assert product.provenance is Provenance.ESTIMATED and set(joules(record.energy)) == set(TRUTH) - {"gemm"}
    assert "tensor, which has no plain memory" in text or found.void_reason


@pytest.mark.nightly
def test_a_limit_that_is_lowered_meanwhile_certifies_nothing(quick: tuple[dict[str, Measured], str]) -> None:
    cases, text = quick
    record, _ = cases["lower"]
    assert record.energy is not None and record.energy.power_limits == (650.0, 500.0)
    assert classify_energy_validity(record) in (EnergyValidity.LIMIT_CHANGED, EnergyValidity.TOO_FEW_TICKS)
    assert "of 650 W, 500 W" in text
