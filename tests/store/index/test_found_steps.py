"""Steps are remembered under a digest of their series; nothing that is wrong with the file changes what is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fp8bench.analysis.stats import Floats
from fp8bench.analysis.steps.change_points import Step, steps_of_many
from fp8bench.analysis.steps.changes import changes_of, find_changes
from fp8bench.jobs.history import stretches
from fp8bench.model import Request, Status
from fp8bench.store.index import figure_files as memory
from fp8bench.store.index.figure_files import StepMemory
from fp8bench.store.index.history import open_history
from tests.counts import for_each
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

    monkeypatch.setattr(memory, "steps_of_many", counting)
    return counts


def test_the_same_is_found_and_looked_at_once(
    tmp_path: Path, looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert StepMemory(tmp_path).steps_of_many([]) == [] and not list(tmp_path.iterdir())
    series = made()
    right = steps_of_many(series)
    assert any(right) and not all(right)
    assert StepMemory(tmp_path).steps_of_many(series) == right
    assert StepMemory(tmp_path).steps_of_many(series) == right
    series[3] = np.append(series[3], 1.0)
    assert StepMemory(tmp_path).steps_of_many(series) == steps_of_many(series)
    assert looked == [8, 1]
    change(StepMemory(tmp_path).path, version=0, steps={"a": 1})  # an older file, whose steps may be others
    again = StepMemory(tmp_path)
    assert again.steps_of_many(series) == steps_of_many(series) and not again.troubles and looked == [8, 1, 8]
    monkeypatch.setattr(memory, "_digest_of_code", lambda: b"another")  # a changed constant of the change points
    assert StepMemory(tmp_path).steps_of_many(series) == steps_of_many(series) and looked == [8, 1, 8, 8]


def test_series_are_told_apart_by_every_bit(tmp_path: Path) -> None:
    series = made()
    StepMemory(tmp_path).steps_of_many(series)
    series[0] = np.nextafter(series[0], 2.0)
    assert StepMemory(tmp_path).steps_of_many(series[::-1]) == steps_of_many(series[::-1])
    strided = [np.repeat(one, 2)[::2] for one in series]
    assert StepMemory(tmp_path).steps_of_many(strided) == steps_of_many(series)


def break_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "half of it": break_in_half,
    "a text": lambda path: path.write_text("no JSON"),
    "a list": lambda path: path.write_text("[]"),
    "no steps": lambda path: path.write_text('{"version": 1}'),
    "steps of a text": lambda path: change(path, steps={"a": "b"}),
    "steps that lack fields": lambda path: change(path, steps={"a": [[1, 2]]}),
}


@for_each("damage", DAMAGES)
def test_a_broken_file_is_begun_anew_and_that_is_said_once(tmp_path: Path, damage: str) -> None:
    series = made(200)
    right = steps_of_many(series)
    first = StepMemory(tmp_path)
    first.steps_of_many(series)
    DAMAGES[damage](first.path)
    second, third = StepMemory(tmp_path), StepMemory(tmp_path)
    assert second.steps_of_many(series) == right and len(second.troubles) == 1 and "anew" in second.troubles[0]
    assert third.steps_of_many(series) == right and not third.troubles


def test_files_that_are_newer_or_may_not_be_written(tmp_path: Path) -> None:
    one = StepMemory(tmp_path)
    one.steps_of_many(made())
    change(one.path, version=99)
    content = one.path.read_bytes()
    assert one.steps_of_many(made(200)) == steps_of_many(made(200))
    assert one.path.read_bytes() == content and len(one.troubles) == 1 and "newer" in one.troubles[0]


def test_a_store_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "figures" / "steps.json").mkdir(parents=True)
    (tmp_path / "a file").touch()
    few, many = StepMemory(tmp_path), StepMemory(tmp_path / "a file" / "below")
    assert few.steps_of_many(made()) == steps_of_many(made()) and len(few.troubles) == 1
    assert many.steps_of_many(made(200)) == steps_of_many(made(200)) and "200 series" in many.troubles[-1]
    quiet = StepMemory(tmp_path / "a file" / "below")
    quiet.steps_of_many(made())
    assert not any("series" in trouble for trouble in quiet.troubles)


def test_what_nobody_asks_for_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A series gets a new digest with every commit."""
    monkeypatch.setattr(memory, "_MOST_OTHERS", 20)
    for seed in range(5):
        StepMemory(tmp_path).steps_of_many(made(seed=seed))
    assert 8 <= len(json.loads(StepMemory(tmp_path).path.read_text())["steps"]) <= 28


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
        assert changes_of(stretches(found), StepMemory(tmp_path).steps_of_many) == right
