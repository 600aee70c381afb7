"""Windows of single phases, on a virtual clock that steps and samplers move: energies are known exactly."""

from __future__ import annotations

import pytest

from fp8bench.errors import WorkerLost
from fp8bench.measure.windows import WindowPass, WindowRule
from fp8bench.model import Level, PhaseEnergy
from tests.fakes import CAST, GEMM, MS, UNATTRIBUTED, Fault, Script, arm
from tests.measure.powered import PHASE_WATTS, Power, Runner

# A step of a cast of 0.2 ms, a product of 19 ms and what is left over.
PARTS = Script(lambda call: ((UNATTRIBUTED, CAST, GEMM), (MS // 10, MS // 5, 19 * MS)))
NOBODY = "nobody does unattributed by itself"


def measured(
    windows: int = 2, levels: dict[str, Level] | None = None, spoilt: str = "", **scripts: Script
) -> tuple[dict[str, dict[str, PhaseEnergy]], Runner]:
    """What was found by mode and phase, and the worker that was asked."""
    power = Power()
    worker = Runner(power, scripts)
    worker.spoilt = spoilt
    arms = [arm(mode, (levels or {}).get(mode, Level.NATIVE)) for mode in scripts]
    for one in arms:
        one.prepare(worker)
    found = WindowPass(power.meter(), WindowRule(windows), 0, lambda arm, share: None).phases(arms, worker)
    return {one.planned.case.mode: {part.phase: part for part in found[one.key]} for one in arms}, worker


def test_each_phase_gets_the_energy_of_its_own_power() -> None:
    found, worker = measured(fp32=PARTS, bf16=PARTS)
    for phases in found.values():
        assert list(phases) == ["unattributed", "cast", "gemm"]
        assert phases["unattributed"] == PhaseEnergy("unattributed", (), NOBODY)
        for phase in ("cast", "gemm"):
            assert len(phases[phase].windows) == 2 and phases[phase].why == ""
            for window in phases[phase].windows:
                assert window.joules / window.seconds == pytest.approx(PHASE_WATTS[phase], rel=0.01)
                assert window.intervals >= 10
    held = [entry[1:] for entry in worker.log if entry[0] == "hold" and entry[2] != "unattributed"]
    assert sorted(held[:4]) == sorted(held[4:]) and len({mode for mode, _ in held[:3]}) == 2


def test_a_phase_that_spoils_its_numbers_has_no_window_and_is_tried_once() -> None:
    found, worker = measured(
        3, {"fp8": Level.EMULATED}, spoilt="what it writes is no longer finite", fp32=PARTS, fp8=PARTS
    )
    assert found["fp32"]["cast"] == PhaseEnergy("cast", (), "what it writes is no longer finite")
    assert [len(found[mode]["gemm"].windows) for mode in ("fp32", "fp8")] == [3, 1], "an emulated case has one"
    assert [entry[1:] for entry in worker.log if entry[0] == "hold"].count(("fp32", "cast")) == 1


def test_a_fault_ends_the_pass_and_keeps_what_is_there() -> None:
    broken = Script(PARTS.step, faults=[Fault("hold", WorkerLost("the worker crashed"), at=4)])
    found, worker = measured(2, fp32=broken)
    ended = [one for one in found["fp32"].values() if "of fp32 ended this: the worker crashed" in one.why]
    assert ended and all(not one.windows or len(one.windows) == 1 for one in found["fp32"].values())
    assert not worker.held
