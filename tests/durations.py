"""What each test takes, in a file that FP8BENCH_DURATIONS names: a row a test, of this session or the last that ran it.

Whoever moves tests, or makes them faster, compares two such files.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from pathlib import Path

import pytest

COLUMNS = ("test", "seconds", "slow")
_seconds: dict[str, float] = defaultdict(float)
_slow: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Preparing, calling and clearing up. Processes that share the tests report to the one that wrote their orders."""
    _seconds[report.nodeid] += report.duration
    if {"slow", "nightly"} & set(report.keywords):
        _slow.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Written once, by the process that has all reports; rows of other tests stay."""
    named = os.environ.get("FP8BENCH_DURATIONS")
    if named and not hasattr(session.config, "workerinput"):
        write(Path(named), {test: (seconds, test in _slow) for test, seconds in _seconds.items()})


def write(path: Path, found: dict[str, tuple[float, bool]]) -> None:
    """Tests by name, so that two files compare line by line."""
    before = path.read_text().splitlines() if path.exists() else []
    rows = {row["test"]: row for row in csv.DictReader(before)}
    rows |= {
        test: dict(zip(COLUMNS, (test, f"{seconds:.3f}", "slow" if slow else "quick"), strict=True))
        for test, (seconds, slow) in found.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for _, row in sorted(rows.items()))
