"""What takes how much of a step, by kind of work and by module: shares, never times, as looking makes a step slower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Key = TypeVar("Key")


class ShareKind(StrEnum):
    """What an operator, or a kernel, is for. UNKNOWN is what no rule knows: it is told by its name."""

    GEMM = "gemm"
    ATTENTION = "attention"
    CAST = "cast"
    ACCUMULATE = "accumulate"
    OPTIMIZER = "optimizer"
    ELEMENTWISE = "elementwise"
    COPY = "copy"
    GATHER = "gather"
    VIEW = "view"
    UNKNOWN = "unknown"


class SharesFrom(StrEnum):
    """What was timed: operators on a processor, kernels of a device by the operator that launched them, or the kernels
    of a compiled step, of which nobody knows the module."""

    OPERATORS = "operators"
    KERNELS = "kernels"
    COMPILED = "compiled kernels"


@dataclass(frozen=True)
class Share:
    """Work of one kind in one module, forward or backward, in the pass that looked.

    `module` is its path in the model, the model's class for what it does between its modules, '' outside of any.
    `what` says more of the kind: 'conv' of a product, the name of what is unknown, what else is fused into a kernel.
    """

    kind: ShareKind
    module: str
    backward: bool
    seconds: float
    calls: int
    what: str = ""


@dataclass(frozen=True)
class Shares:
    """The parts of a step. `step` are its seconds without anybody looking, in the same pass.

    What the parts leave of it is the host's, between operators: 'unattributed'. Where they come to more than the step,
    for want of a steadier clock, they are shares of their sum. `fused` is how many kernels hold casts among other work.
    """

    parts: tuple[Share, ...] = ()
    step: float = 0.0
    of: SharesFrom = SharesFrom.OPERATORS
    fused: int = 0

    @property
    def whole(self) -> float:
        """The seconds that all shares are of."""
        return max(self.step, sum(part.seconds for part in self.parts))

    @property
    def unattributed(self) -> float:
        """The share that no part has."""
        return max(0.0, 1.0 - sum(self.by_kind.values())) if self.whole else 0.0

    @property
    def by_kind(self) -> dict[ShareKind, float]:
        """Shares of the step in the order of kinds; only those that there are."""
        found = self.summed(lambda part: part.kind)
        return {kind: found[kind] for kind in ShareKind if kind in found}

    @property
    def by_module(self) -> dict[str, float]:
        """Shares of the step by module, the largest first."""
        found = self.summed(lambda part: part.module)
        return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))

    def summed(self, key: Callable[[Share], Key]) -> dict[Key, float]:
        """Shares of the step, put together by what parts have in common."""
        found: dict[Key, float] = {}
        whole = self.whole
        for part in self.parts:
            found[key(part)] = found.get(key(part), 0.0) + part.seconds / whole
        return found
