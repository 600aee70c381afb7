"""The store that the harness reads millions of points from is one as compacting runs makes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8bench.store.compacted.compact import compact
from fp8bench.store.compacted.manifest import points_of
from fp8bench.store.index.history import open_history
from fp8bench.user_code import import_user_modules
from suites.compacted_history import WORKS, make, measure, write_compacted
from suites.long_history import write_module, write_store
from tests.own_suites import forgotten

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the suite with two pairs of cases is known."""
    with forgotten(tmp_path):
        import_user_modules((str(write_module(tmp_path, 2)),))
        yield tmp_path


def test_its_files_are_what_compacting_runs_makes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte; and so is what is told of them, the steps of the first pair among it."""
    monkeypatch.setattr("fp8bench.store.compacted.spool.secrets.token_hex", lambda count: "ab" * count)
    write_store(folder / "whole", 40, 2)
    whole = compact(folder / "whole", lambda done, commits: None)
    made = write_compacted(folder / "made", 40, 2)
    assert (made.rows, made.runs, made.written) == (whole.rows, whole.runs, whole.written) and made.rows == 40 * 44
    (name,) = made.written
    assert len({(points_of(folder / one) / name / "points.parquet").read_bytes() for one in ("whole", "made")}) == 1
    figures = folder / "whole" / "figures"
    assert not figures.exists()
    told = [open_history(folder / one, lambda runs: None) for one in ("whole", "made")]
    assert [one.read for one in told] == [0, 0]
    assert told[0].trends(lambda _: True) == told[1].trends(lambda _: True)


@pytest.mark.slow
def test_what_is_measured_works(tmp_path: Path) -> None:
    """On a small store."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert make(tmp_path, environment, 40, 1).cpu > 0
    for what in WORKS:
        cost = measure(tmp_path, what, environment, 1)
        assert 0 < cost.cpu < 60 and cost.wall > 0 and 10 << 20 < cost.peak < 400 << 20
