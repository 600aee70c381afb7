"""Linux's files on a CPU: RAPL, clocks and temperatures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.measure.device_watch import Settler
from fp8bench.measure.sensors import rapl
from fp8bench.measure.sensors.rapl import EnergyCounter, EnergyDomain, HostDevice
from fp8bench.model.readings import NoReading, Reading, UnavailableReading
from tests.counts import for_each
from tests.fakes import MS, FakeWorker, Script, arm, gemm_steps

RANGE = 262_143_328_850


def zone(root: Path, folder: str, name: str, energy: object = 1_000_000, limit: object = RANGE) -> Path:
    """One domain's folder; None leaves a file out."""
    path = root / folder
    path.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", energy), ("max_energy_range_uj", limit)):
        if text is not None:
            (path / file).write_text(f"{text}\n")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two packages, one with its memory; with nested, enclosing and duplicate domains."""
    root = tmp_path / "powercap"
    zone(root, "intel-rapl:0", "package-0")
    zone(root, "intel-rapl:0:0", "core")
    zone(root, "intel-rapl:0:1", "dram")
    zone(root, "intel-rapl:1", "package-1", energy=5_000_000)
    zone(root, "intel-rapl:2", "psys")
    zone(root, "intel-rapl-mmio:0", "package-0")
    (root / "intel-rapl").mkdir()
    return root


def test_packages_and_their_memory_count_once(root: Path) -> None:
    domains = rapl.list_energy_domains(root)
    assert [domain.name for domain in domains] == ["package-0", "package-0/dram", "package-1"]
    assert {domain.range_uj for domain in domains} == {RANGE + 1}
    counter = EnergyCounter(domains, lambda: 0.0)
    assert counter.read() == 0.0
    (root / "intel-rapl:0" / "energy_uj").write_text("4000000")
    (root / "intel-rapl:0:1" / "energy_uj").write_text("1500000")
    assert [counter.read(), counter.read()] == pytest.approx([3.5, 3.5])
    (root / "intel-rapl:1" / "energy_uj").unlink()
    with pytest.raises(NoReading, match="energy_uj cannot be read: No such file"):
        counter.read()


@given(
    st.lists(st.integers(0, 200_000), min_size=1, max_size=40), st.integers(200_000, 300_000), st.integers(0, 200_000)
)
def test_a_counter_that_wraps_is_continued(growths: list[int], limit: int, start: int) -> None:
    total, values = start, []
    for growth in growths:
        total += growth
        values.append(total % (limit + 1))
    seconds = iter(range(1000))
    domain = EnergyDomain("package-0", Path("none"), limit + 1)
    readings = iter([start % (limit + 1), *values])
    counter = EnergyCounter((domain,), lambda: float(next(seconds)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rapl, "_read_energy_uj", lambda part: next(readings))
        for _ in growths:
            counter.read()
        assert counter.read() == pytest.approx(sum(growths) * 1e-6)


@for_each("limit", [RANGE, None, "no number"])
def test_a_counter_that_was_reset_is_refused(tmp_path: Path, limit: object) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", energy=100_000_000_000, limit=limit)
    now = [0.0]
    counter = EnergyCounter(rapl.list_energy_domains(tmp_path), lambda: now[0])
    counter.read()
    (path / "energy_uj").write_text("0")
    now[0] = 1.0
    with pytest.raises(NoReading, match=r"^the energy counter of package-0 went back from 100000000000 uJ to 0 uJ$"):
        counter.read()


def test_a_denied_counter_names_a_remedy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names a remedy. Root may read everything, so the denial is planted here."""
    plain = Path.read_text

    def refusing(self: Path, *words: object, **named: object) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(self))
        return plain(self, *words, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", refusing)
    with pytest.raises(NoReading, match=r"energy_uj may be read by root only .*sudo chmod o\+r"):
        rapl.list_energy_domains(root)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_counter_is_denied(root: Path) -> None:
    (root / "intel-rapl:1" / "energy_uj").chmod(0)
    with pytest.raises(NoReading, match="may be read by root only"):
        rapl.list_energy_domains(root)


@for_each(
    ("flags", "why"),
    [
        ("flags\t\t: fpu hypervisor sse", "this is a virtual machine"),
        ("flags\t\t: fpu sse", "this kernel or container"),
    ],
)
def test_a_machine_without_rapl_gives_a_reason(tmp_path: Path, flags: str, why: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{flags}\n")
    with pytest.raises(NoReading, match=f"^there is no .*/absent: {why}"):
        rapl.list_energy_domains(tmp_path / "absent", cpuinfo)
    root = tmp_path / "powercap"
    zone(root, "intel-rapl:0", "psys")
    with pytest.raises(NoReading, match=f"has no RAPL package: {why}"):
        rapl.list_energy_domains(root, cpuinfo)
    with pytest.raises(NoReading, match="this kernel or container"):
        rapl.list_energy_domains(tmp_path / "absent", tmp_path / "no cpuinfo")


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
    seen = device.read_changing_state()
    assert seen["cpu_clock"] == Reading(3.6e9, "Hz", "sysfs") and seen["temperature"] == Reading(61.25, "degC", "sysfs")
    assert (
        seen["sm_clock"] == UnavailableReading("a CPU has no driver")
        and device.has_sensor_files
        and not device.has_no_sensors
    )
    assert device.read_in_this_thread() == seen and device.facts()["driver"] == UnavailableReading(
        "a CPU has no driver"
    )


@for_each("clocks", [{}, {0: "<unknown>"}, {0: "0"}])
def test_unreadable_values_have_a_reason(tmp_path: Path, clocks: dict[int, str]) -> None:
    device = made(tmp_path, clocks)
    assert isinstance(
        device.read_changing_state()["cpu_clock"], UnavailableReading
    ) and device.has_sensor_files == bool(clocks)


def test_a_processor_warms_up_by_what_it_tells(tmp_path: Path) -> None:
    device = made(tmp_path, {}, coretemp=["50000"])
    worker, processor = FakeWorker({"fp32": Script(gemm_steps(10 * MS))}), arm("fp32")
    processor.prepare(worker)
    found = Settler(device, 30.0, worker.clock).warm_up_device(processor, worker)
    assert found.settled and found.seconds < 5
    assert {look.temperature for look in found.looks} == {50.0} and {look.clock for look in found.looks} == {None}
