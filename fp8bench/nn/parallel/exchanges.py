"""What the ranks of a group exchange inside a model, forward and backward, each under the phase communication.

Each exchange is the other way round in backward: where a tensor is copied to all ranks their gradients are added up,
and where tensors are added up the gradient is everybody's. The same for tokens that are gathered or scattered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.numerics.collectives import newest
from fp8bench.protocols import Phases, SilentPhases

_TOKENS = 1


@dataclass
class Group:
    """The ranks that share a model's blocks, this one among them. `phase` has the markers of the step that runs."""

    handle: dist.ProcessGroup
    phase: Phases = field(default_factory=SilentPhases)

    def __post_init__(self) -> None:
        self.rank, self.size = self.handle.rank(), self.handle.size()

    def added(self, x: Tensor) -> Tensor:
        """The sum of everybody's."""
        with self.phase.communication:
            whole = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(whole, group=self.handle)
            return whole

    def largest(self, x: Tensor) -> Tensor:
        """The largest of everybody's, element by element."""
        with self.phase.communication:
            whole = x.clone()
            dist.all_reduce(whole, dist.ReduceOp.MAX, group=self.handle)
            return whole

    def everybodys(self, x: Tensor) -> list[Tensor]:
        """By rank."""
        with self.phase.communication:
            found = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(found, x, group=self.handle)
            return found

    def gathered(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) of everybody's tokens, by rank."""
        return self.all_parts(x).movedim(0, _TOKENS).flatten(_TOKENS, _TOKENS + 1)

    def scattered(self, x: Tensor) -> Tensor:
        """Of the sum of everybody's (batch, tokens, width) this rank's tokens."""
        return self.own_part(torch.stack(x.chunk(self.size, _TOKENS)))

    def all_parts(self, x: Tensor) -> Tensor:
        """(ranks, ...) of everybody's."""
        with self.phase.communication:
            parts = x.new_empty(self.size, *x.shape)
            newest("all_gather_single", "all_gather_into_tensor")(parts, x.contiguous()[None], group=self.handle)
            return parts

    def own_part(self, parts: Tensor) -> Tensor:
        """Of the sum of everybody's (ranks, ...) this rank's."""
        with self.phase.communication:
            own = parts.new_empty(1, *parts.shape[1:])
            newest("reduce_scatter_single", "reduce_scatter_tensor")(own, parts, group=self.handle)
            return own[0]

    def own(self, x: Tensor) -> Tensor:
        """This rank's tokens of (batch, tokens, ...)."""
        return x.chunk(self.size, _TOKENS)[self.rank]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.added(gradients[0]), None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.added(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.gathered(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.scattered(gradients[0]), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.scattered(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.gathered(gradients[0]), None


def copied(x: Tensor, group: Group) -> Tensor:
    """To all ranks, which have it already; their gradients are added up."""
    y: Tensor = _Copied.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def added(x: Tensor, group: Group) -> Tensor:
    """Of all ranks; the gradient is everybody's."""
    y: Tensor = _Added.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def gathered(x: Tensor, group: Group) -> Tensor:
    """The tokens of all ranks; of the gradients' sum each gets its own."""
    y: Tensor = _Gathered.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def scattered(x: Tensor, group: Group) -> Tensor:
    """Of the sum of all ranks this one's tokens; gradients are gathered."""
    y: Tensor = _Scattered.apply(x, group)  # type: ignore[no-untyped-call]
    return y
