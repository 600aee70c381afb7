"""How a native cast or product differs from its emulation on the same operands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.planned import Support


class Difference(StrEnum):
    """What explains all of the elements that differ; a NONE has none."""

    NONE = "none"
    ORDER = "order"
    ROUNDING = "rounding"
    OVERFLOW = "overflow"
    LAYOUT = "layout"
    SCALE = "scale"
    ACCUMULATION = "accumulation"
    UNEXPLAINED = "unexplained"

    @property
    def conforms(self) -> bool:
        """Whether both do the same: no definition of a product says in which order it is summed."""
        return self in (Difference.NONE, Difference.ORDER)


@dataclass(frozen=True)
class FirstElement:
    """The first element that differs, and what each side gave there."""

    place: tuple[int, ...]
    native: float
    emulated: float


@dataclass(frozen=True)
class Conformity:
    """One cast or product of one mode: `shape` is MxK of a cast, MxNxK of a product.

    `count` of `total` elements differ, by `largest` steps of the result's format at most. `difference` is None where
    the device does not do it, and `why` says so; of a difference it says what was found.
    """

    mode: str
    what: str
    shape: str
    difference: Difference | None = None
    why: str = ""
    count: int = 0
    total: int = 0
    largest: float = 0.0
    first: FirstElement | None = None


@dataclass(frozen=True)
class ModeConformity:
    """Every cast and product of one mode; `support` is how the device does it."""

    mode: str
    support: Support
    found: tuple[Conformity, ...]

    @property
    def compared(self) -> bool:
        """Whether the device does any of it."""
        return any(one.difference is not None for one in self.found)

    @property
    def conforms(self) -> bool:
        """Whether all that the device does is what its emulation does."""
        return all(one.difference is None or one.difference.conforms for one in self.found)
