"""The contents of one untimed step: its operators, their shares of it, and which products can be converted. A workload
does not declare them. Shares are never times, because observing makes a step slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar


@dataclass(frozen=True)
class OperatorCount:
    """An operator, and how often a step calls it with tensors of the same shapes in one phase, forward or backward.

    `inputs` and `outputs` are its tensors, like 'bf16[128,256]'. `flops`, `bytes` and `launches` are those of one call:
    `flops` is None without a formula, 0 for what multiplies nothing; `bytes` are read and written, each tensor once;
    `launches` are the fewest kernels it starts. `path` is the dtype in which a product multiplies, '' for other
    operators. Views move nothing, and are left out.
    """

    phase: str
    operator: str
    backward: bool = False
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    calls: int = 1
    flops: int | None = 0
    bytes: int = 0
    path: str = ""
    launches: int = 1


@dataclass(frozen=True)
class PhaseCount:
    """The sums of a phase, forward and backward. `by_path` are its FLOPs by the dtype that they multiply in, `by_dtype`
    its bytes by that of the tensors; `unknown` counts calls without a formula, which are in no sum of FLOPs."""

    phase: str
    flops: int = 0
    bytes: int = 0
    launches: int = 0
    unknown: int = 0
    by_path: tuple[tuple[str, int], ...] = ()
    by_dtype: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Tape:
    """The operators of one step, and their sums by phase.

    `unwritten` counts memory that was made in the step and read, or left behind, though no operator wrote to it: some
    kernel outside of torch must have. `fused` names a compiled function that ran, whose operators are listed as without
    a compiler; '' if none did.
    """

    operators: tuple[OperatorCount, ...] = ()
    phases: tuple[PhaseCount, ...] = ()
    unwritten: int = 0
    fused: str = ""

    @property
    def flops(self) -> int:
        return sum(phase.flops for phase in self.phases)

    @property
    def bytes(self) -> int:
        return sum(phase.bytes for phase in self.phases)

    @property
    def launches(self) -> int:
        return sum(phase.launches for phase in self.phases)

    @property
    def unknown(self) -> int:
        return sum(phase.unknown for phase in self.phases)

    @property
    def complete(self) -> bool:
        """Tells whether `flops` are all that the step did."""
        return not self.unknown and not self.unwritten

    @property
    def by_path(self) -> dict[str, int]:
        flops_by_path: dict[str, int] = {}
        for phase in self.phases:
            for path, flops in phase.by_path:
                flops_by_path[path] = flops_by_path.get(path, 0) + flops
        return flops_by_path

    def of(self, phase: str) -> PhaseCount | None:
        return next((count for count in self.phases if count.phase == phase), None)


@dataclass(frozen=True)
class LateSteps:
    """Observations of a timed state's steps in slots after the timing, while their operators were recorded.

    `told_apart` describes how timed slots differ from recorded ones, '' if they do not. `by_path` are a step's FLOPs on
    average, by the dtype that they multiply in, of compiled ones uncompiled; None if an operator has no formula.
    `varies` means that steps differ in how much they multiply. `switches` are those of arithmetic that a step sets and
    puts back; `subnormal` is the share of subnormal numbers in the results of its operators. `in_operators` are the
    seconds of a step's operators on average, `seconds` those of the slowest, by name: by the thread's own clock, and on
    a processor only. `waits` is how often a step left its core by itself.
    """

    told_apart: str = ""
    by_path: tuple[tuple[str, float], ...] | None = None
    varies: bool = False
    switches: tuple[str, ...] = ()
    subnormal: float = 0.0
    seconds: tuple[tuple[str, float], ...] = ()
    in_operators: float | None = None
    waits: float = 0.0

    @property
    def flops(self) -> float | None:
        return None if self.by_path is None else sum(flops for _, flops in self.by_path)


Key = TypeVar("Key")


class ShareKind(StrEnum):
    """The purpose of an operator, or of a kernel. UNKNOWN matches no rule, and is shown by its name."""

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
    """The source of shares: operators on a processor, or kernels of a device by the operator that launched them. Older
    runs also have kernels of compiled steps, of no module."""

    OPERATORS = "operators"
    KERNELS = "kernels"
    COMPILED = "compiled kernels"


@dataclass(frozen=True)
class Share:
    """Work of one kind in one module, forward or backward, in an untimed pass.

    `module` is its path in the model, the model's class for work between its modules, '' outside of any. `what` refines
    the kind: 'conv' for a product, the name of what is unknown.
    """

    kind: ShareKind
    module: str
    backward: bool
    seconds: float
    calls: int
    what: str = ""


@dataclass(frozen=True)
class Shares:
    """The parts of a step. `step` are its unobserved seconds in the same pass.

    The remainder is the host's time between operators: 'unattributed'. Where they sum to more than the step, because
    clocks vary, they are shares of their sum.
    """

    parts: tuple[Share, ...] = ()
    step: float = 0.0
    of: SharesFrom = SharesFrom.OPERATORS

    @property
    def whole(self) -> float:
        return max(self.step, sum(part.seconds for part in self.parts))

    @property
    def unattributed_share(self) -> float:
        return max(0.0, 1.0 - sum(self.by_kind.values())) if self.whole else 0.0

    @property
    def by_kind(self) -> dict[ShareKind, float]:
        shares = self.sum_by(lambda part: part.kind)
        return {kind: shares[kind] for kind in ShareKind if kind in shares}

    @property
    def by_module(self) -> dict[str, float]:
        """Shares of the step by module, the largest first."""
        shares = self.sum_by(lambda part: part.module)
        return dict(sorted(shares.items(), key=lambda part: (-part[1], part[0])))

    def sum_by(self, key: Callable[[Share], Key]) -> dict[Key, float]:
        shares: dict[Key, float] = {}
        total = self.whole
        for part in self.parts:
            shares[key(part)] = shares.get(key(part), 0.0) + part.seconds / total
        return shares


@dataclass(frozen=True)
class HeldProduct:
    """A product of a layer in a step: (m, k) times (k, n), `times` times; `backward`: for a gradient."""

    m: int
    n: int
    k: int
    times: int = 1
    backward: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.times


# Marks of a transformer's parts in paths; the first that fits counts: BERT also has an attention.output.dense.
_PARTS = {
    "attn": ("attn", "attention"),
    "mlp": (
        "mlp",
        "ffn",
        "feed_forward",
        "feedforward",
        "densereludense",
        "intermediate",
        "experts",
        "fc1",
        "fc2",
        "linear1",
        "linear2",
        "output.dense",
    ),
}


def part_of(path: str) -> str:
    """The part of a transformer that a layer's path names: 'attn', 'mlp' or ''."""
    return next((part for part, marks in _PARTS.items() if any(mark in path.lower() for mark in marks)), "")


