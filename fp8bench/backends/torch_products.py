"""fp8bench's own rounding, on every device; and torch's own scaled products, and nothing else."""

from __future__ import annotations

from fp8bench.formats.hardware import emulated, is_amd, is_nvidia, refused, unknown_kind
from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.nn.shared_precisions import RecipePrecision, native_arithmetic, recipe_of
from fp8bench.protocols import Arithmetic, Backend, Precision
from fp8bench.registry import backends


@backends.register("emulated")
class EmulatedProducts(Backend):
    """What every device can do, also one that has the units."""

    name = "emulated"
    summary = "values rounded by fp8bench, products in fp32: any recipe, any shape, and no speed"

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        if facts.accelerated and not (is_nvidia(facts) or is_amd(facts)):
            return unknown_kind(facts, precision.name)
        return emulated("backend=emulated: values rounded, products in fp32")

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        from fp8bench.nn.arithmetics import RecipeArithmetic

        return RecipeArithmetic(recipe_of(precision))


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
