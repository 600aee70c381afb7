"""The only module of fp8bench that files with custom suites, precisions or devices need to import.

The names in this module and their signatures are stable. If a change breaks a file that uses only these names,
CHANGELOG.md lists the change. docs/user-suites.md explains each name. This module does not import torch.
"""

from fp8bench.model import (
    Case,
    DeviceFacts,
    Level,
    MemoryCourse,
    MemoryRole,
    Params,
    Scalar,
    StaticScales,
    Support,
    TensorStatistics,
    Work,
)
from fp8bench.protocols import (
    Arithmetic,
    Backend,
    CannotCapture,
    CannotLimit,
    Device,
    Grid,
    Layer,
    MemoryMeter,
    Operand,
    Phases,
    Precision,
    Role,
    Setup,
    SilentPhases,
    Stamper,
    TensorScale,
    Workload,
)
from fp8bench.protocols.axes import Axis, Option, one_of, whole_number
from fp8bench.protocols.workload import StepParts
from fp8bench.registry import backends, devices, precisions, workloads

__all__ = [
    "Arithmetic", "Axis", "Backend", "CannotCapture", "CannotLimit", "Case", "Device", "DeviceFacts", "Grid", "Layer",
    "Level", "MemoryCourse", "MemoryMeter", "MemoryRole", "Operand", "Option", "Params", "Phases", "Precision",
    "Role", "Scalar", "Setup", "SilentPhases", "Stamper", "StaticScales", "StepParts", "Support", "TensorScale",
    "TensorStatistics", "Work", "Workload", "backends", "devices", "one_of", "precisions", "whole_number", "workloads",
]  # fmt: skip
