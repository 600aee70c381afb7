"""emulated: fp8bench's own rounding, on every device."""

from __future__ import annotations

from fp8bench.formats.hardware import emulated, is_amd, is_nvidia, unknown_kind
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import recipe_of
from fp8bench.protocols import Arithmetic, Backend, Precision
from fp8bench.registry import backends


@backends.register("emulated")
class Emulated(Backend):
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
