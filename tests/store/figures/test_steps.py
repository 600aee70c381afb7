"""Steps are remembered under a digest of their series; nothing that is wrong with the cache changes what is found."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fp8bench.analysis.stats import Floats
from fp8bench.analysis.steps.change_points import Step, steps_of_many
from fp8bench.analysis.steps.changes import changes_of, find_changes
from fp8bench.jobs.history import stretches
from fp8bench.model import Request, Status
from fp8bench.store.figures import steps
from fp8bench.store.figures.cache import cache_of, read_cached
from fp8bench.store.figures.history import open_history
from fp8bench.store.figures.steps import remembered_steps
from tests.histories import history, keep, read_trends, records, run_at


def made(count: int = 8, length: int = 40, seed: int = 0) -> list[Floats]:
    random = np.random.default_rng(seed)
    series = random.normal(1.0, 0.01, (count, length))
    series[::2, length // 2 :] *= 1.1
    return list(series)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []

    def counting(series: list[Floats]) -> list[tuple[Step, ...]]:
        counts.append(len(series))
        return steps_of_many(series)

    monkeypatch.setattr(steps, "steps_of_many", counting)
    return counts


def test_the_same_is_found_and_looked_at_once(
    tmp_path: Path, looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remembered_steps(tmp_path, []) == [] and not list(tmp_path.iterdir())
    series = made()
    right = steps_of_many(series)
    assert any(right) and not all(right)
    assert remembered_steps(tmp_path, series) == remembered_steps(tmp_path, series) == right
    series[3] = np.append(series[3], 1.0)
    assert remembered_steps(tmp_path, series) == steps_of_many(series) and looked == [8, 1]
    assert len(read_cached(tmp_path, "steps")) == 8  # a series gets a new digest with every commit
    monkeypatch.setattr(steps, "_digest_of_code", lambda: b"another")  # a changed constant of the change points
    assert remembered_steps(tmp_path, series) == steps_of_many(series) and looked == [8, 1, 8]


def test_series_are_told_apart_by_every_bit(tmp_path: Path) -> None:
    series = made()
    remembered_steps(tmp_path, series)
    series[0] = np.nextafter(series[0], 2.0)
    assert remembered_steps(tmp_path, series[::-1]) == steps_of_many(series[::-1])
    strided = [np.repeat(one, 2)[::2] for one in series]
    assert remembered_steps(tmp_path, strided) == steps_of_many(series)


def test_a_store_that_may_not_be_written(tmp_path: Path) -> None:
    cache_of(tmp_path).mkdir()
    assert remembered_steps(tmp_path, made()) == steps_of_many(made())


def test_changes_of_a_history_are_those_of_its_trends(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    times = random.normal(1.0, 0.005, 40)
    times[20:] *= 1.1
    history(tmp_path, *times)
    keep(tmp_path, run_at(41, facts={"torch": "2.99"}))
    keep(tmp_path, run_at(42, request=Request("gemm", quick=True)))
    keep(tmp_path, run_at(43, records=tuple(records(status=Status.FAILED))))
    found = open_history(tmp_path, lambda done, runs: None)
    right = find_changes(read_trends(tmp_path, lambda _: True).trends)
    assert right.changes and right.left
    for _ in range(2):
        assert changes_of(stretches(found), partial(remembered_steps, tmp_path)) == right
