"""Values, all frozen: what is asked, what will run, what was measured.

Units inside: seconds, bytes, joules; integer nanoseconds in raw clock samples, where the name says so.
Nothing here knows torch, files or text.
"""

from fp8bench.model.followed import Cell, Course, Fault, Figure, Point, Series
from fp8bench.model.measured import (
    Environment,
    Finding,
    Interval,
    Measurement,
    Overheads,
    Record,
    Resumption,
    Run,
    Segments,
    SlotSample,
    TensorStatistics,
    Timing,
)
from fp8bench.model.planned import (
    Case,
    DeviceFacts,
    Group,
    Params,
    Plan,
    PlannedCase,
    Request,
    Scalar,
    Support,
    Work,
)
from fp8bench.model.words import (
    CELL_PHASES,
    PHASES,
    UNATTRIBUTED,
    Label,
    Level,
    Phase,
    Provenance,
    Status,
    Verdict,
)

__all__ = [
    "CELL_PHASES",
    "PHASES",
    "UNATTRIBUTED",
    "Case",
    "Cell",
    "Course",
    "DeviceFacts",
    "Environment",
    "Fault",
    "Figure",
    "Finding",
    "Group",
    "Interval",
    "Label",
    "Level",
    "Measurement",
    "Overheads",
    "Params",
    "Phase",
    "Plan",
    "PlannedCase",
    "Point",
    "Provenance",
    "Record",
    "Request",
    "Resumption",
    "Run",
    "Scalar",
    "Segments",
    "Series",
    "SlotSample",
    "Status",
    "Support",
    "TensorStatistics",
    "Timing",
    "Verdict",
    "Work",
]
