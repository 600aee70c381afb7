"""Whose ceilings an audit holds a kernel against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8bench.features.audit.command import _ceilings
from fp8bench.measure.ceilings import VARIABLE
from fp8bench.model import Ceilings, Limit, Rate
from tests.facts import CPU

QUICK = Ceilings((Rate(Limit.PRODUCT, "fp32", shape=(1,), runs=(1e12,)),))


class Worker:
    """Counts quick looks."""

    def __init__(self) -> None:
        self.looks = 0

    def software(self) -> dict[str, str]:
        return {"torch": "2"}

    def within(self, _: float) -> Worker:
        return self

    def ceilings(self, *_: Any) -> Ceilings:
        self.looks += 1
        return QUICK


def asked(worker: Any, store: Path, threads: int = 1) -> float | None:
    found = _ceilings(worker, CPU, threads, store)
    return None if found is None else found.bound(Limit.PRODUCT, "fp32")


def test_a_quick_look_is_taken_once_where_there_is_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "measured")
    worker = Worker()
    assert asked(worker, tmp_path) == asked(worker, tmp_path) == 1e12 and worker.looks == 1
    assert asked(worker, tmp_path, threads=4) == 4e12, "a quick look is of one thread"
    assert asked(worker, tmp_path / "none") == 1e12 and worker.looks == 2
    assert not (tmp_path / "none").exists(), "an audit makes no store"


def test_where_nothing_is_to_be_measured_what_is_kept_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "measured")
    assert asked(Worker(), tmp_path) == 1e12
    monkeypatch.setenv(VARIABLE, "off")
    worker = Worker()
    assert asked(worker, tmp_path / "none") is None and asked(worker, tmp_path) == 1e12 and worker.looks == 0
