"""Kept rows, tables, processes and loads of trials."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from suites.trials import Rows, Table, conditions, least_seconds, load, options, ran


def test_rows_are_kept_and_found_by_what_they_say(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "folder")
    rows.add(what="run", load=2)
    rows.add(what="gate", pair=["a", "b"])
    again = Rows(tmp_path / "folder")
    assert again.all == rows.all and again.of(what="gate", pair=["a", "b"]) == rows.all[1:]
    assert again.of(what="run", load=4) == []


def test_a_table_shows_shares_in_percent(capsys: pytest.CaptureFixture[str]) -> None:
    Table("of two builds", "false alarms", "+8%", name=10).row("1 run", 0.25, "none")
    assert capsys.readouterr().out.splitlines() == [
        "of two builds", "            false alarms      +8%", "1 run              25.00     none",
    ]  # fmt: skip


def test_options_have_defaults_types_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"builds": (3, "of each"), "json": (Path, "there"), "trained": (False, "first")}
    monkeypatch.setattr(sys, "argv", ["trial", "--builds", "5", "--trained"])
    asked = options("what it does", **known)
    assert (asked.builds, asked.json, asked.trained) == (5, None, True)


def test_what_ends_otherwise_was_not_measured() -> None:
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


def test_times_are_taken_in_turns() -> None:
    calls: list[str] = []
    assert all(time >= 0 for time in least_seconds(2, lambda: calls.append("a"), lambda: calls.append("b")))
    assert calls == list("ababab")


def test_conditions_say_where_it_was() -> None:
    assert {"fp8bench", "commit", "torch", "cores", "load"} <= set(conditions()) and os.cpu_count()
