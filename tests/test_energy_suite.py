"""Whole suites in separate processes, with the real pynvml and the library of tests/samplers/nvml/ as a driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TypeGuard

import pytest

from fp8bench.api import load
from fp8bench.features.train.kind import KIND, load_training
from fp8bench.features.train.values import ArmCost
from fp8bench.model import EnergyUse, Run
from fp8bench.model.stopping import DeviceSettling
from tests.measure.sensors.nvml.library import Device, Simulation, build, uuid_of, why_not
from tests.trainings import write_tokens

GEMM = ("suite", "gemm", "--set", "shape=128", "--set", "product=forward", "--dtypes", "fp32,bf16", "--no-report")


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """The library, built once, and loaded only by other processes."""
    if why_not():
        pytest.skip(why_not())
    return Simulation(build(tmp_path_factory.mktemp("nvml")))


def printed(simulation: Simulation, folder: Path, *words: str, warming_up: bool = False) -> str:
    """What a command line prints."""
    environment = {**simulation.environment(), "FP8BENCH_NVML_DEVICE": uuid_of(1), "COLUMNS": "120"}
    if warming_up:
        environment.pop("FP8BENCH_WARM_UP")
    done = subprocess.run(
        [sys.executable, "-m", "fp8bench", *words, "--store", "store"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ran(simulation: Simulation, folder: Path, *words: str, warming_up: bool = False) -> tuple[Run, str]:
    """The run of a suite, and its output."""
    text = printed(simulation, folder, *GEMM, "--quick", *words, warming_up=warming_up)
    return load("last", folder / "store"), text


def settled_in_time(settling: DeviceSettling | None) -> TypeGuard[DeviceSettling]:
    """The library's clock and temperature are constant; on a busy machine the time limit may come first."""
    return settling is not None and (settling.settled or settling.looks[-1].at >= settling.limit)


def quick_counter(simulation: Simulation) -> Device:
    """A counter so fast that windows have enough ticks even if the system stops the process for a while."""
    device = simulation.reset()
    device.period_ns = 10_000_000
    return device


def energies(run: Run) -> list[EnergyUse]:
    found = [record.energy for record in run.records]
    return [one for one in found if one is not None]


@pytest.mark.slow
def test_a_suite_measures_energy_where_there_is_a_counter(simulation: Simulation, tmp_path: Path) -> None:
    quick_counter(simulation).reasons = 0x4
    run, text = ran(simulation, tmp_path, "--sustained", "1", warming_up=True)
    assert len(energies(run)) == 2
    for use in energies(run):
        assert use.source == "counter" and use.why == "" and len(use.windows) == 3
        for window in use.windows:
            assert window.joules / window.seconds == pytest.approx(300.0, rel=0.01) and window.steps > 1
            assert window.intervals >= 10 and window.throttle == 0x4 and window.sm_clock == 1755e6
        assert use.idle_before == pytest.approx(300.0, rel=0.01) and use.idle_after == pytest.approx(300.0, rel=0.01)
    for record in run.records:
        assert record.watch is not None and record.watch.throttle == 0x4 and record.watch.looks >= 1
        assert (
            record.watch.temperature == 55 and record.watch.why == "" and record.watch.sm_clock == pytest.approx(1755e6)
        )
        assert settled_in_time(record.watch.warm_up) and record.watch.warm_up.limit == 5.0
        assert record.timing is not None
        assert all(slot.thread_seconds and slot.preemptions is not None for slot in record.timing.slots)
        assert len(record.sustained) == 3
        for turn in record.sustained:
            assert sum(turn.seconds) >= 1 and settled_in_time(turn.settling)
            assert turn.clock == 1755e6 and turn.watts == pytest.approx(300.0, rel=0.01)
        settled = sum(turn.settling is not None and turn.settling.settled for turn in record.sustained)
        assert f"3, {settled} settled" in text
    assert "sustained: a step in turns of seconds" in text and "1.75 GHz" in text


@pytest.mark.slow
def test_without_energy_the_device_is_watched_all_the_same(simulation: Simulation, tmp_path: Path) -> None:
    """Throttling affects times too; the counter is never read."""
    simulation.reset().reasons = 0x40
    simulation.fail("nvmlDeviceGetTotalEnergyConsumption", 3)
    run, _ = ran(simulation, tmp_path, "--no-energy")
    assert not energies(run)
    assert all(record.watch is not None and record.watch.throttle == 0x40 for record in run.records)


@pytest.mark.slow
def test_a_counter_that_goes_back_is_a_reason(simulation: Simulation, tmp_path: Path) -> None:
    simulation.reset()
    for function, code in (("nvmlDeviceGetTotalEnergyConsumption", 15), ("nvmlDeviceGetFieldValues", 15)):
        simulation.fail(function, code, first=40)
    simulation.fail("nvmlDeviceGetPowerUsage", 15)
    run, text = ran(simulation, tmp_path)
    assert all(record.timing is not None for record in run.records)
    for use in energies(run):
        assert not use.windows and "the GPU is lost" in use.why
    assert "Does low precision pay here?" in text


@pytest.mark.slow
def test_a_driver_that_hangs_ends_no_run(simulation: Simulation, tmp_path: Path) -> None:
    quick_counter(simulation)
    simulation.fail("nvmlDeviceGetTotalEnergyConsumption", first=60, delay=1e6)
    run, _ = ran(simulation, tmp_path)
    assert all(record.timing is not None for record in run.records)
    uses = energies(run)
    assert uses and all("gave no answer for 5 s" in use.why for use in uses)
    for use in uses:
        assert all(window.joules > 0 for window in use.windows)


@pytest.mark.slow
def test_a_training_measures_the_energy_of_each_arm(simulation: Simulation, tmp_path: Path) -> None:
    quick_counter(simulation)
    write_tokens(tmp_path / "text")
    words = "train --data text --steps 4 --seeds 1 --batch 1 --sequence 16 --dtypes fp32,bf16"
    text = printed(simulation, tmp_path, *words.split())
    (path,) = KIND.files(tmp_path / "store")
    found = {one.arm: one.energy for one in load_training(path).select_lines(ArmCost) if one.energy}
    assert found.keys() == {"fp32", "bf16"} and "J/step" in text and "J [" in text
    for use in found.values():
        (window,) = use.windows
        assert use.source == "counter" and use.why == "" and window.intervals >= 10
        assert window.joules / window.seconds == pytest.approx(300.0, rel=0.01)
