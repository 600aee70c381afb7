"""Finds the links between this machine's GPUs, and writes them to a file for `plan-parallel --topology`.

The rates of links come from the driver and the system. If the store has a measured all-reduce of all GPUs, its rate is
used instead. The rates of matrix products are measured ceilings. Without ceilings they are the peaks of the vendor,
which are above what a real product reaches.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fp8bench.analysis.roofline import find_datasheet
from fp8bench.analysis.verdicts import step_seconds_of_calls
from fp8bench.errors import StoreError, UsageError
from fp8bench.model import Limit, Record
from fp8bench.store.ceilings import load_ceilings_history
from fp8bench.store.runs.listing import iterate_newest_files
from fp8bench.store.runs.run_file import load_run

# GB/s of one PCIe lane in one direction, by PCIe generation.
_PCIE_LANE_RATES = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# NVLink's data rate as a part of its signal rate. The driver reports the signal rate: 18 links of 26.562 GB/s give the
# 450 GB/s of an H100.
_NVLINK_DATA_SHARE = 16 / 17
# Search at most this many runs, newest first, for the measured rate of an all-reduce.
_MAX_SEARCHED_RUNS = 200
_NVIDIA_SMI_FIELDS = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class TopologyFileLine:
    """A line of the topology file. If `value` is None, the line is a comment. `source` names the origin of
    the value.
    """

    name: str
    value: float | None
    unit: str
    source: str

    @property
    def text(self) -> str:
        if self.value is None:
            return f"# {self.name}: {self.source}"
        return f"{self.name}: {self.value:.6g}{f' {self.unit}' if self.unit else ''}  # {self.source}"


def write_topology(path: Path, store: Path, infiniband: Path = INFINIBAND) -> Iterator[str]:
    """Writes the topology file and yields its lines. Raises UsageError if the file exists, or if the machine has no
    GPUs.
    """
    if path.exists():
        raise UsageError(f"--topology {path} exists already. Give another name, or remove it.")
    # 1. Ask the driver for the GPUs, which must be of one kind.
    answer = _query_nvidia_smi(f"--query-gpu={_NVIDIA_SMI_FIELDS}", "--format=csv,noheader,nounits")
    gpus = [list(map(str.strip, line.split(","))) for line in answer]
    if not gpus or any(len(fields) != len(_NVIDIA_SMI_FIELDS.split(",")) for fields in gpus):
        raise UsageError(f"--topology: nvidia-smi lists no GPUs: {' '.join(answer)[:200]!r}")
    if len(names := sorted({fields[0] for fields in gpus})) > 1:
        raise UsageError(f"--topology: a plan supports one kind of GPU, but this machine has {', '.join(names)}.")
    # 2. Describe the GPUs, their links and the network ports.
    kinds = count_gpu_links_by_kind(_query_nvidia_smi("topo", "-m"))
    yield from (f"{name} {memory_text} MiB" for name, memory_text, *_ in gpus)
    yield f"between GPUs: {', '.join(f'{count} x {link_kind}' for link_kind, count in kinds.items()) or 'no links'}"
    for name, rate in list_active_ports(infiniband):
        yield f"{name}: {rate:g} Gb/s"
    # 3. Write the file, then yield its lines without the title.
    lines = list(_make_topology_lines(gpus, kinds, store, infiniband))
    text = [f"# {len(gpus)} {gpus[0][0]}, as fp8bench doctor --topology found them", *(line.text for line in lines)]
    try:
        path.write_text("\n".join([*text, ""]), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--topology {path} cannot be written: {error.strerror}.") from None
    yield from text[1:]
    missing_names = [line.name for line in lines if line.value is None]
    yield f"written to {path}" + (f"; add {', '.join(missing_names)}, which are unknown here" if missing_names else "")


def _make_topology_lines(
    gpus: list[list[str]], kinds: dict[str, int], store: Path, infiniband: Path
) -> Iterator[TopologyFileLine]:
    name, memory_text, *pcie = gpus[0]
    yield TopologyFileLine("node", len(gpus), "", "nvidia-smi")
    is_number = re.fullmatch(r"[\d.]+", memory_text)
    yield TopologyFileLine(
        "memory",
        float(memory_text) if is_number else None,
        "MiB",
        "nvidia-smi" if is_number else "the driver does not report it",
    )
    # A measured rate is best, then the rate of NVLinks, then that of PCIe.
    measured_bandwidth = find_measured_bandwidth(store, len(gpus))
    has_nvlinks = any(link_kind.startswith("NV") for link_kind in kinds)
    nvlink_signal_rate = sum_nvlink_rates(_query_nvidia_smi("nvlink", "-s")) if has_nvlinks else None
    link_rate: float | None
    if measured_bandwidth is not None:
        link_rate = measured_bandwidth[0] / 1e9
        source = f"bus bandwidth of all_reduce, measured in run {measured_bandwidth[1]}"
    elif nvlink_signal_rate:
        link_rate = nvlink_signal_rate * _NVLINK_DATA_SHARE
        source = "the data rate of its NVLinks, not measured"
    else:
        link_rate = _compute_pcie_rate(*pcie)
        source = f"PCIe {pcie[0]} x{pcie[1]}, not measured"
    yield TopologyFileLine("inside", link_rate, "GB/s", source)
    # Ports have Gb/s, the file has GB/s. All GPUs share the ports.
    port_rate_per_gpu = sum(port_rate for _, port_rate in list_active_ports(infiniband)) / 8 / len(gpus)
    source = (
        "a GPU's share of the active InfiniBand or RoCE ports, not measured" if port_rate_per_gpu else "no active port"
    )
    yield TopologyFileLine("between", port_rate_per_gpu or None, "GB/s", source)
    yield from (_find_product_rate(precision, name, store) for precision in ("bf16", "fp8"))


def _find_product_rate(precision: str, name: str, store: Path) -> TopologyFileLine:
    """Returns the line of the topology file with the rate of matrix products in a precision: the newest measured
    ceiling of the device, or else the peak of its datasheet.
    """
    ceiling_rates = [
        ceilings.bound(Limit.PRODUCT, precision) for ceilings in load_ceilings_history(store) if ceilings.device == name
    ]
    if rate := next(filter(None, reversed(ceiling_rates)), None):
        return TopologyFileLine(precision, rate / 1e12, "TFLOP/s", "measured ceiling")
    datasheet = find_datasheet(name)
    peak = datasheet.peak(precision) if datasheet is not None else None
    if datasheet is None or peak is None:
        return TopologyFileLine(precision, None, "", "unknown: fp8bench suite ceilings measures it")
    citation = datasheet.cite_figures("dense")
    source = f"{citation}, which real products do not reach: fp8bench suite ceilings measures their rate"
    return TopologyFileLine(precision, peak / 1e12, "TFLOP/s", source)


def _query_nvidia_smi(*options: str) -> list[str]:
    command = ["nvidia-smi", *options]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--topology reads an NVIDIA driver, and nvidia-smi gave no answer: {error}") from None
    if result.returncode:
        raise UsageError(f"{' '.join(command)} failed: {(result.stderr or result.stdout).strip()[:200]}")
    return [line for line in result.stdout.splitlines() if line.strip()]


def count_gpu_links_by_kind(matrix: list[str]) -> dict[str, int]:
    """Counts the links between GPUs by their kind ('NV18', 'PIX', 'SYS'), from the matrix that nvidia-smi prints."""
    counts = Counter[str]()
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix]
    gpu_rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    # Column 0 has the name of the row's GPU, and a column for each GPU follows. Count each pair of GPUs once: begin
    # after the column of the row's GPU.
    for next_column, row in enumerate(gpu_rows, 2):
        counts.update(row[next_column : len(gpu_rows) + 1])
    return counts


def sum_nvlink_rates(status: list[str]) -> float:
    """Returns the summed signal rate of a GPU's active links in GB/s, the smallest such sum of all GPUs."""
    link_rate_sums: list[float] = []
    for line in status:
        if line.startswith("GPU "):
            link_rate_sums.append(0.0)
        elif link_rate_sums and (rate := re.search(r"Link \d+: ([\d.]+) GB/s", line)):
            link_rate_sums[-1] += float(rate[1])
    return min(link_rate_sums, default=0.0)


