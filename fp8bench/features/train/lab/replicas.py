"""Compares the weights of a model's replicas on several ranks. This uses no collective operation, which would wait
forever for a rank that does not take part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.own_ranks import Ranks, count_ranks, make_store
from fp8bench.features.train.lab.readings import FigureValue


class ReplicaWeightCheck:
    """Compares sums of the weights of all ranks. In every watched step, each rank puts its sum into the process group's
    store. Rank 0 reads the sums of all ranks in the previous watched step, and every other rank reads that of rank 0.
    No rank waits, and a missing sum is not compared.
    """

    def __init__(self, module: nn.Module) -> None:
        is_sharded = any(hasattr(parameter, "full_tensor") for parameter in module.parameters())
        self._store: Any = make_store() if count_ranks() > 1 and not is_sharded else None
        if self._store is not None:
            self._rank = Ranks.get_rank()
            self._partners = [0] if self._rank else list(range(1, count_ranks()))
        self._sums: list[tuple[int, float]] = []
        self._once_equal: set[int] = set()

    def list_figures(self, step: int, weights: Sequence[Tensor]) -> dict[tuple[str, str], FigureValue]:
        """Returns the number of ranks whose weights now differ from this rank's, as a figure named after the first such
        rank; {} if no weights differ. Ranks that hold different parts of a model are not counted.
        """
        if self._store is None:
            return {}
        diverged_ranks = [rank for rank in self._partners if self._has_diverged(rank)] if self._sums else []
        self._sums.append((step, float(_sum_weights(weights))))
        self._store.set(_make_store_key(step, self._rank), repr(self._sums[-1][1]))
        # The latest sums stay in the store, because other ranks may still have to read them.
        if len(self._sums) > _STORED_STEPS:
            self._store.delete_key(_make_store_key(self._sums.pop(0)[0], self._rank))
        return {("replicas_apart", f"rank {diverged_ranks[0]}"): float(len(diverged_ranks))} if diverged_ranks else {}

    def _has_diverged(self, rank: int) -> bool:
        step, weights_sum = self._sums[-1]
        if not self._store.check([_make_store_key(step, rank)]):
            return False
        if math.isclose(float(self._store.get(_make_store_key(step, rank))), weights_sum, rel_tol=_ROUNDING):
            # Ranks whose weights were never equal hold different parts of the model.
            self._once_equal.add(rank)
            return False
        return rank in self._once_equal


# Each rank keeps its sums of this many steps in the store. Sums count as equal if they differ by at most this share,
# because two devices may round differently.
_STORED_STEPS, _ROUNDING = 4, 1e-7


# Integer types by their number of bytes. A float is viewed as the integer type of its size.
_INTEGER_TYPE_BY_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_weight_bits(weights: Sequence[Tensor]) -> Tensor:
    """Returns a number that almost surely changes if any bit of the weights does. The bits are added as integers, which
    is several times as fast as adding float64.
    """
    bits = [tensor.view(_INTEGER_TYPE_BY_BYTES[tensor.element_size()]).sum(dtype=torch.int32) for tensor in weights]
    return _add_weighted_by_position(torch.stack(bits))


def _sum_weights(weights: Sequence[Tensor]) -> Tensor:
    return _add_weighted_by_position(torch.stack([tensor.sum(dtype=torch.float64) for tensor in weights]))


def _add_weighted_by_position(sums: Tensor) -> Tensor:
    """Returns the sum of `sums`, each multiplied by its position, so that exchanging two tensors changes the result."""
    sums = sums.to(torch.float64)
    return (sums * torch.arange(1, len(sums) + 1).to(sums)).sum()


def _make_store_key(step: int, rank: int) -> str:
    return f"{step} {rank}"
