"""A processor's clock and temperature, from made files."""

from __future__ import annotations

from pathlib import Path

from fp8bench.measure.device_watch import Settler
from fp8bench.measure.sensors.rapl import HostDevice
from fp8bench.model.readings import Reading, Unavailable
from tests.counts import for_each
from tests.fakes import MS, FakeWorker, Script, arm, gemm_steps


def made(root: Path, clocks: dict[int, str], **chips: list[str]) -> HostDevice:
    """A kernel's folders: kilohertz by core, and thousandths of degrees by chip."""
    for core, text in clocks.items():
        folder = root / f"devices/system/cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(text)
    for number, (name, texts) in enumerate(chips.items()):
        folder = root / f"class/hwmon/hwmon{number}"
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        for place, text in enumerate(texts, 1):
            (folder / f"temp{place}_input").write_text(text)
    return HostDevice("a CPU has no driver", root)


def test_the_fastest_core_and_the_hottest_sensor_of_a_processor(tmp_path: Path) -> None:
    device = made(tmp_path, {0: "1500000\n", 1: "3600000\n"}, k10temp=["61250", "58000"], nvme=["90000"])
    seen = device.glance()
    assert seen["cpu_clock"] == Reading(3.6e9, "Hz", "sysfs") and seen["temperature"] == Reading(61.25, "degC", "sysfs")
    assert seen["sm_clock"] == Unavailable("a CPU has no driver") and device.tells and not device.silent
    assert device.changing() == seen and device.facts()["driver"] == Unavailable("a CPU has no driver")


@for_each("clocks", [{}, {0: "<unknown>"}, {0: "0"}])
def test_what_cannot_be_read_is_a_reason_and_no_zero(tmp_path: Path, clocks: dict[int, str]) -> None:
    device = made(tmp_path, clocks)
    assert isinstance(device.glance()["cpu_clock"], Unavailable) and device.tells == bool(clocks)


def test_a_processor_warms_up_by_what_it_tells(tmp_path: Path) -> None:
    device = made(tmp_path, {}, coretemp=["50000"])
    worker, one = FakeWorker({"fp32": Script(gemm_steps(10 * MS))}), arm("fp32")
    one.prepare(worker)
    found = Settler(device, 30.0, worker.clock).settle(one, worker)
    assert found is not None and found.settled and found.seconds < 5
    assert {look.temperature for look in found.looks} == {50.0} and {look.clock for look in found.looks} == {None}
