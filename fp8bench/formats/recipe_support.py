"""Whether torch has native products for a recipe on a device, and why not. Knows no torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from fp8bench.formats.grids import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8bench.formats.hardware import (
    MI300X,
    DeviceClass,
    amd_class,
    emulated_because,
    emulated_everywhere,
    is_amd,
    is_intel,
    is_nvidia,
    native,
    nvidia_class,
)
from fp8bench.formats.product_rules import Product, Scheme, missing, objections
from fp8bench.formats.recipes import Accumulator, Recipe, Treatment
from fp8bench.model import DeviceFacts, Support

# Sides that suit every multiple, because shapes do not matter here.
_SIDE = 4096
_EXTENTS = {
    Scheme.TENSOR: "a scale a tensor",
    Scheme.ROW: "a scale a row",
    Scheme.BLOCK: "a scale for 128 elements",
    Scheme.MXFP8: "a scale for 32 elements",
    Scheme.NVFP4: "a scale for 16 elements and one a tensor",
}
# The first CUDA whose cuBLASLt has them.
_CUDA = {Scheme.BLOCK: (12, 9), Scheme.MXFP8: (12, 8), Scheme.NVFP4: (12, 8)}
_FNUZ = {E4M3: E4M3FNUZ, E5M2: E5M2FNUZ}


def on_device(recipe: Recipe, facts: DeviceFacts) -> Recipe:
    device = amd_class(facts.arch) if is_amd(facts) else None
    return recipe if device is None else in_formats_of(device, recipe)


def in_formats_of(device: DeviceClass, recipe: Recipe) -> Recipe:
    """The recipe in the formats of a class of devices: FP8 without blocks is e4m3fnuz and e5m2fnuz on MI300."""
    if device is not MI300X or recipe.in_blocks:
        return recipe
    treatments = [replace(treatment, fmt=_FNUZ.get(treatment.fmt, treatment.fmt)) for treatment in recipe.treatments]
    return replace(recipe, input=treatments[0], weight=treatments[1], gradient=treatments[2])


def kept_by_nobody(recipe: Recipe) -> str:
    """Why the layout of a recipe's operands on a device is unknown; '' where a library has a product that reads
    them."""
    for a, b in recipe.products:
        scheme = Product(_SIDE, _SIDE, _SIDE, a, b).scheme
        if scheme in (None, Scheme.MXFP6):
            return f"no library here has a product of {a.fmt.name} and {b.fmt.name} with these scales"
    return ""


def recipe_support(recipe: Recipe, words: str, facts: DeviceFacts) -> Support:
    """Native where torch has a scaled product for all products of a recipe, else emulated, and why."""
    if not (is_nvidia(facts) or is_amd(facts) or is_intel(facts)):
        return emulated_everywhere(facts, words)
    # Short sums are a model of what Hopper's units do, so they are only emulated.
    if recipe.accumulator is not Accumulator.FP32:
        return emulated_because(f"sums of {recipe.accumulator_bits} bits are a model, which no kernel follows")
    # Check the recipe in this device's formats: MI300's differ at the same width.
    meant = on_device(recipe, facts)
    products = [Product(_SIDE, _SIDE, _SIDE, a, b) for a, b in meant.products]
    # A recipe is native only as a whole: one emulated product would make its speed a mixture.
    schemes = {product.scheme for product in products}
    scheme = schemes.pop() if len(schemes) == 1 else None
    if scheme is None:
        return emulated_everywhere(facts, words)
    against = _amd_objection if is_amd(facts) else _intel_objection if is_intel(facts) else _objection
    if reason := against(scheme, products, facts):
        return emulated_because(f"{words} is not native here ({reason})")
    where = f"{_WHERE} by oneDNN, which widens codes where the GPU has no FP8 units" if is_intel(facts) else _WHERE
    extent = "whose scales are 1" if recipe.is_unscaled else _EXTENTS[scheme]
    return native(f"{where}, {extent}{_other_formats(recipe.treatments, meant.treatments)}")


_WHERE = "torch's scaled product (torch.nn.functional.scaled_mm)"


def _other_formats(requested: tuple[Treatment, ...], meant: tuple[Treatment, ...]) -> str:
    names = dict.fromkeys(
        treatment.fmt.name
        for treatment, request in zip(meant, requested, strict=True)
        if treatment.fmt is not request.fmt
    )
    return f", in {' and '.join(names)} as this device has them" if names else ""


def _amd_objection(scheme: Scheme, products: list[Product], facts: DeviceFacts) -> str:
    device = amd_class(facts.arch)
    if device is None:
        return f"nothing is known of FP8 units of {facts.arch or 'this device'}"
    if scheme not in (Scheme.TENSOR, Scheme.ROW):
        # AMD's scales are in plain order, and the ones here are swizzled for NVIDIA's units.
        return f"{scheme} is not used on AMD's devices yet"
    return _against(products, device)


def _intel_objection(scheme: Scheme, products: list[Product], facts: DeviceFacts) -> str:
    if scheme not in (Scheme.TENSOR, Scheme.ROW):
        return f"torch has no {scheme} for XPUs"
    return "" if facts.scaled_products else "this torch has no scaled products for XPUs"


def _against(products: list[Product], device: DeviceClass) -> str:
    """The first objection of a class of devices, or of torch there, to the products; '' if they are supported."""
    if lacking := next(filter(None, (missing(product, device) for product in products)), ""):
        return lacking
    against = chain.from_iterable(objections(product, device) for product in products)
    return next((objection.why for objection in against), "")


def _objection(scheme: Scheme, products: list[Product], facts: DeviceFacts) -> str:
    if facts.capability is None:
        return f"{scheme} needs a compute capability, and this device states none"
    device = nvidia_class(facts.capability)
    lacking = any(missing(product, device) for product in products)
    if reason := _against(products, device):
        return f"{reason}; this device has {'.'.join(map(str, facts.capability))}" if lacking else reason
    if scheme is Scheme.MXFP4:
        return "torch multiplies MXFP4 by kernels of FBGEMM's, which are not used here"
    # The class of device decides what is multiplied, the version of CUDA whether torch offers it.
    needed = _CUDA.get(scheme, (0, 0))
    have = tuple(int(part) for part in (facts.cuda or "0.0").split(".")[:2])
    return f"{scheme} needs CUDA {'.'.join(map(str, needed))}; this torch has {facts.cuda}" if have < needed else ""
