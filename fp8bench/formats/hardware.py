"""Which devices have units for which formats: the facts that precisions' support is made of. Knows no torch."""

from __future__ import annotations

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
        return emulated(f"no hardware for {words}: values rounded, products in fp32")
    if facts.kind == "cuda":
        return emulated(f"no native backend for {words} yet: values rounded, products in fp32")
    return unknown_kind(facts, words)


def _shown(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
