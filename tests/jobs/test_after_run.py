"""Steps after a run that lack something measuring does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.commands import ROOT, environment

# A process that cannot import asv's packages, and commands that need them only for the history.
WITHOUT_ASV = """
import sys
sys.modules["asv_runner"] = sys.modules["asv"] = None
from pathlib import Path
import fp8bench.cli.commands.suite
from fp8bench.jobs.after_run import RequestedOutputs, after_run
from fp8bench.store.runs.run_file import load_run
from tests.histories import keep, run_at
store = Path(sys.argv[1])
run = load_run(keep(store, run_at(1)))
print(after_run(run, store, RequestedOutputs(), print))
"""


def test_without_asv_a_run_keeps_its_table_and_its_file(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", WITHOUT_ASV, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    note, outcome = done.stdout.splitlines()
    assert note.startswith("history: asv's statistics cannot be imported (")
    assert "pip install 'asv_runner" in note
    assert note.endswith("The run is stored; `fp8bench history rebuild` rebuilds the view.")
    assert outcome == "True" and not (tmp_path / "asv" / "results").exists()
