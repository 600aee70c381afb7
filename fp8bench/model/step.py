"""The contents of one untimed step: its operators, how much of its time they take, and which of its products can be
converted.

They are observed, and not declared by a workload. Only shares of the time are stored, and no times, because
observation makes a step slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar


@dataclass(frozen=True)
class OperatorCount:
    """An operator, and how often a step calls it with tensors of these shapes, in one phase, forward or backward.

    `inputs` and `outputs` are its tensors, such as 'bf16[128,256]'. `flops`, `bytes` and `launches` are those of one
    call. `flops` is None if the operator has no formula, and 0 if nothing is multiplied. `bytes` are read and
    written, each tensor counted once. `launches` is the smallest possible number of kernels. `path` is the dtype in
    which a product multiplies, '' for other operators. Views move no data and are not listed.
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
    """The sums over the operators of a phase, forward and backward. `by_path` divides its FLOPs by the dtype that
    multiplies, and `by_dtype` its bytes by the dtype of the tensors. `unknown` counts calls of operators without a
    formula, whose FLOPs are not included.
    """

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

    `unwritten` counts tensors that were made in the step, and then read or left behind, although no operator wrote to
    them. A kernel outside of torch must have written them. `fused` names a compiled function that ran, or ''. Its
    operators are listed as they run without a compiler.
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
        """Whether `flops` includes all that the step multiplied."""
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
    """Observations of steps that ran after the timing, in slots of a timed state, while their operators were
    recorded.

    `told_apart` describes how timed slots differ from recorded ones, or ''. `by_path` is the mean FLOPs of a step by
    the dtype that multiplies (compiled steps run uncompiled); None if an operator has no formula. `varies` means that
    the FLOPs differ from step to step. `switches` are the arithmetic switches that a step sets and restores.
    `subnormal` is the share of subnormal numbers in the results of its operators. `in_operators` is the mean seconds
    of all operators of a step, and `seconds` has the seconds of the slowest operators by name. Both are measured by
    the clock of the thread, and only on a CPU. `waits` is how often a step gave up its core.
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
    """The purpose of an operator or kernel. UNKNOWN has no known purpose, and is shown by its name."""

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
    """The source of time shares: operators on a CPU, or kernels of a device, assigned to the operator that launched
    them. Older runs also have kernels of compiled steps, which belong to no module.
    """

    OPERATORS = "operators"
    KERNELS = "kernels"
    COMPILED = "compiled kernels"


@dataclass(frozen=True)
class Share:
    """The time that one kind of operators takes in one module, forward or backward, in an untimed pass.

    `module` is the path of the module. For work between the modules of a model it is the model's class, and outside
    of the model it is ''. `what` refines the kind, such as 'conv' for a product, or is the name of an unknown
    operator.
    """

    kind: ShareKind
    module: str
    backward: bool
    seconds: float
    calls: int
    what: str = ""


@dataclass(frozen=True)
class Shares:
    """The parts of a step's time. `step` is the time in seconds of an unobserved step in the same pass.

    The rest of the time is the host's time between operators, called 'unattributed'. If the parts sum to more than
    the step, because clocks vary, they are divided by their sum.
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
        """The share of the step by module, the largest first."""
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
    """A product of a layer in a step: a matrix (m, k) times a matrix (k, n), repeated `times` times. `backward` marks
    a product that computes a gradient.
    """

    m: int
    n: int
    k: int
    times: int = 1
    backward: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.times


# Words in module paths that identify a part of a transformer. The first match counts, because some paths match several
# parts, such as BERT's attention.output.dense.
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
    """Returns the part of a transformer that a layer's path names: 'attn', 'mlp' or ''."""
    return next((part for part, marks in _PARTS.items() if any(mark in path.lower() for mark in marks)), "")


@dataclass(frozen=True)
class Holder:
    """A weight that is multiplied: that of a module, or one parameter of a module with several.

    `name` is its path in the model, and `also` are further paths of the same module. If the weight can be converted,
    `kind` is 'linear', 'conv1d' (of GPT-2), 'conv2d', 'experts' (one matrix per expert) or 'head'; otherwise it is
    the name of the class. `weight` is the shape of the weight, and `flops` counts all of its products in a step,
    forward and backward. A weight that is not converted has a `reason` (a sentence) and a `rule` (one of 'skipped',
    'kept', 'class', 'forward', 'shape', 'not-called'). `native` names requirements of native products that its shapes
    break on every device.
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
    """Products whose operands are not weights of a `Holder`. `operator` is torch's name, and `module` the path of the
    module that runs it, or ''. `weight` is the parameter that is multiplied, '' if none or unknown. `flops` is None
    if the operator has no formula.
    """

    operator: str
    module: str = ""
    flops: int | None = 0
    calls: int = 1
    reason: str = ""
    weight: str = ""


@dataclass(frozen=True)
class Coverage:
    """The products of one step: those of the model's weights (`holders`), and all others. `flops` counts the complete
    step.

    `loss` is a sentence about the tensor from which backward started. `remarks` describe how other steps differ from
    this one.
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
        """The number of calls of operators for which no formula counts FLOPs. No sum includes them."""
        return sum(product.calls for product in self.others if product.flops is None)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Returns two numbers for each kind of holder, the largest first: all FLOPs of the kind, and its converted
        FLOPs.
        """
        flops_by_kind: dict[str, tuple[int, int]] = {}
        for holder in self.holders:
            all_flops, converted = flops_by_kind.get(holder.kind, (0, 0))
            flops_by_kind[holder.kind] = all_flops + holder.flops, converted + holder.flops * holder.converted
        return dict(sorted(flops_by_kind.items(), key=lambda item: -item[1][0]))
