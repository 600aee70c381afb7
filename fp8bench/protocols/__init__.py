"""The interfaces that suites, precisions, backends and devices implement, and the values that these interfaces pass.

Each interface has at most four abstract methods. This package uses torch in annotations only. Implementations import
torch inside their methods, so that fp8bench can list their names without importing it.
"""

from fp8bench.protocols.arithmetic import MEMORY_ROLES, Arithmetic, Fused, Operand, Role, ScaleBook, WatchedArithmetic
from fp8bench.protocols.measuring import (
    CannotCapture,
    CannotLimit,
    CannotMark,
    Device,
    Markers,
    MemoryMeter,
    Observer,
    Phases,
    ReportingMarker,
    SilentObserver,
    SilentPhases,
    Stamper,
)
from fp8bench.protocols.precision import Backend, Precision, TensorScale, float32_products, limit_to_one_thread
from fp8bench.protocols.workload import (
    Covered,
    Grid,
    Layer,
    Setup,
    Workload,
    explain_missing_product,
    find_map_key,
    list_map_keys,
)

__all__ = [
    "MEMORY_ROLES", "Arithmetic", "Backend", "CannotCapture", "CannotLimit", "CannotMark", "Covered", "Device", "Fused",
    "Grid", "Layer", "Markers", "MemoryMeter", "Observer", "Operand", "Phases", "Precision", "ReportingMarker", "Role",
    "ScaleBook", "Setup", "SilentObserver", "SilentPhases", "Stamper", "TensorScale", "WatchedArithmetic", "Workload",
    "explain_missing_product", "find_map_key", "float32_products", "limit_to_one_thread", "list_map_keys",
]  # fmt: skip
