"""A forked worker reports the same about itself as a started one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fp8bench.measure import process
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model.raw import Settings

SUITE = """
import os, sys
from fp8bench.suites import workloads
ABOUT = (sys.path, sys.flags, dict(os.environ), os.getcwd(), os.getsid(0) == os.getpid(), sys.stdin.read(), sys.argv[0])
open(os.environ["ABOUT"], "w").write(repr(ABOUT))
"""


def about(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, str]:
    """The worker's report, and what a user's module sees in it."""
    found = folder / "about"
    suite = folder / "about_itself.py"
    suite.write_text(SUITE)
    monkeypatch.setenv("ABOUT", str(found))
    with ProcessWorker(Settings(imports=(str(suite),))) as worker:
        said = (worker.software(), worker.ask(60.0, "probe"))
    return said, found.read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked off on Linux alone")
def test_it_is_as_one_that_was_started(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.subprocess is not subprocess
    forked = about(tmp_path, monkeypatch)
    monkeypatch.setattr(process, "subprocess", subprocess)
    assert forked == about(tmp_path, monkeypatch)
