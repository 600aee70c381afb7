"""Compares the weights of a model's replicas on several ranks, without a collective that a rank could miss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.own_ranks import make_store
from fp8bench.features.train.lab.readings import Number


class Replicas:
    """In every watched step each rank leaves a sum over its weights in the process group's store. Rank 0 reads those of
    the watched step before from all ranks, the others that of rank 0. Nothing waits: what is not there is not
    compared."""

    def __init__(self, module: nn.Module) -> None:
        group = torch.distributed
        several = group.is_available() and group.is_initialized() and group.get_world_size() > 1
        sharded = any(hasattr(parameter, "full_tensor") for parameter in module.parameters())
        self._store: Any = make_store() if several and not sharded else None
        if self._store is not None:
            self._rank = group.get_rank()
            self._partners = [0] if self._rank else list(range(1, group.get_world_size()))
        self._sums: list[tuple[int, float]] = []
        self._were_equal: set[int] = set()

    def figures(self, step: int, weights: Tensor) -> dict[tuple[str, str], Number]:
        """Returns the number of ranks whose weights were equal to this rank's and no longer are, under the first one.
        Ranks that hold different parts of a model never were equal."""
        if self._store is None:
            return {}
        apart = [rank for rank in self._partners if self._is_apart(rank)] if self._sums else []
        self._sums.append((step, float(weights)))
        self._store.set(_key(step, self._rank), repr(self._sums[-1][1]))
        # Other ranks may still read the sum of the step before.
        if len(self._sums) > _KEPT:
            self._store.delete_key(_key(self._sums.pop(0)[0], self._rank))
        return {("replicas_apart", f"rank {apart[0]}"): float(len(apart))} if apart else {}

    def _is_apart(self, rank: int) -> bool:
        step, weights = self._sums[-1]
        if not self._store.check([_key(step, rank)]):
            return False
        if math.isclose(float(self._store.get(_key(step, rank))), weights, rel_tol=_ROUNDING):
            self._were_equal.add(rank)
            return False
        return rank in self._were_equal


# Steps whose sums stay in the store; and what two devices may round differently.
_KEPT, _ROUNDING = 4, 1e-7


def _key(step: int, rank: int) -> str:
    return f"{step} {rank}"
