"""Links between GPUs: from a fake driver with published transcripts, from ports in files, and from measured runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.analysis.verdicts import step_seconds_of_calls
from fp8bench.errors import UsageError
from fp8bench.features.plan_parallel.command import read_topology
from fp8bench.jobs import topology
from fp8bench.jobs.topology import count_gpu_links_by_kind, find_measured_bandwidth, sum_nvlink_rates, write_topology
from fp8bench.model import Case, Ceilings, Limit, Rate, Record, Run, Status
from fp8bench.model.ranks import Transfer
from tests.runs import NATIVE, run_of, samples

# As nvidia-smi prints them on nodes of 8 (https://github.com/stas00/ml-engineering, network/README.md), cut to 3.
TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tNV18\tPIX\t0-51\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-51\t0
GPU2\tNV18\tNV18\t X \tSYS\t52-103\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
  SYS  = Connection traversing PCIe
NIC Legend:
  NIC0: mlx5_0
"""
LINKS = "".join(f"GPU {gpu}: NVIDIA H200 (UUID: GPU-{gpu})\n" + "\t Link 0: 26.562 GB/s\n" * 18 for gpu in range(3))
GPUS = "NVIDIA H200, 143771, 5, 16\n" * 3


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a fake nvidia-smi and its answers by first argument."""
    folder = tmp_path / "driver"
    folder.mkdir()
    for name, text in (("--query-gpu", GPUS), ("topo", TOPOLOGY), ("nvlink", LINKS)):
        (folder / name).write_text(text)
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nset -e\nword="${{1%%=*}}"\ncat "{folder}/$word"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.fixture
def ports(tmp_path: Path) -> Path:
    """Three adapters of 400 Gb/s, one of which is down; another has an earlier link failure."""
    for number, state in enumerate(("4: ACTIVE", "4: ACTIVE", "1: DOWN")):
        port = tmp_path / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "state").write_text(f"{state}\n")
    return tmp_path / "infiniband"


def test_a_file_that_a_plan_takes(driver: Path, ports: Path, tmp_path: Path) -> None:
    """18 links of 26.562 GB/s signalling rate are the 450 GB/s of an H200's datasheet."""
    file = tmp_path / "node.yaml"
    said = "\n".join(write_topology(file, tmp_path / "store", ports))
    node = read_topology(file)
    assert (node.node, node.memory) == (3, 143771 << 20)
    assert node.inside == pytest.approx(450e9, rel=1e-4) and node.between == pytest.approx(2 * 400e9 / 8 / 3)
    assert (node.bf16, node.fp8) == (989.5e12, 1979e12)
    assert "between GPUs: 3 x NV18" in said and "mlx5_1 port 1: 400 Gb/s" in said
    assert "mlx5_2" not in said and "real products do not reach" in said


def collective(rate: float, *, gpus: int = 3, device: str = "cuda:0", way: str = "all_reduce") -> Run:
    """A run of a collective whose calls take 1.1 s, at `rate` bytes/s of bus bandwidth."""
    timing = samples(("communication",), (1_100_000,), rounds=1)
    seconds = float(step_seconds_of_calls(timing).mean())
    case = replace(CASE, params=(("collective", way),), device=device, ranks=gpus)
    transfer = Transfer(0.0, rate * seconds / 1.5, 0.0, 1.5, True)
    record = Record(case, NATIVE, Status.OK, timing=replace(timing, slots=timing.slots[:1]), transfer=transfer)
    return replace(run_of([record]), id=f"run-{rate:g}-{gpus}-{device}-{way}")


