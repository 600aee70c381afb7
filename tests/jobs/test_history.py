"""What was acknowledged, as the changes of a store know it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

from fp8bench.analysis.steps.acknowledged import ack_of
from fp8bench.analysis.steps.changes import Found, find_changes
from fp8bench.jobs.history import kept_acks
from fp8bench.jobs.observer import JobObserver
from fp8bench.store.acks import append_acks
from tests.analysis.steps.test_changes import levels

NOBODY = cast("JobObserver", None)


def test_one_interpreter_by_two_names(tmp_path: Path) -> None:
    """bin/python and bin/python3 are one: an acknowledgement is of the trend under either name."""
    (tmp_path / "python3").touch()
    (tmp_path / "python").symlink_to("python3")
    (tmp_path / "other").touch()
    stepped = levels((20, 1.0), (5, 1.1))
    seen = [replace(stepped, python=str(tmp_path / name)) for name in ("python3", "python", "other")]
    changes = [find_changes([trend]).changes[0] for trend in seen]
    append_acks(tmp_path, [ack_of(changes[0], "2026-01-05T12:00:00+00:00", "")])
    for change, name in zip(changes, ("python3", "python", "python3"), strict=True):
        (kept,) = kept_acks(tmp_path, Found((change,), 1, Counter()), NOBODY)
        assert kept.python == str(tmp_path / name)
