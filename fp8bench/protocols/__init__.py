"""The interfaces a leaf implements, and the small values that pass through them.

Each has at most four abstract methods. torch appears in annotations only: a leaf imports it inside its methods, so
that every name can be listed without it.
"""

from fp8bench.protocols.arithmetic import Arithmetic, Operand, Role
from fp8bench.protocols.device import CannotLimit, Device, MemoryMeter, Stamper
from fp8bench.protocols.layers import Layer, key_of, keys_of
from fp8bench.protocols.memory import MEMORY_OF, MemoryHolder
from fp8bench.protocols.observer import Observer, SilentObserver
from fp8bench.protocols.phases import Phases, SilentMarker, SilentPhases
from fp8bench.protocols.precision import Precision, TensorScale, float32_products
from fp8bench.protocols.scales import KeptScale, ScaleBook, Standing
from fp8bench.protocols.workload import Grid, Setup, Workload

__all__ = [
    "MEMORY_OF",
    "Arithmetic",
    "CannotLimit",
    "Device",
    "Grid",
    "KeptScale",
    "Layer",
    "MemoryHolder",
    "MemoryMeter",
    "Observer",
    "Operand",
    "Phases",
    "Precision",
    "Role",
    "ScaleBook",
    "Setup",
    "SilentMarker",
    "SilentObserver",
    "SilentPhases",
    "Stamper",
    "Standing",
    "TensorScale",
    "Workload",
    "float32_products",
    "key_of",
    "keys_of",
]
