"""Joins the rows of all ranks of a watched loop on rank 0.

Rows go through the key-value store of torch.distributed, not through a collective: a rank that has stopped watching
must not make the others wait.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import deque
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fp8bench.features.train.values import UNSEEN, Lines, StepRow, TrainingEvent

# Rank 0 waits at most this long for the last rows of the others, when all have finished.
_LAST_SECONDS = 10.0
# All ranks run the same script, so that a store has the same number on each.
_numbers = itertools.count()


def make_store() -> Any:
    """Returns a part of the process group's key-value store that nothing else uses."""
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"fp8bench-{next(_numbers)}", store)  # type: ignore[attr-defined]


class Ranks:
    """The ranks of a loop; a single one without torch.distributed."""

    def __init__(self) -> None:
        self.rank = self.number()
        self._store: Any = None
        self.size = dist.get_world_size() if _is_initialized() else 1
        if self.size > 1:
            self._store = make_store()
        self._sent = 0
        # Batches of rank 0 that wait for the rows of the others: number, rows and the lines after them.
        self._waiting: deque[tuple[int, list[StepRow], Lines]] = deque()
        self._silent: set[int] = set()

    @staticmethod
    def number() -> int:
        return dist.get_rank() if _is_initialized() else 0

    def share(self, tensor: Tensor) -> float:
        """Returns the share of a tensor's square norm that this rank contributes: ranks with the same values share."""
        if self.size == 1:
            return 1.0
        placements: Any = getattr(tensor, "placements", None)
        if placements is None:
            return 1 / self.size
        counts: list[int] = list(tensor.device_mesh.shape)  # type: ignore[attr-defined]
        sizes = zip(placements, counts, strict=True)
        copies = math.prod(count for placement, count in sizes if not placement.is_shard())
        return float(math.prod(counts) / self.size / copies)

    def join(self, rows: list[StepRow], lines: Lines, last: bool = False) -> Lines:
        """Takes this rank's next lines, and returns those whose rows are complete: on rank 0 those of an earlier
        call, elsewhere none."""
        if self._store is None:
            return (*rows, *lines)
        if self.rank:
            figures = [(row.step, row.loss, row.gradient_norm, row.parameter_norm, row.update_ratio) for row in rows]
            self._store.set(f"{self._sent}/{self.rank}", json.dumps(figures))
            self._sent += 1
            return ()
        self._waiting.append((self._sent, rows, lines))
        self._sent += 1
        complete: list[Any] = []
        limit = time.monotonic() + (_LAST_SECONDS if last else 0.0)
        while self._waiting:
            keys = self._keys(self._waiting[0][0])
            arrived = self._store.check(list(keys.values()))
            # The others may be a few steps behind, or have stopped: wait for one batch, and not for ever.
            if not arrived and last and time.monotonic() < limit:
                time.sleep(0.05)
            elif not arrived and len(self._waiting) <= 2 and not last:
                break
            else:
                _, own_rows, own_lines = self._waiting.popleft()
                complete += [*self._merge(own_rows, keys), *own_lines]
        return complete

    def _keys(self, number: int) -> dict[int, str]:
        return {rank: f"{number}/{rank}" for rank in range(1, self.size) if rank not in self._silent}

    def _merge(self, rows: list[StepRow], keys: dict[int, str]) -> Lines:
        merged: list[Any] = []
        figures: list[dict[int, list[float]]] = []
        for rank, key in keys.items():
            if self._store.check([key]):
                figures.append({int(step): numbers for step, *numbers in json.loads(self._store.get(key))})
                self._store.delete_key(key)
            else:
                self._silent.add(rank)
                words = f"rank {rank} has not reported since: its losses and norms are missing in the rows from here on"
                step = rows[0].step if rows else 0
                merged.append(TrainingEvent(rows[0].arm if rows else "", 0, step, UNSEEN, words))
        for row in rows:
            others = [numbers[row.step] for numbers in figures if row.step in numbers]
            own = [row.loss, row.gradient_norm, row.parameter_norm, row.update_ratio]
            merged.append(self._join_row(row, [own, *others]))
        return merged

    def _join_row(self, row: StepRow, ranks: list[list[float]]) -> StepRow:
        """Returns the mean loss, and norms over all shards. Ranks that are missing count as the mean of the others."""
        losses, gradients, sizes, ratios = zip(*ranks, strict=True)
        missing = math.sqrt(self.size / len(ranks))
        # A rank without any part of the model has no ratio.
        moved = [size * ratio for size, ratio in zip(sizes, ratios, strict=True) if size]
        size = math.hypot(*sizes)
        return replace(
            row,
            loss=sum(losses) / len(losses),
            gradient_norm=math.hypot(*gradients) * missing,
            parameter_norm=size * missing,
            update_ratio=math.hypot(*moved) / size if size else row.update_ratio,
        )


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
