"""The store that the harness opens is one as runs make it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8bench.store.index.history import open_history
from fp8bench.store.runs.listing import run_files
from fp8bench.user_code import import_user_modules
from suites.long_history import ROUNDS, make, measure, write_module, write_store
from tests.counts import sampled
from tests.histories import read_trends, trends_of
from tests.own_suites import forgotten


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """Twelve commits of two pairs of cases, whose suite is known."""
    write_store(tmp_path / "store", 12, 2)
    with forgotten(tmp_path):
        import_user_modules((str(write_module(tmp_path, 2)),))
        yield tmp_path / "store"


def test_it_is_the_same_for_the_same_seed(store: Path, tmp_path: Path) -> None:
    """And another for another one; a commit more leaves those before as they are."""
    write_store(tmp_path / "same", 11, 2)
    write_store(tmp_path / "same", 1, 2, first=11)
    write_store(tmp_path / "other", 12, 2, seed=1)
    texts = [[path.read_bytes() for path in run_files(one)] for one in (store, tmp_path / "same", tmp_path / "other")]
    assert texts[0] == texts[1] != texts[2]


def test_it_has_eleven_series_a_pair(store: Path) -> None:
    """With as many points as commits, of ten samples each but for the memory; and both ways of opening agree."""
    found = read_trends(store, lambda _: True)
    assert trends_of(open_history(store, lambda done, runs: None), lambda _: True) == found
    assert len(found.trends) == 22 and not found.left
    samples = {(trend.series.metric, figure.samples) for trend in found.trends for figure in trend.measured}
    once = {"peak_memory", "mean_time", "relative_mean_time"}
    assert samples == {(name, 1 if name in once else ROUNDS) for name, _ in samples}
    assert all(len(trend.measured) == 12 for trend in found.trends)


@pytest.mark.parametrize("what", sampled(["show"], ["from the runs", "show", "after a run of all"]))
def test_what_is_measured_works(tmp_path: Path, what: str) -> None:
    """On a small store; a step lies in its first pair. What the process holds that starts it does not count."""
    held = b"x" * (400 << 20)
    make(tmp_path, 300, 1)
    cost = measure(tmp_path, what, 1, 1)
    assert 0 < cost.cpu < 60 and cost.wall > 0 and 10 << 20 < cost.peak < len(held) // 2
