"""Kept rows, tables, processes and loads of trials."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from suites.trials import Rows, load, ran


def test_rows_are_kept_and_found_by_what_they_say(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "folder")
    rows.add(what="run", load=2)
    rows.add(what="gate", pair=["a", "b"])
    again = Rows(tmp_path / "folder")
    assert again.all == rows.all and again.of(what="gate", pair=["a", "b"]) == rows.all[1:]
    assert again.of(what="run", load=4) == []


def test_a_failed_trial_is_not_measured() -> None:
    assert ran([sys.executable, "-c", "import suites, fp8bench; print(1)"]).stdout == "1\n"
    with pytest.raises(RuntimeError, match="ended with 3: why"):
        ran([sys.executable, "-c", "import sys; sys.stderr.write('why'); sys.exit(3)"])


def test_a_load_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = subprocess.Popen

    def start(*words: object, **more: object) -> subprocess.Popen[str]:
        started.append(popen(*words, **more))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr("suites.trials.subprocess.Popen", start)
    monkeypatch.setattr("suites.trials.time.sleep", lambda seconds: None)
    with load(2):
        assert [process.poll() for process in started] == [None, None]
    assert all(process.returncode for process in started)
