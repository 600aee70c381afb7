"""Energy of an Intel GPU, from files as its drivers write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8bench.measure.sensors import rapl
from fp8bench.measure.sensors.energy import SourceKind
from fp8bench.measure.sensors.meter import meter_for
from fp8bench.measure.sensors.rapl import Counter
from fp8bench.model import DeviceFacts
from fp8bench.model.readings import NoReading
from tests.counts import for_each

XPU = DeviceFacts("xpu", 0, "Intel Data Center GPU Max 1550", 64 << 30, "2.13.0")


def sensors(root: Path, number: int, driver: str, energy: str | None = "1000000") -> Path:
    """One device's folder."""
    folder = root / f"hwmon{number}"
    folder.mkdir()
    (folder / "name").write_text(f"{driver}\n")
    if energy is not None:
        (folder / "energy1_input").write_text(f"{energy}\n")
    return folder


@for_each("driver", ["i915", "xe"])
def test_the_only_one_is_read_in_joules(driver: str, tmp_path: Path) -> None:
    sensors(tmp_path, 0, "nvme", "5")
    sensors(tmp_path, 1, driver, None)
    one = sensors(tmp_path, 2, driver)
    counter = Counter((rapl.gpu_domain(tmp_path),), lambda: 0.0)
    assert counter.read() == 0.0
    (one / "energy1_input").write_text("3500000")
    assert counter.read() == 2.5
    (one / "energy1_input").write_text("3000000")
    with pytest.raises(NoReading, match="went back"):
        counter.read()


def test_no_device_is_guessed(tmp_path: Path) -> None:
    for number in (1, 2):
        sensors(tmp_path, number, "xe")
    with pytest.raises(NoReading, match="2 Intel GPUs count their energy, and torch does not tell which"):
        rapl.gpu_domain(tmp_path)


@for_each(("energy", "why"), [(None, "no energy counter of an Intel GPU"), ("-", "no number")])
def test_without_a_number_there_is_a_reason(energy: str | None, why: str, tmp_path: Path) -> None:
    sensors(tmp_path, 0, "xe", energy)
    with pytest.raises(NoReading, match=why):
        rapl.gpu_domain(tmp_path)


def test_its_meter_says_why_it_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rapl.gpu_domain, "__defaults__", (tmp_path,))
    with meter_for(XPU, {}) as meter:
        assert meter.kind is SourceKind.NONE and "no energy counter of an Intel GPU" in meter.why
    with meter_for(XPU, {}, energy=False) as meter:
        assert meter.why == "--no-energy was given"