CASE = Case("collective", (), "fp32", "cuda:0")


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the store hold these runs, newest first."""

    def store(*runs: Run) -> None:
        known = {Path(run.id): run for run in runs}
        monkeypatch.setattr(topology, "iterate_newest_files", lambda _: iter(known))
        monkeypatch.setattr(topology, "load_run", known.__getitem__)

    return store


def test_a_measured_bandwidth_comes_first(
    driver: Path, ports: Path, tmp_path: Path, stored: Callable[..., None]
) -> None:
    """The newest all-reduce of all GPUs; not of fewer, on a CPU, or of another collective."""
    others = [collective(9e9, gpus=2), collective(8e9, device="cpu"), collective(7e9, way="all_gather")]
    stored(*others, collective(361e9), collective(1e9))
    bandwidth = find_measured_bandwidth(tmp_path, 3)
    assert (
        bandwidth is not None
        and bandwidth[0] == pytest.approx(361e9, rel=0.02)
        and bandwidth[1].startswith("run-3.61e+11-3")
    )
    file = tmp_path / "node.yaml"
    said = "\n".join(write_topology(file, tmp_path / "store", ports))
    assert (
        read_topology(file).inside == pytest.approx(bandwidth[0], rel=1e-4) and "measured in run run-3.61e+11" in said
    )
    stored(*others)
    assert find_measured_bandwidth(tmp_path, 3) is None


def test_measured_ceilings_take_the_place_of_datasheets(
    driver: Path, ports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = (Rate(Limit.PRODUCT, "bf16", (712e12, 713e12, 714e12)),)
    known = [Ceilings(rates, "2026-01-01", device="NVIDIA H200"), Ceilings((), "2026-01-02", device="NVIDIA L4")]
    monkeypatch.setattr(topology, "load_ceilings_history", lambda _: known)
    file = tmp_path / "node.yaml"
    list(write_topology(file, tmp_path / "store", ports))
    assert read_topology(file).bf16 == pytest.approx(rates[0].value, rel=1e-5) and read_topology(file).fp8 == 1979e12


def test_what_nobody_says_is_left_to_the_reader(driver: Path, tmp_path: Path) -> None:
    """Without ports the rate between nodes is a comment, and a plan asks for it."""
    file = tmp_path / "node.yaml"
    *_, last = write_topology(file, tmp_path / "store", tmp_path / "nothing")
    assert last.endswith("add between, which are unknown here")
    with pytest.raises(UsageError, match="between is missing"):
        read_topology(file)


def test_without_nvlink_pcie_counts(driver: Path, ports: Path, tmp_path: Path) -> None:
    (driver / "topo").write_text(TOPOLOGY.replace("NV18", "PHB"))
    file = tmp_path / "node.yaml"
    list(write_topology(file, tmp_path / "store", ports))
    assert read_topology(file).inside == pytest.approx(63e9, rel=0.01)  # generation 5, 16 lanes


def test_links_that_are_down_do_not_count() -> None:
    status = [
        "GPU 0: X",
        "\t Link 0: 50 GB/s",
        "\t Link 1: 50 GB/s",
        "GPU 1: X",
        "\t Link 0: 50 GB/s",
        "\t Link 1: <inactive>",
    ]
    assert sum_nvlink_rates(status) == 50 and sum_nvlink_rates([]) == 0
    assert count_gpu_links_by_kind(TOPOLOGY.splitlines()) == {"NV18": 3}
    assert count_gpu_links_by_kind(["\x1b[4mGPU0\x1b[0m  X ", "NIC0 X"]) == {}


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("--query-gpu", "NVIDIA H200, 1, 5, 16\nNVIDIA L4, 1, 4, 16\n", "one kind of GPU"),
        ("--query-gpu", "No devices were found\n", "no GPUs"),
        ("--query-gpu", "", "no GPUs"),
        ("topo", None, "failed"),
    ],
)
def test_what_is_refused(name: str, text: str | None, why: str, driver: Path, tmp_path: Path) -> None:
    (driver / name).unlink() if text is None else (driver / name).write_text(text)
    with pytest.raises(UsageError, match=why):
        list(write_topology(tmp_path / "node.yaml", tmp_path / "store", tmp_path))
    assert not (tmp_path / "node.yaml").exists()


def test_what_a_driver_does_not_know(driver: Path, tmp_path: Path) -> None:
    (driver / "--query-gpu").write_text("NVIDIA Unheard, [N/A], [N/A], [N/A]\n")
    (driver / "topo").write_text("GPU0\nGPU0\t X \n")
    file = tmp_path / "node.yaml"
    *_, last = write_topology(file, tmp_path / "store", tmp_path / "nothing")
    assert last.endswith("add memory, inside, between, bf16, fp8, which are unknown here")
    with pytest.raises(UsageError, match="cannot be written"):
        list(write_topology(tmp_path / "no" / "node.yaml", tmp_path / "store", tmp_path / "nothing"))


def test_no_file_is_written_over(driver: Path, tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        list(write_topology(file, tmp_path / "store", tmp_path))
    assert file.read_text() == "mine"


def test_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="nvidia-smi gave no answer"):
        list(write_topology(tmp_path / "node.yaml", tmp_path / "store", tmp_path))
