"""What one case has come to so far, while its group is measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8bench.errors import WorkerError, WorkerFault
from fp8bench.model import (
    Capacity,
    DeviceWatch,
    EnergyUse,
    LayerScale,
    Level,
    Measurement,
    MemoryUse,
    OperatorTime,
    PlannedCase,
    TensorStatistics,
    Timing,
)

OUT_OF_MEMORY = "out of memory, even alone"


@dataclass
class Outcome:
    """A record in the making. `failure` is the reason of a case that failed, '' while it is alive."""

    planned: PlannedCase
    timing: Timing | None = None
    control: Timing | None = None
    paired_with: Timing | None = None
    paired: bool = True
    stopped: str = ""
    failure: str = ""
    detail: str = ""
    measurements: list[Measurement] = field(default_factory=list)
    statistics: tuple[TensorStatistics, ...] = ()
    trace: str = ""
    operators: tuple[OperatorTime, ...] = ()
    scales: tuple[LayerScale, ...] = ()
    energy: EnergyUse | None = None
    watch: DeviceWatch | None = None
    capacity: Capacity | None = None
    memory: MemoryUse | None = None

    def forget(self) -> None:
        """Whatever was measured while it sat with others: they sit down again."""
        self.timing = self.control = self.paired_with = self.energy = self.watch = None
        self.paired, self.stopped = True, ""

    @property
    def may_fit(self) -> bool:
        """Whether it would run with a batch that is small enough."""
        return self.planned.support.level is not Level.REFUSED and self.failure in ("", OUT_OF_MEMORY)

    def lacks(self, why: str) -> None:
        """Something about it could not be had, which does not fail it."""
        self.detail = "; ".join(filter(None, (self.detail, why)))


def exhausted(cause: WorkerError) -> bool:
    """Whether memory did not suffice, and the worker lives on."""
    return isinstance(cause, WorkerFault) and cause.out_of_memory