def _compute_pcie_rate(generation: str, width: str) -> float | None:
    try:
        return _PCIE_LANE_RATES[int(generation)] * int(width)
    except (KeyError, ValueError):
        return None


def list_active_ports(folder: Path) -> list[tuple[str, float]]:
    """Returns the name and the rate in Gb/s of each active InfiniBand or RoCE port."""
    named_port_rates = []
    for port in sorted(folder.glob("*/ports/*")):
        try:
            rate = re.match(r"([\d.]+) Gb/sec", (port / "rate").read_text())
            is_port_active = "ACTIVE" in (port / "state").read_text()
        except OSError:
            continue
        if rate and is_port_active:
            named_port_rates.append((f"{port.parts[-3]} port {port.name}", float(rate[1])))
    return named_port_rates


def find_measured_bandwidth(store: Path, gpus: int) -> tuple[float, str] | None:
    """Returns the best bus bandwidth (bytes/s) of an all-reduce of all GPUs, and the id of its run. The newest run
    with such an all-reduce is used.
    """
    for file in islice(iterate_newest_files(store), _MAX_SEARCHED_RUNS):
        try:
            run = load_run(file)
        except StoreError:  # the file is not a run, or comes from a different version
            continue
        rates = [rate for record in run.records if (rate := _find_bus_bandwidth(record, gpus))]
        if rates:
            return max(rates), run.id
    return None


def _find_bus_bandwidth(record: Record, gpus: int) -> float | None:
    case = record.case
    transfer = record.transfer
    if not record.is_ok or record.timing is None or transfer is None or case.workload != "collective":
        return None
    if case.ranks != gpus or not case.device.startswith("cuda") or dict(case.params).get("collective") != "all_reduce":
        return None
    if not record.support.is_native:
        return None
    seconds: float = statistics.median(step_seconds_of_calls(record.timing).tolist())
    return transfer.payload * transfer.bus_factor / seconds