@dataclass(frozen=True)
class Holder:
    """A weight that products are made with: a whole module, or one parameter of a module that has several.

    `name` is its path in the model, `also` the other paths of the same module; `kind` is 'linear', 'conv1d' (GPT-2's),
    'conv2d', 'experts' (a matrix for each expert) or 'head' where it can be converted, else the name of its class.
    `weight` is the weight's shape, `flops` those of all its products in a step, forward and backward. A weight that is
    not converted has a `reason`, a sentence, and a `rule`, a word for it ('skipped', 'kept', 'class', 'forward',
    'shape', 'not-called'). `native` names the requirements of native products that its shapes break, on any device.
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

    @property
    def group(self) -> str:
        return "" if self.kind == "head" else part_of(self.name)


@dataclass(frozen=True)
class OtherProduct:
    """Products outside of all holders: `operator` is torch's name for it, `module` the path of the module that runs it,
    '' for none. `weight` is the parameter that it multiplies by, '' without one or if unknown. `flops` is None without
    a formula for the operator."""

    operator: str
    module: str = ""
    flops: int | None = 0
    calls: int = 1
    reason: str = ""
    weight: str = ""


@dataclass(frozen=True)
class Coverage:
    """The products of one step: those in holders, and all others. `flops` are those of the whole step.

    `loss` is a sentence about the tensor that backward began from, `remarks` are differences of other steps from this
    one.
    """

    holders: tuple[Holder, ...] = ()
    others: tuple[OtherProduct, ...] = ()
    flops: int = 0
    loss: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def converted_flops(self) -> int:
        return sum(holder.flops for holder in self.holders if holder.converted)

    @property
    def share(self) -> float:
        """The share of the step's FLOPs that is converted; 0 for a step without products."""
        return self.converted_flops / self.flops if self.flops else 0.0

    @property
    def unknown(self) -> int:
        """Calls of operators without a formula, which are in no sum."""
        return sum(product.calls for product in self.others if product.flops is None)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """FLOPs of each kind of holder, the most first: all, and the converted ones."""
        flops_by_kind: dict[str, tuple[int, int]] = {}
        for holder in self.holders:
            every, converted = flops_by_kind.get(holder.kind, (0, 0))
            flops_by_kind[holder.kind] = every + holder.flops, converted + holder.flops * holder.converted
        return dict(sorted(flops_by_kind.items(), key=lambda item: -item[1][0]))
