"""The interfaces a leaf implements, and the small values that pass through them.

Each has at most four abstract methods. torch appears in annotations only: a leaf imports it inside its methods, so
that every name can be listed without it.
"""

from fp8bench.protocols.arithmetic import MEMORY_OF, Arithmetic, Fused, Operand, Role, ScaleBook, WatchedArithmetic
from fp8bench.protocols.measuring import (
    CannotCapture,
    CannotLimit,
    CannotMark,
    Device,
    Markers,
    MemoryMeter,
    Observer,
    Phases,
    SilentObserver,
    SilentPhases,
    Stamper,
    TellingMarker,
)
from fp8bench.protocols.precision import Backend, Precision, TensorScale, float32_products, one_thread
from fp8bench.protocols.workload import Covered, Grid, Layer, Setup, Workload, around_objection, key_of, keys_of

__all__ = [
    "MEMORY_OF", "Arithmetic", "Backend", "CannotCapture", "CannotLimit", "CannotMark", "Covered", "Device", "Fused",
    "Grid", "Layer", "Markers", "MemoryMeter", "Observer", "Operand", "Phases", "Precision", "Role", "ScaleBook",
    "Setup", "SilentObserver", "SilentPhases", "Stamper", "TellingMarker", "TensorScale", "WatchedArithmetic",
    "Workload", "around_objection", "float32_products", "key_of", "keys_of", "one_thread",
]  # fmt: skip
