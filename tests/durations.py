"""Writes each test's duration to the file that FP8BENCH_DURATIONS names, one row per test.

Rows of tests that did not run in this session stay. Compare two files after moving or speeding up tests.
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
    """Records setup, call and teardown. Parallel processes report to the one that distributes tests."""
    _seconds[report.nodeid] += report.duration
    if {"slow", "nightly"} & set(report.keywords):
        _slow.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes once, in the process that has all reports; rows of other tests stay."""
    named = os.environ.get("FP8BENCH_DURATIONS")
    if named and not hasattr(session.config, "workerinput"):
        write(Path(named), {test: (seconds, test in _slow) for test, seconds in _seconds.items()})


def write(path: Path, found: dict[str, tuple[float, bool]]) -> None:
    """Sorts tests by name, so that two files compare line by line."""
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
