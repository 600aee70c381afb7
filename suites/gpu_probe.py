"""Describes a GPU and the overhead of measuring on it: `python -m suites.gpu_probe --json PATH`, about 40 s.

fp8bench's energy is compared with the driver's counter, which this program reads through NVML without fp8bench: from
one update of the counter to another around a window, under a steady load.
"""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp8bench
from fp8bench.errors import EXIT_FAILED, EXIT_OK
from fp8bench.measure.handle import START_SECONDS, ProcessWorker
from fp8bench.measure.sensors.energy import Energy
from fp8bench.measure.sensors.meter import open_meter
from fp8bench.model import DeviceFacts
from fp8bench.model.codec import encode
from fp8bench.model.raw import Settings
from fp8bench.registry import precisions
from suites.trials import conditions, options, run_command, write_document

_FIELDS = (
    "name,driver_version,vbios_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.applications.graphics,power.draw,"
    "power.limit,power.max_limit,temperature.gpu,ecc.mode.current,mig.mode.current,persistence_mode,memory.used"
)
_WINDOW = 4.0
_LONGEST_TICK = 2.0


@fp8bench.audited("product", "fp8", takes="codes", second="kn", multiple=16)
def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Calls torch's own scaled product, so that the audit checks what torch promises."""
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)


def _computes(device: str) -> bool:
    """Whether products on the device are right. Under a runtime that computes nothing, no figure has a meaning."""
    torch.manual_seed(0)
    a = torch.randn(64, 64, dtype=torch.float64)
    return bool(torch.allclose((a.to(device) @ a.to(device)).cpu(), a @ a))


def _driver() -> dict[str, str]:
    try:
        values = run_command(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader"]).stdout.splitlines()[0]
    except (OSError, RuntimeError) as failure:
        return {"why": str(failure)}
    return dict(zip(_FIELDS.split(","), map(str.strip, values.split(",")), strict=False))


class _Counter:
    """Reads NVML's total energy of a GPU in joules, while products keep the GPU busy."""

    def __init__(self, facts: DeviceFacts) -> None:
        library: Any = importlib.import_module("pynvml")
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{facts.uuid.removeprefix('GPU-')}")
        self._read: Callable[[], float] = lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        self._a = torch.randn(4096, 4096, device=facts.key, dtype=torch.bfloat16)

    def work(self) -> None:
        for _ in range(20):
            self._a @ self._a
        torch.cuda.synchronize(self._a.device)

    def tick(self) -> tuple[float, float]:
        """Waits until the counter changes, and returns the time and the new value."""
        first, end = self._read(), time.monotonic() + _LONGEST_TICK
        while (now := self._read()) == first:
            if time.monotonic() > end:
                raise RuntimeError(f"NVML's total did not change in {_LONGEST_TICK:g} s of work")
            self._a @ self._a
            torch.cuda.synchronize(self._a.device)
        return time.monotonic(), now


def _energy(facts: DeviceFacts) -> dict[str, Any]:
    """Returns the watts by a window of fp8bench and by NVML's counter, or why they are missing."""
    try:
        counter = _Counter(facts)
        with open_meter(facts) as meter:
            (begun, first), opened = counter.tick(), time.monotonic()
            with meter.window() as window:
                while not window.has_failed and (not window.is_enough or time.monotonic() < opened + _WINDOW):
                    counter.work()
            ended, last = counter.tick()
            energy = window.energy
    except Exception as failure:  # noqa: BLE001 - whatever a driver says, it is a row of the table
        return {"why": f"{type(failure).__name__}: {failure}"}
    if not isinstance(energy, Energy):
        return {"why": energy.reason}
    return {"window_watts": energy.watts, "nvml_watts": (last - first) / (ended - begun), "source": energy.source.value}


def probe() -> dict[str, Any]:
    """Returns all facts as a JSON document. Raises SystemExit without a GPU."""
    with ProcessWorker(Settings()) as worker:
        facts = next((device for device in worker.probe() if device.kind == "cuda"), None)
        if facts is None:
            raise SystemExit(f"torch {torch.__version__} sees no CUDA device")
        overheads = worker.with_time_limit(START_SECONDS).overheads(facts)
    supports = {name: precisions.get(name).support(facts) for name in precisions.names()}
    return {
        "device": encode(facts),
        "computes": _computes(facts.key),
        "driver": _driver(),
        "overheads": encode(overheads),
        "precisions": {name: [support.level.value, support.reason] for name, support in supports.items()},
        "energy": _energy(facts),
        "cuda": torch.version.cuda,
        **conditions(),
    }


def main() -> int:
    asked = options(__doc__, json=(Path, "also write the document to this file"))
    document = probe()
    write_document(document, asked.json)
    return EXIT_OK if document["computes"] else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
