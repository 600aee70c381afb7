"""Whether torch multiplies what a recipe makes of tensors natively on a device, and why not. Knows no torch."""

from __future__ import annotations

from itertools import chain

from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.formats.hardware import emulated_because, emulated_everywhere, is_amd, is_nvidia, native, nvidia_class
from fp8bench.formats.product_rules import missing, objections
from fp8bench.formats.recipes import Accumulator, Recipe
from fp8bench.formats.scaled_products import Product, Scheme
from fp8bench.model import DeviceFacts, Support

# Sides that fit every multiple: what is asked for here does not depend on them.
_SIDE = 4096
_EXTENTS = {
    Scheme.TENSOR: "a scale a tensor", Scheme.ROW: "a scale a row", Scheme.BLOCK: "a scale for 128 elements",
    Scheme.MXFP8: "a scale for 32 elements", Scheme.NVFP4: "a scale for 16 elements and one a tensor",
}  # fmt: skip
# The first CUDA whose cuBLASLt takes them.
_CUDA = {Scheme.BLOCK: (12, 9), Scheme.MXFP8: (12, 8), Scheme.NVFP4: (12, 8)}
_CDNA3 = (9, 4)


def recipe_support(recipe: Recipe, words: str, facts: DeviceFacts) -> Support:
    """Native where torch has a scaled product for all products of a recipe, else emulated, and why."""
    if is_amd(facts) and facts.capability == _CDNA3 and _float_scales(recipe):
        return emulated_because("MI300's FP8 is e4m3fnuz and e5m2fnuz, not the E4M3 and E5M2 defined here")
    if not is_nvidia(facts):
        return emulated_everywhere(facts, words)
    if recipe.accumulator is not Accumulator.FP32:
        return emulated_because("sums of 14 bits are a model, which no kernel follows")
    products = [Product(_SIDE, _SIDE, _SIDE, a, b) for a, b in recipe.products]
    schemes = {one.scheme for one in products}
    scheme = schemes.pop() if len(schemes) == 1 else None
    if scheme is None:
        return emulated_everywhere(facts, words)
    why = _objection(scheme, products, facts)
    return emulated_because(f"{words} is not native here ({why})") if why else native(f"{_WHERE}, {_EXTENTS[scheme]}")


_WHERE = "torch's scaled product (torch.nn.functional.scaled_mm)"


def _objection(scheme: Scheme, products: list[Product], facts: DeviceFacts) -> str:
    """Why such products are not to be had; '' where they are."""
    if facts.capability is None:
        return f"{scheme} needs a compute capability, and this device states none"
    device = nvidia_class(facts.capability)
    lacking = next((why for one in products if (why := missing(one, device))), None)
    if lacking:
        shown = ".".join(map(str, facts.capability))
        return f"{lacking.why}; this device has {shown}"
    against = next(chain.from_iterable(objections(one, device) for one in products), None)
    if against:
        return against.why
    if scheme is Scheme.MXFP4:
        return "torch multiplies MXFP4 by kernels of FBGEMM's, which are not used here"
    needed = _CUDA.get(scheme, (0, 0))
    have = tuple(int(part) for part in (facts.cuda or "0.0").split(".")[:2])
    return f"{scheme} needs CUDA {'.'.join(map(str, needed))}; this torch has {facts.cuda}" if have < needed else ""


def _float_scales(recipe: Recipe) -> bool:
    """Whether all operands are FP8 with a float32 scale a tensor, or a row."""
    return not recipe.in_blocks and all(one.scaling and one.fmt in (E4M3, E5M2) for one in recipe.treatments)
