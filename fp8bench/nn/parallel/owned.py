"""Whole tensors of a model that have one owner each among ranks: means of gradients go to owners, and what owners make
of their tensors goes to all. In float32, in bf16, or in FP8 with a scale for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fp8bench.nn.parallel.exchanges import FP8Wire, RankGroup
from fp8bench.numerics.fp8_reduce import Pieces
from fp8bench.protocols import Phases

T = TypeVar("T")


class OwnedTensors:
    """Tensors by their places in a model, of so many numbers each; `wire` is what they travel in."""

    def __init__(self, group: RankGroup, sizes: Sequence[int], wire: str) -> None:
        self._group, self.owners = group, owners(sizes, group.size)
        self.fp8 = FP8Wire(group.handle) if wire == "fp8" else None
        self.sent_as = torch.bfloat16 if wire == "bf16" else torch.float32
        owned = [self.of(owner, sizes) for owner in range(group.size)]
        self._pieces = [Pieces(some, max(map(len, owned))) for some in owned]

    def of(self, owner: int, some: Sequence[T]) -> list[T]:
        """Of what there is for each tensor that of an owner's."""
        return [one for one, place in zip(some, self.owners, strict=True) if place == owner]

    def own(self, some: Sequence[T]) -> list[T]:
        return self.of(self._group.rank, some)

    def means(self, gradients: Sequence[Tensor], phase: Phases) -> list[Tensor]:
        """Over all ranks, of the tensors that this one owns; what was given may be overwritten."""
        if self.fp8 is not None:
            by_owner = [_row(self.of(owner, gradients)) for owner in range(self._group.size)]
            found = self.fp8.own_tensors_of_mean(torch.cat(by_owner), self._pieces, phase)
            return _apart(found, self.own(gradients))
        self._group.phase = phase
        with phase.cast:
            sent = [gradient.to(self.sent_as) for gradient in gradients]  # themselves in float32
        self._group.to_owners(sent, self.owners)
        means = [tensor.to(torch.float32) for tensor in self.own(sent)]
        torch._foreach_div_(means, self._group.size)
        return means

    def put(self, own: Sequence[Tensor], wholes: Sequence[Tensor], phase: Phases) -> None:
        """What each owner has of its tensors into those of all, on every rank as it was sent."""
        if self.fp8 is not None:
            every = self.fp8.joined_tensors(_row(own), self._pieces, phase)
            for owner, row in enumerate(torch.split(every, [some.size for some in self._pieces])):
                theirs = self.of(owner, wholes)
                torch._foreach_copy_(theirs, _apart(row, theirs))
            return
        self._group.phase = phase
        with phase.cast:
            sent = [tensor.to(self.sent_as) for tensor in self.newest(own, wholes)]
        self._group.from_owners(sent, self.owners)
        pairs = [(whole, tensor) for whole, tensor in zip(wholes, sent, strict=True) if whole is not tensor]
        if pairs:
            torch._foreach_copy_([whole for whole, _ in pairs], [tensor for _, tensor in pairs])

    def newest(self, own: Sequence[Tensor], wholes: Sequence[Tensor]) -> list[Tensor]:
        """All tensors, those of this rank as it has them."""
        mine = iter(own)
        return [
            next(mine) if owner == self._group.rank else whole for owner, whole in zip(self.owners, wholes, strict=True)
        ]


def owners(elements: Sequence[int], ranks: int) -> list[int]:
    """For each tensor the rank that owns it: the largest first, each to whoever has least so far."""
    owned, found = [0] * ranks, [0] * len(elements)
    for place in sorted(range(len(elements)), key=lambda one: (-elements[one], one)):
        found[place] = owned.index(min(owned))
        owned[found[place]] += elements[place]
    return found


def _row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _apart(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [tensor.numel() for tensor in like]
    return [piece.view_as(tensor) for piece, tensor in zip(torch.split(row, sizes), like, strict=True)]
