"""The committed report of a real run is what a fresh rendering gives, byte for byte, and is there at once."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from fp8bench.jobs.report_files import ReportDestinations, write_report
from fp8bench.store.runs.run_file import load_run

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "reports" / "sample"
# Versions that affect the bytes, besides fp8bench.
RENDERING = ("jinja2", "markupsafe", "numpy")


def other_versions() -> list[str]:
    """Packages whose version differs from the tested one."""
    pinned = dict(re.findall(r"^([\w.-]+)==([^ ;#\n]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    tested = {name.lower(): number for name, number in pinned.items()}
    return [f"{name} {version(name)}" for name in RENDERING if tested.get(name) != version(name)]


def test_it_equals_a_fresh_rendering(tmp_path: Path) -> None:
    """`fp8bench report reports/sample/run.jsonl --html reports/sample/report.html` rewrites it."""
    others = other_versions()
    if others or sys.version_info[:2] != (3, 11):
        pytest.skip(f"bytes are compared under Python 3.11 and constraints.txt only, not {', '.join(others) or 'this'}")
    write_report([load_run(SAMPLE / "run.jsonl")], tmp_path, ReportDestinations(html=tmp_path / "again.html"))
    assert (tmp_path / "again.html").read_text() == (SAMPLE / "report.html").read_text()


def test_it_is_small_and_loads_nothing() -> None:
    text = (SAMPLE / "report.html").read_text()
    assert len(text) < 600_000
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", text)
