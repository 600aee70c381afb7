"""How much of a model's products lies in layers that can be converted to another precision; what cannot, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeldProduct:
    """A product of a layer in a step: (m, k) times (k, n), so many times; `backward` says for a gradient."""

    m: int
    n: int
    k: int
    times: int = 1
    backward: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.times


@dataclass(frozen=True)
class Holder:
    """A weight that products are made with: a module of its own, or one parameter of a module that has several.

    `name` is its path in the model, `also` the other paths of the same module; `kind` is 'linear', 'conv1d' (GPT-2's),
    'conv2d', 'experts' (a matrix for each expert) or 'head' where it can be converted, else the name of its class.
    `weight` is the weight's shape, `flops` those of all its products in a step, forward and backward. What is not
    converted has a `reason`, a sentence, and a `rule`, a word for it ('skipped', 'kept', 'class', 'forward',
    'shape', 'not-called'). `native` says what native products of a device want of its shapes and do not have; it is a
    fact of shapes, and there on every device.
    """

    name: str
    kind: str
    weight: tuple[int, ...]
    products: tuple[HeldProduct, ...] = ()
    flops: int = 0
    calls: int = 0
    converted: bool = False
    reason: str = ""
    rule: str = ""
    native: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class OtherProduct:
    """Products outside of all holders: `operator` is torch's name for it, `module` the path of the module that runs
    it, '' for none. `weight` is the parameter that it multiplies by, '' where it is none, or nobody can tell. `flops`
    is None where nobody has a formula for the operator."""

    operator: str
    module: str = ""
    flops: int | None = 0
    calls: int = 1
    reason: str = ""
    weight: str = ""


@dataclass(frozen=True)
class Coverage:
    """The products of one step: those in holders, and all others. `flops` are those of the whole step.

    `loss` says in a sentence what backward began from.
    """

    holders: tuple[Holder, ...] = ()
    others: tuple[OtherProduct, ...] = ()
    flops: int = 0
    loss: str = ""

    @property
    def converted_flops(self) -> int:
        return sum(holder.flops for holder in self.holders if holder.converted)

    @property
    def share(self) -> float:
        """Converted FLOPs of all of the step; 0 for a step without products."""
        return self.converted_flops / self.flops if self.flops else 0.0

    @property
    def unknown(self) -> int:
        """Calls of operators that nobody has a formula for: no sum has them."""
        return sum(other.calls for other in self.others if other.flops is None)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """FLOPs of each kind of holder, the most first: all, and the converted ones."""
        found: dict[str, tuple[int, int]] = {}
        for holder in self.holders:
            every, converted = found.get(holder.kind, (0, 0))
            found[holder.kind] = every + holder.flops, converted + holder.flops * holder.converted
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))
