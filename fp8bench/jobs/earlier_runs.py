"""The step times of cases in the latest earlier runs, for a sentence in a run's report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError
from fp8bench.model import Run
from fp8bench.store.runs.listing import listing
from fp8bench.store.runs.run_file import load_head, load_run

# The maximum number of earlier runs read, and of files examined to find them.
_MOST_RUNS, _MOST_FILES = 5, 50


def find_earlier_steps(run: Run, store: Path) -> dict[str, list[float]]:
    """Returns the best step time of each case, in seconds, in the latest runs before this one, newest first.

    Runs of the same suite on the same machine count, regardless of commit.
    """
    steps: dict[str, list[float]] = {}
    for earlier in _find_runs(run, store):
        for case, finding in findings(earlier).items():
            if finding.best_seconds is not None:
                steps.setdefault(case, []).append(finding.best_seconds)
    return steps


def _find_runs(run: Run, store: Path) -> Iterator[Run]:
    runs_found = 0
    for path in listing(store).files[:_MOST_FILES]:
        with contextlib.suppress(StoreError):
            if runs_found < _MOST_RUNS and _is_earlier(load_head(path), run):
                yield load_run(path)
                runs_found += 1


def _is_earlier(earlier: Run, run: Run) -> bool:
    same_machine = earlier.environment.get("machine") == run.environment.get("machine")
    return same_machine and earlier.request.suite == run.request.suite and earlier.started < run.started
