"""Finds the step times of cases in the latest earlier runs. The report of a run mentions them in a sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError
from fp8bench.model import Run
from fp8bench.store.runs.listing import listing
from fp8bench.store.runs.run_file import load_header, load_run

# The most earlier runs that are loaded, and the most files that are searched for them.
_MAX_RUNS, _MAX_FILES = 5, 50


def find_earlier_step_seconds(run: Run, store: Path) -> dict[str, list[float]]:
    """Returns for each case the best step times, in seconds, of the latest runs before this one, newest first. A run
    counts if it measured the same suite on the same machine, even at a different commit.
    """
    steps: dict[str, list[float]] = {}
    for earlier in _load_earlier_runs(run, store):
        for case, finding in findings(earlier).items():
            if finding.best_seconds is not None:
                steps.setdefault(case, []).append(finding.best_seconds)
    return steps


def _load_earlier_runs(run: Run, store: Path) -> Iterator[Run]:
    loaded_run_count = 0
    for path in listing(store).files[:_MAX_FILES]:
        with contextlib.suppress(StoreError):  # the file is not a run, or comes from a different version
            if loaded_run_count < _MAX_RUNS and _is_comparable_earlier_run(load_header(path), run):
                yield load_run(path)
                loaded_run_count += 1


def _is_comparable_earlier_run(earlier: Run, run: Run) -> bool:
    is_same_machine = earlier.environment.get("machine") == run.environment.get("machine")
    return is_same_machine and earlier.request.suite == run.request.suite and earlier.started < run.started
