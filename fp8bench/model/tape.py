"""What the operators of one untimed step were, counted: nothing here is declared by a workload."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OperatorCount:
    """An operator that a step called so often with tensors of the same shapes, in one phase, forward or backward.

    `inputs` and `outputs` are its tensors in words, 'bf16[128,256]' each. `flops`, `bytes` and `launches` are those of
    one call: `flops` is None where nobody has a formula for it, 0 where it multiplies nothing; `bytes` are those read
    and written, each tensor once; `launches` are the kernels that it starts at least. `path` is the dtype in which a
    product multiplies, '' for what is no product. Views move nothing, and are not here.
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
    its bytes by that of the tensors; `unknown` is how many calls have no formula, and are in no sum of FLOPs."""

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

    `unwritten` counts memory that was made in the step and read, or left behind, though no operator wrote to it: code
    that is no operator of torch's (a kernel of one's own) must have. `fused` says that a compiled function ran, whose
    operators are here as they are without a compiler; '' if none did.
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
    def by_path(self) -> dict[str, int]:
        """FLOPs of the step by the dtype that they multiply in."""
        found: dict[str, int] = {}
        for phase in self.phases:
            for path, flops in phase.by_path:
                found[path] = found.get(path, 0) + flops
        return found

    def of(self, phase: str) -> PhaseCount | None:
        """The sums of that phase, if anything ran in it."""
        return next((one for one in self.phases if one.phase == phase), None)
