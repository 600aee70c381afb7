"""Defines the frozen values of requests, plans and results. Units are seconds, bytes and joules. Raw clock samples are
integer nanoseconds, in fields whose names end in `ns`. This package uses neither torch nor files, and formats no
text.
"""

from fp8bench.model.consumed import (
    Capacity,
    DeviceWatch,
    EnergyUse,
    EnergyWindow,
    HeldBlock,
    MemoryCourse,
    MemoryUse,
    PhaseEnergy,
    PhaseMemory,
    SustainedTurn,
)
from fp8bench.model.measured import (
    Ceiling,
    Ceilings,
    FreshRounds,
    GivenTensors,
    Interval,
    LayerScale,
    Limit,
    Measurement,
    Products,
    Rate,
    Record,
    ReplayTimes,
    Reruns,
    Rotation,
    Segments,
    SlotSample,
    StepEffect,
    TensorStatistics,
    Timing,
)
from fp8bench.model.planned import Case, DeviceFacts, Group, Params, Plan, PlannedCase, Scalar, Scalars, Support, Work
from fp8bench.model.request import Request, StaticScales
from fp8bench.model.run import Environment, Finding, Overheads, PhaseGain, Resumption, Run
from fp8bench.model.series import (
    ENERGY_SOURCE,
    Ack,
    Cell,
    Comparison,
    Conditions,
    Direction,
    Ending,
    Evidence,
    Fault,
    Figure,
    Noise,
    Point,
    Series,
    Trend,
    trend_name,
)
from fp8bench.model.step import LateSteps, OperatorCount, PhaseCount, Share, ShareKind, Shares, SharesFrom, Tape
from fp8bench.model.words import (
    CELL_PHASES,
    PHASES,
    UNATTRIBUTED,
    Label,
    Level,
    MemoryRole,
    Phase,
    Provenance,
    Status,
    Verdict,
)

__all__ = [
    "CELL_PHASES", "ENERGY_SOURCE", "PHASES", "UNATTRIBUTED", "Ack", "Capacity", "Case", "Ceiling",
    "Ceilings", "Cell", "Comparison", "Conditions", "DeviceFacts", "DeviceWatch", "Direction", "Ending",
    "EnergyUse", "EnergyWindow", "Environment", "Evidence", "Fault", "Figure", "Finding", "FreshRounds", "GivenTensors",
    "Group", "HeldBlock", "Interval", "Label", "LateSteps", "LayerScale", "Level", "Limit", "Measurement",
    "MemoryCourse", "MemoryRole", "MemoryUse", "Noise", "OperatorCount", "Overheads", "Params", "Phase",
    "PhaseCount", "PhaseEnergy", "PhaseGain", "PhaseMemory", "Plan", "PlannedCase", "Point", "Products", "Provenance",
    "Rate", "Record", "ReplayTimes", "Request", "Reruns", "Resumption", "Rotation", "Run", "Scalar", "Scalars",
    "Segments", "Series", "Share", "ShareKind", "Shares", "SharesFrom", "SlotSample", "StaticScales", "Status",
    "StepEffect", "Support", "SustainedTurn", "Tape", "TensorStatistics", "Timing", "Trend", "Verdict", "Work",
    "trend_name",
]  # fmt: skip
