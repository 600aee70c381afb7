"""What became of every product of some layers, in some modes, on some classes of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fp8bench.formats.hardware import DeviceClass
from fp8bench.formats.scaled_products import Objection, Product, Sides


@dataclass(frozen=True)
class LinearShape:
    """A linear layer: so many tokens, features out and features in.

    `output` is the type of its products; `row_major` says that their second operands lie row by row.
    """

    name: str
    tokens: int
    outputs: int
    inputs: int
    output: str = "bf16"
    row_major: bool = False


class Outcome(StrEnum):
    """What a device makes of a product."""

    FITS = "fits"
    PAD = "pad"
    REFUSED = "refused"
    MISSING = "missing"


@dataclass(frozen=True)
class Judgement:
    """An outcome and why. `padded` are the sides that would do, and what they cost more, as shares."""

    outcome: Outcome
    objections: tuple[Objection, ...] = ()
    padded: Sides | None = None
    more_flops: float = 0.0
    more_bytes: float = 0.0


@dataclass(frozen=True)
class Finding:
    """One product of one layer in one mode on one class of devices: what torch says, and Transformer Engine.

    `te` is None where it has no recipe for it, or nothing to do with the device.
    """

    shape: LinearShape
    kind: str
    mode: str
    device: DeviceClass
    product: Product
    torch: Judgement
    te: Judgement | None


def homeless(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each product and mode that fits on none of the devices as it is."""
    first: dict[tuple[LinearShape, str, str], Finding] = {}
    housed = set()
    for one in findings:
        key = (one.shape, one.kind, one.mode)
        first.setdefault(key, one)
        if one.torch.outcome is Outcome.FITS:
            housed.add(key)
    return [one for key, one in first.items() if key not in housed]
