"""Joins the rows of all ranks of a watched loop on rank 0. Ranks exchange rows through the key-value store of
torch.distributed. In a collective operation, all ranks would wait for a rank that has stopped watching.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.features.train.values import UNSEEN_EVENT, Lines, StepRow, TrainingEvent

# At the end of a loop rank 0 waits at most this long for the last rows of other ranks.
_LAST_ROWS_WAIT_SECONDS = 10.0
# Gives each key-value store of this process a number, which is a part of its prefix. All ranks run the same script, so
# a store has the same number on every rank.
_key_value_store_numbers = itertools.count()


def make_store() -> Any:
    """Returns a key-value store of the process group under a prefix that nothing else uses."""
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"fp8bench-{next(_key_value_store_numbers)}", store)  # type: ignore[attr-defined]


class Ranks:
    """Merges the rows of figures of all ranks of a watched loop. Without torch.distributed there is a single rank."""

    def __init__(self) -> None:
        self.rank = self.get_rank()
        self._store: Any = None
        self.size = count_ranks()
        if self.size > 1:
            self._store = make_store()
        self._sent = 0
        # On rank 0: its rows, until other ranks have sent theirs. Each entry has the number of the exchange, the rows,
        # and the lines after these rows.
        self._waiting_batches: deque[tuple[int, list[StepRow], Lines]] = deque()
        self._silent_ranks: set[int] = set()

    @staticmethod
    def get_rank() -> int:
        return dist.get_rank() if count_ranks() > 1 else 0

    def compute_norm_shares(self, norms: Sequence[Tensor], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns this rank's contribution to the norm of each tensor over all ranks."""
        if self.size == 1:
            return norms
        return torch._foreach_mul(
            list(norms), [math.sqrt(self._compute_squared_norm_share(tensor)) for tensor in tensors]
        )

    def _compute_squared_norm_share(self, tensor: Tensor) -> float:
        """Returns which share of a tensor's squared norm this rank contributes. If several ranks hold the same
        values, each contributes an equal share.
        """
        placements: Any = getattr(tensor, "placements", None)
        if placements is None:
            return 1 / self.size
        counts: list[int] = list(tensor.device_mesh.shape)  # type: ignore[attr-defined]
        sizes = zip(placements, counts, strict=True)
        copies = math.prod(count for placement, count in sizes if not placement.is_shard())
        return float(math.prod(counts) / self.size / copies)

    def join(self, rows: list[StepRow], lines: Lines, is_last: bool = False) -> Lines:
        """Takes this rank's rows and other lines since the last call. Rank 0 returns lines, with rows merged over
        ranks, and leaves out a rank that is several steps behind. With `is_last`, it waits a while for missing rows.
        Other ranks send their rows, and return no lines.
        """
        if self._store is None:
            return (*rows, *lines)
        if self.rank:
            figures = [(row.step, row.loss, row.gradient_norm, row.parameter_norm, row.update_ratio) for row in rows]
            self._store.set(f"{self._sent}/{self.rank}", json.dumps(figures))
            self._sent += 1
            return ()
        self._waiting_batches.append((self._sent, rows, lines))
        self._sent += 1
        merged_lines: list[Any] = []
        last_rows_deadline = time.monotonic() + (_LAST_ROWS_WAIT_SECONDS if is_last else 0.0)
        while self._waiting_batches:
            keys = self._list_store_keys(self._waiting_batches[0][0])
            is_batch_complete = self._store.check(list(keys.values()))
            # Other ranks may be a few steps behind or have stopped: wait for one batch, and then go on without them.
            if not is_batch_complete and is_last and time.monotonic() < last_rows_deadline:
                time.sleep(0.05)
            elif not is_batch_complete and len(self._waiting_batches) <= 2 and not is_last:
                break
            else:
                _, own_rows, own_lines = self._waiting_batches.popleft()
                merged_lines += [*self._merge_rows(own_rows, keys), *own_lines]
        return merged_lines

    def _list_store_keys(self, number: int) -> dict[int, str]:
        return {rank: f"{number}/{rank}" for rank in range(1, self.size) if rank not in self._silent_ranks}

    def _merge_rows(self, rows: list[StepRow], keys: dict[int, str]) -> Lines:
        merged_lines: list[Any] = []
        rank_numbers_by_step: list[dict[int, list[float]]] = []
        for rank, key in keys.items():
            if self._store.check([key]):
                rank_numbers_by_step.append({int(step): numbers for step, *numbers in json.loads(self._store.get(key))})
                # Otherwise the store would grow with every step.
                self._store.delete_key(key)
            else:
                self._silent_ranks.add(rank)
                words = f"rank {rank} has not reported since: its losses and norms are missing in the rows from here on"
                step = rows[0].step if rows else 0
                merged_lines.append(TrainingEvent(rows[0].arm if rows else "", 0, step, UNSEEN_EVENT, words))
        for row in rows:
            other_rank_rows = [numbers[row.step] for numbers in rank_numbers_by_step if row.step in numbers]
            rank_row_values = [row.loss, row.gradient_norm, row.parameter_norm, row.update_ratio]
            merged_lines.append(self._merge_row_over_ranks(row, [rank_row_values, *other_rank_rows]))
        return merged_lines

    def _merge_row_over_ranks(self, row: StepRow, ranks: list[list[float]]) -> StepRow:
        """Returns a row with the mean loss of all ranks, and with norms over the parts of all ranks. A missing rank is
        assumed to have the mean of the others.
        """
        losses, gradients, parameter_norms, ratios = zip(*ranks, strict=True)
        missing_ranks_factor = math.sqrt(self.size / len(ranks))
        # Skip ranks that hold no part of the model.
        change_norms = [
            parameter_norm * ratio
            for parameter_norm, ratio in zip(parameter_norms, ratios, strict=True)
            if parameter_norm
        ]
        # Each rank's norm is only its contribution, so add their squares.
        parameter_norm = math.hypot(*parameter_norms)
        return replace(
            row,
            loss=sum(losses) / len(losses),
            gradient_norm=math.hypot(*gradients) * missing_ranks_factor,
            parameter_norm=parameter_norm * missing_ranks_factor,
            update_ratio=math.hypot(*change_norms) / parameter_norm if parameter_norm else row.update_ratio,
        )


def count_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
