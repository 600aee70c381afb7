"""Defines what is observed in one untimed step: its operators, how much of its time they take, and which of its
products can be converted to low precision.

All of this is observed and not declared by a workload. The observed times only show shares of the step's time, because
observing makes a step slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar


@dataclass(frozen=True)
class OperatorCount:
    """An operator of torch, and how often a step calls it with tensors of the same shapes, in one phase and in the
    forward or the backward pass.

    `inputs` and `outputs` are its tensors, such as 'bf16[128,256]'. `flops`, `bytes` and `launches` are those of one
    call. `flops` is None if the operator has no formula, and 0 if nothing is multiplied. `bytes` are the
    bytes read and written, each tensor counted once. `launches` is the smallest possible number of kernels. `path` is
    the dtype in which a product multiplies, '' for other operators. Views move no data and are not listed.
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
    """The sums over the operators of a phase, forward and backward. `by_path` has the FLOPs for each dtype in which
    products multiply, and `by_dtype` has the bytes for each dtype of tensors. `unknown` counts calls of operators for
    which no formula counts FLOPs: the sums do not include them.
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

    `unwritten` counts tensors that the step allocated, and then read or left behind, although no operator wrote to
    them: a kernel outside of torch must have written them. `fused` names a compiled function that ran, or ''. The
    operators of this function are listed as they run without a compiler.
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
        """Whether `flops` includes all products of the step."""
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
    """Observations of late steps: steps that ran after the timing, in a state that was timed, while their operators
    were recorded.

    If steps behave differently while their operators are recorded, `told_apart` describes the difference; otherwise ''.
    `by_path` has the mean FLOPs of a step for each dtype in which products multiply (compiled steps run uncompiled);
    None if an operator has no formula. `varies` means that the FLOPs differ from step to step. `switches` are torch's
    settings for arithmetic that a step sets and restores. `subnormal` is the share of subnormal numbers in the results
    of the operators. `in_operators` is the mean time of all operators of a step, and `seconds` has the seconds of the
    slowest operators by name. Both are measured by the CPU clock of the thread, and only on a CPU. `waits` is how often
    a step gave up its core.
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
    """The purpose of an operator or kernel. One with an UNKNOWN purpose is shown by its name."""

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
    """The source of time shares. OPERATORS: operators on a CPU. KERNELS: kernels on a device, each assigned to the
    operator that launched it. COMPILED: kernels of compiled steps, which belong to no module (only in older runs).
    """

    OPERATORS = "operators"
    KERNELS = "kernels"
    COMPILED = "compiled kernels"


@dataclass(frozen=True)
class Share:
    """The time that one kind of operators takes in one module, in the forward or the backward pass of an untimed step.

    `module` is the path of the module. For operators between the modules of a model it is the model's class, and for
    operators outside of the model it is ''. `what` refines the kind, such as 'conv' for a product, or is the name of an
    unknown operator.
    """

    kind: ShareKind
    module: str
    backward: bool
    seconds: float
    calls: int
    what: str = ""


@dataclass(frozen=True)
class Shares:
    """The parts of a step's time. `step` is the time in seconds of an unobserved step of the same untimed pass.

    Time that belongs to no part is called 'unattributed': the host's time between operators. If the parts sum to more
    than `step`, because clocks vary, shares are computed by dividing by their sum.
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
        """The share of the step's time that each module takes, the largest share first."""
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
    """A product of a layer in a step: a matrix (m, k) times a matrix (k, n), computed `times` times. `backward` is True
    for a product that computes a gradient.
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
_PATH_WORDS_BY_MODEL_PART = {
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


def find_transformer_part(path: str) -> str:
    """Returns the part of a transformer to which a layer belongs by its path: 'attn', 'mlp', or '' if unknown."""
    return next(
        (
            part
            for part, part_words in _PATH_WORDS_BY_MODEL_PART.items()
            if any(word in path.lower() for word in part_words)
        ),
        "",
    )


@dataclass(frozen=True)
class Holder:
    """A weight that a step multiplies: the weight of a module, or one parameter of a module with several weights.

    `name` is the path of the weight in the model, and `also` are further paths of the same module. If the weight can be
    converted to low precision, `kind` is 'linear', 'conv1d' (of GPT-2), 'conv2d', 'experts' (one matrix per expert) or
    'head'; otherwise it is the name of the module's class. `weight` is the shape of the weight, and `flops` counts all
    of its products in a step, forward and backward. A weight that is not converted has a `reason` (a sentence) and a
    `rule` (a code for similar reasons, such as 'shape' or 'not-called'). `native` is the reason why native kernels
    refuse some of its products on every device, or ''.
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
        return "" if self.kind == "head" else find_transformer_part(self.name)


@dataclass(frozen=True)
class OtherProduct:
    """A kind of product in a step that uses none of the weights in `Coverage.holders`. `operator` is torch's name of
    the product, and `module` is the path of the module that runs it, or ''. If the product multiplies a parameter,
    `weight` names it; '' if none or unknown. `flops` is None if the operator has no formula.
    """

    operator: str
    module: str = ""
    flops: int | None = 0
    calls: int = 1
    reason: str = ""
    weight: str = ""


@dataclass(frozen=True)
class Coverage:
    """Which products of one step can be converted to low precision: the products of the model's weights (`holders`),
    and all other products. `flops` counts the complete step.

    `loss` is a sentence about the tensor from which the backward pass started. `remarks` describe how other steps
    differ from this one.
    """

    holders: tuple[Holder, ...] = ()
    others: tuple[OtherProduct, ...] = ()
    flops: int = 0
    loss: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def converted_flops(self) -> int:
        return sum(weight_holder.flops for weight_holder in self.holders if weight_holder.converted)

    @property
    def share(self) -> float:
        """The share of the step's FLOPs that is converted to low precision; 0 for a step without products."""
        return self.converted_flops / self.flops if self.flops else 0.0

    @property
    def unknown(self) -> int:
        """The number of calls of operators for which no formula counts FLOPs. `flops` does not include them."""
        return sum(product.calls for product in self.others if product.flops is None)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Returns the FLOPs (all, converted) of the weights of each kind, such as 'linear' or 'head'. The kind with the
        most FLOPs comes first.
        """
        flops_by_kind: dict[str, tuple[int, int]] = {}
        for weight_holder in self.holders:
            all_flops, converted_flops = flops_by_kind.get(weight_holder.kind, (0, 0))
            flops_by_kind[weight_holder.kind] = (
                all_flops + weight_holder.flops,
                converted_flops + weight_holder.flops * weight_holder.converted,
            )
        return dict(sorted(flops_by_kind.items(), key=lambda item: -item[1][0]))
