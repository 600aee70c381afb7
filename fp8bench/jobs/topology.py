"""The links between this machine's GPUs, as the file that `plan-parallel --topology` takes.

Links are those that the driver and the system report, unless the store has a measured all-reduce of all GPUs. Rates of
products are measured ceilings, else the vendor's peaks, which no product reaches.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8bench.analysis.roofline import datasheet_of
from fp8bench.analysis.verdicts import totals
from fp8bench.errors import StoreError, UsageError
from fp8bench.model import Limit, Record
from fp8bench.store.ceilings import history_of_ceilings
from fp8bench.store.runs.listing import newest_files
from fp8bench.store.runs.run_file import load_run

# GB/s per lane, one way, by PCIe generation.
_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# The driver reports the signal rate; this share of it is data: 18 links of 26.562 GB/s are an H100's 450.
_DATA = 16 / 17
# How many runs are searched for a collective, from the newest on.
_MOST_RUNS = 200
_QUERY = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class TopologyLine:
    """A line of the file, commented out if `value` is None; `source` names the origin of the value."""

    name: str
    value: float | None
    unit: str
    source: str

    @property
    def text(self) -> str:
        if self.value is None:
            return f"# {self.name}: {self.source}"
        return f"{self.name}: {self.value:.6g}{f' {self.unit}' if self.unit else ''}  # {self.source}"


def topology_lines(path: Path, store: Path, infiniband: Path = INFINIBAND) -> Iterator[str]:
    """Writes the file and yields its lines. Raises UsageError if it exists, or without GPUs."""
    if path.exists():
        raise UsageError(f"--topology {path} exists already. Give another name, or remove it.")
    answer = _query_driver(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    gpus = [list(map(str.strip, line.split(","))) for line in answer]
    if not gpus or any(len(fields) != len(_QUERY.split(",")) for fields in gpus):
        raise UsageError(f"--topology: nvidia-smi lists no GPUs: {' '.join(answer)[:200]!r}")
    if len(names := sorted({fields[0] for fields in gpus})) > 1:
        raise UsageError(f"--topology: a plan supports one kind of GPU, but this machine has {', '.join(names)}.")
    kinds = links_between(_query_driver("topo", "-m"))
    yield from (f"{name} {memory} MiB" for name, memory, *_ in gpus)
    yield f"between GPUs: {', '.join(f'{count} x {kind}' for kind, count in kinds.items()) or 'nothing to join'}"
    for name, rate in adapters(infiniband):
        yield f"{name}: {rate:g} Gb/s"
    lines = list(_lines(gpus, kinds, store, infiniband))
    text = [f"# {len(gpus)} {gpus[0][0]}, as fp8bench doctor --topology found them", *(line.text for line in lines)]
    try:
        path.write_text("\n".join([*text, ""]), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--topology {path} cannot be written: {error.strerror}.") from None
    yield from text[1:]
    missing = [line.name for line in lines if line.value is None]
    yield f"written to {path}" + (f"; add {', '.join(missing)}, which nothing here says" if missing else "")


def _lines(gpus: list[list[str]], kinds: dict[str, int], store: Path, infiniband: Path) -> Iterator[TopologyLine]:
    name, memory, *pcie = gpus[0]
    yield TopologyLine("node", len(gpus), "", "nvidia-smi")
    known = re.fullmatch(r"[\d.]+", memory)
    yield TopologyLine(
        "memory", float(memory) if known else None, "MiB", "nvidia-smi" if known else "the driver is silent"
    )
    measured = measured_bandwidth(store, len(gpus))
    links = link_rate(_query_driver("nvlink", "-s")) if any(kind.startswith("NV") for kind in kinds) else None
    rate: float | None
    if measured is not None:
        rate, words = measured[0] / 1e9, f"bus bandwidth of all_reduce, measured in run {measured[1]}"
    elif links:
        rate, words = links * _DATA, "the data rate of its NVLinks, not measured"
    else:
        rate, words = _pcie(*pcie), f"PCIe {pcie[0]} x{pcie[1]}, not measured"
    yield TopologyLine("inside", rate, "GB/s", words)
    ports = sum(rate for _, rate in adapters(infiniband)) / 8 / len(gpus)
    words = "a GPU's share of the active InfiniBand or RoCE ports, not measured" if ports else "no active port here"
    yield TopologyLine("between", ports or None, "GB/s", words)
    yield from (_rate(precision, name, store) for precision in ("bf16", "fp8"))


def _rate(precision: str, name: str, store: Path) -> TopologyLine:
    """Returns the newest measured ceiling of a device, else the datasheet's peak."""
    bounds = [
        ceilings.bound(Limit.PRODUCT, precision) for ceilings in history_of_ceilings(store) if ceilings.device == name
    ]
    if rate := next(filter(None, reversed(bounds)), None):
        return TopologyLine(precision, rate / 1e12, "TFLOP/s", "measured ceiling")
    sheet = datasheet_of(name)
    peak = sheet.peak(precision) if sheet is not None else None
    if sheet is None or peak is None:
        return TopologyLine(precision, None, "", "unknown: fp8bench suite ceilings measures it")
    source = f"{sheet.cite('dense')}, which no product reaches: fp8bench suite ceilings measures it"
    return TopologyLine(precision, peak / 1e12, "TFLOP/s", source)


