"""Runs with energy windows made by hand, on a GPU that nobody has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fp8bench.model import (
    Case,
    DeviceFacts,
    EnergyUse,
    EnergyWindow,
    Finding,
    Interval,
    PhaseEnergy,
    Record,
    Scalar,
    Status,
    Verdict,
    Work,
)
from tests.materials import Made, recased, shapes
from tests.runs import EMULATED, NATIVE, error, phases, run_of

GPU = DeviceFacts("cuda", 0, "Fictional G100", 80 << 30, "2.13.0", (9, 0), "12.8")
IDLE = 81.0
TOO_FEW = "not measurable: 7 tick interval(s) of the energy counter, 10 are needed"
VIRTUAL = "this is a virtual machine, which has no powercap"


def window(joules: float, seconds: float = 0.01, steps: int = 100, uncertainty: float | None = 0.004) -> EnergyWindow:
    """A window of `steps` steps, each of these joules and seconds."""
    return EnergyWindow(steps, seconds * steps, joules * steps, 12, uncertainty, 1.41e9, 61.0)


def phase_of(name: str, joules: float, seconds: float) -> PhaseEnergy:
    """Three windows of one phase, each of these joules and seconds per repetition."""
    return PhaseEnergy(name, (window(joules, seconds),) * 3)


def use(
    joules: Sequence[float], seconds: float = 0.01, source: str = "counter", why: str = "", uncertainty: float = 0.004
) -> EnergyUse:
    """One window per value of joules a step; sensors are exact."""
    counts = source in ("counter", "rapl")
    windows = tuple(window(one, seconds, uncertainty=uncertainty if counts else None) for one in joules)
    return EnergyUse(source, windows, IDLE, IDLE + 2.0, why)


def case(precision: str, params: dict[str, Scalar], device: str = "cuda:0") -> Case:
    return Case("transformer", tuple(params.items()), precision, device)


def energetic() -> Made:
    """A group on a GPU: fp32 takes 3.10 J in 10 ms, bf16 1.90 J, fp8 about as much as fp32; nvfp4 is emulated."""
    work = Work(flops=3.1e12, tokens=1024)
    params: dict[str, Scalar] = {"layers": 4, "width": 256, "batch": 4}
    parts = {"cast": 0.1, "gemm": 0.5, "attention": 0.1, "optimizer_step": 0.1, "elementwise": 0.15}

    def record(mode: str, energy: EnergyUse, **changes: object) -> Record:
        made = Record(
            case(mode, params), NATIVE, Status.OK, work, energy=energy, measurements=(error("loss_error", 1e-4),)
        )
        return replace(made, **changes)  # type: ignore[arg-type]

    records = [
        record("fp32", use((3.10, 3.08, 3.13)), is_reference=True),
        record("bf16", use((1.90, 1.89, 1.91), 0.0062)),
        record("fp8", use((3.02, 2.95, 3.09), 0.0094)),
        record("nvfp4", use((31.0,), 0.12), support=EMULATED),
        record("fp16", EnergyUse("counter", why=TOO_FEW)),
    ]

    def finding(mode: str, verdict: Verdict, best: float, ratio: Interval | None = None) -> Finding:
        return Finding(case(mode, params), verdict, best, best * 1.02, 0.01, ratio, 0.004, phases(best, **parts))

    findings = [
        finding("fp32", Verdict.REFERENCE, 9.9e-3),
        finding("bf16", Verdict.FASTER, 6.1e-3, Interval(0.617, 0.612, 0.622, 0.99)),
        finding("fp8", Verdict.FASTER, 9.3e-3, Interval(0.939, 0.935, 0.943, 0.99)),
        finding("nvfp4", Verdict.EMULATED, 0.118),
        finding("fp16", Verdict.FASTER, 6.2e-3, Interval(0.626, 0.62, 0.632, 0.99)),
    ]
    return run_of(records, devices=(GPU,)), {one.case.id: one for one in findings}


def with_energy(**by_mode: EnergyUse | None) -> Made:
    """The group of energetic() with these windows."""
    run, findings = energetic()
    records = [replace(one, energy=by_mode.get(one.case.mode, one.energy)) for one in run.records]
    return replace(run, records=tuple(records)), findings


def squares(*shares: float) -> Made:
    """A shape of gemm for each share: fp32 takes 1 mJ, 16 mJ, ... a step, bf16 this share of it."""
    run, findings = shapes(*({"m": 256 << number, "n": 64, "k": 64} for number in range(len(shares))))
    records = []
    for one in run.records:
        place = round(math.log2(int(one.case.param("m")) / 256))
        joules = 1e-3 * 16**place * {"fp32": 1.0, "bf16": shares[place], "fp8": 4.0}[one.case.mode]
        energy = use((joules, joules * 1.01, joules * 0.99), 1e-5 * 16**place)
        records.append(replace(one, energy=energy))
    return replace(run, records=tuple(records)), findings


def unmeasured(why: str = VIRTUAL) -> Made:
    """The same on a CPU without an energy counter."""
    run, findings = recased(energetic(), lambda case: replace(case, device="cpu"))
    return run_of([replace(one, energy=EnergyUse("none", why=why)) for one in run.records]), findings


def without_energy() -> Made:
    """The same without measuring energy, like runs before energy was supported."""
    run, findings = energetic()
    return replace(run, records=tuple(replace(one, energy=None) for one in run.records)), findings
