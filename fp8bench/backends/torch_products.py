"""torch: its own scaled products, and nothing else."""

from __future__ import annotations

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.nn.shared_precisions import RecipePrecision, native_arithmetic, recipe_of
from fp8bench.protocols import Arithmetic, Backend, Precision
from fp8bench.registry import backends


@backends.register("torch")
class TorchProducts(Backend):
    """Unlike `auto` it does not fall back to emulation."""

    name = "torch"
    summary = "torch's scaled products alone: refused where there are none"

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        assert isinstance(precision, RecipePrecision)
        own = precision.own_support(facts)
        if own.level is not Level.EMULATED:
            return own
        return refused(f"torch multiplies no such thing here ({own.reason}): choose backend=emulated, or auto")

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        return native_arithmetic(recipe_of(precision), facts)
