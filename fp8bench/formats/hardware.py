"""Which devices have units for which formats: the facts that precisions' support is made of. Knows no torch."""

from __future__ import annotations

from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.formats.recipes import Accumulator, Recipe
from fp8bench.model import DeviceFacts, Level, Support

AMPERE = (8, 0)
ADA = (8, 9)
CDNA3 = (9, 4)


def is_cpu(facts: DeviceFacts) -> bool:
    return facts.kind == "cpu"


def is_nvidia(facts: DeviceFacts) -> bool:
    return facts.kind == "cuda" and facts.hip is None


def is_amd(facts: DeviceFacts) -> bool:
    """AMD GPUs call themselves cuda in torch, too."""
    return facts.kind == "cuda" and facts.hip is not None


def capability(facts: DeviceFacts) -> tuple[int, int]:
    """Compute capability; (0, 0) where the device has none."""
    return facts.capability or (0, 0)


def native(reason: str) -> Support:
    return Support(Level.NATIVE, reason)


def emulated(reason: str) -> Support:
    return Support(Level.EMULATED, reason)


def refused(reason: str) -> Support:
    return Support(Level.REFUSED, reason)


def from_capability(facts: DeviceFacts, first: tuple[int, int], words: str) -> Support:
    """Native on NVIDIA devices from that compute capability on, refused below."""
    have = capability(facts)
    if have >= first:
        return native(f"{words} units from compute capability {_shown(first)}")
    return refused(f"{words} needs compute capability {_shown(first)}; this device has {_shown(have)}")


def unknown_kind(facts: DeviceFacts, words: str) -> Support:
    """Refused: fp8bench knows nothing of that format on devices of that kind."""
    return refused(f"{words} is not known to work on {facts.kind} devices")


def emulated_everywhere(facts: DeviceFacts, words: str) -> Support:
    """For formats that no device computes natively through fp8bench."""
    if is_cpu(facts):
        return emulated(f"no hardware for {words}: {_EMULATED}")
    if facts.kind == "cuda":
        return emulated(f"no native backend for {words} yet: {_EMULATED}")
    return unknown_kind(facts, words)


def recipe_support(recipe: Recipe, words: str, facts: DeviceFacts) -> Support:
    """Native where torch has a scaled product for all three products of a recipe, else emulated, and why."""
    if not is_nvidia(facts) or not _eight_bits(recipe):
        amd = is_amd(facts) and capability(facts) == CDNA3 and _eight_bits(recipe)
        return emulated(f"{_NOT_FNUZ}: {_EMULATED}") if amd else emulated_everywhere(facts, words)
    if recipe.input.fmt is E5M2 and recipe.weight.fmt is E5M2:
        return emulated(f"CUDA has no product of two E5M2 tensors: {_EMULATED}")
    if recipe.accumulator is not Accumulator.FP32:
        return emulated(f"sums of 14 bits are a model, which no kernel follows: {_EMULATED}")
    found = from_capability(facts, ADA, "FP8")
    if found.level is Level.NATIVE:
        return native(f"torch's scaled product (torch.nn.functional.scaled_mm), {_scales(recipe)}")
    return emulated(f"{found.reason}: {_EMULATED}")


_EMULATED = "values rounded, products in fp32"
_NOT_FNUZ = "MI300's FP8 is e4m3fnuz and e5m2fnuz, not the E4M3 and E5M2 defined here"


def _eight_bits(recipe: Recipe) -> bool:
    """Whether all operands are FP8 with a float32 scale a tensor, or a row: what torch's products take everywhere."""
    extents = {(one.scaling.rows, one.scaling.columns) if one.scaling else None for one in recipe.treatments}
    return extents in ({(0, 0)}, {(1, 0)}) and all(one.fmt in (E4M3, E5M2) for one in recipe.treatments)


def _scales(recipe: Recipe) -> str:
    return "a scale a tensor" if recipe.per_tensor else "a scale a row"


def _shown(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
