"""Ranks begin together, or those that do not come are named."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fp8bench.worker.ranks.bench import StartLine


def test_nobody_begins_before_all_have_come(tmp_path: Path) -> None:
    """Three ranks, 50 times: when one goes on, all have come as often, and none of them once more."""
    lines = [StartLine(tmp_path, rank, 3, 20.0) for rank in range(3)]
    come, wrong = [0, 0, 0], list[tuple[int, ...]]()

    def run(rank: int) -> None:
        for turn in range(1, 51):
            come[rank] += 1
            lines[rank].meet()
            seen = tuple(come)
            if min(seen) < turn or max(seen) > turn + 1:
                wrong.append(seen)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
    assert come == [50, 50, 50] and not wrong


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    first, second, _ = (StartLine(tmp_path, rank, 3, 0.05) for rank in range(3))
    with pytest.raises(TimeoutError, match=r"^rank 1, rank 2 did not come to the start line within 0\.05 s$"):
        first.meet()
    with pytest.raises(TimeoutError, match=r"^rank 2 did not"):
        second.meet()


def test_a_rank_that_joins_late_takes_nothing_away(tmp_path: Path) -> None:
    alone = StartLine(tmp_path, 0, 2, 0.0)
    with pytest.raises(TimeoutError):
        alone.meet()
    StartLine(tmp_path, 1, 2, 0.0).meet()