def _query_driver(*words: str) -> list[str]:
    command = ["nvidia-smi", *words]
    try:
        done = subprocess.run(
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
    if done.returncode:
        raise UsageError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[:200]}")
    return [line for line in done.stdout.splitlines() if line.strip()]


def links_between(matrix: list[str]) -> dict[str, int]:
    """Returns how many links of each kind join two GPUs ('NV18', 'PIX', 'SYS'), from nvidia-smi's matrix."""
    counts: dict[str, int] = {}
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix]
    of_gpus = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    for number, row in enumerate(of_gpus):
        for kind in row[1 : len(of_gpus) + 1][number + 1 :]:
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def link_rate(status: list[str]) -> float:
    """Returns GB/s of signals on the active links of the GPU with the fewest links."""
    sums: list[float] = []
    for line in status:
        if line.startswith("GPU "):
            sums.append(0.0)
        elif sums and (rate := re.search(r"Link \d+: ([\d.]+) GB/s", line)):
            sums[-1] += float(rate[1])
    return min(sums, default=0.0)


def _pcie(generation: str, width: str) -> float | None:
    try:
        return _LANE[int(generation)] * int(width)
    except (KeyError, ValueError):
        return None


def adapters(folder: Path) -> list[tuple[str, float]]:
    """Returns active ports: name and Gb/s."""
    ports = []
    for port in sorted(folder.glob("*/ports/*")):
        try:
            rate = re.match(r"([\d.]+) Gb/sec", (port / "rate").read_text())
            active = "ACTIVE" in (port / "state").read_text()
        except OSError:
            continue
        if rate and active:
            ports.append((f"{port.parts[-3]} port {port.name}", float(rate[1])))
    return ports


def measured_bandwidth(store: Path, gpus: int) -> tuple[float, str] | None:
    """Returns the best bus bandwidth (bytes/s) of an all-reduce of all GPUs, and its run: the newest that has one."""
    for place, file in enumerate(newest_files(store)):
        if place >= _MOST_RUNS:
            break
        try:
            run = load_run(file)
        except StoreError:  # another version, or not a run
            continue
        rates = [rate for record in run.records if (rate := _bus(record, gpus))]
        if rates:
            return max(rates), run.id
    return None


def _bus(record: Record, gpus: int) -> float | None:
    case, transfer = record.case, record.transfer
    if not record.is_ok or record.timing is None or transfer is None or case.workload != "collective":
        return None
    if case.ranks != gpus or not case.device.startswith("cuda") or dict(case.params).get("collective") != "all_reduce":
        return None
    if not record.support.is_native:
        return None
    return float(transfer.payload * transfer.bus_factor / statistics.median(totals(record.timing).tolist()))
