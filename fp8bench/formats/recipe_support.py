"""Tells whether torch has native products for a recipe on a device, and if not, why. Does not use torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from fp8bench.formats.grids import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8bench.formats.hardware import (
    MI300X,
    DeviceClass,
    amd_class,
    emulated_everywhere,
    is_amd,
    is_intel,
    is_nvidia,
    make_emulated_support,
    native,
    nvidia_class,
)
from fp8bench.formats.product_rules import Product, ScalingScheme, explain_missing_product_kind, list_product_objections
from fp8bench.formats.recipes import Accumulator, Recipe, Treatment
from fp8bench.model import DeviceFacts, Support

# Products are checked with this M, N and K: a multiple of all that rules require, because the support of a recipe must
# not depend on sizes.
_TYPICAL_MATRIX_SIDE = 4096
_SCALE_EXTENT_WORDS = {
    ScalingScheme.TENSOR: "a scale a tensor",
    ScalingScheme.ROW: "a scale a row",
    ScalingScheme.BLOCK: "a scale for 128 elements",
    ScalingScheme.MXFP8: "a scale for 32 elements",
    ScalingScheme.NVFP4: "a scale for 16 elements and one a tensor",
}
# The first CUDA version whose cuBLASLt supports products with these scales.
_FIRST_CUDA = {ScalingScheme.BLOCK: (12, 9), ScalingScheme.MXFP8: (12, 8), ScalingScheme.NVFP4: (12, 8)}
_FNUZ_FORMATS = {E4M3: E4M3FNUZ, E5M2: E5M2FNUZ}


def recipe_on_device(recipe: Recipe, facts: DeviceFacts) -> Recipe:
    """Returns the recipe with the variants of its element formats that the device has in hardware."""
    device = amd_class(facts.arch) if is_amd(facts) else None
    return recipe if device is None else use_device_formats(device, recipe)


def use_device_formats(device: DeviceClass, recipe: Recipe) -> Recipe:
    """Returns the recipe with the variants of its element formats that a class of devices has. On MI300, FP8 without
    blocks is e4m3fnuz and e5m2fnuz.
    """
    if device is not MI300X or recipe.has_block_scaling:
        return recipe
    device_treatments = [
        replace(treatment, fmt=_FNUZ_FORMATS.get(treatment.fmt, treatment.fmt)) for treatment in recipe.treatments
    ]
    return replace(recipe, input=device_treatments[0], weight=device_treatments[1], gradient=device_treatments[2])


def explain_unknown_layout(recipe: Recipe) -> str:
    """Returns why the memory layout of a recipe's operands is unknown: no library multiplies such operands. Returns ''
    if a library does.
    """
    for a, b in recipe.products:
        if Product(_TYPICAL_MATRIX_SIDE, _TYPICAL_MATRIX_SIDE, _TYPICAL_MATRIX_SIDE, a, b).scheme in (
            None,
            ScalingScheme.MXFP6,
        ):
            return f"no library here has a product of {a.fmt.name} and {b.fmt.name} with these scales"
    return ""


def recipe_support(recipe: Recipe, words: str, facts: DeviceFacts) -> Support:
    """Returns native support if torch has scaled products for all products of a recipe. Otherwise returns emulated
    support with the reason.
    """
    if not (is_nvidia(facts) or is_amd(facts) or is_intel(facts)):
        return emulated_everywhere(facts, words)
    # Sums with few bits are a model of Hopper's hardware, so they are always emulated.
    if recipe.accumulator is not Accumulator.FP32:
        return make_emulated_support(f"sums of {recipe.accumulator_bits} bits are a model, which no kernel follows")
    # Check the recipe in the formats of this device: MI300 has other formats with the same bits.
    device_recipe = recipe_on_device(recipe, facts)
    products = [
        Product(_TYPICAL_MATRIX_SIDE, _TYPICAL_MATRIX_SIDE, _TYPICAL_MATRIX_SIDE, a, b)
        for a, b in device_recipe.products
    ]
    # A recipe is native only if all its products are native. If one product were emulated, the recipe's speed would
    # mean nothing.
    schemes = {product.scheme for product in products}
    scheme = schemes.pop() if len(schemes) == 1 else None
    if scheme is None:
        return emulated_everywhere(facts, words)
    explain_refusal = (
        _find_amd_objection if is_amd(facts) else _find_intel_objection if is_intel(facts) else _find_nvidia_objection
    )
    if reason := explain_refusal(scheme, products, facts):
        return make_emulated_support(f"{words} is not native here ({reason})")
    kernel_text = (
        f"{_SCALED_PRODUCT_WORDS} by oneDNN, which widens codes where the GPU has no FP8 units"
        if is_intel(facts)
        else _SCALED_PRODUCT_WORDS
    )
    scale_extent_text = "whose scales are 1" if recipe.is_unscaled else _SCALE_EXTENT_WORDS[scheme]
    return native(
        f"{kernel_text}, {scale_extent_text}{_format_changed_formats(recipe.treatments, device_recipe.treatments)}"
    )


_SCALED_PRODUCT_WORDS = "torch's scaled product (torch.nn.functional.scaled_mm)"


def _format_changed_formats(requested: tuple[Treatment, ...], meant: tuple[Treatment, ...]) -> str:
    names = dict.fromkeys(
        treatment.fmt.name
        for treatment, request in zip(meant, requested, strict=True)
        if treatment.fmt is not request.fmt
    )
    return f", in this device's {' and '.join(names)}" if names else ""


def _find_amd_objection(scheme: ScalingScheme, products: list[Product], facts: DeviceFacts) -> str:
    device = amd_class(facts.arch)
    if device is None:
        return f"fp8bench does not know the FP8 units of {facts.arch or 'this device'}"
    if scheme not in (ScalingScheme.TENSOR, ScalingScheme.ROW):
        # AMD needs scales row by row. fp8bench writes them swizzled, as NVIDIA's hardware needs them.
        return f"{scheme} is not used on AMD's devices yet"
    return _find_first_objection(products, device)


def _find_intel_objection(scheme: ScalingScheme, products: list[Product], facts: DeviceFacts) -> str:
    if scheme not in (ScalingScheme.TENSOR, ScalingScheme.ROW):
        return f"torch has no {scheme} for XPUs"
    return "" if facts.scaled_products else "this torch has no scaled products for XPUs"


def _find_first_objection(products: list[Product], device: DeviceClass) -> str:
    """Returns the first reason why a class of devices, or torch on it, does not support these products. Returns '' if
    all are supported.
    """
    if reason := next(filter(None, (explain_missing_product_kind(product, device) for product in products)), ""):
        return reason
    product_objections = chain.from_iterable(list_product_objections(product, device) for product in products)
    return next((objection.why for objection in product_objections), "")


def _find_nvidia_objection(scheme: ScalingScheme, products: list[Product], facts: DeviceFacts) -> str:
    if facts.capability is None:
        return f"{scheme} needs a compute capability, and this device states none"
    device = nvidia_class(facts.capability)
    is_unsupported = any(explain_missing_product_kind(product, device) for product in products)
    if reason := _find_first_objection(products, device):
        return f"{reason}; this device has {'.'.join(map(str, facts.capability))}" if is_unsupported else reason
    if scheme is ScalingScheme.MXFP4:
        return "torch multiplies MXFP4 by FBGEMM's kernels, which are not used here"
    # The device can compute these products, but this torch may come with too old a version of CUDA.
    required_cuda_version = _FIRST_CUDA.get(scheme, (0, 0))
    torch_cuda = tuple(int(number) for number in (facts.cuda or "0.0").split(".")[:2])
    return (
        f"{scheme} needs CUDA {'.'.join(map(str, required_cuda_version))}; this torch has {facts.cuda}"
        if torch_cuda < required_cuda_version
        else ""
    )
